"""Couplings over observed edges: the graph term of DIFFormer, GCN, GAT and their kin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.facts import Promise
from diffusion_mp.errors import check_device, check_kind, check_tensor, describe
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import entries_at, is_symmetric
from diffusion_mp.kernels.spmm import spmm


class SparseCoupling(Coupling):
    r"""s_ij = Σ of the weights of the edges j → i; multi-edges add up, an isolated node has a zero row.

    Args:
        graph: the edges.
        weight: [E] or [E, H] in the order of ``graph.edge_index``; ``None`` takes the graph's own weights.
        symmetric: a promise, or ``None`` to look at the entries when somebody asks (O(E log E)). The answer is kept,
            for the graph's own weights by the graph, so that the next coupling on it need not look again.
        row_stochastic, nonnegative, metric: promises about S, see `Coupling`.

    Attributes:
        own: whether the weights are the graph's own.

    Raises:
        TypeError, ValueError: no graph, or weights that do not fit its edges.

    Examples:
        >>> S = SparseCoupling(graph, torch.ones(12))
        >>> (S @ x.unsqueeze(1)).shape
        torch.Size([6, 1, 4])
    """

    def __init__(
        self,
        graph: Graph,
        weight: Tensor | None = None,
        *,
        symmetric: Promise | None = None,
        row_stochastic: bool = False,
        nonnegative: bool = False,
        metric: Callable[[], Tensor | None] | None = None,
    ) -> None:
        if not isinstance(graph, Graph):
            check_kind(graph, "graph", Graph, "a Graph")
        own = weight is None
        if weight is None:
            weight = graph.edge_weight
            if weight is None:
                weight = torch.ones(graph.num_edges, device=graph.edges.device)
        else:
            check_tensor(weight, "weight", "[num_edges] or [num_edges, heads]")
            check_device(weight, "weight", graph.edges.device, "the graph")
            if weight.dim() not in (1, 2) or weight.size(0) != graph.num_edges:
                raise ValueError(
                    f"weight must be [num_edges] or [num_edges, heads] with {graph.num_edges} edges; "
                    f"got {describe(weight)}."
                )
        by_head = weight if weight.dim() == 2 else weight.unsqueeze(1)

        def looks_symmetric() -> bool:
            return graph.is_symmetric if own else is_symmetric(graph.edges, by_head, graph.num_nodes)

        super().__init__(
            graph.num_nodes,
            by_head.size(1),
            by_head,
            ptr=lambda: graph.segments,
            symmetric=looks_symmetric if symmetric is None else symmetric,
            row_stochastic=row_stochastic,
            nonnegative=nonnegative,
            metric=metric,
        )
        self.graph, self.weight, self.own = graph, by_head, own

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return spmm(self.graph.pattern, self.weight, v)

    def _transpose(self) -> Coupling:
        return SparseCoupling(self.graph.reverse(), self.weight, nonnegative=self.nonnegative)

    def degree(self) -> Float[Tensor, "N heads"]:
        total = self.weight.to(torch.promote_types(self.dtype, torch.float32))
        zeros = total.new_zeros(self.num_nodes, self.heads)
        return zeros.index_add(0, self.graph.edges[1], total)

    def diagonal(self) -> Float[Tensor, "N heads"]:
        source, target = self.graph.edges
        zeros = self.weight.new_zeros(self.num_nodes, self.heads)
        return zeros.index_add(0, target, self.weight * (source == target).unsqueeze(1))

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return entries_at(edge_index, self.graph.edges, self.weight, self.num_nodes)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        source, target = self.graph.edges
        dense = self.weight.new_zeros(self.num_nodes, self.num_nodes, self.heads)
        return dense.index_put((target, source), self.weight, accumulate=True).permute(2, 0, 1)
