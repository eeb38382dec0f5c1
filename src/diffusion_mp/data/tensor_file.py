"""What `torch.save` wrote, read as tensors and plain containers only."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_tensors(path: Path) -> Any:
    """Tensors on the CPU, in lists, tuples and dictionaries with strings and numbers; no code of the file is run.

    PyTorch's own restricted reader (`weights_only=True`) does the work; nothing but whole, dense tensors passes.
    Errors: ValueError for anything else, for a compressed archive, and for tensors that claim more than the file has;
    also whatever `zipfile` and `torch.load` say of a damaged one: use it within `reading`.
    """
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("torch.save compresses nothing, but parts of this are compressed")
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(loaded))
    if claimed > path.stat().st_size:
        raise ValueError(f"its tensors claim {claimed} bytes, more than the file has")
    return loaded


def _tensors(loaded: Any) -> list[Tensor]:
    """All tensors, each as often as it is used."""
    tensors, entered, waiting = [], set(), [loaded]
    while waiting:
        value = waiting.pop()
        if type(value) is Tensor:
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
                raise ValueError(f"it holds a tensor that is not dense: {value.layout} on {value.device}")
            tensors.append(value)
        elif isinstance(value, (list, tuple, dict)):
            if value and id(value) in entered:  # a few bytes could become as many graphs as one likes
                raise ValueError(f"it uses one {type(value).__name__} twice")
            entered.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, (str, int, float, type(None))):
            raise ValueError(f"it holds a {type(value).__name__}, which is neither a tensor nor a plain value")
    return tensors
