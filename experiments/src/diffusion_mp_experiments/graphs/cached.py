"""Datasets whose graphs are made once and then read from disk."""

from __future__ import annotations

import os
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.data import BaseData
from tqdm import tqdm

from diffusion_mp_experiments.files.made_once import made_once
from diffusion_mp_experiments.files.reading import as_path, reading
from diffusion_mp_experiments.files.tensor_file import load_tensors
from diffusion_mp_experiments.graphs.agreement import check_collated

Transform = Callable[[Data], Data]

_GRAPHS, _NOTE = "graphs.pt", "pre_transform.txt"


class CachedDataset(InMemoryDataset):
    """An in-memory dataset that writes `make()`'s graphs to `root/processed/key` and reads them from there.

    A subclass sets what `make` needs, then calls `super().__init__`; `key` must tell all of it apart, for a file that
    is there is not made again. The folder is complete or absent, however many processes ask for it and whichever of
    them are killed. It is read as tensors only, whatever its files say; where they are damaged, or an earlier version
    wrote them, a warning says so and they are made anew. (PyG's own caches are unpickled, and so is the note of the
    `pre_transform` beside them; here nothing of PyG's reads or writes, since this class has no `process`.)

    Args:
        root: a writable folder.
        key: the name of the folder of these graphs.
        num_graphs: how many `make` gives.
        transform: acts on a graph whenever it is asked for.
        pre_transform: acts before saving; a warning says when another one than the saved one is passed (what they print
            is compared, and PyG's transforms print no options).
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
        """The graphs, `num_graphs` of them, in order."""

    @property
    def raw_file_names(self) -> list[str]:
        """None: nothing is downloaded."""
        return []

    @property
    def processed_dir(self) -> str:
        """A folder of its own for every key."""
        return os.path.join(self.root, "processed", self._key)

    @property
    def processed_file_names(self) -> list[str]:
        """The one file of graphs."""
        return [_GRAPHS]

    @classmethod
    def save(cls, data_list: Sequence[BaseData], path: str) -> None:
        """Writes graphs as tensors and plain containers."""
        data, slices = cls.collate(data_list)
        torch.save((data.to_dict(), slices), path)

    def load(self, path: str, data_cls: type[BaseData] = Data) -> None:
        """Reads what `save` wrote; ValueError naming the file where it is anything else."""
        with reading(Path(path), "A cache that cannot be read is made anew."):
            loaded = load_tensors(Path(path))
            if not isinstance(loaded, tuple) or len(loaded) != 2:
                raise ValueError("it is not in this version's format")
            data, slices = loaded
            check_collated(data, slices, self._num_graphs)
            self.data, self.slices = data_cls.from_dict(data), slices

    def _read(self, folder: Path) -> bool | None:
        """Whether the graphs are there; None where they are not, or cannot be read."""
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
        """Makes and saves the graphs, with a progress bar unless `log=False`."""
        bar: Any = tqdm(self.make(), self._key, self._num_graphs, unit="graph", disable=not self.log)
        graphs = [data if self.pre_transform is None else self.pre_transform(data) for data in bar]
        self.save(graphs, str(folder / _GRAPHS))
        (folder / _NOTE).write_bytes(_printed(self.pre_transform))


def _printed(transform: Transform | None) -> bytes:
    """What a transform prints, without the address that a function has in this run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(transform)).encode()
