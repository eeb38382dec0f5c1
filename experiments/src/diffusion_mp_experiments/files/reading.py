"""What all readers of files share: paths, indices, and the sentences for files that are missing or damaged."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from diffusion_mp.checks import check_kind, describe

_LONGEST = 300  # characters of a parser's own words: some quote the file


def as_path(value: str | Path, name: str) -> Path:
    """Return the path with ~ expanded, whether or not it exists; TypeError or ValueError names the argument."""
    check_kind(value, name, (str, os.PathLike), "a path, a str or a pathlib.Path")
    try:
        path = Path(value).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()  # its other errors are for names that no file system takes
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be a path that a file can have; got {describe(value)}: {error}."
        ) from error
    return path


def check_present(
    what: str, folder: Path, files: Iterable[Path], how_to_get: str
) -> None:
    """Raise FileNotFoundError, naming the missing files and `how_to_get` them, unless all are there."""
    missing = [str(file.relative_to(folder)) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{what} is not at {folder}: missing {', '.join(missing)}. {how_to_get}"
        )


def check_indices(index: Tensor, limit: int | Tensor, name: str, low: int = 0) -> None:
    """Raise ValueError unless `index` holds integers in low .. limit − 1; a tensor has a limit for each of them."""
    if index.is_floating_point() or index.is_complex():
        raise ValueError(f"{name} must be integers; got {index.dtype}")
    index = index.long()  # torch computes next to nothing in uint16 and its like
    if index.numel() and (int(index.min()) < low or bool((index >= limit).any())):
        highest = (
            limit - 1
            if isinstance(limit, int)
            else "the number of its graph's nodes - 1"
        )
        ends = f"got up to {int(index.max())} and down to {int(index.min())}"
        raise ValueError(f"{name} must lie in {low}..{highest}, {ends}")


@contextmanager
def reading(path: Path, way_out: str) -> Iterator[None]:
    """Turn any error about the content of `path` into one ValueError, "path: what. way_out".

    Parsers raise nearly everything. Only errors that say nothing about the content pass: an OSError with an error
    number, too little memory, a missing library; and a ValueError that names `path` already. Do nothing but read in the
    block.
    """
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        # Parsers raise OSError without a number, or have sought a place before the beginning of the file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        said = str(error)
        # A reader within this one has said where and what.
        if isinstance(error, ValueError) and str(path) in said:
            raise
        if type(error) is not ValueError:
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        if len(said) > _LONGEST:
            said = f"{said[:_LONGEST]} …"
        raise ValueError(f"{path}: {said.rstrip('.')}. {way_out}") from error
