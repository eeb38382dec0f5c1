"""Tables in text files, plain or gzipped, streamed block by block with a progress bar.

`numpy.loadtxt` and `csv` hold a line of any length, and gzip compresses a thousandfold: a small file could fill the
memory. Here at most one block of `_BYTES` and one line of `LONGEST` are held.
"""

import gzip
import re
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
MARK = (
    b"\xef\xbb\xbf"  # the byte-order mark with which some editors begin a file in UTF-8
)
_BLANK = re.compile(rb"(?:\A|\n)([ \t\r\f\v]*)(?=\n)")
_WAY_OUT = "Fetch the file again, as it was published: gzipped text where the name ends in .gz, else plain text."


def count_lines(path: Path, *, progress: bool = True) -> int:
    """Count the lines of a text, whose last may end without a line break, or be followed by blank ones."""
    return sum(
        block.count(b"\n") + 1 for _, block in _whole_lines(path, "counting", progress)
    )


def line_blocks(
    path: Path, size: int, *, longest: int = LONGEST, progress: bool = True
) -> Iterator[tuple[int, list[bytes]]]:
    """Yield lists of at most `size` lines without their line breaks, each with the number of its first line, from 0.

    Lines may end in \\r\\n, the last one in nothing, and blank lines may follow it; a byte-order mark is left out.
    """
    for start, block in _whole_lines(path, "reading", progress):
        lines = [line.removesuffix(b"\r") for line in block.split(b"\n")]
        if max(map(len, lines)) > longest:
            raise _too_long(
                path,
                start + next(i for i, line in enumerate(lines) if len(line) > longest),
                longest,
            )
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
    """Yield the rows of a table of finite numbers in blocks [rows, columns], each with the number of its first row.

    The delimiter is white space by default; with `below`, numbers must lie in 0 .. below − 1. `what` is their name.
    """
    for start, lines in line_blocks(
        path, _BLOCK // columns + 1, longest=_NUMBER * columns, progress=progress
    ):
        here = f"{path}, from line {start + 1} on"
        try:
            # Older releases of NumPy only warn of 1.5 among integers.
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                block = np.loadtxt(
                    lines,
                    dtype,
                    comments=None,
                    delimiter=delimiter,
                    ndmin=2,
                    encoding=None,
                )
        except (ValueError, Warning) as error:
            raise ValueError(f"{here}: {error}") from error
        if block.shape != (len(lines), columns):
            found = f"{block.shape[0]} of {block.shape[1]}"
            raise ValueError(
                f"{here}: expected {len(lines)} rows of {columns} numbers; got {found}."
            )
        wrong = ~np.isfinite(block)
        must = "must be finite; got NaN or infinity"
        if below is not None and not wrong.any():
            must = f"must lie in 0..{below - 1}; got {block.min()}..{block.max()} from line {start + 1} on"
            wrong = (block < 0) | (block >= below)
        if wrong.any():
            raise ValueError(
                f"{path}, line {start + int(wrong.any(1).argmax()) + 1}: the {what} {must}."
            )
        yield start, block


def _whole_lines(path: Path, task: str, progress: bool) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of complete lines, without the last line break, each with the number of its first line.

    A byte-order mark is left out, and so are blank lines at the end; others are refused, for lines are numbered.
    """
    # For tqdm, None is: no bar where standard error is not a terminal.
    hidden: Any = None if progress else True
    start = 0
    blank = 0  # lines, of which it is not known yet whether others follow
    with (
        path.open("rb") as file,
        tqdm.wrapattr(
            file,
            "read",
            path.stat().st_size,
            desc=f"{task} {path.name}",
            disable=hidden,
        ) as raw,
        gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as text,
    ):
        with reading(path, _WAY_OUT):
            rest = text.read(len(MARK)).removeprefix(MARK)
        block = b" "
        while block:
            with reading(path, _WAY_OUT):
                block = text.read(_BYTES)
            if block:
                whole, line_break, rest = (rest + block).rpartition(b"\n")
            else:
                whole = rest
                line_break = rest
                rest = b""
            if line_break:
                lines, more = _without_blank_end(whole)
                if lines:
                    _check_none_is_blank(path, start, lines, blank)
                    yield start, lines
                    start += lines.count(b"\n") + 1
                blank += more
            if len(rest) > LONGEST:
                raise _too_long(path, start, LONGEST)


def _check_none_is_blank(path: Path, start: int, lines: bytes, blank: int) -> None:
    """Raise where ``blank`` lines come before these, or one of these is blank."""
    found = _BLANK.search(lines)
    if blank or found:
        before = 0 if blank or found is None else lines.count(b"\n", 0, found.start(1))
        must = "a line with others after it must not be blank"
        raise ValueError(f"{path}, line {start + before + 1}: {must}. {_WAY_OUT}")


def _without_blank_end(whole: bytes) -> tuple[bytes, int]:
    """Return lines without the blank ones at their end, and how many these are."""
    last = len(whole.rstrip())
    if not last:
        return b"", whole.count(b"\n") + 1
    line_break = whole.find(b"\n", last)
    if line_break < 0:
        return whole, 0
    return whole[:line_break], whole.count(b"\n", line_break)


def _too_long(path: Path, line: int, longest: int) -> ValueError:
    must = f"a line must have at most {longest} bytes; this one has more"
    return ValueError(f"{path}, line {line + 1}: {must}. {_WAY_OUT}")
