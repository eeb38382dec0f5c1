"""Arrays larger than memory: one folder of .npy files, filled block by block and read by memory map."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

_SOURCES = "sources.json"


class ArrayFolder:
    """Named arrays of a folder; of the one that is written, only the block at hand is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """An array of zeros, which take no space on the disk before they are written."""
        np.lib.format.open_memmap(self._file(name), "w+", dtype=dtype, shape=shape)

    def write(self, name: str, where: Any, block: Shaped[np.ndarray, " ..."]) -> None:
        """`array[where] = block`; the pages leave the memory of this process at once."""
        np.load(self._file(name), mmap_mode="r+", allow_pickle=False)[where] = block

    def put(self, name: str, array: Shaped[np.ndarray, " ..."]) -> None:
        """A whole array."""
        np.save(self._file(name), array, allow_pickle=False)

    def load(self) -> dict[str, Tensor]:
        """All arrays by name, not read before they are used; what is written into them stays out of the files."""
        files = sorted(self.path.glob("*.npy"))
        return {file.stem: torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False)) for file in files}

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


def mapped_arrays(
    cache: Path, make: Callable[[ArrayFolder], None], sources: Iterable[Path] = (), *, made_by: str = ""
) -> dict[str, Tensor]:
    """The arrays in the folder `cache`, which `make` fills unless it is there.

    The folder is complete or absent: it is made as `<cache>.part` and then renamed, so a run that is killed leaves a
    part behind that the next one deletes. `sources.json` beside the arrays holds the SHA-256 sum, size and time of
    change of every source, and `made_by`; where a source that exists has another size or time, or `made_by` differs,
    the folder is made anew. Sources may be deleted once it is complete. Nothing keeps two processes from making it at
    once: let one be done before others ask.
    """
    sources = list(sources)
    if not _is_current(cache, sources, made_by):
        part = cache.with_name(f"{cache.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(ArrayFolder(part))
        record = {
            "made_by": made_by,
            "files": {file.name: _stamp(file) | {"sha256": _sha256(file)} for file in sources},
        }
        (part / _SOURCES).write_text(json.dumps(record, indent=1))
        shutil.rmtree(cache, ignore_errors=True)
        os.replace(part, cache)
    return ArrayFolder(cache).load()


def _is_current(cache: Path, sources: list[Path], made_by: str) -> bool:
    if not (cache / _SOURCES).is_file():
        return False
    record = json.loads((cache / _SOURCES).read_text())
    known = record["files"]
    return record["made_by"] == made_by and all(
        file.name in known and known[file.name].items() >= _stamp(file).items() for file in sources if file.exists()
    )


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
