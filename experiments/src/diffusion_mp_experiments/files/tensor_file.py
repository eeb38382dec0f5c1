"""What `torch.save` wrote, read as tensors and plain containers only."""

from __future__ import annotations

import mmap
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor


def load_tensors(path: Path) -> Any:
    """Tensors on the CPU, in lists, tuples and dictionaries with strings and numbers; no code of the file is run.

    PyTorch's own restricted reader (`weights_only=True`) does the work; nothing but whole, dense tensors passes.

    Raises:
        ValueError: anything else, a compressed archive, and tensors that claim more than the file has.
        BadZipFile, RuntimeError: and others, a damaged file; use it within `reading`.
    """
    with _mapped(path) as content, zipfile.ZipFile(content) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("torch.save compresses nothing, but parts of this are compressed")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose sentence proposes to run what the file asks for
        raise ValueError("it is damaged, or asks for more than tensors") from error
    _check(loaded, path.stat().st_size)
    return loaded


@contextmanager
def _mapped(path: Path) -> Iterator[IO[bytes]]:
    """A file that can be asked for more than it has without making room for that, as `zipfile` asks."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:2] != b"PK":
            raise ValueError("it is no zip file, as torch.save writes since version 1.6")
        yield content  # type: ignore[misc]


def _check(loaded: Any, size: int) -> None:
    """Raise ValueError unless all that is in `loaded`, counted as often as it is used, fits into `size` bytes."""
    claimed, waiting = 0, [loaded]
    while waiting:
        value = waiting.pop()
        claimed += 1  # so that containers which lie in each other many times come to an end
        if type(value) is Tensor:
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
                raise ValueError(f"it holds a tensor that is not dense: {value.layout} on {value.device}")
            claimed += value.numel() * value.element_size()
        elif isinstance(value, (list, tuple, dict)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, (str, int, float, type(None))):
            raise ValueError(f"it holds a {type(value).__name__}, which is neither a tensor nor a plain value")
        if claimed > size:
            raise ValueError("its tensors claim more bytes than the file has")
