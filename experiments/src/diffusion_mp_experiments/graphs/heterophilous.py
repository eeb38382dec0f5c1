"""The graphs of Platonov et al. (2023), in which neighbours seldom share a class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from diffusion_mp.errors import check_kind
from diffusion_mp_experiments.files.npz import read_npz
from diffusion_mp_experiments.files.reading import as_path, check_present, reading
from diffusion_mp_experiments.graphs.agreement import check_indices

_MASKS = ("train", "val", "test")
_ARRAYS = ("node_features", "node_labels", "edges", *(f"{name}_masks" for name in _MASKS))
_LARGEST = 1 << 28  # bytes of all arrays; those of the largest file, questions, take 60 million
_WAY_OUT = "Fetch it anew, from the folder data of https://github.com/yandex-research/heterophilous-graphs."


def load_heterophilous(root: str | Path, name: str) -> Data:
    """One graph of Platonov et al. (2023): minesweeper, or chameleon_filtered, which is chameleon without duplicates.

    Reads `root/<name>.npz`, or `root/<name>/raw/<name>.npz`, where PyG's `HeterophilousGraphDataset` puts it, and
    writes nothing. The graph is the one that PyG makes of it.

    Args:
        root: the folder of the file.
        name: of the file, as it is published.

    Returns:
        The graph with x [N, C], edge_index [2, E] in both directions, y [N], and the published splits as train_mask,
        val_mask and test_mask [N, splits]; `Split.of(data, i)` is split number i.

    Raises:
        TypeError: name is no name.
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or its arrays do not belong together.

    Examples:
        >>> import numpy as np
        >>> masks = {f"{part}_masks": np.eye(3, dtype=bool)[[c]] for c, part in enumerate(("train", "val", "test"))}
        >>> arrays = {"node_features": np.eye(3), "node_labels": np.arange(3), "edges": np.array([[0, 1]])}
        >>> np.savez(folder / "tiny.npz", **arrays, **masks)
        >>> load_heterophilous(folder, "tiny").edge_index
        tensor([[0, 1],
                [1, 0]])
    """
    check_kind(name, "name", str, "the name of a file, like minesweeper")
    folder = as_path(root, "root")
    path = as_path(folder / f"{name}.npz", "name")
    if not path.is_file() and (folder / name / "raw").is_dir():
        path = folder / name / "raw" / path.name
    check_present(name, path.parent, [path], _WAY_OUT.replace("Fetch it anew,", "Fetch it"))
    with reading(path, _WAY_OUT):
        x, y, edges, *masks = map(torch.from_numpy, read_npz(path, _ARRAYS, _LARGEST).values())
        _check(x, y, edges, masks)
        edge_index = to_undirected(edges.t().contiguous().long(), num_nodes=len(y))
    data = Data(x=x.float(), edge_index=edge_index, y=y.long())
    for name, mask in zip(_MASKS, masks, strict=True):
        data[f"{name}_mask"] = mask.t().contiguous()
    return data


def _check(x: Tensor, y: Tensor, edges: Tensor, masks: list[Tensor]) -> None:
    """Raise ValueError unless these are features [N, C], labels [N], edges [E, 2] and three masks [splits, N]."""
    if x.dim() != 2 or not x.is_floating_point() or not x.isfinite().all():
        raise ValueError(f"node_features must be finite numbers [N, C], got {list(x.shape)} of {x.dtype}")
    check_indices(y, len(y) if y.dim() == 1 else 1, "node_labels")
    check_indices(edges, len(x), "edges")
    if y.shape != x.shape[:1] or edges.dim() != 2 or edges.size(1) != 2:
        raise ValueError(f"node_labels {list(y.shape)} and edges {list(edges.shape)} do not go with {len(x)} nodes")
    for name, mask in zip(_MASKS, masks, strict=True):
        if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape != (len(masks[0]), len(x)) or not len(mask):
            raise ValueError(f"{name}_masks must be bools [splits, {len(x)}], got {list(mask.shape)} of {mask.dtype}")
    if (torch.stack(masks).sum(0) > 1).any():
        raise ValueError("a node is in two parts of a split")
