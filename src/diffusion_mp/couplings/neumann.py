"""The 1-D Laplacian of a sequence: a position couples with its neighbours at a few strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import (
    check_choice,
    check_counts,
    check_has_values,
    check_tensor,
    describe,
)
from diffusion_mp.couplings.base import Coupling, TransposedCoupling
from diffusion_mp.couplings.shapes import ByRow, Values
from diffusion_mp.graph.arguments import as_num_nodes
from diffusion_mp.kernels.neumann import (
    Boundary,
    neumann_function,
    neumann_product,
)


class NeumannCoupling(Coupling):
    r"""Neighbours along a sequence, at several strides.

    S = Σ_k α_k A_{h_k} with A_h = Δ_h + 2I and (Δ_h x)_i = x_left − 2x_i + x_right (Zhang & Zhou, Eq. 1, § 3.2).

    Rows are positions, in order. Every row sums to 2Σ_k α_k, so I + Σ_k α_k Δ_{h_k} is a step of
    ``ExplicitEuler(tau=1)``. The boundary defines the neighbours beyond the ends. By Theorems 4.2 and 4.4 and Corollary
    4.5, for Σα_k ≤ ½ a step is non-expansive, and the energy never rises.

    - ``"symmetric"``: the half-sample extension, x₀ = x₁, x₋₁ = x₂, …, of period 2L. Symmetric, keeps the mean; Δ_h is
      diagonal in the DCT-II basis, with eigenvalues −4 sin²(πmh/2L). All guarantees hold at every stride.
    - ``"replicate"``: the end is repeated, as the paper prints. Not symmetric for h > 1: neither mean nor norm are
      kept, and Corollary 4.5, which the paper states for it, is false (docs/errata.md, P1).
    - ``"drop"``: no flow from a missing neighbour. Symmetric; but for h > 1 the energy may rise, up to 1.5 times.
    - ``"periodic"``: the two ends are neighbours. Symmetric; but the energy of a path may rise while the cycle's falls.
    - ``"causal"``: (Δ_h x)_i = x_{i−h} − x_i, or 0 without x_{i−h}. Not symmetric, and the mean is not kept. For
      Σα_k ≤ 1 a step is a convex combination, non-expansive in the maximum norm.

    If all strides are 1, the first three are the same matrix.

    Args:
        num_nodes, alpha, strides, boundary: N; α [K, H], for every stride and head; h_k ≥ 1; one of the five.
        ptr: row boundaries of several sequences, on the CPU (``Graph.segments``); ``None`` is one sequence.
        promises: ``nonnegative``, that α ≥ 0.

    Examples:
        >>> NeumannCoupling(6, torch.full((1, 1), 0.25)).symmetric  # a sequence of six positions, stride 1
        True
    """

    parts = ("alpha",)

    def __init__(
        self,
        num_nodes: int,
        alpha: Float[Tensor, "K H"],
        strides: Sequence[int] = (1,),
        boundary: Boundary = "symmetric",
        ptr: Tensor | None = None,
        **promises: bool | None,
    ) -> None:
        symmetric = check_stencil(strides, boundary)
        num_nodes = as_num_nodes(num_nodes)
        shape = f"[{len(strides)} strides, heads]"
        check_tensor(alpha, "alpha", shape)
        check_has_values(alpha, "alpha")
        if alpha.dim() != 2 or alpha.size(0) != len(strides):
            raise ValueError(f"alpha must be {shape}; got {describe(alpha)}.")
        super().__init__(num_nodes, alpha.size(1), alpha, ptr, **promises)
        self.symmetric = symmetric
        self.alpha = alpha
        self.strides = tuple(strides)
        self.boundary = boundary

    def _product(self, v: Values, *, transpose: bool = False) -> Values:
        alpha = self.alpha.expand(-1, v.size(1))
        return neumann_product(
            v, alpha, self.strides, self.boundary, self.ptr, transpose=transpose
        )

    def _transpose(self) -> Coupling:
        return TransposedCoupling(self)

    def degree(self) -> ByRow:
        return (2 * self.alpha.sum(0)).repeat(self.num_nodes, 1)

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Values
    ) -> Values | None:
        """f(D̄ − S) v in O(N D log L), for periodic sequences, the symmetric extension, and matrices equal to it."""
        periodic = self.boundary == "periodic"
        # With strides of 1 the boundaries that leave the matrix symmetric all make the same one.
        paths = self.symmetric and set(self.strides) == {1}
        if not (periodic or paths or self.boundary == "symmetric"):
            return None
        return neumann_function(
            function, v, self.alpha, self.strides, self.ptr, periodic=periodic
        )


def check_stencil(strides: Sequence[int], boundary: str) -> bool:
    """Return whether A_h is symmetric for all strides h; raise unless these are integers ≥ 1 and the boundary known."""
    check_choice(boundary, "boundary", get_args(Boundary))
    if isinstance(strides, str) or not isinstance(strides, Sequence):
        raise TypeError(
            f"strides must be a sequence of integers, such as (1,) or (1, 2, 4); got {describe(strides)}."
        )
    if len(strides) == 0:
        raise ValueError(
            "strides must name at least one stride, such as (1,) or (1, 2, 4); got none."
        )
    check_counts(**{f"strides[{k}]": stride for k, stride in enumerate(strides)})
    return boundary in ("symmetric", "drop", "periodic") or (
        boundary == "replicate" and set(strides) == {1}
    )
