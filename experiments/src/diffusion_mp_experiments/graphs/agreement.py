"""Whether the parts of a graph that was read agree with each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data


def check_indices(index: Tensor, limit: int | Tensor, name: str) -> None:
    """Raise ValueError unless `index` holds integers in 0 .. limit − 1; a tensor has a limit for each of them."""
    if index.is_floating_point() or index.is_complex():
        raise ValueError(f"{name} must be integers; got {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or bool((index >= limit).any())):
        highest = limit - 1 if isinstance(limit, int) else "the number of its graph's nodes - 1"
        raise ValueError(
            f"{name} must lie in 0..{highest}, got up to {int(index.max())} and down to {int(index.min())}"
        )


def check_collated(data: Any, slices: Any, num_graphs: int) -> None:
    """Raise ValueError unless `data` and `slices` are collated graphs, `num_graphs` of them.

    Every attribute must be divided among the same number of graphs, the edges of each join nodes of its own, and
    `edge_attr` and `y` go with edges and nodes (or `y` with graphs). A single graph has None for its slices. What a
    transform may have added besides is not looked into further.
    """
    if not isinstance(data, dict) or not all(isinstance(name, str) and name.isidentifier() for name in data):
        raise ValueError("it is not a dictionary of attributes")
    if any(name.startswith("_") and name != "_num_nodes" for name in data):
        raise ValueError(f"{sorted(data)} are not the attributes of a graph")
    x, edge_index = data.get("x"), data.get("edge_index")
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor) or x.dim() != 2 or edge_index.dim() != 2:
        raise ValueError("its graphs have no x [N, C] or no edge_index [2, E]")
    if slices is None:
        slices = {name: torch.tensor([0, _length(name, part)]) for name, part in data.items() if _is_divided(part)}
    if not isinstance(slices, dict) or not slices.keys() <= data.keys():
        raise ValueError("it divides attributes among graphs that it does not have")
    ends = {name: _checked(name, data[name], end) for name, end in slices.items() if isinstance(end, Tensor)}
    counts = {len(end) - 1 for end in ends.values()}
    if counts != {num_graphs}:
        raise ValueError(f"it has attributes of {sorted(counts)} graphs, expected {num_graphs}")
    _check_parts(data, {name: end.diff() for name, end in ends.items()})


def _check_parts(data: dict[str, Any], lengths: dict[str, Tensor]) -> None:
    """Raise ValueError unless the attributes of every graph, whose lengths these are, agree."""
    nodes, edges = lengths["x"], lengths["edge_index"]
    if data["edge_index"].size(0) != 2:
        raise ValueError(f"edge_index must be [2, E], got {list(data['edge_index'].shape)}")
    check_indices(data["edge_index"], nodes.repeat_interleave(edges), "edge_index")
    for name, expected in (("edge_attr", [edges]), ("y", [nodes, torch.ones_like(nodes)])):
        if name in lengths and not any(torch.equal(lengths[name], fitting) for fitting in expected):
            raise ValueError(f"{name} does not go with the nodes and edges of its graphs")


def _checked(name: str, part: Any, end: Tensor) -> Tensor:
    """Where the graphs end in an attribute, if they can end there."""
    if end.dim() != 1 or end.dtype != torch.int64 or len(end) < 2 or int(end[0]) or bool((end.diff() < 0).any()):
        raise ValueError(f"{name} is divided by {list(end.shape)} numbers that do not ascend from 0")
    if not _is_divided(part) or int(end[-1]) != _length(name, part):
        raise ValueError(f"{name} is divided into graphs at {int(end[-1])}, where it does not end")
    return end


def _is_divided(part: Any) -> bool:
    return isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 0)


def _length(name: str, part: Any) -> int:
    """How much of an attribute there is, along the dimension in which PyG joins graphs."""
    return part.size(Data().__cat_dim__(name, part)) if isinstance(part, Tensor) else len(part)
