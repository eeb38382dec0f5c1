"""Tables in text files, plain or gzipped, read block by block with a progress bar.

A file is compressed a thousandfold at no cost, so nothing here holds more of it than one block of `_BYTES` and one line
of `LONGEST`, whatever the file has been made of.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

from diffusion_mp_experiments.files.reading import reading

_BLOCK = 1 << 18  # lines
_BYTES = 1 << 22
LONGEST = 1 << 24  # bytes of a line
_NUMBER = 64  # bytes of a number
_WAY_OUT = (
    "Fetch the file again, as it was published; a name that ends in .gz must be gzipped text, any other plain text."
)


def count_lines(path: Path, *, progress: bool = True) -> int:
    """Lines of the text; the last may end without a line break.

    Raises:
        ValueError: what gzip can not read, naming the file, and a line of more than `LONGEST` bytes, naming it.
    """
    return sum(block.count(b"\n") + 1 for _, block in _whole_lines(path, "counting", progress))


def line_blocks(
    path: Path, size: int, *, longest: int = LONGEST, progress: bool = True
) -> Iterator[tuple[int, list[bytes]]]:
    """The text in lists of at most `size` lines, without their line breaks, each with the number of its first line.

    Raises:
        ValueError: as `count_lines`, and a line of more than `longest` bytes.
    """
    for start, block in _whole_lines(path, "reading", progress):
        lines = [line.removesuffix(b"\r") for line in block.split(b"\n")]
        if max(map(len, lines)) > longest:
            raise _too_long(path, start + next(i for i, line in enumerate(lines) if len(line) > longest), longest)
        for first in range(0, len(lines), size):
            yield start + first, lines[first : first + size]


def number_blocks(
    path: Path,
    columns: int,
    dtype: type[np.generic],
    *,
    delimiter: str | None = None,
    below: int | None = None,
    what: str = "numbers",
    progress: bool = True,
) -> Iterator[tuple[int, Shaped[np.ndarray, "rows columns"]]]:
    """The rows of a table of finite numbers [rows, columns] in blocks, each with the number of its first row.

    Args:
        path: the file.
        columns, dtype: of the table.
        delimiter: between the numbers; white space by default.
        below: numbers must lie in 0 .. below − 1, if given.
        what: what a sentence calls the numbers.
        progress: show a bar, on a terminal.

    Raises:
        ValueError: a row that is not so many numbers, naming the lines; a number that is not finite or, with `below`,
            out of range, naming its line.
    """
    for start, lines in line_blocks(path, _BLOCK // columns + 1, longest=_NUMBER * columns, progress=progress):
        try:
            with warnings.catch_warnings():  # older releases of numpy only warn of 1.5 where whole numbers are due
                warnings.simplefilter("error")
                block = np.loadtxt(lines, dtype, comments=None, delimiter=delimiter, ndmin=2, encoding=None)
        except (ValueError, Warning) as error:
            raise ValueError(f"{path}, from line {start + 1} on: {error}") from error
        if block.shape != (len(lines), columns):
            raise ValueError(
                f"{path}, from line {start + 1} on: expected {len(lines)} rows of {columns} numbers; got "
                f"{block.shape[0]} of {block.shape[1]}."
            )
        if not np.isfinite(block).all():
            line = start + int((~np.isfinite(block)).any(1).argmax()) + 1
            raise ValueError(f"{path}, line {line}: the {what} must be finite; got NaN or infinity.")
        if below is not None and not 0 <= block.min() <= block.max() < below:
            line = start + int(((block < 0) | (block >= below)).any(1).argmax()) + 1
            raise ValueError(
                f"{path}, line {line}: the {what} must lie in 0..{below - 1}; got {block.min()}..{block.max()} from "
                f"line {start + 1} on."
            )
        yield start, block


def _whole_lines(path: Path, task: str, progress: bool) -> Iterator[tuple[int, bytes]]:
    """The text in blocks of whole lines, without the last line break, each with the number of its first line."""
    hidden: Any = None if progress else True  # for tqdm: no bar where standard error is not a terminal, or none at all
    start, rest, block = 0, b"", b" "
    with (
        path.open("rb") as file,
        tqdm.wrapattr(file, "read", path.stat().st_size, desc=f"{task} {path.name}", disable=hidden) as raw,
        gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as text,
    ):
        while block:
            with reading(path, _WAY_OUT):
                block = text.read(_BYTES)
            whole, end, rest = (rest + block).rpartition(b"\n") if block else (rest, rest, b"")
            if end:
                yield start, whole
                start += whole.count(b"\n") + 1
            if len(rest) > LONGEST:
                raise _too_long(path, start, LONGEST)


def _too_long(path: Path, line: int, longest: int) -> ValueError:
    return ValueError(
        f"{path}, line {line + 1}: a line must have at most {longest} bytes; this one has more. {_WAY_OUT}"
    )
