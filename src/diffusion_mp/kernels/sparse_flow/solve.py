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

import torch
from torch import Tensor

from diffusion_mp.kernels.precision import exp_limit
from diffusion_mp.kernels.sparse_flow.newton import DENSE, Layout, newton
from diffusion_mp.kernels.sparse_flow.rows import RowPotentials

#: The unit of ρ and ν lies between 1 and e^UNIT.
UNIT = 60.0


def units(log_drag: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h of the unit e^h, ``lift``, what w is above u_o, and ν, from log γ.

    γ up to e^UNIT is carried by the unit, what is beyond it by ``lift``. A γ below e^−UNIT is nothing beside ζ, but for
    senders of far more friction than o it may be everything: w rises until γ reaches e^−UNIT.
    """
    rubs = log_drag > -torch.inf
    rise = torch.where(rubs, (-UNIT - log_drag).clamp_min(0), 0.0)
    nu = torch.where(rubs, log_drag.clamp(-UNIT, 0).exp(), 0.0)
    return log_drag.clamp(0, UNIT), (log_drag - UNIT).clamp_min(0), rise, nu


def solve(
    s: Tensor, u: Tensor, resistance: Tensor, friction: Tensor, lam: Tensor, leak: Tensor, rows: Layout = DENSE
) -> RowPotentials:
    """Complete rows of scores, with M, U, λ and 1/α of every row; ``best`` is a place among the entries.

    Newton's method on μ, which keeps its leading digits, says who may flow, and Newton's method from the threshold of
    the best of these who does. If that one turns out not to, all begins anew with those of less friction. An entry with
    s = −∞ and u = ∞ is none, which M and U know already.
    """
    info, limit, log_lam = torch.finfo(s.dtype), exp_limit(s.dtype), lam.log()
    ceiling, top, may = torch.full_like(lam, torch.inf), rows.top(s).clamp_min(info.min), torch.ones_like(s)
    first = searching = True
    while searching:
        # In units of the largest conductance no weight of Newton's equation exceeds one, and no threshold overflows.
        weight = (s - rows.spread(top)).clamp_(max=0).exp_()
        offset = (log_lam - friction + resistance + top).clamp_min(info.min)  # u may be ∞
        threshold = (u + rows.spread(offset)).clamp_(max=limit).exp_()
        root = newton(
            weight if first else weight.mul_(may), threshold, leak * (-resistance - top).exp(), rows=rows
        ).root
        log_root = root.log()
        slack = 32 * info.eps * (1 + log_root.abs() + offset.abs())
        reach = torch.where(log_root > limit - 1, torch.inf, log_root - offset + slack).minimum(ceiling)

        torch.lt(u, rows.spread(reach), out=may)
        best = rows.best(torch.sub(may, 1, out=threshold).mul_(info.max / 4).add_(s))
        s_best, u_best = rows.at(s, best).clamp_min(info.min), rows.at(u, best)
        log_c = resistance + s_best
        unit, lift, rise, nu = units(log_c + log_lam + u_best - friction)
        w = u_best + rise
        log_f = w - friction
        a = unit - s_best

        torch.add(s, rows.spread(a), out=weight)
        if bool(lift.any()):
            weight += torch.lt(u, rows.spread(w)) * rows.spread(lift)
        weight.clamp_(max=limit).exp_().mul_(may)
        torch.sub(u, rows.spread(w), out=threshold).clamp_(max=limit).exp_().sub_(1).mul_(rows.spread(nu))
        threshold.clamp_(max=2)  # above any ρ
        by_leak, total = leak * (unit - log_c).exp(), 1 - leak * lam * log_f.exp()
        rho, slope, moment, active, _ = newton(weight, threshold, by_leak, total, rows)

        # Who is closed by a hair is as good to measure from, if others flow and their sum is right to the last digits.
        excess = (total + moment - rho * (slope + by_leak)).abs()
        flows = (rho > 0) | ((slope > info.tiny**0.5) & (lift == 0) & (excess < 8 * info.eps))
        first = searching = False
        if not bool(flows.all()):
            closed = ~flows & (rows.add(may) > 0)
            searching = bool(closed.any())
            ceiling = torch.where(closed, u_best, ceiling)
            torch.lt(u, rows.spread(ceiling), out=may)
            top = rows.top((may - 1).mul_(info.max / 4).add_(s)).clamp_min(info.min)

    theta, height = log_lam + log_f, unit - log_c  # logarithms of θ_o and of what multiplies ρ
    above, below = torch.logaddexp(theta, rho.log() + height), theta + (rho * (height - theta).exp()).log1p()
    log_mu = torch.where(rho > 0, above, below)
    # Of the sums over those that flow z = ρp − pt, and e^{u − w} = 1 + t/ν.
    resisted = rows.add(threshold.mul_(threshold).mul_(weight))
    drag = nu * rows.add(rows.without(weight, best)) + moment
    work = theta.exp() * (rho * slope - moment) + (unit + lift - log_c).exp() * (rho * moment - resisted)
    # Where nothing flows μ is α, and the terms are such that they say so.
    return RowPotentials(
        a=torch.where(flows, a, 0.0),
        w=torch.where(flows, w, friction),
        rho=torch.where(flows, rho, 0.0),
        nu=torch.where(flows, nu, 0.0),
        lift=torch.where(flows, lift, 0.0),
        best=torch.where(flows, best, 0),
        log_mu=torch.where(flows, log_mu, -leak.log()),
        resistance=resistance,
        friction=friction,
        slope=torch.where(flows, slope + by_leak, 1.0),
        drag=torch.where(flows, drag, 0.0),
        work=torch.where(flows, work, 0.0),
        support=torch.where(flows, rows.add(active.mul_(may)), 0.0),
    )
