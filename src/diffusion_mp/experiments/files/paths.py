"""Paths of the files that a data set is read from, and the sentence for those that are not there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from diffusion_mp.errors import check_kind, describe


def as_path(value: str | Path, name: str) -> Path:
    """The path, with ~ for the home folder; whether something is there is for others to say.

    Raises:
        TypeError, ValueError: it is no path, or no file system takes it; the sentence names the argument.
    """
    check_kind(value, name, (str, os.PathLike), "a path, a str or a pathlib.Path")
    try:
        path = Path(value).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()  # whose other errors are of names that no file system takes
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a path that a file can have; got {describe(value)}: {error}.") from error
    return path


def check_present(what: str, folder: Path, files: Iterable[Path], how_to_get: str) -> None:
    """Raise ``FileNotFoundError`` unless all files of a data set are there; it says which are not, and `how_to_get`."""
    missing = [str(file.relative_to(folder)) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{what} is not at {folder}: missing {', '.join(missing)}. {how_to_get}")
