"""What takes long to make and is then kept on the disk: complete or absent, however many processes ask for it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

T = TypeVar("T")


def made_once(folder: Path, load: Callable[[Path], T | None], make: Callable[[Path], None], *, anew: bool = False) -> T:
    """What `load(folder)` gives; where that is None, or with `anew`, `make` writes the folder first.

    `load` answers None unless the folder is there, complete and of today; it says so itself where that is a surprise.
    `make` gets an empty folder beside it, which is renamed when everything is written. Whoever makes it holds the lock
    `<folder>.lock`, which the operating system takes back from a process that dies; the others wait and then read. What
    a killed process left behind is deleted by the next one that holds the lock. A complete folder is read without a
    lock, so it may be read-only.
    """
    found = None if anew else load(folder)
    if found is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        found = None if anew else load(folder)  # somebody may have made it while this process waited
        if found is not None:
            return found
        prefix = f"{folder.name}.part-"
        for left in folder.parent.iterdir():
            if left.name.startswith(prefix):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as part:
            new, old = Path(part) / "new", Path(part) / "old"
            new.mkdir()
            make(new)
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        found = load(folder)
    if found is None:
        raise ValueError(f"{folder} was written and cannot be read. Delete it and see whether the disk is full.")
    return found
