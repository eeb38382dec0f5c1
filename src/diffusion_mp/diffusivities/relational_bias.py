"""Observed edges as a learnable bias of the attention (NodeFormer)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, PolynomialCoupling
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.errors import check_counts
from diffusion_mp.graph import Graph


class RelationalBias(Diffusivity):
    r"""Σ_p σ(b_p) Aᵖ with learnable b, zero at the start (Wu et al. 2022; slides, "Input Graphs as Relational Bias").

    z_u ← z_u + Σ_{v: a_uv = 1} σ(b) v_v, per head, for one hop: a plain sum over the observed edges, each with its
    weight. The released code divides by degrees instead, as ``"sym"`` and ``"row"`` do.

    Hop p counts walks of length p, A v, A(A v), …, which costs O(pE) and stores no power of A. (The released code
    builds A² and keeps where it is non-zero: reachability, in as many entries as that has.)

    Args:
        heads: H, one bias per head.
        hops: P.
        normalization, options: of A, see :class:`AdjacencyDiffusivity` (``self_loops``, ``direction``).

    Attributes:
        bias: b [P, H].

    Examples:
        >>> RelationalBias(heads=2, hops=2, normalization="sym")(x, graph).heads
        2
    """

    depends_on = "parts"
    needs_graph = True
    why_no_penalty = (
        "the relational bias is fixed by the graph and its b: certify the coupling itself (Theorem 1), where A is "
        "symmetric."
    )

    def __init__(
        self, heads: int = 1, *, hops: int = 1, normalization: Literal["sum", "sym", "row"] = "sum", **options: Any
    ) -> None:
        super().__init__()
        check_counts(heads=heads, hops=hops)
        self.adjacency: Diffusivity = AdjacencyDiffusivity(normalization, **options)
        self.heads = heads
        self.symmetric = self.adjacency.symmetric
        self.bias = nn.Parameter(torch.zeros(hops, heads))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        return PolynomialCoupling(graph.couple(self.adjacency, x), self.bias.sigmoid(), nonnegative=True)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, hops={self.bias.size(0)}"
