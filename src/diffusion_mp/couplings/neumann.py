"""The 1-D Laplacian of a sequence, which couples a position with its neighbours at a few strides."""

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
    """Couple a position with its neighbours along a sequence, at several strides.

    With A_h = Δ_h + 2I and (Δ_h x)_i = x_left − 2x_i + x_right at distance h (Zhang & Zhou, Eq. 1, § 3.2):

        S = Σ_k α_k A_{h_k}

    Rows are ordered positions. Every row sums to 2Σ_k α_k, so the step of ``ExplicitEuler(tau=1)`` is I + Σ_k α_k
    Δ_{h_k}. For Σα_k ≤ ½ a step is non-expansive and the energy never rises (Theorems 4.2 and 4.4 and Corollary 4.5).
    The boundary defines the neighbours beyond the ends:

    - ``"symmetric"``: the half-sample extension x₀ = x₁, x₋₁ = x₂, …, of period 2L. The matrix is symmetric and keeps
      the mean. Δ_h is diagonal in the DCT-II basis, with eigenvalues −4 sin²(πmh/2L). All guarantees hold at every
      stride.
    - ``"replicate"``: the end is repeated, as the paper prints. For h > 1 the matrix is not symmetric, and a step keeps
      neither the mean nor the norm. Corollary 4.5, which the paper states for this boundary, is false (docs/errata.md,
      P1).
    - ``"drop"``: nothing flows from a missing neighbour. The matrix is symmetric, but for h > 1 the energy may rise, up
      to 1.5 times.
    - ``"periodic"``: the two ends are neighbours. The matrix is symmetric. The energy of the cycle falls, but the
      energy of the path may rise.
    - ``"causal"``: (Δ_h x)_i = x_{i−h} − x_i, or 0 without x_{i−h}. The matrix is not symmetric, and a step does not
      keep the mean. For Σα_k ≤ 1 a step is a convex combination, non-expansive in the maximum norm.

    If all strides are 1, the first three boundaries give the same matrix.

    Args:
        num_nodes: number N of positions.
        alpha: the strengths α [K, H], one for every stride and head.
        strides: the K distances h_k ≥ 1. By default only direct neighbours, ``(1,)``.
        boundary: one of the five boundaries above. By default ``"symmetric"``, since all guarantees hold for it.
        ptr: row boundaries [B+1] of several sequences, on the CPU (``Graph.segments``). ``None`` is one sequence.

    Options:
        nonnegative: whether α ≥ 0. ``None``, the default, promises nothing.

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
            v,
            alpha,
            self.strides,
            self.boundary,
            self.ptr,
            transpose=transpose,
        )

    def _transpose(self) -> Coupling:
        return TransposedCoupling(self)

    def degree(self) -> ByRow:
        # Two neighbours at every stride: one that is missing is the node itself, or another node again.
        return (2 * self.alpha.sum(0)).repeat(self.num_nodes, 1)

    def laplacian_function(
        self, function: Callable[[Tensor], Tensor], v: Values
    ) -> Values | None:
        """Return f(D̄ − S) v in O(N D log L) if the eigenvectors are cosines or waves, otherwise ``None``.

        They are for periodic sequences, for the symmetric extension, and for the matrices equal to it.

        Args:
            function: f, an elementwise function of the eigenvalues.
            v: values [N, H, D].
        """
        periodic = self.boundary == "periodic"
        # With strides of 1 the boundaries that leave the matrix symmetric all make the same one.
        paths = self.symmetric and set(self.strides) == {1}
        if not (periodic or paths or self.boundary == "symmetric"):
            return None
        return neumann_function(
            function,
            v,
            self.alpha,
            self.strides,
            self.ptr,
            periodic=periodic,
        )


def check_stencil(strides: Sequence[int], boundary: str) -> bool:
    """Return whether A_h is symmetric for all strides h.

    Raises:
        TypeError: the strides are not a sequence of integers.
        ValueError: a stride is below 1, there is none, or the boundary is unknown.
    """
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
