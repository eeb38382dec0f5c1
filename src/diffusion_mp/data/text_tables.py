"""Tables in text files, plain or gzipped, read block by block with a progress bar."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

Read = Callable[[int], bytes]

_BLOCK = 1 << 18  # lines
_BYTES = 1 << 22


@contextmanager
def open_text(path: Path, task: str, *, progress: bool = True) -> Iterator[Read]:
    """A function that reads so many bytes of the text; the bar counts those of the file, which may be a .gz."""
    shown: Any = None if progress else True  # for tqdm: nothing where standard error is not a terminal
    with (
        path.open("rb") as file,
        tqdm.wrapattr(file, "read", path.stat().st_size, desc=f"{task} {path.name}", disable=shown) as raw,
    ):
        if path.suffix == ".gz":
            with gzip.open(raw) as text:
                yield text.read
        else:
            yield raw.read


def count_lines(path: Path, *, progress: bool = True) -> int:
    """Lines of the text; the last may end without a line break."""
    lines, last = 0, b"\n"
    with open_text(path, "counting", progress=progress) as read:
        while block := read(_BYTES):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def line_blocks(path: Path, size: int, *, progress: bool = True) -> Iterator[tuple[int, list[bytes]]]:
    """The text in lists of at most `size` lines, without their line breaks, each with the number of its first line."""
    with open_text(path, "reading", progress=progress) as read:
        lines, start = _lines(read), 0
        while block := list(islice(lines, size)):
            yield start, block
            start += len(block)


def number_blocks(
    path: Path, columns: int, dtype: type[np.generic], *, delimiter: str | None = None, progress: bool = True
) -> Iterator[tuple[int, Shaped[np.ndarray, "rows columns"]]]:
    """The rows of a table of numbers [rows, columns] in blocks, each with the number of its first row.

    Errors: ValueError naming the file and the lines for a row that is not so many numbers.
    """
    for start, lines in line_blocks(path, _BLOCK // columns + 1, progress=progress):
        try:
            block = np.loadtxt(lines, dtype, comments=None, delimiter=delimiter, ndmin=2, encoding=None)
        except ValueError as error:
            raise ValueError(f"{path}, from line {start + 1} on: {error}") from error
        if block.shape != (len(lines), columns):
            raise ValueError(
                f"{path}, from line {start + 1} on: expected {len(lines)} rows of {columns} numbers; got "
                f"{block.shape[0]} of {block.shape[1]}."
            )
        yield start, block


def _lines(read: Read) -> Iterator[bytes]:
    """Lines without their breaks."""
    rest = b""
    while block := read(_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest
