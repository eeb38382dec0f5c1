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


def units(log_drag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h of the unit e^h, ``lift``, and what w is above u_o, from log γ.

    γ up to e^UNIT is carried by the unit, what is beyond it by ``lift``. A γ below e^−UNIT is nothing beside ζ, but for
    senders of far more friction than o it may be everything: w rises until γ reaches e^−UNIT.
    """
    rise = torch.where(log_drag > -torch.inf, (-UNIT - log_drag).clamp_min(0), 0.0)
    return log_drag.clamp(0, UNIT), (log_drag - UNIT).clamp_min(0), rise


def solve(
    s: Tensor, u: Tensor, resistance: Tensor, friction: Tensor, lam: Tensor, leak: Tensor, rows: Layout = DENSE
) -> RowPotentials:
    """Complete rows of scores, with M, U, λ and 1/α of every row; ``best`` is a place among the entries.

    Newton's method on μ, which keeps its leading digits, says who may flow, and Newton's method from the threshold of
    the best of these who does. If that one turns out not to, all begins anew with those of less friction.
    """
    info, limit, log_lam = torch.finfo(s.dtype), exp_limit(s.dtype), lam.log()
    reach, ceiling, top = None, torch.full_like(lam, torch.inf), rows.top(s)
    may = torch.empty_like(u)
    while reach is None or bool(closed.any()):
        # In units of the largest conductance no weight of Newton's equation exceeds one, and no threshold overflows.
        top = top.clamp_min(info.min)
        weight = (s - rows.spread(top)).clamp_(max=0).exp_()
        if reach is not None:
            weight.mul_(may)
        offset = log_lam - friction + resistance + top
        threshold = (u + rows.spread(offset)).clamp_(max=limit).exp_()
        root, _ = newton(weight, threshold, leak * (-resistance - top).exp(), rows=rows)
        log_root = root.log()
        slack = 32 * info.eps * (1 + log_root.abs() + offset.abs())
        reach = torch.where(log_root > limit - 1, torch.inf, log_root - offset + slack).minimum(ceiling)

        may = torch.lt(u, rows.spread(reach), out=may)
        best = rows.best((may - 1).mul_(info.max / 4).add_(s))
        s_best, w = rows.at(s, best).clamp_min(info.min), rows.at(u, best)
        log_c = resistance + s_best
        unit, lift, rise = units(log_c + log_lam + w - friction)
        w = w + rise
        log_f = w - friction
        a, nu = unit - s_best, (log_c + log_lam + log_f - unit - lift).exp()

        exponent = s + rows.spread(a)
        if bool(lift.any()):
            exponent += torch.lt(u, rows.spread(w)) * rows.spread(lift)
        weight = exponent.clamp_(max=limit).exp_().mul_(may)
        share = (u - rows.spread(w)).clamp_(max=limit).exp_()  # θ/θ_o
        threshold = (share - 1).mul_(rows.spread(nu)).clamp_(max=2)  # above any ρ
        by_leak, total = leak * (unit - log_c).exp(), 1 - leak * lam * log_f.exp()
        rho, _ = newton(weight, threshold, by_leak, total, rows)

        some = rows.add(may) > 0
        closed = some & (rho <= 0)
        if bool(closed.any()):
            ceiling = torch.where(closed, w, ceiling)
            may = torch.lt(u, rows.spread(ceiling), out=may)
            top = rows.top((may - 1).mul_(info.max / 4).add_(s))

    may.mul_(torch.lt(threshold, rows.spread(rho)))
    weight.mul_(may)
    slope = rows.add(weight) + by_leak
    flow = threshold.sub_(rows.spread(rho)).mul_(weight)
    work = -lam * log_f.exp() * rows.add(flow.mul_(share))
    drag = nu * rows.add(weight.mul_(rows.without(share, best)))
    return RowPotentials(
        a=a,
        w=w,
        rho=torch.where(some, rho, 0.0),
        nu=torch.where(some, nu, 0.0),
        lift=lift,
        best=best,
        # Where nothing flows μ is α.
        log_mu=torch.where(some, torch.logaddexp(log_lam + log_f, rho.log() + unit - log_c), -leak.log()),
        resistance=resistance,
        friction=friction,
        slope=torch.where(some, slope, 1.0),
        drag=drag,
        work=work,
        support=rows.add(may),
    )
