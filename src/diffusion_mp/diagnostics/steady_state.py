"""The steady state of a coupling: variance of every node, and the least spread between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, DenseCoupling
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.energies.pairs import State, by_head, check_heads
from diffusion_mp.graph.ops import mean_rows
from diffusion_mp.kernels.precision import quotient
from diffusion_mp.updates.derivatives import DENSE
from diffusion_mp.updates.implicit import dense_factor
from diffusion_mp.updates.linear_solve import LowRankInverse

SINGULAR = (
    "posterior_variance cannot invert (1 + leak) D̄ − Ω: the coupling is not what it promises to be, or rounding loses "
    "the leak. Raise the leak."
)


def posterior_variance(coupling: Coupling, leak: float) -> Float[Tensor, "N heads"]:
    r"""Return how uncertain the energy is about every node, σ_i² = [((1 + κ)D̄ − Ω)⁻¹]_ii with D̄ the row sums of Ω.

    This is the variance in a Gaussian field (Rue & Held, 2005, Section 2.2) of density exp(−½ xᵀQx + β hᵀD̄x),
    Q = (1 + κ)D̄ − Ω. Its mean is the steady state of D̄⁻¹Ω with source h, ``Equilibrium("residual", beta, leak=κ)``.
    Low-rank couplings are inverted in closed form, O(N F² + F³) (Theorem T3 of docs/certified.md), others densely up to
    4 096 nodes of one head. Ω, the coupling, is symmetric and nonnegative, before rows are divided by their sums; κ,
    the leak, is positive.

    Raises:
        CouplingMismatchError: the coupling is not known to be symmetric and nonnegative, or is too large.
        SingularSystemError: a row of the coupling is zero.

    Examples:
        >>> posterior_variance(SigmoidPenalty().coupling(0.1 * x), leak=0.5).shape
        torch.Size([6, 1])
    """
    errors.check_positive(leak, "leak")
    _check_promises(coupling, "posterior_variance")
    degree = coupling.exact_degree(torch.float64).unsqueeze(2)
    if not bool((degree > 0).all()):
        raise errors.SingularSystemError(
            "posterior_variance needs positive row sums; got a zero row. Leave it out."
        )
    dtype = torch.promote_types(coupling.dtype, torch.float32)
    if coupling.low_rank:
        form = coupling.low_rank_form(torch.float64)
    else:
        form = None
    if form is not None:
        inverse = LowRankInverse(form, (1.0 + leak) * degree)
        _check_ones(inverse(leak * degree.detach()))
        return inverse.inverse_diagonal().to(dtype)
    entries = coupling.heads * coupling.num_nodes**2
    if entries > DENSE:
        way_out = (
            "Take a low-rank coupling, such as that of SimpleDiffusivity(row_stochastic=False)."
        )
        limit = (
            f"inverts a {type(coupling).__name__} densely, up to {DENSE:,} entries; got {entries:,}"
        )
        raise errors.CouplingMismatchError(f"posterior_variance {limit}. {way_out}")
    matrix = coupling.to_dense().double()
    matrix = (
        matrix + matrix.mT
    ) / 2  # symmetric, and with the sums of its own rounded entries, Q keeps a small leak
    degree = matrix.sum(2, keepdim=True)
    factor = dense_factor(DenseCoupling(matrix), (1.0 + leak) * degree.transpose(0, 1))
    if factor is None:
        raise errors.SingularSystemError(SINGULAR)
    _check_ones(torch.cholesky_solve(leak * degree, factor))
    return torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2).t().to(dtype)


def _check_ones(solved: Tensor) -> None:
    """Raise unless Q⁻¹κD̄ 1, which is 1 in exact arithmetic, is so up to some digits."""
    if not bool(((solved - 1).abs() <= 1e-3).all()):
        raise errors.SingularSystemError(SINGULAR)


def _check_promises(coupling: Coupling, name: str) -> None:
    check_coupling_kind(coupling)
    if not (coupling.whole and coupling.symmetric and coupling.nonnegative):
        needed = "a symmetric and nonnegative coupling of all nodes, as with row_stochastic=False"
        raise errors.CouplingMismatchError(f"{name} needs {needed}; got {coupling!r}.")


@dataclass(frozen=True)
class SmoothingFloor:
    """The result of `smoothing_floor`: ``spread`` ≥ ``floor`` = (|β| ``source`` − ``residual``)/(2 + κ).

    These are norms ‖ΠX‖ in the metric D̄, of the state Z, of H and of (I − Ŝ + κ)Z − βH, zero at a steady state.

    Examples:
        >>> isinstance(smoothing_floor(SigmoidPenalty().coupling(0.1 * x), 0.1 * x, 0.1 * x), SmoothingFloor)
        True
    """

    spread: float
    source: float
    residual: float
    floor: float


@torch.no_grad()
def smoothing_floor(
    coupling: Coupling, x: State, source: State, *, beta: float = 1.0, leak: float = 0.0
) -> SmoothingFloor:
    r"""Return how far apart a source keeps nodes, however many layers there are.

    At a steady state (I − Ŝ + κ)Z = βH with Ŝ = D̄⁻¹Ω, ‖ΠZ‖_D̄ ≥ |β|/(2 + κ) ‖ΠH‖_D̄ (Theorem T6 of docs/certified.md).
    Π subtracts the D̄-weighted mean of every graph. For other states the norm of the residual is subtracted from
    |β| ‖ΠH‖_D̄.

    Args:
        coupling: Ω, symmetric and nonnegative, with row sums d̄, before normalisation; zero rows have weight zero.
        x, source: Z and H, [N, C] or [N, H, D]; norms are over all heads and graphs.
        beta, leak: β, the weight of the source, and κ ≥ 0.

    Raises:
        CouplingMismatchError: Ω is not known to be symmetric and nonnegative.

    Examples:
        >>> smoothing_floor(SigmoidPenalty().coupling(0.1 * x), 0.1 * x, 0.1 * x, leak=0.5).floor >= 0
        True
    """
    check_coupling_kind(coupling)
    errors.check_number(beta, "beta")
    errors.check_positive(leak, "leak", allow_zero=True)
    for name, state in (("x", x), ("source", source)):
        check_heads(state, name)
        coupling.check(by_head(state), name)
    z = by_head(x).double()
    h = by_head(source).double()
    if z.shape != h.shape:
        raise ValueError(
            f"source must have the shape {list(x.shape)} of the state x; got {errors.describe(source)}."
        )
    _check_promises(coupling, "smoothing_floor")
    degree = coupling.exact_degree(torch.float64).unsqueeze(2)
    residual = quotient(coupling.laplacian(z), degree) + leak * z - beta * h
    spread, apart, left = (_spread(part, degree, coupling.ptr) for part in (z, h, residual))
    return SmoothingFloor(
        spread, apart, left, floor=max(0.0, abs(beta) * apart - left) / (2 + leak)
    )


def _spread(x: Tensor, degree: Tensor, ptr: Tensor | None) -> float:
    """Return ‖Πx‖ in the metric of the degrees [N, H, 1]."""
    mean = quotient(mean_rows(degree * x, ptr), mean_rows(degree, ptr))
    return float((degree * (x - mean).square()).sum()) ** 0.5
