"""NumPy's .npy files of plain numbers, their lengths checked before any room is made."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from numpy.lib import format as npy

_LONGEST = 1024  # characters of a header; those of NumPy have 118
_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8"}  # those that torch has too


def _read_header(stream: io.BufferedIOBase, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in columns, and type, where header and numbers take `size` bytes together."""
    if npy.read_magic(stream) != (1, 0):  # later versions are for names of fields, which plain numbers have not
        raise ValueError("its header is not the one of an array of numbers")
    shape, in_columns, dtype = npy.read_array_header_1_0(stream, max_header_size=_LONGEST)
    if dtype.hasobject:
        raise ValueError("it holds objects, which NumPy reads with allow_pickle=True only, since they can run code")
    if dtype.str[1:] not in _TYPES:
        raise ValueError(f"it holds numbers of type {dtype}, which torch does not have")
    if min(shape, default=0) < 0 or stream.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array {dtype} of shape {shape} does not fill {size} bytes")
    return shape, in_columns, dtype


def read_array(content: bytes) -> Shaped[np.ndarray, " ..."]:
    """The array of a .npy file that is in memory, in this machine's byte order."""
    stream = io.BytesIO(content)
    shape, in_columns, dtype = _read_header(stream, len(content))
    numbers = np.frombuffer(stream.read(), dtype).reshape(shape, order="F" if in_columns else "C")
    return numbers.astype(dtype.newbyteorder("="))


def map_array(path: Path) -> Shaped[np.ndarray, " ..."]:
    """The array of a .npy file, not read before it is used; what is written into it stays out of the file."""
    with path.open("rb") as file:
        shape, in_columns, dtype = _read_header(file, path.stat().st_size)
        start = file.tell()
    if not dtype.isnative:
        raise ValueError("its numbers have another byte order than this machine's")
    if 0 in shape:  # nothing to map
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "c", start, shape, "F" if in_columns else "C")
