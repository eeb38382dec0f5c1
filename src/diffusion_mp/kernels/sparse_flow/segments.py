"""The row problem of sparse flow on observed edges: O(E), and differentiable any number of times."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.kernels.operation import empty_like, operation
from diffusion_mp.kernels.precision import accumulating, exp_limit
from diffusion_mp.kernels.sparse_flow.newton import newton


class EdgeFlow(NamedTuple):
    """The flow z of every edge [E, H] and the potential μ of every node [N, H]."""

    flow: Tensor
    potential: Tensor


def _found_by_newton(weight: Tensor, threshold: Tensor, leak: Tensor, total: Tensor, target: Tensor) -> Tensor:
    root, _ = newton(
        weight,
        threshold,
        leak,
        total,
        add=lambda entries: torch.zeros_like(leak).index_add_(0, target, entries),
        spread=lambda row: row[target],
    )
    return (threshold < root[target]) & (weight > 0)


# An operation, so that torch.compile need not look inside: Newton ends when the values say so.
@operation("sparse_flow_support", cpu=_found_by_newton)
def _support(weight: Tensor, threshold: Tensor, leak: Tensor, total: Tensor, target: Tensor) -> Tensor:
    return empty_like(weight).bool()


def _extreme(x: Tensor, target: Tensor, like: Tensor, reduce: str) -> Tensor:
    """The largest or smallest entry of every row, 0 where a row has none."""
    index = target.unsqueeze(1).expand_as(x)
    return torch.zeros_like(like).scatter_reduce(0, index, x, reduce, include_self=False)


def _log_sum(x: Tensor, prior: Tensor, top: Tensor, target: Tensor) -> Tensor:
    """log Σ_e a_e e^{x_e} at every target, 0 where a row has no weight."""
    exp = prior * (x - top[target]).masked_fill(prior == 0, 0.0).exp()
    total = torch.zeros_like(top).index_add(0, target, exp)
    return (total + (total == 0)).log() + top


def sparse_flow_edges(
    s: Float[Tensor, "E H"],
    u: Float[Tensor, "E H"],
    prior: Float[Tensor, "E one"],
    lam: Float[Tensor, "N H"],
    leak: Float[Tensor, "N H"],
    target: Int[Tensor, " E"],
) -> EdgeFlow:
    r"""The flow of least energy over the edges that end at each node (SFi-Former, Eqs. 6 and 9, on a given graph).

    An edge of weight a counts as a parallel ones: r_e = e^{−s_e}/Σ_l a_l e^{−s_l}, f_e = e^{u_e}/Σ_l a_l e^{u_l} over
    the edges l with the same target, and z_e = a_e max(μ − λf_e, 0)/r_e with Σ_e z_e + μ/α = 1. With λ = 0 and α = ∞ it
    is the softmax of s with prior a. A node without edges, or without weight on any, receives nothing: μ = α, or 0.

    Args:
        s, u: scores of resistances and frictions. prior: a ≥ 0.
        lam: λ ≥ 0. leak: 1/α, 0 for conservation. target: the node that each edge ends at.

    O(E H) time and memory; in at least float32.
    """
    (s, u, prior, lam, leak), _ = accumulating(s, u, prior, lam, leak)
    with torch.no_grad():
        open_ = (prior > 0).expand_as(s)
        info = torch.finfo(s.dtype)
        low, high = s.masked_fill(~open_, info.max), s.masked_fill(~open_, info.min)
        bottom, top = _extreme(low, target, lam, "amin"), _extreme(high, target, lam, "amax")
        easiest = _extreme(u.masked_fill(~open_, info.min), target, lam, "amax")
        none = torch.zeros_like(lam).index_add(0, target, open_.to(lam.dtype)) == 0
        bottom, top, easiest = (t.masked_fill(none, 0.0) for t in (bottom, top, easiest))
    log_scale = _log_sum(-s, prior, -bottom, target) + top  # log of the largest conductance of weight one
    friction = _log_sum(u, prior, easiest, target)
    weight = prior * (s - top[target]).masked_fill(~open_, 0.0).exp()
    exponent = (u + (log_scale - friction)[target]).clamp(max=exp_limit(s.dtype))
    threshold = lam[target] * exponent.masked_fill(~open_, 0.0).exp()
    leak_scaled = leak * (-log_scale).exp()
    with torch.no_grad():
        lowest = _extreme(threshold.masked_fill(~open_, info.max), target, lam, "amin").masked_fill(none, 0.0)
    # Relative to the least threshold of the row, where neither side cancels.
    threshold, total = threshold - lowest[target], 1 - leak_scaled * lowest
    with torch.no_grad():
        active = _support(weight, threshold, leak_scaled, total, target)
        idle = torch.zeros_like(lam).index_add(0, target, active.to(lam.dtype)) == 0
        # From here on relative to the largest conductance that carries flow: it may be tiny beside the others of its
        # row, and the square of its inverse, which is in the gradient, out of range.
        carried = _extreme(s.masked_fill(~active, info.min), target, lam, "amax").masked_fill(idle, 0.0)
        lower = (carried - top).masked_fill(idle, 0.0)
    weight = (prior * (s - carried[target]).masked_fill(~active, 0.0).exp()).masked_fill(~active, 0.0)
    threshold = (threshold * lower.exp()[target]).masked_fill(~active, 0.0)
    slope = torch.zeros_like(lam).index_add(0, target, weight) + leak * (-log_scale - lower).exp()
    driven = total + torch.zeros_like(lam).index_add(0, target, weight * threshold)
    root = driven / slope.masked_fill(slope == 0, torch.inf)
    flow = (weight * (root[target] - threshold)).clamp_min(0)
    height = root * (-log_scale - lower).exp() + lowest * (-log_scale).exp()
    potential = torch.where(idle, 1 / leak.masked_fill(leak == 0, torch.inf), height)
    return EdgeFlow(flow, potential)
