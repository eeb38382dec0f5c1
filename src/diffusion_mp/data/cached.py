"""Datasets whose graphs are made once and then read from disk."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch_geometric.data import Data, InMemoryDataset
from tqdm import tqdm

Transform = Callable[[Data], Data]


class CachedDataset(InMemoryDataset):
    """An in-memory dataset that writes `make()`'s graphs to `root/processed/key` and reads them from there.

    A subclass sets what `make` needs, then calls `super().__init__`; `key` must tell all of it apart, for a file that
    is there is not made again. The file is complete or absent: a run that is killed leaves a `.part` behind, never half
    a dataset. `pre_transform` acts before saving; PyG warns when another one than the saved one is passed (it
    compares what they print, and its own transforms print no options), and `force_reload=True` makes the file anew.
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
        super().__init__(str(root), transform, pre_transform, log=log, force_reload=force_reload)
        self.load(self.processed_paths[0])

    @abstractmethod
    def make(self) -> Iterator[Data]:
        """The graphs, `num_graphs` of them, in order."""

    @property
    def raw_file_names(self) -> list[str]:
        """None: nothing is downloaded."""
        return []

    @property
    def processed_dir(self) -> str:
        """A folder of its own for every key, so that PyG's note of the `pre_transform` lies beside its file."""
        return os.path.join(self.root, "processed", self._key)

    @property
    def processed_file_names(self) -> list[str]:
        """The one file."""
        return ["graphs.pt"]

    def process(self) -> None:
        """Makes and saves the graphs, with a progress bar unless `log=False`."""
        bar: Any = tqdm(self.make(), self._key, self._num_graphs, unit="graph", disable=not self.log)
        graphs = [data if self.pre_transform is None else self.pre_transform(data) for data in bar]
        path = self.processed_paths[0]
        self.save(graphs, f"{path}.part")
        os.replace(f"{path}.part", path)
