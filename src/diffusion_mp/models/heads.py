"""From states to predictions: for nodes, for graphs, for pairs of nodes, for padded sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diffusion_mp.errors import as_size, check_choice, check_pairs
from diffusion_mp.graph import Graph

Task = Literal["node", "graph", "link"]
Pooling = Literal["mean", "first", "last"]


class Head(nn.Module, ABC):
    """An MLP with one hidden layer, W₂ ReLU(W₁ x), and where it stands.

    Args:
        channels, out_channels: of the states and of the predictions.
    """

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, out_channels))

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        """The predictions, for states [N, C]; ``pairs`` [2, L] are of a link task only."""
        check_no_pairs(pairs)
        return self.mlp(self.read(x, graph))

    @abstractmethod
    def read(self, x: Tensor, graph: Graph) -> Tensor:
        """What the MLP reads."""


class NodeHead(Head):
    """Logits of every node [N, out_channels]."""

    def read(self, x: Tensor, graph: Graph) -> Tensor:
        return x


class GraphHead(Head):
    """Logits of every graph [B, out_channels], of the mean of its nodes; an empty graph counts as zero."""

    def read(self, x: Tensor, graph: Graph) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if graph.is_single:
            mean = wide.sum(0, keepdim=True) / max(1, graph.num_nodes)
        else:
            member = graph.batch.to(x.device)
            total = wide.new_zeros(graph.num_graphs, x.size(1)).index_add(0, member, wide)
            mean = total / graph.ptr.diff().to(total).clamp(min=1).unsqueeze(1)
        return mean.to(x.dtype)


class LinkHead(NodeHead):
    """Scores of listed pairs [L]: ⟨MLP(x_u), MLP(x_v)⟩ / √out_channels, the same in both directions.

    Divided as in attention, so that scores are small at the start of training and a binary cross-entropy near log 2.
    """

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        if pairs is None:
            raise ValueError("edge_label_index is needed for a link task: [2, L], the pairs to score; got None.")
        pairs = check_pairs(pairs, "edge_label_index", x.size(0), x.device, "[2, L] of int64")
        embedding = super().forward(x, graph, None)
        return (embedding[pairs[0]] * embedding[pairs[1]]).sum(1) * as_size(embedding.size(1)) ** -0.5


HEADS: dict[str, type[Head]] = {"node": NodeHead, "graph": GraphHead, "link": LinkHead}


def check_no_pairs(pairs: Tensor | None) -> None:
    """Raise ``ValueError`` if pairs came to what does not score any."""
    if pairs is not None:
        raise ValueError("edge_label_index belongs to task='link'; leave it out for nodes and graphs.")


def output_layers(channels: int, out_channels: int, task: Task) -> tuple[nn.Module, Head | None]:
    """A linear map of every node's state to its logits; or, for graphs and links, the states as they are and a head."""
    check_choice(task, "task", HEADS)
    if task == "node":
        return nn.Linear(channels, out_channels), None
    return nn.Identity(), HEADS[task](channels, out_channels)


def pooled(x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"], pooling: Pooling) -> Float[Tensor, "B C"]:
    """The mean of the tokens of every sequence, its first one, where a tokeniser puts its [CLS], or its last one, which
    has seen all others in a causal model; in at least float32. A sequence without a token counts as zero."""
    if pooling == "first":
        mask = mask & (mask.cumsum(1) == 1)
    elif pooling == "last":
        mask = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~mask.unsqueeze(2), 0)
    return (wide.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
