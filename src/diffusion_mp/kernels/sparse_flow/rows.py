"""What is known of the rows of sparse flow, and travels together."""

from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.operation import Narrow, Wide, empty_like


class Features(NamedTuple):
    """q and k of the scores s, and q̃ and k̃ of the frictions' scores u; [N, H, F] and [N, H, G].

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.zeros(6, 2), torch.zeros(6, 2))
        >>> support(Features(q, k, friction_q=q, friction_k=k), rows.terms, None).shape  # all pairs flow
        torch.Size([2, 36])
    """

    q: Narrow
    k: Narrow
    friction_q: Narrow
    friction_k: Narrow


class RowTerms(NamedTuple):
    """With the scores of a row it gives z_ij = e^{s_ij + a_i} max(ρ_i + ν_i(1 − e^{u_ij − w_i}), 0); [N, H].

    The potential is measured from the threshold of the best conductor o among the senders that flow (``best``):
    w = u_io, ν is its friction and ρ the potential above it, so a potential that hardly exceeds the friction of a good
    conductor keeps all its digits. At o itself 1 − e^{u − w} is zero, however u is rounded. The unit of ρ and ν is free
    and such that neither leaves the range; where it has no such unit, a is larger by ``lift`` for senders with u < w.
    Where u is so large that its rounding hides a threshold, ``reach`` says who is closed.

    Attributes:
        a: log of the scale of the row.
        w: log of the threshold of o, u_io.
        rho, nu: the potential above that threshold, and the friction of o, in one unit.
        lift: what a is larger by for senders with u < w.
        reach: senders with u ≥ reach are closed; ∞ where ρ and ν say it of all.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))
        >>> isinstance(rows.terms, RowTerms), rows.terms.best.shape
        (True, torch.Size([6, 2]))
    """

    a: Wide
    w: Wide
    rho: Wide
    nu: Wide
    lift: Wide
    reach: Wide
    best: Tensor
    """o, the number of a node."""


class RowPotentials(NamedTuple):
    """The solved problem of every row, [N, H]; the first seven are its :class:`RowTerms`.

    ``lift``, ``reach``, ``best`` and what comes after ``log_mu`` have no gradient.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.full((6, 2), 100.0), torch.ones(6, 2))
        >>> isinstance(rows, RowPotentials), int(rows.support.sum())  # such frictions let nothing flow
        (True, 0)
    """

    a: Tensor
    w: Tensor
    rho: Tensor
    nu: Tensor
    lift: Tensor
    reach: Tensor
    best: Tensor
    log_mu: Tensor
    """log μ, of the potential."""
    resistance: Tensor
    """M = log Σ_j e^{−s_ij}."""
    friction: Tensor
    """U = log Σ_j e^{u_ij}."""
    slope: Tensor
    """Σ_J e^{s + a} + e^{a − M}/α over the entries J that flow: what ρ is divided by."""
    drag: Tensor
    """Σ_J ν e^{s + a + u − w} over those beside o."""
    work: Tensor
    """Σ_j θ_ij z_ij, the work of the frictions."""
    support: Tensor
    """The size of J."""

    @property
    def terms(self) -> RowTerms:
        """What gives the entries."""
        return RowTerms(*self[:7])


def empty_potentials(lam: Tensor) -> RowPotentials:
    """Without values, for rows with λ [N, H]."""
    return RowPotentials(*empty_like(*14 * [lam]))._replace(
        best=torch.empty(lam.shape, dtype=torch.long, device=lam.device)
    )
