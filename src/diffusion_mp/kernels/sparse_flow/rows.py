"""What is known of the rows of sparse flow, and travels together."""

from typing import NamedTuple

from torch import Tensor

from diffusion_mp.kernels.operation import Narrow, Wide


class Features(NamedTuple):
    """q and k of the scores s, and q̃ and k̃ of the frictions' scores u; [N, H, F] and [N, H, G]."""

    q: Narrow
    k: Narrow
    friction_q: Narrow
    friction_k: Narrow


class RowTerms(NamedTuple):
    """With the scores of a row it gives z_ij = e^{s_ij + a_i} max(1 − λ_i e^{u_ij − w_i}, 0); [N, H]."""

    lam: Wide
    a: Wide
    w: Wide


class RowPotentials(NamedTuple):
    """The solved problem of every row, [N, H]; ``a`` and ``w`` give its entries, see :class:`RowTerms`.

    What comes after ``log_mu`` has no gradient.
    """

    a: Tensor
    w: Tensor
    log_mu: Tensor
    """log μ, of the potential."""
    resistance: Tensor
    """M = log Σ_j e^{−s_ij}."""
    slope: Tensor
    """A = μ(Σ_J c + 1/α) over the entries J that flow, c their conductances."""
    work: Tensor
    """Σ_j θ_ij z_ij, the work of the frictions."""
    support: Tensor
    """The size of J."""
