"""NumPy's .npy files of plain numbers, their lengths checked before any room is made."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Shaped

_LONGEST = 1 << 16  # characters of a header; those of NumPy have 118
_HEADER = re.compile(
    r"\{'descr': '([<>|=]?)([A-Za-z]\d*)', 'fortran_order': (True|False), 'shape': \(([\d, ]{0,200})\), \} *\n"
)
_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8"}  # those that torch has too


@dataclass(frozen=True)
class Header:
    """What stands before the numbers: the type as a byte order and a code such as i8, and the shape."""

    order: str
    code: str
    in_columns: bool
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.code == "O":
            raise ValueError("it holds objects, which NumPy reads with allow_pickle=True only, since they can run code")
        if self.code not in _TYPES:
            raise ValueError(f"it holds numbers of type {self.code}, which torch does not have")
        return np.dtype(f"{self.order}{self.code}")

    @property
    def layout(self) -> Literal["C", "F"]:
        return "F" if self.in_columns else "C"

    def check_size(self, size: int) -> None:
        """Raise ValueError unless header and numbers take `size` bytes together."""
        if self.start + math.prod(self.shape) * self.dtype.itemsize != size:
            raise ValueError(f"an array {self.dtype} of shape {self.shape} does not fill {size} bytes")


def read_header(stream: io.BufferedIOBase) -> Header:
    """The header at the beginning of a .npy file; it is matched, never evaluated. ValueError where it is none."""
    magic = stream.read(8)
    if len(magic) != 8 or magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise ValueError("it does not begin as a .npy file")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(stream.read(width), "little")
    text = stream.read(min(length, _LONGEST)).decode("latin-1")
    found = _HEADER.fullmatch(text)
    if length != len(text) or found is None:
        raise ValueError(f"its header is not one of numpy.save: {text[:80]!r}")
    order, code, in_columns, shape = found.groups()
    lengths = tuple(int(part) for part in shape.replace(" ", "").split(",") if part)
    if any(length >= 2**48 for length in lengths):
        raise ValueError(f"its shape is {lengths}")
    return Header(order, code, in_columns == "True", lengths, 8 + width + length)


def read_array(stream: io.BytesIO) -> Shaped[np.ndarray, " ..."]:
    """The array of a .npy file that is in memory."""
    header = read_header(stream)
    data = stream.read()
    header.check_size(header.start + len(data))
    numbers = np.frombuffer(data, header.dtype)
    return numbers.reshape(header.shape, order=header.layout).astype(header.dtype.newbyteorder("="))


def map_array(path: Path) -> Shaped[np.ndarray, " ..."]:
    """The array of a .npy file, not read before it is used; what is written into it stays out of the file."""
    with path.open("rb") as file:
        header = read_header(file)
    header.check_size(path.stat().st_size)
    if not header.dtype.isnative:
        raise ValueError("its numbers have another byte order than this machine's")
    if 0 in header.shape:  # nothing to map
        return np.empty(header.shape, header.dtype)
    return np.memmap(path, header.dtype, "c", header.start, header.shape, header.layout)
