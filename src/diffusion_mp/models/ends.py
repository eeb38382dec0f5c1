"""The first and last parts of models: features to states, and states to predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diffusion_mp.errors import (
    INTEGERS,
    as_size,
    check_choice,
    check_counts,
    check_device,
    check_kind,
    check_pairs,
    describe,
    found_later,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers.features import channels_at_first, check_input, input_linear

Task = Literal["node", "graph", "link"]
Pooling = Literal["mean", "first", "last"]


def feature_columns(channels: int | Sequence[int], name: str) -> int:
    """Return the number of columns of features: ``channels`` numbers (-1: unknown), or categories (a list of sizes)."""
    if isinstance(channels, (int, str)) or not isinstance(channels, Sequence):
        if not found_later(channels):
            check_counts(**{name: channels})
        return channels
    if not channels:
        raise ValueError(f"{name} must be a number of channels or a list with a table size per column; got none.")
    check_counts(**{f"{name}[{column}]": size for column, size in enumerate(channels)})
    return len(channels)


class FeatureEncoder(nn.Module):
    """W x + b for floating-point features, or Σ_f T_f[x_f] for categories (atoms, bonds), one table per column.

    Args:
        channels: the number of floating-point features, -1 to infer it from the first call; or a list with the number
            of categories of every column.
        out_channels: channels of the state.
        name: name of the input in messages.

    Shapes:
        x: [N, channels] floating point, dense or sparse; or [N, len(channels)], or [N] for one column, of integers.

    Raises:
        TypeError, ValueError: the input does not fit, or a category is not in its table.
    """

    def __init__(self, channels: int | Sequence[int], out_channels: int, name: str = "x") -> None:
        super().__init__()
        self.name = name
        self.channels = feature_columns(channels, "channels")
        self.sizes = None if isinstance(channels, int) else tuple(channels)
        check_counts(out_channels=out_channels)
        self.linear = input_linear(self.channels, out_channels) if self.sizes is None else None
        self.tables = nn.ModuleList(nn.Embedding(size, out_channels) for size in self.sizes or ())

    def forward(self, x: Tensor, name: str | None = None) -> Tensor:
        """Return the states [N, out_channels]; ``name`` overrides the name of the input in messages."""
        name = name or self.name
        if self.linear is not None:
            if self.channels == -1:
                self.channels = channels_at_first(self, x)
            check_input(x, name, channels=self.channels, module=self)
            return self.linear(x)
        columns = self._columns(x, name).unbind(1)
        check_device(x, name, self.tables[0].weight.device, f"the tables of {name}")  # type: ignore[arg-type]
        return reduce(torch.add, (table(column) for table, column in zip(self.tables, columns, strict=True)))

    def _columns(self, x: Tensor, name: str) -> Tensor:
        """Return x as [N, F], with categories checked unless ``torch.compile`` traces."""
        check_kind(x, name, Tensor, f"a tensor [rows, {self.channels}] of integers")
        if x.dtype not in INTEGERS:
            raise TypeError(f"{name} must hold categories (integers); got {describe(x)}. Convert it with .long().")
        columns = x.unsqueeze(1) if x.dim() == 1 else x
        if columns.dim() != 2 or columns.size(1) != self.channels:
            raise ValueError(f"{name} must be [rows, {self.channels}], one column per table; got {describe(x)}.")
        if columns.numel() and not torch.compiler.is_compiling():
            for column, size in enumerate(self.sizes or ()):
                low, high = columns[:, column].aminmax()
                if low < 0 or high >= size:
                    raise ValueError(
                        f"column {column} of {name} must lie in 0..{size - 1}, as its table does; "
                        f"got {int(low)}..{int(high)}."
                    )
        return columns.long()

    def extra_repr(self) -> str:
        return f"{self.channels if self.sizes is None else list(self.sizes)}"


class Head(nn.Module, ABC):
    """An MLP with one hidden layer, W₂ ReLU(W₁ x), that reads [N, channels] and predicts [N, out_channels]."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, out_channels))

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        """Return the predictions for states [N, C]; ``pairs`` [2, L] belong to link tasks only."""
        check_no_pairs(pairs)
        return self.mlp(self.read(x, graph))

    @abstractmethod
    def read(self, x: Tensor, graph: Graph) -> Tensor:
        """Return the input of the MLP."""


class NodeHead(Head):
    """Logits of every node [N, out_channels]."""

    def read(self, x: Tensor, graph: Graph) -> Tensor:
        return x


class GraphHead(Head):
    """Logits of every graph [B, out_channels], from the mean of its nodes, which is zero for an empty graph."""

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

    Scaled as in attention, so that initial scores are small and a binary cross-entropy starts near log 2.
    """

    def forward(self, x: Tensor, graph: Graph, pairs: Tensor | None) -> Tensor:
        if pairs is None:
            raise ValueError("edge_label_index is needed for a link task: [2, L], the pairs to score; got None.")
        pairs = check_pairs(pairs, "edge_label_index", x.size(0), x.device, "[2, L] of int64")
        embedding = super().forward(x, graph, None)
        return (embedding[pairs[0]] * embedding[pairs[1]]).sum(1) * as_size(embedding.size(1)) ** -0.5


HEADS: dict[str, type[Head]] = {"node": NodeHead, "graph": GraphHead, "link": LinkHead}


def check_no_pairs(pairs: Tensor | None) -> None:
    """Raise ``ValueError`` if pairs are passed to a model that does not score links."""
    if pairs is not None:
        raise ValueError("edge_label_index belongs to task='link'; leave it out for nodes and graphs.")


def output_layers(channels: int, out_channels: int, task: Task) -> tuple[nn.Module, Head | None]:
    """Return a linear map of states to logits and no head; for graphs and links, the identity and a head."""
    check_choice(task, "task", HEADS)
    if task == "node":
        return nn.Linear(channels, out_channels), None
    return nn.Identity(), HEADS[task](channels, out_channels)


def pooled(x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"], pooling: Pooling) -> Float[Tensor, "B C"]:
    """Return the mean, the first or the last token of every sequence, computed in at least float32.

    The first token is the [CLS] of many tokenisers; the last one has seen all others in a causal model. A sequence
    without tokens gives zero.
    """
    if pooling == "first":
        mask = mask & (mask.cumsum(1) == 1)
    elif pooling == "last":
        mask = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~mask.unsqueeze(2), 0)
    return (wide.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
