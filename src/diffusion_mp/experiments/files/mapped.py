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

from diffusion_mp.experiments.files.made_once import made_once
from diffusion_mp.experiments.files.npy import map_array
from diffusion_mp.experiments.files.reading import reading

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

    def shapes(self) -> dict[str, list[Any]]:
        """The type and the lengths of every array, by name."""
        return _shapes(self._arrays())

    def load(self, shapes: dict[str, list[Any]]) -> dict[str, Tensor]:
        """All arrays by name, not read before they are used; what is written into them stays out of the files.

        Errors: ValueError unless the folder holds arrays of just these names and `shapes`.
        """
        arrays = self._arrays()
        if _shapes(arrays) != shapes:
            raise ValueError(f"its arrays are {_shapes(arrays)}, expected {shapes}")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _arrays(self) -> dict[str, Shaped[np.ndarray, " ..."]]:
        return {file.stem: map_array(file) for file in sorted(self.path.glob("*.npy"))}

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


def _shapes(arrays: dict[str, Shaped[np.ndarray, " ..."]]) -> dict[str, list[Any]]:
    return {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}


def mapped_arrays(
    cache: Path, make: Callable[[ArrayFolder], None], sources: Iterable[Path] = (), *, made_by: str = ""
) -> dict[str, Tensor]:
    """The arrays in the folder `cache`, which `make` fills unless it is there.

    The folder is complete or absent, however many processes ask for it and whichever of them are killed
    (`made_once`). `sources.json` beside the arrays holds their types and shapes, the SHA-256 sum, size and time of
    change of every source, and `made_by`. The folder is made anew where a source that exists has another size or time,
    where `made_by` differs, and, after a warning, where `sources.json` and the arrays do not agree. Sources may be
    deleted once it is complete.
    """
    sources = list(sources)

    def load(folder: Path) -> dict[str, Tensor] | None:
        if not _holds_arrays(folder):
            return None
        try:
            with reading(folder, "A cache that cannot be read is made anew."):
                if not (folder / _SOURCES).is_file():
                    raise ValueError(f"it has no {_SOURCES}")
                record = json.loads((folder / _SOURCES).read_text())
                current = record["made_by"] == made_by and _unchanged(record["files"], sources)
                return ArrayFolder(folder).load(record["arrays"]) if current else None
        except FileNotFoundError:  # another process is putting a new one in its place
            return None
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
            return None

    def write(folder: Path) -> None:
        arrays = ArrayFolder(folder)
        make(arrays)
        files = {file.name: _stamp(file) | {"sha256": _sha256(file)} for file in sources}
        record = {"made_by": made_by, "arrays": arrays.shapes(), "files": files}
        (folder / _SOURCES).write_text(json.dumps(record, indent=1))

    return made_once(cache, load, write)


def _holds_arrays(folder: Path) -> bool:
    """Whether there is anything; ValueError where it is something that must not be overwritten."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return False
    strange = [name for name in names if name != _SOURCES and not name.endswith(".npy")]
    if strange:
        raise ValueError(f"{folder} holds {strange[0]}, which is no array; name a folder of its own for the arrays.")
    return bool(names)


def _unchanged(known: Any, sources: list[Path]) -> bool:
    return all(
        file.name in known and known[file.name].items() >= _stamp(file).items() for file in sources if file.exists()
    )


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
