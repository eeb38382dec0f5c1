"""Attention beside the observed graph: a Ŝ + b Ã where edges were observed, and Ŝ alone where none were."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, ScaledCoupling, SumCoupling, row_normalized
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.errors import check_choice, check_kind, check_positive, check_share
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops

Mix = Literal["sum", "mean", "joint"]


class AdjacencyEnhancedCoupling(SumCoupling):
    """w S + (1 − w) Ã with 0 < w < 1; ``attention`` is S, to be looked at by itself."""

    def __init__(self, attention: Coupling, adjacency: Coupling, share: Tensor) -> None:
        # By name: under torch.compile ``share * attention`` would ask the tensor on its left, which knows no couplings.
        terms = ((share, attention), (1 - share, adjacency))
        super().__init__([ScaledCoupling(factor, term, nonnegative=True) for factor, term in terms])
        self.attention = attention


class GraphAugmentedDiffusivity(Diffusivity):
    r"""An all-pair attention Ŝ with a graph term Ã (Wu, Wipf & Yan 2025, Section 5.3.2).

    The algebra says the same, ``attention + graph_term`` and ``0.5 * attention + 0.5 * graph_term``, but needs observed
    edges. This one is Ŝ alone for a graph without them.

    Args:
        attention: gives Ŝ.
        graph_term: gives Ã, and is asked only where edges were observed.
        mix: ``"sum"``: Ŝ + Ã, Eq. (61), made for the residual update (Eq. 63); ``"mean"``: ½Ŝ + ½Ã, Eq. (24), made for
            the conservative one. The paper calls them one thing; they move the state differently
            (docs/errata.md, D3). Here each is normalised by itself; ``"joint"``: D⁻¹(Ŝ + Ã) with D the row sums of
            both, so that a node hears its neighbours the more the more of them it has. With a row-normalised Ŝ
            none of the three descends Eq. 25 (docs/errata.md, D24); `CertifiedStep` on an unnormalised sum does.
        graph_weight: w in [0, 1]: (1 − w) Ŝ + w Ã in place of both shares above, as released code mixes them.

    Raises:
        TypeError, ValueError: something else than two diffusivities, another mix, or a w outside [0, 1].

    Examples:
        >>> diffusivity = GraphAugmentedDiffusivity(SimpleDiffusivity(), AdjacencyDiffusivity("row"), mix="mean")
        >>> torch.allclose(diffusivity(x, graph).degree(), torch.ones(6, 1))
        True
    """

    depends_on = "parts"
    why_no_penalty = (
        "attention and a graph term that are normalised one by one do not descend Eq. 25, the energy that is printed "
        "for them (D24 in docs/errata.md). CertifiedStep on the unnormalised sum descends a JointEnergy."
    )

    def __init__(
        self,
        attention: Diffusivity,
        graph_term: Diffusivity,
        mix: Mix = "sum",
        graph_weight: float | None = None,
    ) -> None:
        super().__init__()
        check_kind(attention, "attention", Diffusivity, "a Diffusivity")
        check_kind(graph_term, "graph_term", Diffusivity, "a Diffusivity")
        check_choice(mix, "mix", get_args(Mix))
        if graph_weight is not None:
            check_share(graph_weight, "graph_weight", "the graph term beside 1 - graph_weight of the attention")
        self.attention, self.graph_term, self.mix = attention, graph_term, mix
        self.graph_weight = graph_weight
        self.heads = max(attention.heads, graph_term.heads)
        self.needs_graph = attention.needs_graph
        self.symmetric = attention.symmetric and graph_term.symmetric and mix != "joint"
        self.row_stochastic = mix == "joint" and attention.row_stochastic

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        attention: Coupling = self.attention(x, graph)
        return attention if graph.edge_index is None else self.mixed(attention, self.graph_term(x, graph))

    def mixed(self, attention: Coupling, graph_term: Coupling) -> Coupling:
        """Both couplings as one."""
        if self.graph_weight is None:
            both = SumCoupling([attention, graph_term])
        else:
            both = SumCoupling([(1 - self.graph_weight) * attention, self.graph_weight * graph_term])
        if self.mix == "joint":
            return row_normalized(both)
        return 0.5 * both if self.mix == "mean" and self.graph_weight is None else both

    def extra_repr(self) -> str:
        return f"mix={self.mix!r}, graph_weight={self.graph_weight}"


class AdjacencyEnhancedDiffusivity(GraphAugmentedDiffusivity):
    r"""(1 + γ)⁻¹ [γ S + Ã] with Ã = D^-½ (A + I) D^-½ and a learnable γ > 0 (SFi-Former, Eq. 11).

    γ = e^g with a learnable g, so the weights are σ(g) and σ(−g): a convex combination.

    Args:
        attention: gives S.
        gamma: γ at the start.
        self_loops: of Ã, see :class:`AdjacencyDiffusivity`.

    Raises:
        TypeError, ValueError: γ is not positive.

    Examples:
        >>> AdjacencyEnhancedDiffusivity(SparseFlowDiffusivity(4), gamma=1.0)(x, graph).heads
        1
    """

    why_no_penalty = "attention plus a graph term, with a learnable balance: no theorem names an energy it descends."

    def __init__(self, attention: Diffusivity, *, gamma: float = 1.0, self_loops: SelfLoops = "remaining") -> None:
        super().__init__(attention, AdjacencyDiffusivity("sym", self_loops=self_loops))
        check_positive(gamma, "gamma")
        self.initial = math.log(gamma)
        self.log_gamma = nn.Parameter(torch.tensor(self.initial))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.log_gamma, self.initial)

    def mixed(self, attention: Coupling, graph_term: Coupling) -> Coupling:
        return AdjacencyEnhancedCoupling(attention, graph_term, self.log_gamma.sigmoid())

    def extra_repr(self) -> str:
        return f"gamma={math.exp(self.initial):g}"
