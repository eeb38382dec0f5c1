"""Attention and the observed graph together (Wu, Wipf & Yan 2025, Section 5.3.2)."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.errors import check_choice, check_kind
from diffusion_mp.graph import Graph


class GraphAugmentedDiffusivity(Diffusivity):
    r"""An all-pair diffusivity Ŝ with a graph term Ã, when there is a graph; Ŝ alone when there is none.

    - ``mix="sum"``: Ŝ + Ã, Eq. (61), made for the residual update (Eq. 63);
    - ``mix="mean"``: ½Ŝ + ½Ã, Eq. (24), made for the conservative update; with a graph it is
      ``0.5 * attention + 0.5 * graph_term``.

    These are different updates of the state (ERRATA D3).
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
        self.attention = attention
        self.graph_term = graph_term
        self.mix = mix
        self.heads = max(attention.heads, graph_term.heads)
        self.symmetric = attention.symmetric and graph_term.symmetric

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        attention = self.attention(x, graph)
        if graph.edge_index is None:
            return attention
        both = attention + self.graph_term(x, graph)
        return both if self.mix == "sum" else 0.5 * both

    def extra_repr(self) -> str:
        return f"mix={self.mix!r}"
