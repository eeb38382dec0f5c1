"""The variance of every node at the steady state of a coupling."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import checks, errors
from diffusion_mp.couplings import Coupling, DenseCoupling
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.runtime.precision import wide_dtype
from diffusion_mp.updates.derivatives import DENSE
from diffusion_mp.updates.implicit import dense_factor
from diffusion_mp.updates.linear_solve import LowRankInverse

SINGULAR = (
    "posterior_variance cannot invert (1 + leak) D̄ − Ω: the coupling is not what it promises to be, or rounding loses "
    "the leak. Raise the leak."
)


def posterior_variance(coupling: Coupling, leak: float) -> Float[Tensor, "N heads"]:
    r"""Return how uncertain the energy is about every node, σ_i² = [((1 + κ)D̄ − Ω)⁻¹]_ii.

    Ω is the coupling, D̄ the diagonal matrix of its row sums and κ the leak. With Q = (1 + κ)D̄ − Ω, this is the
    variance in a Gaussian field of density exp(−½ xᵀQx + β hᵀD̄x) (Rue & Held, 2005, Section 2.2). The mean of the
    field is the steady state of D̄⁻¹Ω with source h, ``Equilibrium("residual", beta, leak=κ)``.

    Low-rank couplings are inverted in closed form, in O(N F² + F³) (Theorem T3 of docs/certified.md). Other couplings
    are inverted densely, up to 4 096 nodes of one head.

    Args:
        coupling: Ω, symmetric and nonnegative, before rows are divided by their sums.
        leak: κ > 0. It has no default: without a leak Q is singular.

    Shapes:
        output: [N, heads].

    Raises:
        CouplingMismatchError: the coupling is not known to be symmetric and nonnegative, or is too large.
        SingularSystemError: a row of the coupling is zero.

    Examples:
        >>> posterior_variance(SigmoidPenalty().coupling(0.1 * x), leak=0.5).shape
        torch.Size([6, 1])
    """
    checks.check_positive(leak, "leak")
    check_coupling_kind(coupling)
    if not (coupling.whole and coupling.symmetric and coupling.nonnegative):
        raise errors.CouplingMismatchError(
            f"posterior_variance needs a symmetric and nonnegative coupling of all nodes, as with "
            f"row_stochastic=False; got {coupling!r}."
        )
    # In double precision: Q is singular but for the leak, which single precision would round away below 1e-7.
    degree = coupling.exact_degree(torch.float64).unsqueeze(2)
    if not bool((degree > 0).all()):
        raise errors.SingularSystemError(
            "posterior_variance needs positive row sums; got a zero row. Leave it out."
        )
    dtype = wide_dtype(coupling.dtype)
    form = coupling.low_rank_form(torch.float64) if coupling.low_rank else None
    if form is not None:
        # No matrix of all pairs is formed.
        inverse = LowRankInverse(form, (1.0 + leak) * degree)
        _check_ones(inverse(leak * degree.detach()))
        return inverse.inverse_diagonal().to(dtype)
    entries = coupling.heads * coupling.num_nodes**2
    if entries > DENSE:
        raise errors.CouplingMismatchError(
            f"posterior_variance inverts a {type(coupling).__name__} densely, up to {DENSE:,} entries; got "
            f"{entries:,}. Take a low-rank coupling, such as that of SimpleDiffusivity(row_stochastic=False)."
        )
    # Entries are rounded in the dtype of the coupling. Made symmetric, and with row sums of the rounded entries, Q is
    # diagonally dominant by exactly the leak, however small it is; with degree from above it could be indefinite.
    matrix = coupling.to_dense().double()
    matrix = (matrix + matrix.mT) / 2
    degree = matrix.sum(2, keepdim=True)
    factor = dense_factor(DenseCoupling(matrix), (1.0 + leak) * degree.transpose(0, 1))
    if factor is None:
        raise errors.SingularSystemError(SINGULAR)
    _check_ones(torch.cholesky_solve(leak * degree, factor))
    return torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2).t().to(dtype)


def _check_ones(solved: Tensor) -> None:
    """Raise unless Q⁻¹κD̄ 1 equals 1, as in exact arithmetic, up to some digits."""
    # Constants are the direction in which Q is nearly singular, so their solution shows lost digits first.
    if not bool(((solved - 1).abs() <= 1e-3).all()):
        raise errors.SingularSystemError(SINGULAR)
