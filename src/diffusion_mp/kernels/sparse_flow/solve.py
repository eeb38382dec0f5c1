"""The row problem of sparse flow in floating point, for rows of a tile and for segments of edges.

In logarithms, with M = log Σ e^{−s} and U = log Σ e^{u}, sender j conducts c = e^{s + M} and asks for θ = λe^{u − U}:

    z_j = c_j max(μ − θ_j, 0),   Σ_j z_j + μ/α = 1.

Where a good conductor o flows, μ exceeds θ_o by as little as 1/c_o: a μ that stands by itself has no digits left of it,
and the rounding of it, times c_o, is the error of the row. So the potential is measured from θ_o, for the best
conductor o among those that flow: with ζ = c_o(μ − θ_o) and γ = c_oθ_o

    z_j = e^{s_j − s_o} max(ζ + γ(1 − e^{u_j − u_o}), 0),

where nothing cancels but frictions that are almost equal. No conductance, which may overflow, is ever formed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffusion_mp.kernels.precision import exp_, exp_limit
from diffusion_mp.kernels.sparse_flow.newton import DENSE, Layout, newton
from diffusion_mp.kernels.sparse_flow.rows import RowPotentials


def unit_limit(dtype: torch.dtype) -> float:
    """The logarithm of the largest unit of ρ and ν: beyond the square of its resolution nothing is seen.

    Derivatives by frictions that are equal grow like the unit, and so does the rounding in which they cancel.
    """
    return -2 * math.log(torch.finfo(dtype).eps)


def units(log_drag: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h of the unit e^h, ``lift``, what w is above u_o, and ν, from log γ.

    γ up to the largest unit is carried by the unit, what is beyond it by ``lift``. A γ below its inverse is nothing
    beside ζ, but for senders of far more friction than o it may be everything: w rises until γ reaches that.
    """
    limit = unit_limit(log_drag.dtype)
    rubs = log_drag > -torch.inf
    rise = torch.where(rubs, (-limit - log_drag).clamp_min(0), 0.0)
    nu = torch.where(rubs, log_drag.clamp(-limit, 0.0).exp(), 0.0)
    return log_drag.clamp(0.0, limit), (log_drag - limit).clamp_min(0), rise, nu


def below(s: Tensor, u: Tensor, bound: Tensor, rows: Layout) -> tuple[Tensor, Tensor]:
    """The conductors of less friction than u < bound, all others with an s below any; how many these are, by row."""
    within = torch.lt(u, rows.spread(bound), out=torch.empty_like(s))
    count = rows.add(within)
    return within.sub_(1).mul_(torch.finfo(s.dtype).max / 4).add_(s), count


def solve(
    s: Tensor, u: Tensor, resistance: Tensor, friction: Tensor, lam: Tensor, leak: Tensor, rows: Layout = DENSE
) -> RowPotentials:
    """Complete rows of scores, with M, U, λ and 1/α of every row; ``best`` is a place among the entries.

    Newton's method on μ, which keeps its leading digits, says who may flow, and Newton's method from the threshold of
    the best of these who does. If that one turns out not to, all begins anew with those of less friction. An entry with
    s = −∞ and u = ∞ is none, which M and U know already.
    """
    info, limit, log_lam = torch.finfo(s.dtype), exp_limit(s.dtype), lam.log()
    candidates, ceiling = s, torch.full_like(lam, torch.inf)
    while True:
        # In units of the largest conductance no weight of Newton's equation exceeds one, and no threshold overflows.
        top = rows.top(candidates).clamp_min(info.min)
        weight = torch.threshold_(exp_(torch.sub(candidates, rows.spread(top))), 2 * math.exp(-limit), 0.0)
        offset = (log_lam - friction + resistance + top).clamp_min(info.min)  # u may be ∞
        threshold = exp_(torch.add(u, rows.spread(offset)))
        log_root = newton(weight, threshold, leak * (-resistance - top).exp(), rows=rows).root.log()
        slack = 32 * info.eps * (1 + log_root.abs() + offset.abs())
        reach = torch.where(log_root > limit - 1, torch.inf, log_root - offset + slack).minimum(ceiling)

        candidates, count = below(s, u, reach, rows)
        best = rows.best(candidates)
        s_best, u_best = rows.at(s, best).clamp_min(info.min / 8), rows.at(u, best)
        log_c = resistance + s_best
        unit, lift, rise, nu = units(log_c + log_lam + (u_best - friction))
        w = u_best + rise
        # Not w − U, whose rounding may be more than all of it.
        log_f = torch.where(rise > 0, nu.log() - log_c - log_lam, u_best - friction)
        a = unit - s_best

        weight = candidates.add_(rows.spread(a))
        if bool(lift.any()):
            weight += torch.lt(u, rows.spread(w)) * rows.spread(lift)
        exp_(weight, unit_limit(s.dtype))  # nobody who flows conducts more than o
        # Above any ρ is as good as 2.
        highest = (2 / nu).log1p().clamp(max=limit)
        threshold = exp_(torch.sub(u, rows.spread(w)).clamp_max_(rows.spread(highest))).sub_(1).mul_(rows.spread(nu))
        # The best conductor leads as a leak does, also below its threshold: the sign of ρ says whether it flows.
        some = count > 0
        own = rows.at(weight, best).where(some, 0.0)
        by_leak, total = leak * (unit - log_c).exp(), 1 - leak * lam * log_f.exp()
        rho, slope, moment, active, support, _ = newton(
            rows.without(weight, best), threshold, by_leak + own, total, count, rows
        )

        flows = some & (rho > 0)
        if flows.all():
            break
        # Who is closed by a hair is as good to measure from, if others flow and their sum is right to the last digits.
        flows |= some & (rho * own > -8 * info.eps) & (slope > info.tiny**0.5) & (lift == 0)
        closed = some & ~flows
        if not closed.any():
            break
        ceiling = torch.where(closed, u_best, ceiling)
        candidates, _ = below(s, u, ceiling, rows)

    theta, height = log_lam + log_f, unit - log_c  # logarithms of θ_o and of what multiplies ρ
    above, beneath = torch.logaddexp(theta, rho.log() + height), theta + (rho / nu).log1p()
    through = slope + own * (rho > 0)
    reach = reach.where(rows.add(active) > count, torch.inf)  # the rounding of w opens some who are closed
    # Of the sums over those that flow z = ρp − pt, and e^{u − w} = 1 + t/ν.
    resisted = rows.add(active.mul_(weight).mul_(threshold).mul_(threshold))
    solved = RowPotentials(
        a=a,
        w=w,
        rho=rho,
        nu=nu,
        lift=lift,
        reach=reach,
        best=best,
        log_mu=torch.where(rho > 0, above, beneath),
        resistance=resistance,
        friction=friction,
        slope=through + by_leak,
        drag=nu * slope + moment,
        work=theta.exp() * (rho * through - moment) + (unit + lift - log_c).exp() * (rho * moment - resisted),
        support=support,
    )
    if flows.all():
        return solved
    # Where nothing flows μ is α, and the terms are such that they say so.
    nothing = torch.zeros_like(rho)
    still = RowPotentials(*14 * [nothing])._replace(
        w=friction,
        reach=nothing + torch.inf,
        best=best.new_zeros(()),
        log_mu=-leak.log(),
        resistance=resistance,
        friction=friction,
        slope=nothing + 1,
    )
    return RowPotentials(*(x.where(flows, y) for x, y in zip(solved, still, strict=True)))
