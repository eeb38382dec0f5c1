"""Tables in text files, plain or gzipped, streamed block by block with a progress bar.

`numpy.loadtxt` and `csv` hold a line of any length, and gzip compresses a thousandfold: a small file could fill the
memory. Here at most one block of `_BYTES` and one line of `LONGEST` are held.
"""

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
_WAY_OUT = "Fetch the file again, as it was published: gzipped text where the name ends in .gz, else plain text."


def count_lines(path: Path, *, progress: bool = True) -> int:
    """Count the lines of a text, whose last may end without a line break."""
    return sum(block.count(b"\n") + 1 for _, block in _whole_lines(path, "counting", progress))


def line_blocks(
    path: Path, size: int, *, longest: int = LONGEST, progress: bool = True
) -> Iterator[tuple[int, list[bytes]]]:
    """Yield lists of at most `size` lines without their line breaks, each with the number of its first line, from 0."""
    for start, block in _whole_lines(path, "reading", progress):
        lines = [line.removesuffix(b"\r") for line in block.split(b"\n")]
        if max(map(len, lines)) > longest:
            raise _too_long(path, start + next(i for i, line in enumerate(lines) if len(line) > longest), longest)
        for first in range(0, len(lines), size):
            yield start + first, lines[first : first + size]


def number_blocks(
    path: Path, columns: int, dtype: type[np.generic],
    *, delimiter: str | None = None, below: int | None = None, what: str = "numbers", progress: bool = True,
) -> Iterator[tuple[int, Shaped[np.ndarray, "rows columns"]]]:  # fmt: skip
    """Yield the rows of a table of finite numbers in blocks [rows, columns], each with the number of its first row.

    The delimiter is white space by default; with `below`, numbers must lie in 0 .. below − 1. `what` is their name.
    """
    for start, lines in line_blocks(path, _BLOCK // columns + 1, longest=_NUMBER * columns, progress=progress):
        here = f"{path}, from line {start + 1} on"
        try:
            with warnings.catch_warnings():  # older releases of NumPy only warn of 1.5 among integers
                warnings.simplefilter("error")
                block = np.loadtxt(lines, dtype, comments=None, delimiter=delimiter, ndmin=2, encoding=None)
        except (ValueError, Warning) as error:
            raise ValueError(f"{here}: {error}") from error
        if block.shape != (len(lines), columns):
            found = f"{block.shape[0]} of {block.shape[1]}"
            raise ValueError(f"{here}: expected {len(lines)} rows of {columns} numbers; got {found}.")
        wrong, must = ~np.isfinite(block), "must be finite; got NaN or infinity"
        if below is not None and not wrong.any():
            must = f"must lie in 0..{below - 1}; got {block.min()}..{block.max()} from line {start + 1} on"
            wrong = (block < 0) | (block >= below)
        if wrong.any():
            raise ValueError(f"{path}, line {start + int(wrong.any(1).argmax()) + 1}: the {what} {must}.")
        yield start, block


def _whole_lines(path: Path, task: str, progress: bool) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of complete lines, without the last line break, each with the number of its first line."""
    hidden: Any = None if progress else True  # for tqdm, None is: no bar where standard error is not a terminal
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
    must = f"a line must have at most {longest} bytes; this one has more"
    return ValueError(f"{path}, line {line + 1}: {must}. {_WAY_OUT}")
