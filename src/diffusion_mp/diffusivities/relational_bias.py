"""Observed edges as a learnable bias of the attention (NodeFormer)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, PolynomialCoupling, ScaledCoupling, SumCoupling
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.errors import check_choice, check_counts
from diffusion_mp.graph import Graph


class RelationalBias(Diffusivity):
    r"""Σ_p σ(b_p) Aᵖ with learnable b, zero at the start (Wu et al. 2022; slides, "Input Graphs as Relational Bias").

    z_u ← z_u + Σ_{v: a_uv = 1} σ(b) v_v, per head, for one hop: a plain sum over the observed edges, each with its
    weight. The released code divides by degrees instead, as ``"sym"`` and ``"row"`` do.

    With ``powers="walks"`` hop p counts walks of length p, A v, A(A v), …, which costs O(pE) and stores no power of A.
    The released code squares A, p − 1 times, and keeps where it is non-zero. That is ``powers="reach"``: hop p is 1
    for everybody who is reached in 1 … 2ᵖ⁻¹ steps, normalised by degrees of its own, in as many entries as that has.

    Args:
        heads: H, one bias per head.
        hops: P.
        normalization, options: of A, see :class:`AdjacencyDiffusivity` (``self_loops``, ``direction``).
        powers: ``"walks"`` or ``"reach"``, of a graph without weights.
        gate: ``"sigmoid"``, σ(b), or ``None``, b itself, as released code has it on some data sets.

    Raises:
        TypeError, ValueError: a number or a choice that does not fit.

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
        self,
        heads: int = 1,
        *,
        hops: int = 1,
        normalization: Literal["sum", "sym", "row"] = "sum",
        powers: Literal["walks", "reach"] = "walks",
        gate: Literal["sigmoid"] | None = "sigmoid",
        **options: Any,
    ) -> None:
        super().__init__()
        check_counts(heads=heads, hops=hops)
        check_choice(powers, "powers", ["walks", "reach"])
        check_choice(gate, "gate", ["sigmoid", None])
        self.adjacency: Diffusivity = AdjacencyDiffusivity(normalization, **options)
        self.heads, self.powers, self.gate = heads, powers, gate
        self.symmetric = self.adjacency.symmetric
        self.bias = nn.Parameter(torch.zeros(hops, heads))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        gates = self.bias if self.gate is None else self.bias.sigmoid()
        nonnegative = self.gate is not None
        if self.powers == "walks":
            return PolynomialCoupling(graph.couple(self.adjacency, x), gates, nonnegative=nonnegative)
        reached = (self.adjacency.couple(x, graph.within(1 << p)) for p in range(len(gates)))
        terms = zip(gates, reached, strict=True)
        return SumCoupling([ScaledCoupling(gate, hop, nonnegative=nonnegative) for gate, hop in terms])

    def extra_repr(self) -> str:
        return f"heads={self.heads}, hops={self.bias.size(0)}, powers={self.powers!r}, gate={self.gate!r}"
