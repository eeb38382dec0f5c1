"""Cora, CiteSeer and PubMed from files already on disk."""

from __future__ import annotations

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
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import coalesce, index_to_mask, remove_self_loops

from diffusion_mp_experiments.files.pickled_arrays import NAMES, as_array, as_csr, as_integers, as_mapping
from diffusion_mp_experiments.files.plain_pickle import read_pickle
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.graphs.agreement import check_indices

# Lower-cased here because PyG finds `ind.cora.x` in the folder `Cora`.
_FOLDERS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_NUM_VAL = 500
_LARGEST = 1 << 30  # bytes of all features, written out; those of CiteSeer, the most, are 49 million
_WAY_OUT = "Fetch the eight files anew, together, from the folder data of https://github.com/kimiyoung/planetoid."


def load_planetoid(root: str | Path, name: str, *, download: bool = False, normalize_features: bool = True) -> Data:
    """One citation network of Yang, Cohen & Salakhutdinov (2016), with the public split in its masks.

    Reads `root/<Name>/raw/ind.<name>.*` and writes nothing, so `root` may be read-only. The graph is the one that PyG
    makes of these files, but for CiteSeer's 15 node numbers without any paper behind them: PyG calls them class 0, here
    they are unlabelled (−1) and never enter a split.

    The raw files are Python pickles. They are read as data: one that asks for anything but arrays, sparse matrices and
    dictionaries is refused, and none of it runs.

    Args:
        root: the folder that holds the folder `<Name>`.
        name: "Cora", "CiteSeer" or "PubMed".
        download: where files are missing, let PyG's `Planetoid` download them into `root` first.
        normalize_features: divide the features of every node by their sum.

    Returns:
        The graph with x [N, C], edge_index [2, E] in both directions, y [N] and three masks [N].

    Raises:
        ValueError: an unknown name, a damaged file, or files that do not belong together.
        FileNotFoundError: files are missing; the sentence says which, how to get them and where to put them.
        ConnectionError: the download failed.

    Examples:
        >>> load_planetoid(folder, "Cora")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: Cora...ind.cora.x...load_planetoid(root, "Cora", download=True).
    """
    if not isinstance(name, str) or name.lower() not in _FOLDERS:
        raise ValueError(f"name must be one of {', '.join(_FOLDERS.values())}, got {name!r}.")
    name = _FOLDERS[name.lower()]
    root = as_path(root, "root")
    raw = root / name / "raw"
    files = {part: raw / f"ind.{name.lower()}.{part}" for part in _PARSERS}
    if download and not all(file.is_file() for file in files.values()):
        _download(root, name)
    check_present(
        name,
        raw,
        files.values(),
        f"Put the eight raw files of https://github.com/kimiyoung/planetoid (folder data) there, so that root is "
        f"{root} and the layout root/{name}/raw/ind.{name.lower()}.*; or, online, let PyG download them: "
        f'load_planetoid(root, "{name}", download=True).',
    )
    data = _read_graph(files)
    return NormalizeFeatures()(data) if normalize_features else data


def _download(root: Path, name: str) -> None:
    """Has PyG download the raw files, and neither process nor load them: PyG would unpickle them."""
    only_raw: dict[str, Any] = {"has_process": False, "load": lambda self, path: None}
    try:
        type("RawPlanetoid", (Planetoid,), only_raw)(str(root), name)
    except Exception as error:  # fsspec, aiohttp and the file system each raise their own
        raise ConnectionError(
            f"PyG could not download {name} from {Planetoid.url} into {root}: {type(error).__name__}: {error}. "
            f"Fetch the files elsewhere and put them under {root / name / 'raw'}."
        ) from error


@dataclass(frozen=True)
class _Parts:
    """The content of the files.

    All papers but the tested stand in `allx`, `ally`, the labelled ones first (`x`, `y`). Row i of `tx`, `ty` is paper
    `test_index[i]`; `graph` has the neighbours of every number.
    """

    x: csr_matrix
    tx: csr_matrix
    allx: csr_matrix
    y: Shaped[np.ndarray, "y _"]
    ty: Shaped[np.ndarray, "ty _"]
    ally: Shaped[np.ndarray, "ally _"]
    graph: dict[int, Int64[np.ndarray, " _"]]
    test_index: Int64[np.ndarray, " tested"]


def _read_graph(files: dict[str, Path]) -> Data:
    """The graph in the files of all parts; ValueError naming the file that is damaged or disagrees with the others."""
    found = {}
    for part, path in files.items():
        with reading(path, _WAY_OUT):
            found[part.replace(".", "_")] = _PARSERS[part](path.read_bytes())
    parts = _Parts(**found)
    for part, wrong in _disagreements(parts):
        raise ValueError(f"{files[part]}: {wrong}. {_WAY_OUT}")
    with reading(files["graph"], _WAY_OUT):
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
        numbers = f"from {num_known}, the rows of allx, to {last}, the last node"
        yield "test.index", f"it must hold different numbers {numbers}"
    if len(parts.y) + _NUM_VAL > num_known:
        yield "y", f"{len(parts.y)} papers to train with and {_NUM_VAL} to validate with exceed the {num_known} of allx"
    if (last + 1) * features > _LARGEST // 4:
        yield "allx", f"{last + 1} papers with {features} features exceed {_LARGEST} bytes"


def _features(content: bytes) -> csr_matrix:
    return as_csr(read_pickle(content, NAMES))


def _labels(content: bytes) -> Shaped[np.ndarray, "n classes"]:
    labels = as_array(read_pickle(content, NAMES))
    if labels.ndim != 2 or labels.shape[1] == 0:
        raise ValueError(f"it must hold one row of classes for each paper, not an array of shape {labels.shape}")
    return labels


def _neighbours(content: bytes) -> dict[int, Int64[np.ndarray, " _"]]:
    lists = as_mapping(read_pickle(content, NAMES))
    if lists.keys() != set(range(len(lists))):
        raise ValueError(f"it must list the neighbours of every number from 0 to {len(lists) - 1}")
    return {node: as_integers(lists[node]) for node in range(len(lists))}


def _numbers(content: bytes) -> Int64[np.ndarray, " n"]:
    return np.array([int(line) for line in content.decode("ascii").split()], np.int64)


def _edges(graph: dict[int, Int64[np.ndarray, " _"]]) -> Tensor:
    """Every pair once, without loops, sorted as PyG sorts them."""
    row = np.repeat(np.arange(len(graph)), [len(neighbours) for neighbours in graph.values()])
    edge_index = torch.from_numpy(np.stack([row, np.concatenate(list(graph.values()))]))
    check_indices(edge_index, len(graph), "the neighbours")
    edge_index, _ = remove_self_loops(edge_index)
    return coalesce(edge_index, num_nodes=len(graph), sort_by_row=False)


_PARSERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("x", "tx", "allx"), _features),
    **dict.fromkeys(("y", "ty", "ally"), _labels),
    "graph": _neighbours,
    "test.index": _numbers,
}
