"""One large graph: a folder of .npy files, filled block by block and opened by memory map."""

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
from torch_geometric.data import Data

from diffusion_mp_experiments.files.arrays import map_array
from diffusion_mp_experiments.files.made_once import made_once
from diffusion_mp_experiments.files.reading import reading

_RECORD = "sources.json"  # the sources of the arrays, and the shapes of the arrays
_BLOCK = 1 << 22  # numbers


class ArrayFolder:
    """Named arrays of a folder that is being written; only the current block is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """Create an array of zeros, which take no space on the disk until they are written."""
        np.lib.format.open_memmap(self._file(name), "w+", dtype=dtype, shape=shape)

    def write(self, name: str, where: Any, block: Shaped[np.ndarray, " ..."]) -> None:
        """Set `array[where] = block`; its pages leave the memory of this process at once."""
        np.load(self._file(name), mmap_mode="r+", allow_pickle=False)[where] = block

    def put(self, name: str, array: Shaped[np.ndarray, " ..."]) -> None:
        np.save(self._file(name), array, allow_pickle=False)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


def mapped_graph(
    cache: Path, make: Callable[[ArrayFolder], None], sources: Iterable[Path] = (), *, made_by: str, classes: int
) -> Data:
    """Return the graph in the folder `cache`, which `make` fills if needed; see `mapped_arrays`.

    `make` writes edge_index [2, E], y with labels −1 .. classes − 1, and other attributes of nodes and edges.
    """
    arrays = mapped_arrays(cache, make, sources, made_by=made_by)
    with reading(cache, "Delete the folder, and it is made anew."):
        _check(cache, arrays, classes)
    return Data(**arrays)


def _check(cache: Path, arrays: dict[str, Tensor], classes: int) -> None:
    """Raise ValueError unless the arrays are a graph with one row for each node, or edge where the name says so."""
    num_nodes, (ends, num_edges) = len(arrays["y"]), arrays["edge_index"].shape
    for name, array in arrays.items():
        rows, found = (num_edges, "edges") if name.startswith("edge_") else (num_nodes, "nodes")
        if name != "edge_index" and len(array) != rows:
            raise ValueError(f"{name} has {len(array)} rows for {rows} {found}")
        if name in ("edge_index", "y") and array.dtype != torch.long:
            raise ValueError(f"{name} must be whole numbers of 64 bits, got {array.dtype}")
    if ends != 2:
        raise ValueError(f"edge_index must be [2, E], got [{ends}, {num_edges}]")
    _check_range("y", arrays["y"].numpy(), -1, classes)
    for start in range(0, 2 * num_edges, _BLOCK):  # mapped again each time, so that pages leave the memory
        ends_here = map_array(cache / "edge_index.npy").reshape(-1)[start : start + _BLOCK]
        _check_range("edge_index", ends_here, 0, num_nodes)


def _check_range(name: str, numbers: Shaped[np.ndarray, " ..."], low: int, end: int) -> None:
    if numbers.size and not low <= numbers.min() <= numbers.max() < end:
        found = f"got up to {numbers.max()} and down to {numbers.min()}"
        raise ValueError(f"{name} must lie in {low}..{end - 1}, {found}")


def mapped_arrays(
    cache: Path, make: Callable[[ArrayFolder], None], sources: Iterable[Path] = (), *, made_by: str = ""
) -> dict[str, Tensor]:
    """Return the arrays in the folder `cache`, memory-mapped, which `make` fills unless it is there.

    Writing to them does not change the files. The folder is complete or absent (see `made_once`). It is made anew where
    an existing source has another size or modification time, where `made_by` differs, and, with a warning, where it is
    damaged; one with anything but arrays is refused. Sources may be deleted; `sources.json` keeps their SHA-256 sums.
    """
    sources = list(sources)

    def load(folder: Path) -> dict[str, Tensor] | None:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if strange := [name for name in names if name != _RECORD and not name.endswith(".npy")]:
            way_out = "name a folder of its own for the arrays"
            raise ValueError(f"{folder} holds {strange[0]}, which is no array; {way_out}.")
        try:
            with reading(folder, "A cache that cannot be read is made anew."):
                return _load(folder, sources, made_by) if names else None
        except FileNotFoundError:  # another process is replacing the folder
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


def _load(folder: Path, sources: list[Path], made_by: str) -> dict[str, Tensor] | None:
    """Return the arrays, or None where others would be made now; a damaged record raises any error."""
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
    return {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
