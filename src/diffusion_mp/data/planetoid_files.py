"""The eight files of a Planetoid data set: read as data, checked against each other, and put together."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from scipy.sparse import csr_matrix
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, index_to_mask, remove_self_loops

from diffusion_mp.data.agreement import check_indices
from diffusion_mp.data.pickled_arrays import MAPPINGS, MATRICES, as_array, as_csr, as_integers, as_mapping
from diffusion_mp.data.plain_pickle import read_pickle
from diffusion_mp.data.reading import reading

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_NUM_VAL = 500
_LARGEST = 1 << 30  # bytes of all features, written out; those of CiteSeer, the most, are 49 million
_WAY_OUT = "Fetch the eight files anew, together, from the folder data of https://github.com/kimiyoung/planetoid."


@dataclass(frozen=True)
class _Parts:
    """All papers but the tested stand in `allx`, `ally`, the labelled ones first (`x`, `y`).

    Row i of `tx`, `ty` is paper `test_index[i]`; `graph` has the neighbours of every number.
    """

    x: csr_matrix
    tx: csr_matrix
    allx: csr_matrix
    y: Shaped[np.ndarray, "y _"]
    ty: Shaped[np.ndarray, "ty _"]
    ally: Shaped[np.ndarray, "ally _"]
    graph: dict[int, Int64[np.ndarray, " _"]]
    test_index: Int64[np.ndarray, " tested"]


def read_graph(prefix: Path) -> Data:
    """The graph in the files `<prefix>.x` and so on, as PyG makes it, but −1 for the label of a number without a paper.

    Shapes: x [N, C], edge_index [2, E] both directions, y [N], train_mask, val_mask, test_mask [N].
    Errors: ValueError naming the file that is damaged or disagrees with the others.
    """

    def read(part: str, parse: Callable[[Path], Any]) -> Any:
        with reading(_path(prefix, part), _WAY_OUT):
            return parse(_path(prefix, part))

    parts = _Parts(
        x=read("x", _features),
        tx=read("tx", _features),
        allx=read("allx", _features),
        y=read("y", _labels),
        ty=read("ty", _labels),
        ally=read("ally", _labels),
        graph=read("graph", _neighbours),
        test_index=read("test.index", _numbers),
    )
    for part, wrong in _disagreements(parts):
        raise ValueError(f"{_path(prefix, part)}: {wrong}. {_WAY_OUT}")
    with reading(_path(prefix, "graph"), _WAY_OUT):
        edge_index = _edges(parts.graph)

    num_nodes, num_train = len(parts.graph), len(parts.y)
    known, tested = torch.arange(len(parts.ally)), torch.from_numpy(parts.test_index)
    x, y = torch.zeros(num_nodes, parts.allx.shape[1]), torch.full((num_nodes,), -1)
    for rows, features, labels in ((known, parts.allx, parts.ally), (tested, parts.tx, parts.ty)):
        x[rows] = torch.from_numpy(features.toarray()).to(x.dtype)
        y[rows] = torch.from_numpy(labels).to(x.dtype).max(dim=1)[1]
    data = Data(x=x, edge_index=edge_index, y=y)
    data.train_mask = index_to_mask(torch.arange(num_train), num_nodes)
    data.val_mask = index_to_mask(torch.arange(num_train, num_train + _NUM_VAL), num_nodes)
    data.test_mask = index_to_mask(tested, num_nodes)
    return data


def _disagreements(parts: _Parts) -> Iterator[tuple[str, str]]:
    """Which file disagrees with the others, and how; `test.index`, which nothing protects, rather than `ty`."""
    num_known, features, classes = len(parts.ally), parts.allx.shape[1], parts.ally.shape[1]
    shapes = {
        "x": (parts.x.shape, (len(parts.y), features)),
        "tx": (parts.tx.shape, (len(parts.ty), features)),
        "allx": (parts.allx.shape, (num_known, features)),
        "y": (parts.y.shape, (len(parts.y), classes)),
        "ty": (parts.ty.shape, (len(parts.ty), classes)),
        "test.index": (parts.test_index.shape, (len(parts.ty),)),
    }
    for part, (found, expected) in shapes.items():
        if found != expected:
            yield part, f"it has the shape {found}; beside the other files, {expected} is expected"
    last, different = len(parts.graph) - 1, np.unique(parts.test_index)
    if not (len(different) == len(parts.ty) > 0 and different[0] == num_known and different[-1] == last):
        yield (
            "test.index",
            f"it must hold different numbers from {num_known}, the rows of allx, to {last}, the last node",
        )
    if len(parts.y) + _NUM_VAL > num_known:
        yield "y", f"{len(parts.y)} papers to train with and {_NUM_VAL} to validate with exceed the {num_known} of allx"
    if (last + 1) * features > _LARGEST // 4:
        yield "allx", f"{last + 1} papers with {features} features exceed {_LARGEST} bytes"


def _pickled(path: Path) -> Any:
    return read_pickle(io.BytesIO(path.read_bytes()), MATRICES | MAPPINGS)


def _features(path: Path) -> csr_matrix:
    return as_csr(_pickled(path))


def _labels(path: Path) -> Shaped[np.ndarray, "n classes"]:
    labels = as_array(_pickled(path))
    if labels.ndim != 2 or labels.shape[1] == 0:
        raise ValueError(f"it must hold one row of classes for each paper, not an array of shape {labels.shape}")
    return labels


def _neighbours(path: Path) -> dict[int, Int64[np.ndarray, " _"]]:
    lists = as_mapping(_pickled(path))
    if lists.keys() != set(range(len(lists))):
        raise ValueError(f"it must list the neighbours of every number from 0 to {len(lists) - 1}")
    return {node: as_integers(lists[node]) for node in range(len(lists))}


def _numbers(path: Path) -> Int64[np.ndarray, " n"]:
    return np.array([int(line) for line in path.read_text("ascii").split()], np.int64)


def _edges(graph: dict[int, Int64[np.ndarray, " _"]]) -> Tensor:
    """Every pair once, without loops, sorted as PyG sorts them."""
    row = np.repeat(np.arange(len(graph)), [len(neighbours) for neighbours in graph.values()])
    edge_index = torch.from_numpy(np.stack([row, np.concatenate(list(graph.values()))]))
    check_indices(edge_index, len(graph), "the neighbours")
    edge_index, _ = remove_self_loops(edge_index)
    return coalesce(edge_index, num_nodes=len(graph), sort_by_row=False)


def _path(prefix: Path, part: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{part}")
