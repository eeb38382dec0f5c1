"""Graphs that are made once and kept on disk: sets of small ones as tensors, one large graph as arrays to map."""

import hashlib
import json
import mmap
import os
import pickle
import re
import shutil
import tempfile
import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
import torch
from filelock import FileLock
from jaxtyping import Shaped
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import BaseData
from tqdm import tqdm

from diffusion_mp_experiments.files.arrays import map_array
from diffusion_mp_experiments.files.reading import as_path, check_indices, reading

T = TypeVar("T")


def made_once(
    folder: Path,
    load: Callable[[Path], T | None],
    make: Callable[[Path], None],
    *,
    anew: bool = False,
) -> T:
    """Return `load(folder)`; where that is None, or with `anew`, `make` writes the folder first.

    `load` returns None unless the folder is current, and raises ValueError, which becomes a warning, where it is
    damaged. `make` gets an empty folder beside it, which is renamed once everything is written. The process that makes
    it holds the lock `<folder>.lock`, which the operating system releases if that process dies; others wait and then
    read. A complete folder is read without a lock, so it may be read-only.
    """

    def read() -> T | None:
        try:
            return load(folder)
        except FileNotFoundError:  # it is not there, or another process is replacing it
            return None
        except ValueError as error:
            warnings.warn(str(error), stacklevel=3)
            return None

    if not anew and (found := read()) is not None:
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if (
            not anew and (found := read()) is not None
        ):  # another process made it in the meantime
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
        found = read()
    if found is None:
        raise ValueError(
            f"{folder} was written and cannot be read. Delete it and see whether the disk is full."
        )
    return found


Transform = Callable[[Data], Data]

_GRAPHS = "graphs.pt"
_NOTE = "pre_transform.txt"


class CachedDataset(InMemoryDataset):
    """An in-memory dataset that writes `make()`'s graphs to `root/processed/key` and reads them from there.

    A subclass sets what `make` needs, then calls `super().__init__`; different graphs need different keys, for existing
    files are not made again. The folder is complete or absent (see `made_once`). Damaged files are made anew, with a
    warning. PyG's own caches are unpickled; here nothing of PyG's reads or writes, since this class has no `process`.

    Args:
        root, key: a writable folder, and the name of the folder of these graphs.
        num_graphs: how many `make` yields.
        transform, pre_transform: applied on access, and before saving; a warning tells when the latter has changed.
        force_reload: make the files anew.
        log: show a progress bar while graphs are made.
    """

    def __init__(
        self,
        root: str | Path,
        key: str,
        num_graphs: int,
        *,
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
        force_reload: bool = False,
        log: bool = True,
    ) -> None:
        self._key = key
        self._num_graphs = num_graphs
        super().__init__(str(as_path(root, "root")), transform, pre_transform, log=log)
        made_once(Path(self.processed_dir), self._read, self._write, anew=force_reload)

    @abstractmethod
    def make(self) -> Iterator[Data]:
        """Yield `num_graphs` graphs in order."""

    raw_file_names = ()  # nothing is downloaded
    processed_file_names = (_GRAPHS,)

    @property
    def processed_dir(self) -> str:
        return os.path.join(self.root, "processed", self._key)

    @classmethod
    def save(cls, data_list: Sequence[BaseData], path: str) -> None:
        data, slices = cls.collate(data_list)
        torch.save((data.to_dict(), slices), path)

    def load(self, path: str, data_cls: type[BaseData] = Data) -> None:
        """Read what `save` wrote; ValueError naming the file where it is anything else."""
        with reading(Path(path), "A cache that cannot be read is made anew."):
            data, slices = _load_tensors(Path(path))
            check_collated(data, slices, self._num_graphs)
            self.data = data_cls.from_dict(data)
            self.slices = slices

    def _read(self, folder: Path) -> bool:
        self.load(str(folder / _GRAPHS))
        note = folder / _NOTE
        if note.is_file() and note.read_bytes() != _printed(self.pre_transform):
            warnings.warn(
                f"{note} names another pre_transform than the one that was passed; the graphs are those of the former. "
                "Pass force_reload=True to make them anew.",
                stacklevel=2,
            )
        return True

    def _write(self, folder: Path) -> None:
        bar: Any = tqdm(
            self.make(), self._key, self._num_graphs, unit="graph", disable=not self.log
        )
        graphs = [
            data if self.pre_transform is None else self.pre_transform(data)
            for data in bar
        ]
        self.save(graphs, str(folder / _GRAPHS))
        (folder / _NOTE).write_bytes(_printed(self.pre_transform))


def _printed(transform: Transform | None) -> bytes:
    """What a transform prints, without the address that a function has in this process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(transform)).encode()


def _load_tensors(path: Path) -> Any:
    """Return dense tensors in plain containers; refuse what would fill the memory: compressed or with false sizes."""
    # A mapped file makes no room for bytes that a header of `zipfile` only claims.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        if content[:2] != b"PK":
            raise ValueError(
                "it is no zip file, as torch.save writes since version 1.6"
            )
        with zipfile.ZipFile(cast("IO[bytes]", content)) as archive:
            if any(
                entry.compress_type != zipfile.ZIP_STORED
                for entry in archive.infolist()
            ):
                raise ValueError(
                    "torch.save compresses nothing, but parts of this are compressed"
                )
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError
    ) as error:  # its sentence proposes to run what the file asks for
        raise ValueError("it is damaged, or asks for more than tensors") from error
    claimed = 0
    waiting = [loaded]
    while waiting:
        value = waiting.pop()
        claimed += 1  # so that containers which contain each other come to an end
        if type(value) is Tensor:
            if (
                value.layout != torch.strided
                or value.device.type != "cpu"
                or value.is_quantized
                or value.is_nested
            ):
                raise ValueError(
                    f"it holds a tensor that is not dense: {value.layout} on {value.device}"
                )
            claimed += value.numel() * value.element_size()
        elif isinstance(value, (list, tuple, dict)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, (str, int, float, type(None))):
            raise ValueError(
                f"it holds a {type(value).__name__}, which is neither a tensor nor a plain value"
            )
        if claimed > path.stat().st_size:
            raise ValueError("its tensors claim more bytes than the file has")
    return loaded


def check_collated(data: Any, slices: Any, num_graphs: int) -> None:
    """Raise ValueError unless `data` and `slices` are `num_graphs` collated graphs.

    Every attribute must be divided among the same number of graphs, edges join nodes of their own graph, and
    `edge_attr` and `y` have the lengths of edges and nodes (or `y` of graphs). `slices` is None for a single graph.
    """
    if not isinstance(data, dict) or not all(
        isinstance(name, str) and name.isidentifier() for name in data
    ):
        raise ValueError("it is not a dictionary of attributes")
    if any(name.startswith("_") and name != "_num_nodes" for name in data):
        raise ValueError(f"{sorted(data)} are not the attributes of a graph")
    x = data.get("x")
    edge_index = data.get("edge_index")
    if (
        not isinstance(x, Tensor)
        or not isinstance(edge_index, Tensor)
        or x.dim() != 2
        or edge_index.dim() != 2
    ):
        raise ValueError("its graphs have no x [N, C] or no edge_index [2, E]")
    lengths = {
        name: length
        for name, part in data.items()
        if (length := _length(name, part)) is not None
    }
    if slices is None:
        slices = {name: torch.tensor([0, length]) for name, length in lengths.items()}
    if not isinstance(slices, dict) or not slices.keys() <= data.keys():
        raise ValueError("it divides attributes among graphs that it does not have")
    sizes = {}
    for name, end in slices.items():
        if isinstance(end, Tensor):
            if (
                end.dim() != 1
                or end.dtype != torch.int64
                or len(end) < 2
                or end[0]
                or bool((end.diff() < 0).any())
            ):
                raise ValueError(
                    f"{name} is divided by {list(end.shape)} numbers that do not ascend from 0"
                )
            if int(end[-1]) != lengths.get(name):
                raise ValueError(
                    f"{name} is divided into graphs at {int(end[-1])}, where it does not end"
                )
            sizes[name] = end.diff()
    if (counts := {len(size) for size in sizes.values()}) != {num_graphs}:
        raise ValueError(
            f"it has attributes of {sorted(counts)} graphs, expected {num_graphs}"
        )
    if edge_index.size(0) != 2:
        raise ValueError(f"edge_index must be [2, E], got {list(edge_index.shape)}")
    nodes = sizes["x"]
    edges = sizes["edge_index"]
    check_indices(edge_index, nodes.repeat_interleave(edges), "edge_index")
    for name, expected in (
        ("edge_attr", [edges]),
        ("y", [nodes, torch.ones_like(nodes)]),
    ):
        if name in sizes and not any(
            torch.equal(sizes[name], fitting) for fitting in expected
        ):
            raise ValueError(
                f"{name} does not go with the nodes and edges of its graphs"
            )


def _length(name: str, part: Any) -> int | None:
    """The length of an attribute in the dimension in which PyG joins graphs; None for what it does not join."""
    if isinstance(part, Tensor):
        return part.size(Data().__cat_dim__(name, part)) if part.dim() else None
    return len(part) if isinstance(part, list) else None


_RECORD = "sources.json"  # the sources of the arrays, and the shapes of the arrays
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

    def write(self, name: str, where: Any, block: Shaped[np.ndarray, " ..."]) -> None:
        """Set `array[where] = block`; its pages leave the memory of this process at once."""
        np.load(self._file(name), mmap_mode="r+", allow_pickle=False)[where] = block

    def put(self, name: str, array: Shaped[np.ndarray, " ..."]) -> None:
        np.save(self._file(name), array, allow_pickle=False)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.npy"


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
        (ends, num_edges) = arrays["edge_index"].shape
        for name, array in arrays.items():
            rows, found = (
                (num_edges, "edges")
                if name.startswith("edge_")
                else (num_nodes, "nodes")
            )
            if name != "edge_index" and len(array) != rows:
                raise ValueError(f"{name} has {len(array)} rows for {rows} {found}")
            if name in ("edge_index", "y") and array.dtype != torch.long:
                raise ValueError(
                    f"{name} must be whole numbers of 64 bits, got {array.dtype}"
                )
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
) -> dict[str, Tensor]:
    """Return the arrays in the folder `cache`, memory-mapped, which `make` fills unless it is there.

    Writing to them does not change the files. The folder is complete or absent (see `made_once`). It is made anew where
    an existing source has another size or modification time, where `made_by` differs, and, with a warning, where it is
    damaged; one with anything but arrays is refused. Sources may be deleted; `sources.json` keeps their SHA-256 sums.
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
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def write(folder: Path) -> None:
        make(ArrayFolder(folder))
        files = {
            file.name: _stamp(file) | {"sha256": _sha256(file)} for file in sources
        }
        record = {
            "made_by": made_by,
            "arrays": _shapes(_arrays(folder)),
            "files": files,
        }
        (folder / _RECORD).write_text(json.dumps(record, indent=1))

    return made_once(cache, load, write)


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
