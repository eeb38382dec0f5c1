"""``EdgeLayer``: layers that move states of nodes and of edges, and how they normalise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from torch import Tensor, nn
from torch_geometric.nn import BatchNorm
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_choice, check_counts, check_edge_rows, check_flags, check_probability, check_state
from diffusion_mp.graph import Graph
from diffusion_mp.layers.pyg_names import KnowsPyGNames, refuse_inputs

Norm = Literal["batch", "layer"] | None


class EdgeLayer(KnowsPyGNames, nn.Module, ABC):
    """A layer on states of nodes and, where there are any, of edges, both of ``channels``; a kind writes :meth:`step`.

    Shapes:
        - x: [N, channels]; edges and batch as in :class:`DiffusionConv`; edge_attr: [E, channels] in the order of
          ``edge_index``, or ``None``.
        - output: x′ [N, channels]; the pair (x′, e′) if ``edge_attr`` was given; with ``return_coupling`` the coupling
          comes last.

    Raises:
        TypeError, ValueError: the input does not fit; a sentence says what came and what was expected.
    """

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        check_counts(channels=channels)
        check_probability(dropout, "dropout")
        self.in_channels = self.out_channels = channels
        self.dropout = dropout

    @abstractmethod
    def step(self, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> tuple[Tensor, Tensor | None, Coupling]:
        """The next states of nodes and of edges, and the coupling, for an input that was checked."""

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Any:
        """The next state; with ``edge_attr`` also the edges' next state; with ``return_coupling`` also the coupling."""
        refuse_inputs(self, others)
        check_flags(return_coupling=return_coupling)
        check_state(x, channels=self.in_channels, module=self)
        graph = Graph.coerce(x, edge_index, edge_weight, batch)
        if edge_attr is not None:
            check_state(edge_attr, "edge_attr", self.in_channels, module=self)
            check_edge_rows(edge_attr, graph.num_edges)
        out, edges, coupling = self.step(x, graph, edge_attr)
        results = [out, *([] if edge_attr is None else [edges]), *([coupling] if return_coupling else [])]
        return out if len(results) == 1 else tuple(results)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor; running statistics start again."""
        for child in self.children():
            reset(child)


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """``"batch"``: over all rows of the call in training, running statistics in evaluation (and in training for a
    single row or none, which has no variance); ``"layer"``: over the channels of a row; ``None``: the identity.

    Only with running statistics, or without batch normalisation, is a graph's output independent of its batch-mates.
    """
    check_choice(norm, "norm", ["batch", "layer", None])
    if norm == "batch":
        return BatchNorm(channels, allow_single_element=True)
    return nn.Identity() if norm is None else nn.LayerNorm(channels)
