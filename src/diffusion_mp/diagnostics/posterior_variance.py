"""``posterior_variance``: how uncertain the energy is about every node."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.errors import CouplingMismatchError, SingularSystemError, check_positive
from diffusion_mp.updates.closed_forms import LowRankInverse
from diffusion_mp.updates.preconditioners import DENSE, dense_factor


def posterior_variance(coupling: Coupling, leak: float) -> Float[Tensor, "N heads"]:
    r"""The variance of every node in the Gaussian field whose exponent is the energy (Rue & Held, 2005, Section 2.2).

        σ_i² = [((1 + κ)D̄ − Ω)⁻¹]_ii

    The field of density exp(−½ xᵀQx + β hᵀD̄x), Q = (1 + κ)D̄ − Ω with D̄ the row sums of Ω, has as its mean the steady
    state of D̄⁻¹Ω, ``Equilibrium("residual", beta, leak=κ)`` with source h, and as its covariance Q⁻¹, whose diagonal
    this is, the same for every channel. A node with little weight to others is uncertain.

    Low-rank couplings are inverted in closed form, O(N F² + F³) (Theorem T3 of docs/certified.md), others densely up to
    4 096 nodes of one head. There is no estimate for larger ones: they are refused.

    Args:
        coupling: Ω, symmetric and non-negative, as it is before its rows are divided by their sums.
        leak: κ > 0.

    Shapes:
        result [N, H], in at least float32; computed in double.

    Raises:
        CouplingMismatchError: the coupling is not promised to be symmetric and nonnegative, or is too large.
        SingularSystemError: a node couples with nobody, not even with itself, and nothing holds it.
        ValueError: the leak is not positive.

    Examples:
        >>> posterior_variance(SigmoidPenalty().coupling(0.1 * x), leak=0.5).shape
        torch.Size([6, 1])
    """
    check_coupling_kind(coupling)
    check_positive(leak, "leak")
    if not (coupling.symmetric and coupling.nonnegative):
        raise CouplingMismatchError(
            f"posterior_variance needs a coupling Ω that is symmetric and nonnegative, before its rows are divided by "
            f"their sums; got {coupling!r}. Make it with row_stochastic=False."
        )
    degree = coupling.exact_degree(torch.float64).unsqueeze(2)
    if not bool((degree > 0).all()):
        raise SingularSystemError(
            "posterior_variance needs positive row sums; got a node that couples with nobody, whose variance is "
            "infinite. Leave it out, or add an IdentityCoupling."
        )
    dtype = torch.promote_types(coupling.dtype, torch.float32)
    diagonal = (1.0 + leak) * degree
    form = coupling.low_rank_form(torch.float64) if coupling.low_rank else None
    if form is not None:
        return LowRankInverse(form, diagonal).inverse_diagonal().to(dtype)
    entries = coupling.heads * coupling.num_nodes**2
    if entries > DENSE:
        raise CouplingMismatchError(
            f"posterior_variance inverts a {type(coupling).__name__} densely, up to {DENSE:,} entries; got "
            f"{entries:,}. Take a low-rank coupling, such as that of SimpleDiffusivity(row_stochastic=False)."
        )
    factor = dense_factor(coupling, diagonal)
    if factor is None:
        raise SingularSystemError(
            "posterior_variance found (1 + leak) D̄ − Ω not positive definite: the coupling is not what it promises to "
            "be, or the leak is lost in the rounding of its row sums. Raise the leak."
        )
    return torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2).t().to(dtype)
