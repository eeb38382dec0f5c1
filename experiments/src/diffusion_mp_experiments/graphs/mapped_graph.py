"""One large graph whose arrays are read from files once, kept in a folder, and opened by memory map."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp_experiments.files.mapped import ArrayFolder, mapped_arrays
from diffusion_mp_experiments.files.npy import map_array
from diffusion_mp_experiments.files.reading import reading

_BLOCK = 1 << 22  # numbers


def mapped_graph(
    cache: Path, make: Callable[[ArrayFolder], None], sources: Iterable[Path] = (), *, made_by: str, classes: int
) -> Data:
    """The graph in the folder `cache`, which `make` fills unless it is there; see `mapped_arrays`.

    Args:
        cache: a folder for these arrays alone.
        make: writes edge_index [2, E], y, and whatever else nodes and edges have.
        sources: the files that it reads.
        made_by: what else decides the arrays.
        classes: labels are −1 .. classes − 1.
    """
    arrays = mapped_arrays(cache, make, sources, made_by=made_by)
    with reading(cache, "Delete the folder, and it is made anew."):
        _check(cache, arrays, classes)
    return Data(**arrays)


def _check(cache: Path, arrays: dict[str, Tensor], classes: int) -> None:
    """Raise ValueError unless the arrays are a graph of as many nodes as `y` has.

    edge_index must be [2, E] within the nodes, other arrays of edges (`edge_…`) have E rows, and all others one for
    each node; labels are −1 .. classes − 1, and both are long. The edges are read once, block by block, and their
    pages leave the memory of this process again.
    """
    num_nodes, (ends, num_edges) = len(arrays["y"]), arrays["edge_index"].shape
    for name, array in arrays.items():
        rows, found = (num_edges, "edges") if name.startswith("edge_") else (num_nodes, "nodes")
        if name != "edge_index" and len(array) != rows:
            raise ValueError(f"{name} has {len(array)} rows for {rows} {found}")
    if ends != 2:
        raise ValueError(f"edge_index must be [2, E], got [{ends}, {num_edges}]")
    for name in ("edge_index", "y"):
        if arrays[name].dtype != torch.long:
            raise ValueError(f"{name} must be whole numbers of 64 bits, got {arrays[name].dtype}")
    low, high = (int(end) for end in arrays["y"].aminmax()) if arrays["y"].numel() else (0, 0)
    if low < -1 or high >= classes:
        raise ValueError(f"y must lie in -1..{classes - 1}, got up to {high} and down to {low}")
    for start in range(0, 2 * num_edges, _BLOCK):
        block = map_array(cache / "edge_index.npy").reshape(-1)[start : start + _BLOCK]
        if block.min() < 0 or block.max() >= num_nodes:
            raise ValueError(
                f"edge_index must lie in 0..{num_nodes - 1}, got up to {block.max()} and down to {block.min()}"
            )
