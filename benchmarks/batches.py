"""Batches of small graphs: the sizes of real graphs if the data is at hand, else random graphs of the same kind."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.datasets import TUDataset

from diffusion_mp.graph import Graph

#: Sizes as their logarithms are spread: mean, standard deviation, and the smallest and the largest graph. (ZINC's are
#: molecules of 9 to 38 atoms, 23 on average.)
SPREAD = {
    "MUTAG": (2.85, 0.27, 10, 28),
    "PROTEINS": (3.29, 0.84, 4, 620),
    "ZINC": (3.12, 0.2, 9, 38),
}


@cache
def sizes(name: str) -> Tensor:
    """Return the numbers of nodes of a few hundred graphs, in the order of the data set."""
    root = Path(os.environ.get("DIFFUSION_MP_DATA", "data"), "TUDataset")
    if (root / name).is_dir():
        return torch.tensor([data.num_nodes for data in TUDataset(str(root), name)])
    mean, std, low, high = SPREAD[name]
    drawn = mean + std * torch.randn(1_000, generator=torch.Generator().manual_seed(0))
    return drawn.exp().round().long().clamp(low, high)


def batch_of(name: str, num_nodes: int) -> Graph:
    """Return the first graphs of a data set, ``num_nodes`` nodes in all, without edges; the last graph may be cut."""
    ends = sizes(name).cumsum(0)
    ends = torch.cat([ends[ends < num_nodes], torch.tensor([num_nodes])])
    counts = ends.diff(prepend=ends.new_zeros(1))
    graph = Graph(
        num_nodes, batch=torch.repeat_interleave(torch.arange(len(counts)), counts)
    )
    graph.segments  # noqa: B018 (found once, as for all layers of a model)
    return graph


def with_ring(graph: Graph) -> Tensor:
    """Return edges [2, E] both ways between every node and the next of its graph: about as many as in molecules."""
    first = torch.arange(graph.num_nodes - 1)
    first = first[graph.batch[:-1] == graph.batch[1:]]
    return torch.stack([torch.cat([first, first + 1]), torch.cat([first + 1, first])])
