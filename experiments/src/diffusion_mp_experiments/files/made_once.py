"""Folders that take long to make: complete or absent, however many processes ask for them."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")


def made_once(folder: Path, load: Callable[[Path], T | None], make: Callable[[Path], None], *, anew: bool = False) -> T:
    """Return `load(folder)`; where that is None, or with `anew`, `make` writes the folder first.

    `load` returns None unless the folder is complete and current. `make` gets an empty folder beside it, which is
    renamed once everything is written. The process that makes it holds the lock `<folder>.lock`, which the operating
    system releases if that process dies; others wait and then read. A complete folder is read without a lock, so it may
    be read-only.
    """
    if not anew and (found := load(folder)) is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not anew and (found := load(folder)) is not None:  # another process made it in the meantime
            return found
        prefix = f"{folder.name}.part-"
        for left in folder.parent.iterdir():  # by processes that were killed
            if left.name.startswith(prefix):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as part:
            new = Path(part) / "new"
            new.mkdir()
            make(new)
            if folder.exists():
                folder.rename(Path(part) / "old")
            new.rename(folder)
        found = load(folder)
    if found is None:
        raise ValueError(f"{folder} was written and cannot be read. Delete it and see whether the disk is full.")
    return found
