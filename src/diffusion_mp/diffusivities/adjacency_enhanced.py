"""Attention and adjacency with a learnable balance (SFi-Former, Eq. 11)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, ScaledCoupling, SumCoupling
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.errors import check_kind, check_positive
from diffusion_mp.graph import Graph, SelfLoops


class AdjacencyEnhancedCoupling(SumCoupling):
    """(1 − w) Ã + w S; ``attention`` is S, to be looked at by itself."""

    def __init__(self, attention: Coupling, adjacency: Coupling, share: Tensor) -> None:
        super().__init__([ScaledCoupling(1 - share, adjacency), ScaledCoupling(share, attention)])
        self.attention = attention
        self.nonnegative = attention.nonnegative and adjacency.nonnegative


class AdjacencyEnhancedDiffusivity(Diffusivity):
    r"""(1 + γ)⁻¹ [Ã + γ S] with Ã = D^-½ (A + I) D^-½ (SFi-Former, Eq. 11); without observed edges S alone.

    γ = e^g with a learnable g, hence positive, and the weights are σ(−g) and σ(g): a convex combination.

    Args:
        attention: gives S.
        gamma: γ at the start.
        self_loops: of Ã, see :class:`AdjacencyDiffusivity`.

    Raises:
        TypeError, ValueError: γ is not positive.
    """

    depends_on = "parts"
    why_no_penalty = "attention plus a graph term, with a learnable balance: no theorem names an energy it descends."

    def __init__(self, attention: Diffusivity, *, gamma: float = 1.0, self_loops: SelfLoops = "remaining") -> None:
        super().__init__()
        check_kind(attention, "attention", Diffusivity, "a Diffusivity")
        check_positive(gamma, "gamma")
        self.attention = attention
        self.adjacency = AdjacencyDiffusivity("sym", self_loops=self_loops)
        self.heads, self.needs_graph = attention.heads, attention.needs_graph
        self.initial = math.log(gamma)
        self.log_gamma = nn.Parameter(torch.tensor(self.initial))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.log_gamma, self.initial)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        attention = self.attention(x, graph)
        if graph.edge_index is None:
            return attention
        adjacency = self.adjacency(x, graph)
        adjacency.symmetric = False  # nobody needs to know, and finding out means sorting the edges
        return AdjacencyEnhancedCoupling(attention, adjacency, self.log_gamma.sigmoid())

    def extra_repr(self) -> str:
        return f"gamma={math.exp(self.initial):g}"
