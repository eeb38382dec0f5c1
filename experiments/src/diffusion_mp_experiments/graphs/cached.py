"""Datasets whose graphs are made once and then read from disk as plain tensors."""

import mmap
import os
import pickle
import re
import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import BaseData
from tqdm import tqdm

from diffusion_mp_experiments.files.made_once import made_once
from diffusion_mp_experiments.files.reading import as_path, check_indices, reading

Transform = Callable[[Data], Data]

_GRAPHS, _NOTE = "graphs.pt", "pre_transform.txt"


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
        self._key, self._num_graphs = key, num_graphs
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
            self.data, self.slices = data_cls.from_dict(data), slices

    def _read(self, folder: Path) -> bool | None:
        if not (folder / _GRAPHS).is_file():
            return None
        try:
            self.load(str(folder / _GRAPHS))
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
            return None
        note = folder / _NOTE
        if note.is_file() and note.read_bytes() != _printed(self.pre_transform):
            warnings.warn(
                f"{note} names another pre_transform than the one that was passed; the graphs are those of the former. "
                "Pass force_reload=True to make them anew.",
                stacklevel=2,
            )
        return True

    def _write(self, folder: Path) -> None:
        bar: Any = tqdm(self.make(), self._key, self._num_graphs, unit="graph", disable=not self.log)
        graphs = [data if self.pre_transform is None else self.pre_transform(data) for data in bar]
        self.save(graphs, str(folder / _GRAPHS))
        (folder / _NOTE).write_bytes(_printed(self.pre_transform))


def _printed(transform: Transform | None) -> bytes:
    """What a transform prints, without the address that a function has in this process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(transform)).encode()


def _load_tensors(path: Path) -> Any:
    """Return dense tensors in plain containers; refuse what would fill the memory: compressed or with false sizes."""
    # A mapped file makes no room for bytes that a header of `zipfile` only claims.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:2] != b"PK":
            raise ValueError("it is no zip file, as torch.save writes since version 1.6")
        with zipfile.ZipFile(cast("IO[bytes]", content)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("torch.save compresses nothing, but parts of this are compressed")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its sentence proposes to run what the file asks for
        raise ValueError("it is damaged, or asks for more than tensors") from error
    claimed, waiting = 0, [loaded]
    while waiting:
        value = waiting.pop()
        claimed += 1  # so that containers which contain each other come to an end
        if type(value) is Tensor:
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
                raise ValueError(f"it holds a tensor that is not dense: {value.layout} on {value.device}")
            claimed += value.numel() * value.element_size()
        elif isinstance(value, (list, tuple, dict)):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, (str, int, float, type(None))):
            raise ValueError(f"it holds a {type(value).__name__}, which is neither a tensor nor a plain value")
        if claimed > path.stat().st_size:
            raise ValueError("its tensors claim more bytes than the file has")
    return loaded


def check_collated(data: Any, slices: Any, num_graphs: int) -> None:
    """Raise ValueError unless `data` and `slices` are `num_graphs` collated graphs.

    Every attribute must be divided among the same number of graphs, edges join nodes of their own graph, and
    `edge_attr` and `y` have the lengths of edges and nodes (or `y` of graphs). `slices` is None for a single graph.
    """
    if not isinstance(data, dict) or not all(isinstance(name, str) and name.isidentifier() for name in data):
        raise ValueError("it is not a dictionary of attributes")
    if any(name.startswith("_") and name != "_num_nodes" for name in data):
        raise ValueError(f"{sorted(data)} are not the attributes of a graph")
    x, edge_index = data.get("x"), data.get("edge_index")
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor) or x.dim() != 2 or edge_index.dim() != 2:
        raise ValueError("its graphs have no x [N, C] or no edge_index [2, E]")
    lengths = {name: length for name, part in data.items() if (length := _length(name, part)) is not None}
    if slices is None:
        slices = {name: torch.tensor([0, length]) for name, length in lengths.items()}
    if not isinstance(slices, dict) or not slices.keys() <= data.keys():
        raise ValueError("it divides attributes among graphs that it does not have")
    sizes = {}
    for name, end in slices.items():
        if isinstance(end, Tensor):
            if end.dim() != 1 or end.dtype != torch.int64 or len(end) < 2 or end[0] or bool((end.diff() < 0).any()):
                raise ValueError(f"{name} is divided by {list(end.shape)} numbers that do not ascend from 0")
            if int(end[-1]) != lengths.get(name):
                raise ValueError(f"{name} is divided into graphs at {int(end[-1])}, where it does not end")
            sizes[name] = end.diff()
    if (counts := {len(size) for size in sizes.values()}) != {num_graphs}:
        raise ValueError(f"it has attributes of {sorted(counts)} graphs, expected {num_graphs}")
    if edge_index.size(0) != 2:
        raise ValueError(f"edge_index must be [2, E], got {list(edge_index.shape)}")
    nodes, edges = sizes["x"], sizes["edge_index"]
    check_indices(edge_index, nodes.repeat_interleave(edges), "edge_index")
    for name, expected in (("edge_attr", [edges]), ("y", [nodes, torch.ones_like(nodes)])):
        if name in sizes and not any(torch.equal(sizes[name], fitting) for fitting in expected):
            raise ValueError(f"{name} does not go with the nodes and edges of its graphs")


def _length(name: str, part: Any) -> int | None:
    """The length of an attribute in the dimension in which PyG joins graphs; None for what it does not join."""
    if isinstance(part, Tensor):
        return part.size(Data().__cat_dim__(name, part)) if part.dim() else None
    return len(part) if isinstance(part, list) else None
