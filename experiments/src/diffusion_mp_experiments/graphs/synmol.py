"""SynMol: molecules whose class is decided by parts of them that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data

from diffusion_mp.errors import check_choice
from diffusion_mp_experiments.files.npz import read_npz
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.graphs.agreement import check_indices

_FILE = "logic8_graphs_plain.npz"
_NUMBERS = ("atom_type", "node_label", "y", "num_nodes", "num_edges", "edge_index_local", "train_index", "test_index")
_LARGEST = 1 << 26  # bytes of all arrays, which take 10 million
_ATOMS = 64  # more types than any molecule needs
_WAY_OUT = "Make it anew of the files of https://github.com/google-research/graph-attribution (data, logic8)."


def load_synmol(root: str | Path, split: Literal["train", "test"]) -> list[Data]:
    """Task "logic8" of Sanchez-Lengeling et al. (2020): molecules, and whether they have certain parts together.

    Args:
        root: the folder that holds `logic8_graphs_plain.npz`, the published graphs without their pickles.
        split: the published one, "train" (7 753 molecules) or "test" (918).

    Returns:
        Molecules with x [N, types], one-hot types of atoms, edge_index [2, E], edge_attr [E, 5], y [1] in 0..1, and
        node_label [N], whether an atom is part of the reason.

    Raises:
        ValueError: an unknown split, a damaged file, or arrays that do not belong together.
        FileNotFoundError: the file is missing.

    Examples:
        >>> import numpy as np
        >>> atoms = {"atom_type": [0, 1, 1], "node_label": [0, 1, 0], "num_nodes": [2, 1], "num_edges": [2, 0]}
        >>> bonds = {"edge_index_local": [[0, 1], [1, 0]], "edge_feat": np.ones((2, 5), np.float32)}
        >>> np.savez(folder / "logic8_graphs_plain.npz", y=[1, 0], train_index=[0], test_index=[1], **atoms, **bonds)
        >>> load_synmol(folder, "train")
        [Data(x=[2, 2], edge_index=[2, 2], edge_attr=[2, 5], y=[1], node_label=[2])]
    """
    check_choice(split, "split", ("train", "test"))
    path = as_path(root, "root") / _FILE
    check_present("SynMol", path.parent, [path], _WAY_OUT)
    with reading(path, _WAY_OUT):
        read = read_npz(path, (*_NUMBERS, "edge_feat"), _LARGEST)
        arrays = {key: torch.from_numpy(part) for key, part in read.items()}
        edge_feat, whole = arrays.pop("edge_feat").float(), {key: part.long() for key, part in arrays.items()}
        _check(whole, edge_feat)
    nodes, edges = whole["num_nodes"].tolist(), whole["num_edges"].tolist()
    parts = (
        one_hot(whole["atom_type"]).float().split(nodes),
        whole["edge_index_local"].split(edges, dim=1),
        edge_feat.split(edges),
        whole["y"].split(1),
        whole["node_label"].split(nodes),
    )
    graphs = [
        Data(x=x, edge_index=edge_index, edge_attr=edge_attr, y=y, node_label=label)
        for x, edge_index, edge_attr, y, label in zip(*parts, strict=True)
    ]
    return [graphs[row] for row in whole[f"{split}_index"].tolist()]


def _check(arrays: dict[str, Tensor], edge_feat: Tensor) -> None:
    """Raise ValueError unless the arrays are graphs."""
    nodes, edges, y = arrays["num_nodes"], arrays["num_edges"], arrays["y"]
    total, pairs, graphs = len(arrays["atom_type"]), len(edge_feat), len(y)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("atom_type", "node_label"), (total,))
    shapes |= {**dict.fromkeys(("num_nodes", "num_edges"), (graphs,)), "edge_index_local": (2, pairs)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            found = list(arrays[name].shape)
            raise ValueError(f"{name} is {found} beside {total} nodes, {pairs} edges and {graphs} graphs")
    if edge_feat.dim() != 2 or not edge_feat.isfinite().all():
        raise ValueError(f"edge_feat must be finite numbers [{pairs}, F], got {list(edge_feat.shape)}")
    if (nodes < 1).any() or (edges < 0).any() or int(nodes.sum()) != total or int(edges.sum()) != pairs:
        raise ValueError(f"num_nodes and num_edges do not add up to {total} nodes and {pairs} edges")
    check_indices(arrays["edge_index_local"], nodes.repeat_interleave(edges), "edge_index_local")
    limits = {"atom_type": _ATOMS, "y": 2, "node_label": 2, "train_index": graphs, "test_index": graphs}
    for name, below in limits.items():
        check_indices(arrays[name], below, name)
    chosen = torch.cat([arrays["train_index"], arrays["test_index"]])
    if len(chosen.unique()) < len(chosen):
        raise ValueError("a molecule is twice in train_index and test_index")
