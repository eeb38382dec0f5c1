"""Processes that all make one cache, for the tests of races; without pytest, so that they start soon."""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

from diffusion_mp_experiments.graphs.cached import (
    ArrayFolder,
    CachedDataset,
    mapped_arrays,
)

NUM_ARRAYS = 4
NUM_GRAPHS = 5


def fill(arrays: ArrayFolder) -> None:
    for i in range(NUM_ARRAYS):
        arrays.create(f"a{i}", (50, 3), np.int64)
        time.sleep(0.002)
        arrays.write(f"a{i}", slice(0, 50), np.full((50, 3), i))


def read_arrays(folder: Path) -> None:
    arrays = mapped_arrays(folder / "cache", fill, made_by="today")
    assert [int(array.sum()) for array in arrays.values()] == [
        150 * i for i in range(NUM_ARRAYS)
    ], arrays


class Few(CachedDataset):
    """Some graphs that take a moment each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "cache", NUM_GRAPHS)

    def make(self) -> Iterator[Data]:
        for i in range(NUM_GRAPHS):
            time.sleep(0.002)
            yield Data(
                x=torch.full((i + 1, 3), float(i)), edge_index=torch.tensor([[0], [i]])
            )


def read_graphs(folder: Path) -> None:
    graphs = Few(folder)
    assert [float(data.x.sum()) for data in graphs] == [
        3 * i * (i + 1) for i in range(NUM_GRAPHS)
    ]


RACES = {"arrays": read_arrays, "graphs": read_graphs}


def race(kind: str, folder: Path, start: float) -> None:
    """One of several processes that begin at the same moment."""
    warnings.simplefilter("ignore")
    time.sleep(max(0.0, start - time.time()))
    RACES[kind](folder)
