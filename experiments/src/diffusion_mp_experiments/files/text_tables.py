"""Tables in text files, plain or gzipped, streamed block by block.

`numpy.loadtxt` and `csv` hold a line of any length, and gzip compresses a thousandfold: a small file could fill the
memory. Here at most `_BYTES` are held, in lines of bounded length.
"""

import gzip
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from diffusion_mp.runtime.progress import progress_bar
from diffusion_mp_experiments.files.reading import reading

_BYTES = 1 << 26
_LONGEST = 1 << 16  # bytes of a line
_NUMBER = 64  # bytes of a number
MARK = b"\xef\xbb\xbf"  # with which some editors begin a file in UTF-8
_WAY_OUT = "Fetch the file again, as it was published: gzipped text where the name ends in .gz, else plain text."


def count_lines(path: Path, longest: int = _LONGEST) -> int:
    """Count the lines that `line_blocks` yields."""
    return sum(len(lines) for _, lines in line_blocks(path, longest))


def line_blocks(
    path: Path, longest: int = _LONGEST
) -> Iterator[tuple[int, list[bytes]]]:
    r"""Yield lists of lines without their line breaks, each with the number of its first line, from 0.

    Lines may end in \r\n, and the last line without a line break. A byte-order mark and blank lines at the end are left
    out. Other blank lines are refused, since lines are numbered, and so is a line of more than `longest` bytes.
    """
    size = path.stat().st_size
    start = 0
    blank = None
    with (
        reading(path, _WAY_OUT),
        path.open("rb") as file,
        progress_bar(path.name, "B", size) as bar,
        gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as text,
    ):
        if text.peek(len(MARK)).startswith(MARK):
            text.read(len(MARK))
        read_line = partial(text.readline, longest + len(b"\r\n"))
        # Lines are bounded, so that many of them are, too.
        at_once = _BYTES // longest + 1
        while lines := list(islice(iter(read_line, b""), at_once)):
            lines = [line.rstrip(b"\r\n") for line in lines]
            for number, line in enumerate(lines, start + 1):
                if len(line) > longest:
                    must = (
                        f"a line must have at most {longest} bytes; this one has more"
                    )
                    raise ValueError(f"{path}, line {number}: {must}. {_WAY_OUT}")
                if blank is None and not line.strip():
                    blank = number
                if blank is not None and line.strip():
                    must = "a line with others after it must not be blank"
                    raise ValueError(f"{path}, line {blank}: {must}. {_WAY_OUT}")
            if blank is not None:
                lines = lines[: max(blank - 1 - start, 0)]
            # Where it is in the compressed file, whose size is known.
            bar.update(file.tell() - bar.n)
            if lines:
                yield start, lines
            start += len(lines)


def number_blocks(
    path: Path,
    columns: int,
    dtype: type[np.generic],
    *,
    delimiter: str | None = None,
    below: int | None = None,
    what: str = "numbers",
) -> Iterator[tuple[int, Shaped[np.ndarray, "rows columns"]]]:
    """Yield the rows of a table of finite numbers in blocks [rows, columns], each with the number of its first row.

    The delimiter is white space by default. With `below`, numbers must lie in 0 .. below − 1. `what` is their name.
    """
    for start, lines in line_blocks(path, _NUMBER * columns):
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
            size_of_block = f"{block.shape[0]} of {block.shape[1]}"
            raise ValueError(
                f"{here}: expected {len(lines)} rows of {columns} numbers; got {size_of_block}."
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
