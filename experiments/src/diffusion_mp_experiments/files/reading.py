"""What all readers of files share: paths, the sentence for what is missing, and the one for what is damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffusion_mp.errors import check_kind, describe

_LONGEST = 300  # characters of a parser's own words: some quote the file


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


@contextmanager
def reading(path: Path, way_out: str) -> Iterator[None]:
    """Turns whatever fails inside the block over the content of `path` into one ValueError, "path: what. way_out".

    What a parser raises depends on the bytes it met: gzip, zip, tar, pickle, json, struct, image and Unicode errors,
    KeyError, IndexError, RecursionError and more, so all of them are taken. What says nothing about the content passes
    as it is: a file that is absent, forbidden or on a failing disk (an OSError with an error number), too little
    memory, a library that is not installed, an interrupt; so does a ValueError that names `path` already. Nothing but
    the reading belongs into the block.
    """
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        # Parsers raise theirs without a number, or have sought a place before the beginning of the file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        said = str(error)
        if isinstance(error, ValueError) and str(path) in said:
            raise
        if type(error) is not ValueError:
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        if len(said) > _LONGEST:
            said = f"{said[:_LONGEST]} …"
        raise ValueError(f"{path}: {said.rstrip('.')}. {way_out}") from error
