"""Rows of sparse flow by one sort, with derivatives: what every path of the library is compared with."""

import math

import torch
from torch import Tensor

from diffusion_mp.kernels.sparse_flow.reference import flowing
from diffusion_mp.runtime.precision import exp_limit


def solve_rows(
    log_conductance: Tensor, threshold: Tensor, alpha: float | Tensor
) -> tuple[Tensor, Tensor]:
    r"""argmin_z ½Σ_j z_j²/c_j + Σ_j θ_j|z_j| + (α/2)(Σ_j z_j − 1)², exactly, by one sort (SFi-Former, Eqs. 6 and 9).

    z_j = c_j max(μ − θ_j, 0) with Σ_j z_j + μ/α = 1; α = ∞ is exact conservation. In a row without an entry that
    conducts (log c = −∞) nothing flows, and μ = α, or 0 for α = ∞. Returns the flow z [..., n] and the potential μ.

    Args:
        log_conductance, threshold: log c with c = 1/r, and θ = λf ≥ 0, [..., n].
        alpha: α > 0, a number or a tensor that broadcasts over rows [..., 1].

    Examples:
        >>> conductance, friction = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0.0, 0.5, 9.0])
        >>> solve_rows(conductance.log(), friction, alpha=float("inf"))  # no flow where friction exceeds the potential
        (tensor([0.7500, 0.2500, 0.0000]), tensor(0.7500))
    """
    inverse = torch.as_tensor(
        1.0 / alpha, dtype=threshold.dtype, device=threshold.device
    )
    # Where nothing flows μ is α, or unknown (0) when the flow is conserved but nothing conducts.
    alone = (1 / inverse.masked_fill(inverse == 0, math.inf)).expand(
        *threshold.shape[:-1], 1
    )
    if threshold.size(-1) == 0:
        return log_conductance + threshold, alone.squeeze(-1)
    with torch.no_grad():
        active = flowing(log_conductance, threshold.log(), inverse)
    idle = ~active.any(-1, keepdim=True)
    # Where nothing flows a row of zeros is solved, whose gradient is finite, and its solution is not used.
    log_c = log_conductance.masked_fill(idle, 0.0).masked_fill(
        ~active & ~idle, -math.inf
    )
    # Linear on the support, as in ``rows.solve``, but without logarithms of thresholds, which may be 0.
    best = log_c.argmax(-1, keepdim=True)
    log_best = log_c.gather(-1, best)
    theta = threshold.gather(-1, best)
    share = (log_c - log_best).exp()
    above = (threshold - theta).masked_fill(~active, 0.0).scatter(-1, best, 0.0)
    # Conductors beyond the limit have equal thresholds, so that clamping them changes nothing.
    dammed = log_c.clamp(max=exp_limit(log_c.dtype)).exp() * above
    slope = share.sum(-1, keepdim=True) + inverse * (-log_best).exp()
    zeta = (1 - inverse * theta + dammed.sum(-1, keepdim=True)) / slope
    flow = (share * zeta - dammed).masked_fill(~active, 0.0)
    return flow, torch.where(idle, alone, theta + zeta * (-log_best).exp()).squeeze(-1)
