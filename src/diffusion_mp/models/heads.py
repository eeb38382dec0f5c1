"""From states to predictions: for nodes, for graphs, for pairs of nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from diffusion_mp.errors import check_pairs
from diffusion_mp.graph import Graph

Task = Literal["node", "graph", "link"]


class Head(nn.Module, ABC):
    """An MLP with one hidden layer, W₂ ReLU(W₁ x), and where it stands.

    Args:
        channels, out_channels: of the states and of the predictions.
    """

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, out_channels))

    def reset_parameters(self) -> None:
        """Draw every parameter anew."""
        reset(self.mlp)

    @abstractmethod
    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        """The predictions, for states [N, C]; ``pairs`` [2, L] are of a link task only."""


class NodeHead(Head):
    """Logits of every node [N, out_channels]."""

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        _refuse(pairs)
        return self.mlp(x)


class GraphHead(Head):
    """Logits of every graph [B, out_channels], of the mean of its nodes; an empty graph counts as zero."""

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        _refuse(pairs)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if graph.is_single:
            mean = wide.sum(0, keepdim=True) / max(1, graph.num_nodes)
        else:
            member = graph.batch.to(x.device)
            total = wide.new_zeros(graph.num_graphs, x.size(1)).index_add(0, member, wide)
            mean = total / graph.ptr.diff().to(total).clamp(min=1).unsqueeze(1)
        return self.mlp(mean.to(x.dtype))


class LinkHead(Head):
    """Scores of listed pairs [L]: ⟨MLP(x_u), MLP(x_v)⟩, the same in both directions."""

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        if pairs is None:
            raise ValueError("edge_label_index is needed for a link task: [2, L], the pairs to score; got None.")
        pairs = check_pairs(pairs, "edge_label_index", x.size(0), x.device, "[2, L] of int64")
        embedding = self.mlp(x)
        return (embedding[pairs[0]] * embedding[pairs[1]]).sum(1)


HEADS: dict[str, type[Head]] = {"node": NodeHead, "graph": GraphHead, "link": LinkHead}


def _refuse(pairs: Tensor | None) -> None:
    if pairs is not None:
        raise ValueError("edge_label_index belongs to task='link'; leave it out for nodes and graphs.")
