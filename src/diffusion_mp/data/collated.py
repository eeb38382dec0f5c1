"""Whether many graphs in one, as PyG collates them, are what they claim to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.data.agreement import check_indices


def check_collated(data: Any, slices: Any, num_graphs: int | None) -> None:
    """Raise ValueError unless `data` and `slices` are collated graphs, `num_graphs` of them where that is known.

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
    if len(counts) != 1 or num_graphs not in (None, *counts):
        raise ValueError(f"it has attributes of {sorted(counts)} graphs, expected {num_graphs or 'one number of them'}")
    _check_parts(data, {name: end.diff() for name, end in ends.items()})


def _check_parts(data: dict[str, Any], lengths: dict[str, Tensor]) -> None:
    """Raise ValueError unless the attributes of every graph, whose lengths these are, agree."""
    nodes, edges = lengths["x"], lengths["edge_index"]
    for name in ("edge_index", "edge_label_index"):
        if name in lengths:
            if data[name].size(0) != 2:
                raise ValueError(f"{name} must be [2, E], got {list(data[name].shape)}")
            check_indices(data[name], nodes.repeat_interleave(lengths[name]), name)
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
