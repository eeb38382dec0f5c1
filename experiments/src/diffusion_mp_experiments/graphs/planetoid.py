"""Cora, CiteSeer and PubMed from files already on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import coalesce, remove_self_loops

from diffusion_mp_experiments.files.pickles import as_integers, read_pickle
from diffusion_mp_experiments.files.reading import (
    as_path,
    check_indices,
    check_present,
    reading,
)
from diffusion_mp_experiments.files.text_tables import MARK

# Lower-cased here because PyG finds `ind.cora.x` in the folder `Cora`.
_FOLDERS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_NUM_VAL = 500
# Bytes of all features, written out; CiteSeer has the most, 49 million.
_LARGEST = 1 << 30
_WAY_OUT = "Fetch the eight files anew, together, from the folder data of https://github.com/kimiyoung/planetoid."


def load_planetoid(
    root: str | Path,
    name: str,
    *,
    download: bool = False,
    normalize_features: bool = True,
) -> Data:
    """Load one citation network of Yang, Cohen & Salakhutdinov (2016), with the public split in its masks.

    The function reads `root/<Name>/raw/ind.<name>.*` and writes nothing, so `root` may be read-only. The files are
    pickles; they are read as data, and none of their code runs.

    The graph is the same as PyG's, except for CiteSeer's 15 node numbers without a paper. PyG gives them class 0. Here
    they are unlabelled (−1) and are in no split.

    Args:
        root: the folder that holds the folder `<Name>`.
        name: "Cora", "CiteSeer" or "PubMed".
        download: whether PyG's `Planetoid` downloads missing files into `root` first. Off by default: nothing is
            downloaded unless asked for.
        normalize_features: whether to divide the features of every node by their sum. On by default.

    Shapes:
        x: [N, C].
        edge_index: [2, E] in both directions.
        y, train_mask, val_mask, test_mask: [N].

    Raises:
        FileNotFoundError: a file is missing. The message says where to get it.
        ConnectionError: the download failed.
        ValueError: a file is damaged, or disagrees with the others.

    Examples:
        >>> load_planetoid(folder, "Cora")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: Cora...ind.cora.x...load_planetoid(root, "Cora", download=True).
    """
    if not isinstance(name, str) or name.lower() not in _FOLDERS:
        raise ValueError(
            f"name must be one of {', '.join(_FOLDERS.values())}, got {name!r}."
        )
    name = _FOLDERS[name.lower()]
    root = as_path(root, "root")
    raw = root / name / "raw"
    files = {part: raw / f"ind.{name.lower()}.{part}" for part in _PARTS}
    if download and not all(file.is_file() for file in files.values()):
        _download(root, name)
    way_out = "Put the eight raw files of https://github.com/kimiyoung/planetoid (folder data) there"
    download_them = (
        f'let PyG download them: load_planetoid(root, "{name}", download=True)'
    )
    check_present(name, raw, files.values(), f"{way_out}; or, online, {download_them}.")
    data = _read_graph(files)
    return NormalizeFeatures()(data) if normalize_features else data


def _download(root: Path, name: str) -> None:
    """Let PyG download the raw files, but neither process nor load them, since PyG would unpickle them."""
    only_raw: dict[str, Any] = {"has_process": False, "load": lambda self, path: None}
    try:
        type("RawPlanetoid", (Planetoid,), only_raw)(str(root), name)
    except (
        Exception
    ) as error:  # fsspec, aiohttp and the file system each raise their own
        raise ConnectionError(
            f"PyG could not download {name} from {Planetoid.url} into {root}: {type(error).__name__}: {error}. "
            f"Fetch the files elsewhere and put them under {root / name / 'raw'}."
        ) from error


def _read_graph(files: dict[str, Path]) -> Data:
    """Return the graph; ValueError names the file that is damaged or disagrees with the others.

    All papers except the test papers are in `allx`, `ally`, the labelled papers first (`x`, `y`). Row i of `tx`, `ty`
    is paper `test.index[i]`. `graph` has the neighbours of every number.
    """
    parts = {}
    for part, path in files.items():
        with reading(path, _WAY_OUT):
            parts[part] = _read_part(part, path.read_bytes())
    _check(files, parts)
    with reading(files["graph"], _WAY_OUT):
        neighbours = parts["graph"]
        row = np.repeat(np.arange(len(neighbours)), list(map(len, neighbours)))
        edge_index = torch.from_numpy(np.stack([row, np.concatenate(neighbours)]))
        check_indices(edge_index, len(neighbours), "the neighbours")
        # Every pair once, without loops, sorted as PyG sorts them.
        edge_index = coalesce(
            remove_self_loops(edge_index)[0],
            num_nodes=len(neighbours),
            sort_by_row=False,
        )
    num_nodes = len(parts["graph"])
    num_train = len(parts["y"])
    trained = torch.arange(len(parts["ally"]))
    tested = torch.from_numpy(parts["test.index"])
    x = torch.zeros(num_nodes, parts["allx"].shape[1])
    # Numbers without a paper stay unlabelled.
    y = torch.full((num_nodes,), -1)
    for rows, prefix in ((trained, "all"), (tested, "t")):
        x[rows] = torch.from_numpy(parts[f"{prefix}x"].toarray()).to(x.dtype)
        y[rows] = torch.from_numpy(parts[f"{prefix}y"]).to(x.dtype).max(dim=1)[1]
    # The labelled papers come first, and those that validate after them.
    node = torch.arange(num_nodes)
    return Data(
        x=x,
        edge_index=edge_index,
        y=y,
        train_mask=node < num_train,
        val_mask=(node >= num_train) & (node < num_train + _NUM_VAL),
        test_mask=torch.isin(node, tested),
    )


def _read_part(part: str, content: bytes) -> Any:
    if part == "test.index":
        return np.array(
            [int(line) for line in content.removeprefix(MARK).decode("ascii").split()],
            np.int64,
        )
    value = read_pickle(content)
    if part.endswith("x") and isinstance(value, csr_matrix):
        return value
    if (
        part.endswith("y")
        and isinstance(value, np.ndarray)
        and value.ndim == 2
        and value.shape[1]
    ):
        return value
    if part == "graph" and isinstance(value, dict):
        if value.keys() != set(range(len(value))):
            raise ValueError(
                f"it must list the neighbours of every number from 0 to {len(value) - 1}"
            )
        return [as_integers(value[node]) for node in range(len(value))]
    kinds = {"x": "a CSR matrix", "y": "an array [papers, classes]"}
    kind = kinds.get(part[-1], "a dictionary")
    raise ValueError(
        f"it must hold {kind}, not a {type(value).__name__} of shape {getattr(value, 'shape', ())}"
    )


def _check(files: dict[str, Path], parts: dict[str, Any]) -> None:
    """Raise ValueError naming the file that disagrees with the others: `test.index` rather than `ty`."""

    def refuse(part: str, wrong: str) -> None:
        raise ValueError(f"{files[part]}: {wrong}. {_WAY_OUT}")

    num_known = len(parts["ally"])
    features = parts["allx"].shape[1]
    classes = parts["ally"].shape[1]
    train = len(parts["y"])
    tested = len(parts["ty"])
    shapes = {
        "x": (train, features),
        "tx": (tested, features),
        "allx": (num_known, features),
        "y": (train, classes),
        "ty": (tested, classes),
        "test.index": (tested,),
    }
    # The length of `ty` counts, so that `test.index` is named where the two differ: a text is damaged more easily.
    for part, expected in shapes.items():
        if parts[part].shape != expected:
            refuse(
                part,
                f"it has the shape {parts[part].shape}; the other files need {expected}",
            )
    last = len(parts["graph"]) - 1
    different = np.unique(parts["test.index"])
    if not (
        len(different) == tested > 0
        and different[0] == num_known
        and different[-1] == last
    ):
        refuse(
            "test.index",
            f"it must hold different numbers from {num_known}, the rows of allx, to {last}, the last",
        )
    if train + _NUM_VAL > num_known:
        refuse(
            "y",
            f"{train} papers to train with and {_NUM_VAL} to validate with exceed the {num_known} of allx",
        )
    if (last + 1) * features > _LARGEST // 4:
        refuse(
            "allx",
            f"{last + 1} papers with {features} features exceed {_LARGEST} bytes",
        )
