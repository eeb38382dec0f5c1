"""Graphs that are made once and kept on disk as memory-mapped arrays: one large graph, or a set of small graphs."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset

from diffusion_mp.checks import describe
from diffusion_mp.runtime.progress import progress_bar
from diffusion_mp_experiments.files.arrays import map_array
from diffusion_mp_experiments.files.reading import as_path, check_indices, reading

T = TypeVar("T")


def made_once(
    folder: Path,
    load: Callable[[Path], T | None],
    make: Callable[[Path], None],
) -> T:
    """Return `load(folder)`; if that is None, `make` writes the folder first.

    `load` returns None unless the folder is current. It raises ValueError if the folder is damaged, which becomes a
    warning. `make` gets an empty folder next to it, which is renamed once everything is written.

    The process that makes the folder holds the lock `<folder>.lock`, which the operating system releases if that
    process dies. Other processes wait and then read. A complete folder is read without a lock, so it may be read-only.
    """

    def read() -> T | None:
        try:
            return load(folder)
        except FileNotFoundError:  # it is not there, or another process is replacing it
            return None
        except ValueError as error:
            warnings.warn(str(error), stacklevel=3)
            return None

    if (loaded := read()) is not None:
        return loaded
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # Another process may have made it while this one waited for the lock.
        if (loaded := read()) is not None:
            return loaded
        prefix = f"{folder.name}.part-"
        for left in folder.parent.iterdir():  # by processes that were killed
            if left.name.startswith(prefix):
                shutil.rmtree(left, ignore_errors=True)
        # Beside the folder, since nothing can be renamed across file systems.
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as part:
            new = Path(part) / "new"
            new.mkdir()
            make(new)
            if folder.exists():
                # A folder that is not empty cannot be replaced, so it leaves first.
                folder.rename(Path(part) / "old")
            new.rename(folder)
        loaded = read()
    if loaded is None:
        raise ValueError(
            f"{folder} was written and cannot be read. Delete it and see whether the disk is full."
        )
    return loaded


Transform = Callable[[Data], Data]

_RECORD = "sources.json"  # the sources of the arrays, and what the arrays are
_BLOCK = 1 << 22  # numbers


class ArrayFolder:
    """Named arrays of a folder that is being written; only the current block is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(
        self, name: str, shape: tuple[int, ...], dtype: type[np.generic]
    ) -> None:
        """Create an array of zeros, which take no space on the disk until they are written."""
        np.lib.format.open_memmap(self._file(name), "w+", dtype=dtype, shape=shape)

    def write(self, name: str, where: Any, block: np.ndarray) -> None:
        """Set `array[where] = block`; its pages leave the memory of this process at once."""
        np.load(self._file(name), mmap_mode="r+", allow_pickle=False)[where] = block

    def put(self, name: str, array: np.ndarray) -> None:
        np.save(self._file(name), array, allow_pickle=False)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


# The array of the rows at which the graphs of an attribute begin and end; no attribute has a point in its name.
_SLICES = ".slices"


class CachedDataset(InMemoryDataset):
    """An in-memory dataset whose graphs are made once by `make()`, and then mapped from `root/processed/key`.

    A subclass sets what `make` needs, then calls `super().__init__`. Different graphs need different keys. The folder
    is a folder of `mapped_arrays`: complete or absent, and made anew if it is damaged or `pre_transform` has changed.

    PyG unpickles its own caches. Here PyG reads and writes nothing, since this class has no `process`.

    Args:
        root: a writable folder.
        key: name of the folder of these graphs.
        num_graphs: how many graphs `make` yields.
        transform: applied to a graph on access.
        pre_transform: applied to a graph before it is saved. All attributes must be dense tensors.
    """

    def __init__(
        self,
        root: str | Path,
        key: str,
        num_graphs: int,
        *,
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
    ) -> None:
        self._key = key
        self._num_graphs = num_graphs
        super().__init__(str(as_path(root, "root")), transform, pre_transform)
        folder = Path(self.processed_dir)
        # What a function prints has its address in this process.
        # Otherwise the same function would be another one in every process.
        made_by = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(pre_transform))
        arrays = mapped_arrays(folder, self._write, made_by=made_by, read_all=True)
        # The record tells that they are as written; that graphs can be of such numbers is checked each time.
        data = {name: part for name, part in arrays.items() if _SLICES not in name}
        with reading(folder, "Delete the folder, and it is made anew."):
            slices = {name: arrays[f"{name}{_SLICES}"] for name in data}
            check_collated(data, slices, num_graphs)
        self.data = Data.from_dict(data)
        self.slices = slices

    @abstractmethod
    def make(self) -> Iterator[Data]:
        """Yield `num_graphs` graphs in order."""

    raw_file_names = ()  # nothing is downloaded
    processed_file_names = (_RECORD,)

    @property
    def processed_dir(self) -> str:
        return os.path.join(self.root, "processed", self._key)

    def _write(self, arrays: ArrayFolder) -> None:
        graphs = []
        with progress_bar(self._key, "graph", self._num_graphs) as bar:
            for graph in self.make():
                graphs.append(
                    self.pre_transform(graph) if self.pre_transform else graph
                )
                bar.update()
        data, slices = self.collate(graphs)
        for name, part in data.to_dict().items():
            if not isinstance(part, Tensor):
                raise TypeError(
                    f"{name} of the graphs must be a tensor to be kept; got {describe(part)}."
                )
            arrays.put(name, part.numpy())
            # PyG divides nothing where there is one graph.
            ends = slices[name] if slices else [0, _length(name, part)]
            arrays.put(f"{name}{_SLICES}", torch.as_tensor(ends).numpy())


def check_collated(
    data: Mapping[str, Tensor], slices: Mapping[str, Tensor], num_graphs: int
) -> None:
    """Raise ValueError unless `data` and `slices` are `num_graphs` collated graphs.

    Every attribute must be divided among the graphs. Edges must join nodes of their own graph. `edge_attr` and `y` must
    have as many rows as there are edges and nodes (or graphs, for `y`). Call this function within `reading`.
    """
    if any(data[name].dim() != 2 for name in ("x", "edge_index")):
        raise ValueError("its graphs have no x [N, C] or no edge_index [2, E]")
    sizes = {}
    for name, ends in slices.items():
        sizes[name] = ends.diff()
        if ends.shape != (num_graphs + 1,) or ends[0] or (sizes[name] < 0).any():
            raise ValueError(
                f"{name} is divided by {list(ends.shape)} numbers, expected {num_graphs + 1} that ascend from 0"
            )
        if int(ends[-1]) != _length(name, data[name]):
            raise ValueError(
                f"{name} is divided into graphs at {int(ends[-1])}, where it does not end"
            )
    # Every graph has features, so their rows tell its nodes.
    nodes = sizes["x"]
    edges = sizes["edge_index"]
    if len(data["edge_index"]) != 2:
        raise ValueError(
            f"edge_index must be [2, E], got {list(data['edge_index'].shape)}"
        )
    check_indices(data["edge_index"], nodes.repeat_interleave(edges), "edge_index")
    if "edge_attr" in sizes and not sizes["edge_attr"].equal(edges):
        raise ValueError("edge_attr does not go with the edges of its graphs")
    if "y" in sizes and not any(
        sizes["y"].equal(each) for each in (nodes, torch.ones_like(nodes))
    ):
        raise ValueError("y does not go with the nodes of its graphs")


def _length(name: str, part: Tensor) -> int:
    """Return the length of an attribute in the dimension in which PyG joins graphs."""
    return part.size(Data().__cat_dim__(name, part))


def mapped_graph(
    cache: Path,
    make: Callable[[ArrayFolder], None],
    sources: Iterable[Path] = (),
    *,
    made_by: str,
    classes: int,
) -> Data:
    """Return the graph in the folder `cache`, which `make` fills if needed; see `mapped_arrays`.

    `make` writes edge_index [2, E], y with labels −1 .. classes − 1, and other attributes of nodes and edges.
    """
    arrays = mapped_arrays(cache, make, sources, made_by=made_by)
    with reading(cache, "Delete the folder, and it is made anew."):
        num_nodes = len(arrays["y"])
        ends, num_edges = arrays["edge_index"].shape
        for name, array in arrays.items():
            rows = num_edges if name.startswith("edge_") else num_nodes
            if name != "edge_index" and len(array) != rows:
                raise ValueError(f"{name} has {len(array)} rows, expected {rows}")
        if ends != 2:
            raise ValueError(f"edge_index must be [2, E], got [{ends}, {num_edges}]")
        check_indices(arrays["y"], classes, "y", low=-1)
        # Mapped again each time, so that pages leave the memory.
        for start in range(0, 2 * num_edges, _BLOCK):
            ends_here = map_array(cache / "edge_index.npy").reshape(-1)[
                start : start + _BLOCK
            ]
            check_indices(torch.from_numpy(ends_here), num_nodes, "edge_index")
    return Data(**arrays)


def mapped_arrays(
    cache: Path,
    make: Callable[[ArrayFolder], None],
    sources: Iterable[Path] = (),
    *,
    made_by: str = "",
    read_all: bool = False,
) -> dict[str, Tensor]:
    """Return the arrays in the folder `cache`, memory-mapped; `make` fills the folder unless it is there.

    Writing to the arrays does not change the files. The folder is complete or absent (see `made_once`). It is made anew
    if an existing source has another size or modification time, if `made_by` differs and, with a warning, if it is
    damaged. A folder with anything but arrays is refused.

    Sources may be deleted; `sources.json` keeps their SHA-256 sums. With `read_all` it also keeps checksums of the
    arrays, and every call then reads the arrays to the end.
    """
    sources = list(sources)
    if strange := [
        path.name
        for path in cache.glob("*")
        if path.name != _RECORD and path.suffix != ".npy"
    ]:
        raise ValueError(
            f"{cache} holds {strange[0]}, which is no array; name a folder of its own for the arrays."
        )

    def load(folder: Path) -> dict[str, Tensor] | None:
        if not any(folder.glob("*")):
            return None
        with reading(folder, "A cache that cannot be read is made anew."):
            if not (folder / _RECORD).is_file():
                raise ValueError(f"it has no {_RECORD}")
            record = json.loads((folder / _RECORD).read_text())
            before = record["files"]
            if record["made_by"] != made_by or not all(
                file.name in before
                and before[file.name].items() >= _stamp(file).items()
                for file in sources
                if file.exists()
            ):
                return None
            arrays = _arrays(folder)
            if _shapes(arrays) != record["arrays"]:
                raise ValueError(
                    f"its arrays are {_shapes(arrays)}, expected {record['arrays']}"
                )
            if read_all and _checksums(arrays) != record["crc32"]:
                raise ValueError("its arrays hold other numbers than were written")
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def write(folder: Path) -> None:
        make(ArrayFolder(folder))
        files = {
            file.name: _stamp(file) | {"sha256": _sha256(file)} for file in sources
        }
        arrays = _arrays(folder)
        record = {"made_by": made_by, "arrays": _shapes(arrays), "files": files}
        if read_all:
            record["crc32"] = _checksums(arrays)
        (folder / _RECORD).write_text(json.dumps(record, indent=1))

    return made_once(cache, load, write)


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    return {file.stem: map_array(file) for file in sorted(folder.glob("*.npy"))}


def _shapes(arrays: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    return {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}


def _checksums(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {
        name: zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        for name, array in arrays.items()
    }


def _stamp(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
