"""The plain truth: one row, exact by a sort and differentiable on the support; every graph's rows, written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.precision import exp_limit
from diffusion_mp.kernels.segments import slices
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms
from diffusion_mp.kernels.sparse_flow.solve import units


def flowing(log_conductance: Tensor, threshold: Tensor, inverse: Tensor) -> Tensor:
    """Who flows: where Σ_i c_i max(θ_j − θ_i, 0) + θ_j/α < 1, summed up in order, so that nothing cancels."""
    top = pad(log_conductance, (0, 1), value=torch.finfo(threshold.dtype).min).amax(-1, keepdim=True)
    conductance, one = (log_conductance - top).exp(), (-top).exp()  # in units of the largest
    order = threshold.masked_fill(conductance == 0, math.inf).argsort(-1)
    theta = threshold.gather(-1, order)
    through = conductance.gather(-1, order).cumsum(-1) + inverse * one
    steps = torch.cat([inverse * one * theta[..., :1], (theta[..., 1:] - theta[..., :-1]) * through[..., :-1]], -1)
    active = torch.zeros_like(conductance).bool().scatter(-1, order, steps.cumsum(-1) < one)
    return active & (conductance > 0)


def on_support(
    active: Tensor, log_conductance: Tensor, threshold: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Flow, ζ and the place of o, given who flows: a linear equation, and so differentiable any number of times.

    The potential is measured from the threshold of the best conductor o, ζ = c_o(μ − θ_o): see ``solve.py``.
    """
    # With a closed entry more, since there is no largest of none.
    best = pad(log_conductance.masked_fill(~active, -math.inf), (0, 1), value=-math.inf).argmax(-1, keepdim=True)
    log_c, theta = log_conductance.gather(-1, best), threshold.gather(-1, best)
    share = (log_conductance - log_c).masked_fill(~active, -math.inf).exp()
    above = (threshold - theta).masked_fill(~active, 0.0).scatter(-1, best, 0.0)
    dammed = log_conductance.masked_fill(~active, -math.inf).exp() * above
    slope = share.sum(-1, keepdim=True) + inverse * (-log_c).exp()
    zeta = (1 - inverse * theta + dammed.sum(-1, keepdim=True)) / slope
    return (share * zeta - dammed).masked_fill(~active, 0.0), zeta, best


def solve_rows(log_conductance: Tensor, threshold: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    r"""argmin_z ½Σ_j z_j²/c_j + Σ_j θ_j|z_j| + (α/2)(Σ_j z_j − 1)², exactly, by one sort (SFi-Former, Eqs. 6 and 9).

    z_j = c_j max(μ − θ_j, 0) with Σ_j z_j + μ/α = 1; α = ∞ is exact conservation. Returns the flow z [..., n] and the
    potential μ [...]; a row without an entry that conducts (log c = −∞) flows nowhere and has μ = α, or 0 for α = ∞.

    Args:
        log_conductance: log c [..., n] with c = 1/r. threshold: θ = λf ≥ 0, [..., n].
        alpha: α > 0, a number or a tensor that broadcasts over rows [..., 1].

    Returns:
        The flow z [..., n] and the potential μ [...].

    Examples:
        >>> conductance, friction = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0.0, 0.5, 9.0])
        >>> flow, potential = solve_rows(conductance.log(), friction, alpha=float("inf"))
        >>> flow, potential  # nothing through what is worth more than the potential
        (tensor([0.7500, 0.2500, 0.0000]), tensor(0.7500))
    """
    inverse = torch.as_tensor(1.0 / alpha, dtype=threshold.dtype, device=threshold.device)
    # Where nothing flows μ is α, or unknown (0) when the flow is conserved but nothing conducts.
    alone = (1 / inverse.masked_fill(inverse == 0, math.inf)).expand(*threshold.shape[:-1], 1)
    if threshold.size(-1) == 0:
        return log_conductance + threshold, alone.squeeze(-1)
    with torch.no_grad():
        active = flowing(log_conductance, threshold, inverse)
    idle = ~active.any(-1, keepdim=True)
    # A row in which nothing flows is solved as one of zeros, and its solution not used: its gradient is finite.
    flow, zeta, best = on_support(active, log_conductance.masked_fill(idle, 0.0), threshold, inverse)
    log_c, theta = log_conductance.masked_fill(idle, 0.0).gather(-1, best), threshold.gather(-1, best)
    return flow.masked_fill(idle, 0.0), torch.where(idle, alone, theta + zeta * (-log_c).exp()).squeeze(-1)


def entries(s: Tensor, u: Tensor, terms: RowTerms, is_best: Tensor) -> Tensor:
    """z of listed pairs, from their scores, the terms of their rows and which pairs are the best of their row.

    Args:
        s, u: scores of resistances and frictions [..., H].
        terms: each [..., H] or broadcasting against them.
        is_best: whether the sender is ``terms.best`` [..., H].

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))
        >>> s = torch.einsum("ihf,jhf->ijh", q, k)  # here the scores of resistances and of frictions
        >>> terms = RowTerms(*(part.unsqueeze(1) for part in rows.terms))

        >>> z = entries(s, s, terms, terms.best == node.view(1, 6, 1))
        >>> torch.allclose(z.sum(1), torch.ones(6, 2))
        True
    """
    return log_entries(s, u, terms, is_best).exp()


def log_entries(s: Tensor, u: Tensor, terms: RowTerms, is_best: Tensor) -> Tensor:
    """log z, −∞ where nothing flows: see :class:`RowTerms`.

    Args:
        s, u, terms, is_best: as of :func:`entries`.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))
        >>> s = torch.einsum("ihf,jhf->ijh", q, k)  # here the scores of resistances and of frictions
        >>> terms = RowTerms(*(part.unsqueeze(1) for part in rows.terms))

        >>> log_entries(s, s, terms, terms.best == node.view(1, 6, 1)).shape
        torch.Size([6, 6, 2])
    """
    limit = exp_limit(s.dtype)
    above = (u - terms.w).masked_fill(u >= terms.reach, math.inf).masked_fill(is_best, 0.0)
    driven = terms.rho - terms.nu * above.clamp(max=limit).expm1()
    flows = driven > 0
    return (s + terms.a + terms.lift * (above < 0) + driven.masked_fill(~flows, 1.0).log()).masked_fill(
        ~flows, -math.inf
    )


def _scores(a: Tensor, b: Tensor, rows: slice) -> Tensor:
    """Inner products of the rows of one graph, [H, n, n]."""
    return torch.einsum("ihf,jhf->hij", a[rows], b[rows])


def sparse_flow_potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    """Every row solved by sorting."""
    q, k, fq, fk = features
    parts = []
    for rows in slices(ptr, q.size(0)):
        parts.append(_solved(_scores(q, k, rows), _scores(fq, fk, rows), lam[rows], leak[rows], rows.start))
    return RowPotentials(*(torch.cat([x.squeeze(2).t() for x in found]) for found in zip(*parts, strict=True)))


def _solved(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor, first: int) -> RowPotentials:
    """The rows of one graph, [H, n, 1], from its scores [H, n, n]; an entry with s = u = −∞ is none."""
    resistance = (-s).masked_fill(s == -math.inf, -math.inf).logsumexp(2, keepdim=True)
    friction = u.logsumexp(2, keepdim=True)
    lam, leak = (x.t().unsqueeze(2) for x in (lam, leak))
    log_c, theta = s + resistance, lam * (u - friction).exp()
    with torch.no_grad():
        active = flowing(log_c, theta, leak)
    flow, zeta, best = on_support(active, log_c, theta, leak)
    s_best, w, log_c_best = (x.gather(2, best) for x in (s, u, log_c))
    unit, lift, rise, _ = units((log_c_best + lam.log() + w - friction).detach())
    idle, a, w = ~active.any(2, keepdim=True), unit - s_best, w + rise
    nu, rho = lam * (log_c_best + w - friction - unit - lift).exp(), zeta * (-unit).exp()
    with torch.no_grad():
        through = (s + a + lift * (u < w)).masked_fill(~active, -math.inf).exp()
        slope = through.sum(2, keepdim=True) + leak * (unit - log_c_best).exp()
        drag = (nu * through * (u - w).exp()).scatter(2, best, 0.0).sum(2, keepdim=True)
        work = (theta * flow).sum(2, keepdim=True)
        last = pad(u.masked_fill(~active, -math.inf), (0, 1), value=-math.inf).amax(2, keepdim=True)
        after = pad(u.masked_fill(u <= last, math.inf), (0, 1), value=math.inf).amin(2, keepdim=True)
        opened = rho > nu * (after - w).clamp(max=exp_limit(s.dtype)).expm1()  # by the rounding of w
        reach = torch.where(opened, (last + after) / 2, math.inf)

    def known(x: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
        """``otherwise`` where nothing flows."""
        return torch.where(idle, otherwise, x)

    return RowPotentials(
        a=known(a),
        w=known(w, friction),
        rho=known(rho),
        nu=known(nu),
        lift=known(lift),
        reach=known(reach, math.inf),
        best=best.masked_fill(idle, 0) + first,
        log_mu=known(theta.gather(2, best) + zeta * (-log_c_best).exp(), 1 / leak).log(),
        resistance=resistance.detach(),
        friction=friction.detach(),
        slope=known(slope, 1.0),
        drag=known(drag),
        work=known(work),
        support=active.sum(2, keepdim=True).to(s),
    )


def sparse_flow_product(features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool) -> Tensor:
    """Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D]."""
    q, k, fq, fk = features
    parts = []
    for rows in slices(ptr, q.size(0)):
        of_rows = RowTerms(*(x[rows].t().unsqueeze(2) for x in terms))
        is_best = torch.arange(rows.start, rows.stop, device=q.device) == of_rows.best
        z = entries(_scores(q, k, rows), _scores(fq, fk, rows), of_rows, is_best)
        parts.append(torch.einsum("hji,jhd->ihd" if transpose else "hij,jhd->ihd", z, v[rows]))
    return torch.cat(parts)
