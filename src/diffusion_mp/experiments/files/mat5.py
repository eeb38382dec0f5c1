"""Matrices of numbers from MATLAB's files (level 5, as versions 5 to 7 and `scipy.io.savemat` write them), mapped.

Written after "MAT-File Format" of The MathWorks. A file is a header and a row of elements, each a tag (its type and
size) and data; an element that is a matrix consists of elements again: flags, lengths, name and numbers. What stands in
a file is compared with its size before anything goes by it.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

_INT8, _INT32, _UINT32, _MATRIX, _COMPRESSED = 1, 5, 6, 14, 15  # types of elements
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMBERS = range(6, 16)  # classes of matrices: double to uint64
_COMPLEX = 8  # a flag
_MOST = 10_000  # variables
_HEAD = 1 << 12  # bytes that hold everything of a variable but its numbers
_BLOCK = 1 << 20


@dataclass(frozen=True)
class _Variable:
    """Where the numbers of a variable begin within its element, and what they are."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    start: int


def map_variable(path: Path, name: str, scratch: Path) -> Shaped[np.ndarray, "rows columns"]:
    """The matrix `name` of a file, not read before it is used; what is compressed is unpacked into `scratch` first.

    Raises:
        ValueError, struct.error, zlib.error: there is no such matrix of real numbers, or the file is damaged; use it
            within `reading`.
    """
    with path.open("rb") as file:
        for kind, size in _elements(file):
            start = file.tell()
            head = struct.pack("<II", kind, size) + file.read(min(size, _HEAD))
            if kind == _COMPRESSED:
                head = zlib.decompressobj().decompress(head[8:], _HEAD)
            variable = _variable(head, name)
            if variable is not None:
                place, offset = path, start - 8
                if kind == _COMPRESSED:
                    file.seek(start)
                    place, offset = scratch / name, 0
                    _unpack(file, size, 8 + int.from_bytes(head[4:8], "little"), place)
                return _mapped(place, offset + variable.start, variable)
            file.seek(start + size)
    raise ValueError(f"it has no {name}")


def _elements(file: BufferedReader) -> Iterator[tuple[int, int]]:
    """Type and size of every element of a file, which stands behind the tag; whoever asks goes on to the next."""
    header = file.read(128)
    if header[1:4] == b"HDF" or header[124:128] == b"\x00\x02IM":
        raise ValueError("it is a file of MATLAB 7.3; save it as version 7 (save -v7)")
    if header[124:128] != b"\x00\x01IM":
        raise ValueError("it is no MATLAB file of version 5 to 7 with little-endian numbers")
    for _ in range(_MOST):
        tag = file.read(8)
        if not tag:
            return
        kind, size = struct.unpack("<II", tag)
        if kind not in (_MATRIX, _COMPRESSED):
            raise ValueError(f"it has an element of type {kind} where a variable belongs")
        yield kind, size
    raise ValueError(f"it has more than {_MOST} variables")


def _variable(head: bytes, name: str) -> _Variable | None:
    """The variable that begins with `head`, if it has this name."""
    flags, lengths, called = 8, 0, 0
    kind, size, flags, lengths = _tag(head, flags)
    if kind != _UINT32 or size != 8:
        raise ValueError("it has a variable without a class")
    dims_kind, dims_size, dims, called = _tag(head, lengths)
    name_kind, name_size, letters, numbers = _tag(head, called)
    if name_kind != _INT8 or head[letters : letters + name_size] != name.encode():
        return None
    if head[flags] not in _NUMBERS or head[flags + 1] & _COMPLEX:
        raise ValueError(f"{name} is no full matrix of real numbers")
    if dims_kind != _INT32 or dims_size != 8:
        raise ValueError(f"{name} is no matrix with rows and columns")
    shape = struct.unpack_from("<2i", head, dims)
    kind, size, start, _ = _tag(head, numbers)
    if kind not in _TYPES or min(shape) < 0:
        raise ValueError(f"{name} has no numbers")
    dtype = np.dtype(f"<{_TYPES[kind]}")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes do not fill {name}, a matrix {dtype} of shape {shape}")
    return _Variable(name, dtype, shape, start)


def _tag(head: bytes, at: int) -> tuple[int, int, int, int]:
    """Type, size and beginning of the element at a place, and where the next begins; a small one lies in its tag."""
    kind, size = struct.unpack_from("<II", head, at)
    if kind >> 16:
        return kind & 0xFFFF, kind >> 16, at + 4, at + 8
    return kind, size, at + 8, at + 8 + -(-size // 8) * 8


def _unpack(file: BufferedReader, size: int, length: int, target: Path) -> None:
    """Writes the element of `length` bytes that is compressed in the next `size` bytes; none beyond it."""
    machine = zlib.decompressobj()
    with target.open("wb") as unpacked:
        while length > 0 and not machine.eof:
            packed = machine.unconsumed_tail
            if not packed:
                packed = file.read(min(size, _BLOCK))
                size -= len(packed)
            block = machine.decompress(packed, min(length, _BLOCK))
            if not packed and not block:
                raise ValueError(f"it ends within {target.name}")
            length -= len(block)
            unpacked.write(block)


def _mapped(path: Path, start: int, variable: _Variable) -> Shaped[np.ndarray, "rows columns"]:
    size = math.prod(variable.shape) * variable.dtype.itemsize
    if start + size > path.stat().st_size:
        raise ValueError(f"it ends within {variable.name}")
    if not size:
        return np.empty(variable.shape, variable.dtype)
    return np.memmap(path, variable.dtype, "r", start, variable.shape, "F")
