"""The plain truth: one row, exact by a sort and differentiable on the support; every graph's rows, written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffusion_mp.kernels.precision import exp_limit
from diffusion_mp.kernels.segments import slices
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms


def scaled_rows(log_conductance: Tensor, threshold: Tensor, alpha: float | Tensor) -> tuple[Tensor, ...]:
    r"""p = c/c_max, t = c_max (θ − θ₀), κ = 1/(α c_max), b = 1 − θ₀/α, θ₀, log c_max and 1/α of every row.

    θ₀ is the smallest threshold of an entry that conducts: then Σ_j c_j max(μ − θ_j, 0) + μ/α = 1 reads
    Σ_j p_j max(ν − t_j, 0) + κν = b with ν = c_max (μ − θ₀), and neither side cancels.
    """
    inverse = torch.as_tensor(1.0 / alpha, dtype=threshold.dtype, device=threshold.device)
    open_ = log_conductance.detach() > -math.inf
    shape = (*threshold.shape[:-1], 1)
    if threshold.size(-1):
        top = log_conductance.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        lowest = threshold.detach().masked_fill(~open_, math.inf).amin(-1, keepdim=True)
        lowest = lowest.masked_fill(lowest == math.inf, 0.0)
    else:
        top = lowest = threshold.new_zeros(shape)
    weight = (log_conductance - top).exp()
    shifted = (threshold - lowest) * top.exp()
    return weight, shifted, (inverse * (-top).exp()).expand(shape), 1 - inverse * lowest, lowest, top, inverse


def on_support(active: Tensor, rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Flow and potential, given who flows: a linear equation, and so differentiable any number of times."""
    weight, shifted, leak, total, lowest, top, inverse = rows
    weight, shifted = weight.masked_fill(~active, 0.0), shifted.masked_fill(~active, 0.0)
    slope = weight.sum(-1, keepdim=True) + leak
    root = (total + (weight * shifted).sum(-1, keepdim=True)) / slope.masked_fill(slope == 0, math.inf)
    flow = (weight * (root - shifted)).masked_fill(~active, 0.0)
    # Where nothing flows μ is α, or unknown (0) when the flow is conserved but nothing conducts.
    idle = 1 / inverse.masked_fill(inverse == 0, math.inf)
    potential = torch.where(active.any(-1, keepdim=True), lowest + root * (-top).exp(), idle)
    return flow, potential.squeeze(-1)


def solve_rows(log_conductance: Tensor, threshold: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    r"""argmin_z ½Σ_j z_j²/c_j + Σ_j θ_j|z_j| + (α/2)(Σ_j z_j − 1)², exactly, by one sort (SFi-Former, Eqs. 6 and 9).

    z_j = c_j max(μ − θ_j, 0) with Σ_j z_j + μ/α = 1; α = ∞ is exact conservation. Returns the flow z [..., n] and the
    potential μ [...]; a row without an entry that conducts (log c = −∞) flows nowhere and has μ = α, or 0 for α = ∞.

    Args:
        log_conductance: log c [..., n] with c = 1/r. threshold: θ = λf ≥ 0, [..., n].
        alpha: α > 0, a number or a tensor that broadcasts over rows [..., 1].
    """
    rows = scaled_rows(log_conductance, threshold, alpha)
    with torch.no_grad():
        weight, shifted, leak, total, *_ = rows
        order = shifted.masked_fill(weight == 0, math.inf).argsort(-1)
        p, t = weight.gather(-1, order), shifted.gather(-1, order)
        # The entry is active where the left side, evaluated at its threshold, is still below the right.
        before = t * (p.cumsum(-1) + leak) - (p * t).cumsum(-1) < total
        active = torch.zeros_like(before).scatter(-1, order, before & (p > 0))
    return on_support(active, rows)


def entries(s: Tensor, u: Tensor, lam: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """z = e^{s + a} max(1 − λe^{u − w}, 0) of listed pairs, from their scores and the numbers of their rows."""
    limit = exp_limit(s.dtype)
    return (s + a).clamp(max=limit).exp() * (1 - lam * (u - w).clamp(max=limit).exp()).clamp_min(0)


def log_entries(s: Tensor, u: Tensor, lam: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """log z, −∞ where nothing flows."""
    theta = lam * (u - w).clamp(max=exp_limit(s.dtype)).exp()
    flows = theta < 1
    return (s + a + (-theta.masked_fill(~flows, 0.0)).log1p()).masked_fill(~flows, -math.inf)


def _scores(a: Tensor, b: Tensor, rows: slice) -> Tensor:
    """Inner products of the rows of one graph, [H, n, n]."""
    return torch.einsum("ihf,jhf->hij", a[rows], b[rows])


def sparse_flow_potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    """Every row solved by sorting."""
    q, k, fq, fk = features
    parts = []
    for rows in slices(ptr, q.size(0)):
        s, u = _scores(q, k, rows), _scores(fq, fk, rows)
        resistance, friction = (-s).logsumexp(2), u.logsumexp(2)
        theta = lam[rows].t().unsqueeze(2) * u.softmax(2)
        flow, mu = solve_rows(s + resistance.unsqueeze(2), theta, 1 / leak[rows].t().unsqueeze(2))
        log_mu = mu.log()
        conductance = (s + resistance.unsqueeze(2)).masked_fill(flow == 0, -math.inf).exp()
        slope = mu * (conductance.sum(2) + leak[rows].t())
        known = (resistance, slope, (theta * flow).sum(2), (flow > 0).sum(2).to(flow))
        parts.append(torch.stack([resistance + log_mu, friction + log_mu, log_mu, *(x.detach() for x in known)]))
    return RowPotentials(*torch.cat(parts, dim=2).transpose(1, 2))


def sparse_flow_product(features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool) -> Tensor:
    """Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D]."""
    q, k, fq, fk = features
    parts = []
    for rows in slices(ptr, q.size(0)):
        of_rows = (x[rows].t().unsqueeze(2) for x in terms)
        z = entries(_scores(q, k, rows), _scores(fq, fk, rows), *of_rows)
        parts.append(torch.einsum("hji,jhd->ihd" if transpose else "hij,jhd->ihd", z, v[rows]))
    return torch.cat(parts)
