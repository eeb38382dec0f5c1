"""Arguments that many data sets share: whole numbers, shares and paths, checked by one sentence each."""

from __future__ import annotations

import os
from contextlib import suppress
from numbers import Real
from operator import index
from pathlib import Path

from diffusion_mp.errors import check_kind, describe


def as_whole(value: object, name: str, way_out: str = "") -> int:
    """A whole number as an int, numpy's and PyTorch's too; a bool is none.

    Errors: TypeError naming the argument.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number; got {describe(value)}.{way_out and f' {way_out}'}")
    return number


def check_share(value: float, name: str) -> None:
    """Raise unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number from 0 to 1; got {describe(value)}.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability; got {value}, which is not from 0 to 1.")


def as_path(value: str | Path, name: str) -> Path:
    """The path, with ~ for the home folder; whether something is there is for others to say.

    Errors: TypeError or ValueError naming the argument.
    """
    check_kind(value, name, (str, os.PathLike), "a path, a str or a pathlib.Path")
    try:
        path = Path(value).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()  # whose other errors are of names that no file system takes
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a path that a file can have; got {describe(value)}: {error}.") from error
    return path
