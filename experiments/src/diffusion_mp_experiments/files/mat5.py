"""Matrices of numbers from MATLAB's files (level 5, as versions 5 to 7 and `scipy.io.savemat` write them).

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
_SPARSE, _NUMBERS = 5, range(6, 16)  # classes of matrices: double to uint64
_COMPLEX = 8  # a flag
_MOST = 10_000  # variables
_HEAD = 1 << 12  # bytes that hold everything of a variable but its numbers
_BLOCK = 1 << 20


@dataclass(frozen=True)
class _Header:
    """Class and shape of a variable, whether it is complex, and where its numbers begin within its element."""

    kind: int
    complex: bool
    shape: tuple[int, ...]
    start: int


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
            head = _content(file, kind, size, _HEAD)
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


def read_pattern(path: Path, name: str, largest: int) -> tuple[Shaped[np.ndarray, "2 entries"], tuple[int, ...]]:
    """Rows and columns of the entries of the sparse matrix `name`, column by column, and its shape.

    Raises:
        ValueError, struct.error, zlib.error: there is no such matrix, it takes more than `largest` bytes, or the file
            is damaged; use it within `reading`.
    """
    with path.open("rb") as file:
        for kind, size in _elements(file):
            start = file.tell()
            header = _header(_content(file, kind, size, _HEAD), name)
            if header is not None:
                file.seek(start)
                return _pattern(_content(file, kind, size, largest), header, name), header.shape
            file.seek(start + size)
    raise ValueError(f"it has no {name}")


def _pattern(content: bytes, header: _Header, name: str) -> Shaped[np.ndarray, "2 entries"]:
    """Of a matrix with the rows of all entries, and how many entries there are before each column."""
    if header.kind != _SPARSE:
        raise ValueError(f"{name} is no sparse matrix")
    rows, after = _integers(content, header.start, name)
    before, _ = _integers(content, after, name)
    height, width = header.shape
    counts = np.diff(before)
    if len(before) != width + 1 or before[0] or (counts < 0).any() or before[-1] > len(rows):
        raise ValueError(f"the columns of {name} do not divide its entries")
    rows = rows[: before[-1]]
    if len(rows) and not 0 <= rows.min() <= rows.max() < height:
        raise ValueError(f"{name} has entries beyond its {height} rows")
    return np.stack([rows, np.arange(width).repeat(counts)])


def _integers(content: bytes, at: int, name: str) -> tuple[Shaped[np.ndarray, " n"], int]:
    """The whole numbers of the element at a place, and where the next begins."""
    kind, size, start, after = _tag(content, at)
    if _TYPES.get(kind, "f")[0] == "f":
        raise ValueError(f"{name} has no places of its entries")
    dtype = np.dtype(f"<{_TYPES[kind]}")
    return np.frombuffer(content, dtype, size // dtype.itemsize, start).astype(np.int64), after


def _content(file: BufferedReader, kind: int, size: int, most: int) -> bytes:
    """The element of a variable with its tag, whose content comes next in the file, or the beginning of it."""
    if kind == _COMPRESSED:
        return zlib.decompressobj().decompress(file.read(min(size, most)), most)
    return struct.pack("<II", kind, size) + file.read(min(size, most))


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


def _header(head: bytes, name: str) -> _Header | None:
    """Of the variable that begins with `head`, if it has this name."""
    flags, lengths, called = 8, 0, 0
    kind, size, flags, lengths = _tag(head, flags)
    if kind != _UINT32 or size != 8:
        raise ValueError("it has a variable without a class")
    dims_kind, dims_size, dims, called = _tag(head, lengths)
    name_kind, name_size, letters, numbers = _tag(head, called)
    if name_kind != _INT8 or head[letters : letters + name_size] != name.encode():
        return None
    if dims_kind != _INT32 or dims_size != 8:
        raise ValueError(f"{name} is no matrix with rows and columns")
    shape = struct.unpack_from("<2i", head, dims)
    if min(shape) < 0:
        raise ValueError(f"{name} has no numbers")
    return _Header(head[flags], bool(head[flags + 1] & _COMPLEX), shape, numbers)


def _variable(head: bytes, name: str) -> _Variable | None:
    """The full matrix of real numbers that begins with `head`, if it has this name."""
    header = _header(head, name)
    if header is None:
        return None
    if header.kind not in _NUMBERS or header.complex:
        raise ValueError(f"{name} is no full matrix of real numbers")
    kind, size, start, _ = _tag(head, header.start)
    if kind not in _TYPES:
        raise ValueError(f"{name} has no numbers")
    shape = header.shape
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
