"""Predictions as a table that any program reads."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusion_mp.errors import describe


def write_predictions(path: Path, predictions: Any) -> Path:
    """A row for every row of the predictions of all batches: its number, and what is predicted in a column or more.

    Args:
        path: the file, which is made or written over, and its folder.
        predictions: what ``Trainer.predict`` returns: a tensor [N] or [N, C] for every batch of every loader.

    Raises:
        ValueError: a batch has predictions of another kind.
    """
    rows = [row for batch in _tensors(predictions) for row in batch.reshape(len(batch), -1).tolist()]
    width = len(rows[0]) if rows else 1
    columns = ["prediction"] if width == 1 else [f"prediction_{column}" for column in range(width)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *columns])
        writer.writerows([number, *row] for number, row in enumerate(rows))
    return path


def _tensors(predictions: Any) -> Iterator[Tensor]:
    if isinstance(predictions, Tensor) and predictions.dim() > 0:
        yield predictions
    elif isinstance(predictions, (list, tuple)):
        for part in predictions:
            yield from _tensors(part)
    else:
        raise ValueError(f"predict_step must return a tensor with a row per prediction; got {describe(predictions)}.")
