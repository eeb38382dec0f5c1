"""``BlockStack``: models whose layers carry states of nodes and of edges, for nodes, graphs and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_choice, check_counts, check_edge_rows, check_flags, check_kind, describe
from diffusion_mp.graph import Graph
from diffusion_mp.graph.checks import check_edge_order
from diffusion_mp.layers import LaplacianEncoder
from diffusion_mp.layers.pyg import refuse_inputs, refuse_proxy
from diffusion_mp.models.base import GraphModel, Record, forget, recorded, with_every_gradient
from diffusion_mp.models.encoders import FeatureEncoder, feature_columns
from diffusion_mp.models.heads import HEADS, Head, Task

Encodings = Tensor | tuple[Tensor, ...]


class BlockStack(GraphModel):
    r"""x⁰ = [W x ‖ PE], e⁰ = W_e e, then (x, e) ← block(x, e, A) for every layer, then a head on x.

    With data of PyG:

    ```python
    model(data.x, data.edge_index, batch=data.batch, edge_attr=data.edge_attr,
          pe=(data.laplacian_eigenvectors, data.laplacian_eigenvalues, data.laplacian_mask))
    ```

    Args:
        in_channels: of floating-point features, -1 for those of the first call; or, for integer features, a list with
            the number of categories of every column (see :class:`FeatureEncoder`).
        hidden_channels: of the states of nodes and edges.
        out_channels: of the predictions; for links of the embeddings whose inner products are the scores.
        num_layers: number of blocks.
        block: makes one, a module called as ``block(x, graph, edge_attr=..., return_coupling=True)``, like
            :class:`GPSBlock`.
        edge_dim: of edge features, as ``in_channels``; ``None``: there are none, and e⁰ is one learned vector.
        pe_channels: of the positional encoding, part of ``hidden_channels``; 0: none.
        pe_encoder: what makes it, called with what is passed as ``pe``; :class:`LaplacianEncoder` by default.
        task: ``"node"``; ``"graph"``: the mean of its nodes is read; ``"link"``: pairs are scored.

    Shapes:
        - x, edges and batch as in :class:`GraphModel`, x [N, columns] of integers for categories; edge_attr:
          [E, edge_dim] in the order of ``edge_index``; pe: a tensor or a tuple of tensors, a row per node;
          edge_label_index: [2, L].
        - output: raw logits [N, out_channels], [B, out_channels], or scores [L].

    Raises:
        TypeError, ValueError: an option or the input does not fit; a sentence says what came and what was expected.
    """

    def __init__(
        self,
        in_channels: int | Sequence[int],
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        block: Callable[[], nn.Module],
        *,
        edge_dim: int | Sequence[int] | None = None,
        pe_channels: int = 0,
        pe_encoder: nn.Module | None = None,
        task: Task = "node",
    ) -> None:
        super().__init__(feature_columns(in_channels, "in_channels"), hidden_channels, out_channels)
        check_counts(num_layers=num_layers)
        check_choice(task, "task", HEADS)
        if edge_dim is not None:
            feature_columns(edge_dim, "edge_dim")
        if type(pe_channels) is not int or pe_channels:
            check_counts(pe_channels=pe_channels)
        check_kind(pe_encoder, "pe_encoder", (nn.Module, NoneType), "a module that makes the encodings")
        if not 0 <= pe_channels < hidden_channels:
            raise ValueError(
                f"pe_channels must lie in 0..{hidden_channels - 1}, a part of hidden_channels; got {pe_channels}."
            )
        if pe_encoder is not None and not pe_channels:
            raise ValueError("pe_encoder needs pe_channels, the number of channels it gives; got pe_channels=0.")
        self.pe_channels = pe_channels
        self.encoder = FeatureEncoder(in_channels, hidden_channels - pe_channels)
        self.pe_encoder = (pe_encoder or LaplacianEncoder(pe_channels)) if pe_channels else None
        self.edge_encoder = None if edge_dim is None else FeatureEncoder(edge_dim, hidden_channels, "edge_attr")
        self.edge_start = nn.Embedding(1, hidden_channels) if edge_dim is None else None
        self.blocks = nn.ModuleList(block() for _ in range(num_layers))
        self.head = HEADS[task](hidden_channels, out_channels)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        pe: Encodings | None = None,
        edge_label_index: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Predictions; with ``return_coupling`` also the operator of every block."""
        refuse_proxy(self, x)
        refuse_inputs(self, others)
        check_edge_order(edge_index, edge_attr)
        check_flags(return_coupling=return_coupling)
        check_kind(x, "x", Tensor, f"a tensor [num_nodes, {self.in_channels}]")
        if not x.dim():
            raise ValueError(f"x must be [num_nodes, {self.in_channels}]; got {describe(x)}.")
        graph = self.edge_mask(Graph.coerce(x, edge_index, edge_weight, batch))
        couplings: list[Coupling] = []
        record = self.edge_mask.listening(graph, couplings.append if return_coupling else forget)
        out = with_every_gradient(self.propagate(x, graph, record, edge_attr, pe, edge_label_index), self)
        return (out, couplings) if return_coupling else out

    def propagate(
        self,
        x: Tensor,
        graph: Graph,
        record: Record,
        edge_attr: Tensor | None = None,
        pe: Encodings | None = None,
        edge_label_index: Tensor | None = None,
    ) -> Tensor:
        x, edges = self._placed(self.encoder(x), pe), self._edges(graph, edge_attr)
        if self.in_channels == -1:
            self.in_channels = self.encoder.channels
        for block in self.blocks:
            if edges is None:
                x = recorded(record, block, x, graph)
            else:
                x, edges = recorded(record, block, x, graph, edge_attr=edges)
        return cast("Head", self.head)(x, graph, edge_label_index)

    def _placed(self, x: Tensor, pe: Encodings | None) -> Tensor:
        """The states with the positional encoding beside them."""
        if (self.pe_encoder is None) != (pe is None):
            raise ValueError(
                "pe must be passed to a model with pe_channels, and only to one; "
                f"got {'none' if pe is None else 'one'} with pe_channels={self.pe_channels}."
            )
        if self.pe_encoder is None or pe is None:
            return x
        for part in pe if isinstance(pe, tuple) and pe else (pe,):
            if not isinstance(part, Tensor) or not (part.is_floating_point() or part.dtype == torch.bool):
                raise TypeError(
                    f"pe must be floating-point tensors, and masks of bool, with a row per node; got {describe(part)}."
                )
            if part.shape[:1] != x.shape[:1] or part.device != x.device:
                raise ValueError(f"pe must have {x.size(0)} rows on {x.device}, one per node; got {describe(part)}.")
        try:
            encoded = cast("Tensor", self.pe_encoder(*pe) if isinstance(pe, tuple) else self.pe_encoder(pe))
        except (TypeError, ValueError) as error:
            raise type(error)(f"pe must be what {type(self.pe_encoder).__name__} reads: {error}") from error
        if encoded.shape != (x.size(0), self.pe_channels):
            raise ValueError(
                f"the encoding of pe must be [{x.size(0)}, {self.pe_channels}], one row per node; "
                f"got {describe(encoded)}."
            )
        return torch.cat([x, encoded], 1)

    def _edges(self, graph: Graph, edge_attr: Tensor | None) -> Tensor | None:
        """The first state of the edges; none without observed edges."""
        if (self.edge_encoder is not None) != (edge_attr is not None) and graph.edge_index is not None:
            raise ValueError(
                "edge_attr must be passed to a model with edge_dim, and only to one; "
                f"got {'none' if edge_attr is None else describe(edge_attr)}."
            )
        if graph.edge_index is None:
            if edge_attr is not None:
                raise ValueError("edge_attr needs edge_index; got edge_attr alone.")
            return None
        if self.edge_encoder is None or edge_attr is None:
            start = cast("nn.Embedding", self.edge_start)
            return start.weight.expand(graph.num_edges, -1)
        check_edge_rows(edge_attr, graph.num_edges)
        return self.edge_encoder(edge_attr)
