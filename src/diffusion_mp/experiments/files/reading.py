"""One sentence for whatever a damaged or foreign file makes its parser say."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 300  # characters of a parser's own words: some quote the file


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
