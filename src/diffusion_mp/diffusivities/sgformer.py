"""The attention of SGFormer: every node itself, and all pairs by one low-rank product (Wu et al. 2023b)."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, LinearAttentionCoupling
from diffusion_mp.diffusivities.query_key import QueryKeyDiffusivity
from diffusion_mp.graph import Graph


class SGFormerDiffusivity(QueryKeyDiffusivity):
    r"""D⁻¹(I + (1/n) Q̃K̃ᵀ), D = diag(1 + (1/n) Q̃(K̃ᵀ1)), in O(N) (slides, "SGFormer"; Wu et al. 2023b).

    Node by node: (S v)_i = (v_i + (1/n) Σ_j (q̃_i·k̃_j) v_j) / (1 + (1/n) Σ_j q̃_i·k̃_j), j over the n nodes of i's own
    graph. The identity belongs to the coupling: its rows sum to one, as those of the attention that the released code
    exports do not. A row whose D is zero, where every k̃_j is −q̃_i, is a zero row.

    Args:
        channels: C of the state; may be ``None`` without projections.
        normalize: ``"row"``: every q and k has unit norm, what PyG's ``SGFormerAttention`` computes; ``"frobenius"``:
            one norm over all nodes, heads and channels of a graph, as the slides define it. Then
            ‖(1/n) Q̃K̃ᵀV‖ ≤ ‖V‖/n for every head, and on large graphs the layer is linear in V: on random states the
            attention changes V by less than 10⁻⁴ of its norm at n = 1 000, and by no more than float32 rounds at
            n = 169 000 (docs/errata.md, G1).
        options: ``heads``, ``projection``, ``head_channels`` and ``bias`` of :class:`QueryKeyDiffusivity`.

    Raises:
        ValueError: ``normalize`` is ``None``, or another option is not one of its choices.

    Examples:
        >>> SGFormerDiffusivity(4, projection="separate")(x).row_stochastic
        True
    """

    row_stochastic = True
    why_no_penalty = (
        "SGFormer's attention is no function of distances of the state: an identity beside inner products of "
        "normalised queries and keys, some of them negative, so no theorem names an energy that it descends. "
        "SimpleDiffusivity is the low-rank attention that has one."
    )

    def __init__(
        self, channels: int | None = None, *, normalize: Literal["row", "frobenius"] = "row", **options: Any
    ) -> None:
        if normalize is None:
            raise ValueError(
                "normalize must be 'row' or 'frobenius'; got None. Row sums of queries and keys of any length may be "
                "zero or negative, and the attention divides by them."
            )
        super().__init__(channels, normalize=normalize, **options)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        q, k = self.queries_and_keys(x, graph, unit=False)
        return LinearAttentionCoupling(q, k, graph.segments, own=1.0, unit=self.normalize == "row")
