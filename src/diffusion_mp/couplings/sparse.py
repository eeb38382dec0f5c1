"""Couplings over observed edges: the graph term of DIFFormer, GCN, GAT and their kin."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.errors import check_device, check_kind, check_tensor, describe
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.spmm import spmm


class SparseCoupling(Coupling):
    r"""s_ij = Σ of the weights of the edges j → i; multi-edges add up, an isolated node has a zero row.

    Args:
        graph: the edges.
        weight: [E] or [E, H] in the order of ``graph.edge_index``; ``None`` takes the graph's own weights.
        symmetric: a promise, or ``None`` to look at the entries when somebody asks (O(E log E), once).
        row_stochastic, nonnegative: promises about S.
    """

    def __init__(
        self,
        graph: Graph,
        weight: Tensor | None = None,
        *,
        symmetric: bool | None = None,
        row_stochastic: bool = False,
        nonnegative: bool = False,
    ) -> None:
        check_kind(graph, "graph", Graph, "a Graph")
        if weight is None:
            own = graph.edge_weight
            weight = own if own is not None else torch.ones(graph.num_edges, device=graph.edges.device)
        check_tensor(weight, "weight", "[num_edges] or [num_edges, heads]")
        check_device(weight, "weight", graph.edges.device, "the graph")
        if weight.dim() not in (1, 2) or weight.size(0) != graph.num_edges:
            raise ValueError(
                f"weight must be [num_edges] or [num_edges, heads] with {graph.num_edges} edges; "
                f"got {describe(weight)}."
            )
        self.graph = graph
        self.weight = weight if weight.dim() == 2 else weight.unsqueeze(1)
        super().__init__(
            graph.num_nodes,
            self.weight.size(1),
            weight,
            row_stochastic=row_stochastic,
            nonnegative=nonnegative,
        )
        self._symmetric = symmetric

    @property
    def symmetric(self) -> bool:
        if self._symmetric is None:
            edges = self.graph.edges
            forth, back = self._at(edges).detach(), self._at(edges.flip(0)).detach()
            scale = float(forth.abs().max()) if len(forth) else 0.0
            self._symmetric = math.isfinite(scale) and torch.allclose(forth, back, rtol=1e-5, atol=1e-6 * scale)
        return self._symmetric

    @symmetric.setter
    def symmetric(self, value: bool) -> None:
        self._symmetric = value

    @property
    def T(self) -> Coupling:
        """Sᵀ: the same weights on the reversed edges."""
        return self if self._symmetric else self._transpose()

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return spmm(self.graph.pattern, self.weight, v)

    def _transpose(self) -> Coupling:
        return SparseCoupling(self.graph.reverse(), self.weight, nonnegative=self.nonnegative)

    def degree(self) -> Float[Tensor, "N heads"]:
        total = self.weight.to(torch.promote_types(self.dtype, torch.float32))
        zeros = total.new_zeros(self.num_nodes, self.heads)
        return zeros.index_add(0, self.graph.edges[1], total)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        # Sum parallel edges once, then look each pair up among the distinct ones: O(E log E).
        source, target = self.graph.edges
        pairs, place = torch.unique(target * self.num_nodes + source, return_inverse=True)
        wanted = edge_index[1] * self.num_nodes + edge_index[0]
        if not pairs.numel():
            return self.weight.new_zeros(wanted.numel(), self.heads)
        entries = self.weight.new_zeros(pairs.numel(), self.heads).index_add(0, place, self.weight)
        found = torch.searchsorted(pairs, wanted).clamp(max=pairs.numel() - 1)
        return entries[found] * (pairs[found] == wanted).unsqueeze(1)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        source, target = self.graph.edges
        dense = self.weight.new_zeros(self.num_nodes, self.num_nodes, self.heads)
        return dense.index_put((target, source), self.weight, accumulate=True).permute(2, 0, 1)
