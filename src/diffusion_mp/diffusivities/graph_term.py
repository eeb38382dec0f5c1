"""Attention beside the observed graph: a Ŝ + b Ã where edges were observed, and Ŝ alone where none were."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, SumCoupling
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.errors import check_choice, check_kind, check_positive
from diffusion_mp.graph import Graph, SelfLoops

Weights = tuple[float, float] | tuple[Tensor, Tensor] | None


class MixedCoupling(SumCoupling):
    """a Ŝ + b Ã with weights a, b > 0, or ``None`` for Ŝ + Ã; ``attention`` is Ŝ, to be looked at by itself."""

    def __init__(self, attention: Coupling, graph_term: Coupling, weights: Weights) -> None:
        super().__init__(
            [attention, graph_term] if weights is None else [weights[0] * attention, weights[1] * graph_term]
        )
        self.attention = attention
        self.nonnegative = attention.nonnegative and graph_term.nonnegative
        self.row_stochastic = False  # ½ + ½ is not one for a node without edges, whose row of Ã is zero


class GraphAugmentedDiffusivity(Diffusivity):
    r"""An all-pair attention Ŝ with a graph term Ã (Wu, Wipf & Yan 2025, Section 5.3.2), each normalised by itself.

    The algebra says the same, ``attention + graph_term`` and ``0.5 * attention + 0.5 * graph_term``, but needs observed
    edges. This one is Ŝ alone for a graph without them.

    Args:
        attention: gives Ŝ.
        graph_term: gives Ã, and is asked only where edges were observed.
        mix: ``"sum"``: Ŝ + Ã, Eq. (61), made for the residual update (Eq. 63); ``"mean"``: ½Ŝ + ½Ã, Eq. (24), made for
            the conservative one. The paper calls them one thing; they move the state differently
            (docs/errata.md, D3).

    Raises:
        TypeError, ValueError: something else than two diffusivities, or another mix.
    """

    depends_on = "parts"
    why_no_penalty = (
        "attention plus a graph term: Energy(penalty, graph_term=...) is its energy (Eq. 25), not certified."
    )

    def __init__(self, attention: Diffusivity, graph_term: Diffusivity, mix: Literal["sum", "mean"] = "sum") -> None:
        super().__init__()
        check_kind(attention, "attention", Diffusivity, "a Diffusivity")
        check_kind(graph_term, "graph_term", Diffusivity, "a Diffusivity")
        check_choice(mix, "mix", ["sum", "mean"])
        self.attention, self.graph_term, self.mix = attention, graph_term, mix
        self.heads = max(attention.heads, graph_term.heads)
        self.needs_graph = attention.needs_graph
        self.symmetric = attention.symmetric and graph_term.symmetric

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        attention: Coupling = graph.couple(self.attention, x)
        if graph.edge_index is None:
            return attention
        return MixedCoupling(attention, graph.couple(self.graph_term, x), self.weights())

    def weights(self) -> Weights:
        """What Ŝ and Ã count; ``None`` for one each."""
        return None if self.mix == "sum" else (0.5, 0.5)

    def extra_repr(self) -> str:
        return f"mix={self.mix!r}"


class AdjacencyEnhancedDiffusivity(GraphAugmentedDiffusivity):
    r"""(1 + γ)⁻¹ [γ S + Ã] with Ã = D^-½ (A + I) D^-½ and a learnable γ > 0 (SFi-Former, Eq. 11).

    γ = e^g with a learnable g, so the weights are σ(g) and σ(−g): a convex combination.

    Args:
        attention: gives S.
        gamma: γ at the start.
        self_loops: of Ã, see :class:`AdjacencyDiffusivity`.

    Raises:
        TypeError, ValueError: γ is not positive.
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

    def weights(self) -> Weights:
        share = self.log_gamma.sigmoid()
        return share, 1 - share

    def extra_repr(self) -> str:
        return f"gamma={math.exp(self.initial):g}"
