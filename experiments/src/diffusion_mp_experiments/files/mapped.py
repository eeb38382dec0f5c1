"""Arrays larger than memory: one folder of .npy files, filled block by block and read by memory map."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from diffusion_mp_experiments.files.made_once import made_once
from diffusion_mp_experiments.files.npy import map_array
from diffusion_mp_experiments.files.reading import reading

_RECORD = "sources.json"  # what the arrays were made of, and their shapes


class ArrayFolder:
    """Named arrays of a folder that is being written; only the block at hand is in memory."""

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

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


def mapped_arrays(
    cache: Path, make: Callable[[ArrayFolder], None], sources: Iterable[Path] = (), *, made_by: str = ""
) -> dict[str, Tensor]:
    """The arrays in the folder `cache`, which `make` fills unless it is there.

    They are not read before they are used, and what is written into them stays out of the files. The folder is complete
    or absent, however many processes ask for it and whichever of them are killed (see `made_once`). It is made anew
    where a source that exists has another size or time of change than before, where `made_by` differs, and, after a
    warning, where it is damaged. Sources may be deleted once it is complete.

    Args:
        cache: a folder for these arrays alone.
        make: writes all arrays.
        sources: the files that it reads; `sources.json` beside the arrays keeps their SHA-256 sums too.
        made_by: what else decides the arrays.

    Raises:
        ValueError: the folder holds something else than arrays, which must not be overwritten.
    """
    sources = list(sources)

    def load(folder: Path) -> dict[str, Tensor] | None:
        if not _holds_arrays(folder):
            return None
        try:
            with reading(folder, "A cache that cannot be read is made anew."):
                return _load(folder, sources, made_by)
        except FileNotFoundError:  # another process is exchanging the folder for a new one at this moment
            return None
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
            return None

    def write(folder: Path) -> None:
        make(ArrayFolder(folder))
        files = {file.name: _stamp(file) | {"sha256": _sha256(file)} for file in sources}
        record = {"made_by": made_by, "arrays": _shapes(_arrays(folder)), "files": files}
        (folder / _RECORD).write_text(json.dumps(record, indent=1))

    return made_once(cache, load, write)


def _holds_arrays(folder: Path) -> bool:
    """Whether there is anything; ValueError where it is something that must not be overwritten."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return False
    strange = [name for name in names if name != _RECORD and not name.endswith(".npy")]
    if strange:
        raise ValueError(f"{folder} holds {strange[0]}, which is no array; name a folder of its own for the arrays.")
    return bool(names)


def _load(folder: Path, sources: list[Path], made_by: str) -> dict[str, Tensor] | None:
    """The arrays; None where today others would be made. Any error where the record is damaged or tells of others."""
    if not (folder / _RECORD).is_file():
        raise ValueError(f"it has no {_RECORD}")
    record = json.loads((folder / _RECORD).read_text())
    before = record["files"]
    if record["made_by"] != made_by or not all(
        file.name in before and before[file.name].items() >= _stamp(file).items() for file in sources if file.exists()
    ):
        return None
    arrays = _arrays(folder)
    if _shapes(arrays) != record["arrays"]:
        raise ValueError(f"its arrays are {_shapes(arrays)}, expected {record['arrays']}")
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _arrays(folder: Path) -> dict[str, Shaped[np.ndarray, " ..."]]:
    return {file.stem: map_array(file) for file in sorted(folder.glob("*.npy"))}


def _shapes(arrays: dict[str, Shaped[np.ndarray, " ..."]]) -> dict[str, list[Any]]:
    """The type and the lengths of every array, by name."""
    return {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
