"""``show_progress``: bars with the time left, off unless they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from diffusion_mp import errors

_after: ContextVar[float | None] = ContextVar("after", default=None)


@contextmanager
def show_progress(after: float = 5.0) -> Iterator[None]:
    """Show a bar with the time left, on stderr, for what takes longer than some seconds in the body.

    These are searches for neighbours, linear systems and fixed points that are solved by iteration (``at_rest``,
    ``num_layers=None``, ``Equilibrium``), `full_graph_inference`, `kernel_error` and ``DiffusionClassifier``.

    Args:
        after: seconds before a bar appears.

    Examples:
        >>> with show_progress():
        ...     edges = knn_graph(x, k=2)  # too fast for a bar
    """
    errors.check_positive(after, "after", allow_zero=True)
    before = _after.set(float(after))
    try:
        yield
    finally:
        _after.reset(before)


def progress_bar(what: str, unit: str, total: float | None = None, **options: Any) -> tqdm[Any]:
    """Return a bar of tqdm, which shows within `show_progress`; ``options`` are those of tqdm."""
    after = _after.get()
    shown = {"desc": what, "unit": unit, "total": total, "delay": after or 0, "disable": after is None, "leave": False}
    return tqdm(**shown | options)


def solving(what: str, max_iter: int) -> Iterator[Callable[[Tensor | float, Tensor | float], None]]:
    """Yield, for every iteration of a solve, a function that moves its bar, given a residual and the goal for it.

    The bar shows how many of the digits that the first residual lacked have been gained.
    """
    with progress_bar(what, "digit", bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}") as bar:

        def closer(residual: Tensor | float, goal: Tensor | float) -> None:
            if bar.disable:
                return
            left = (torch.as_tensor(residual) / goal).nan_to_num().clamp(1, 1e30).max().log10().item()
            bar.total = max(bar.total or 0.0, left)
            bar.update(bar.total - left - bar.n)

        for _ in range(max_iter):
            yield closer
