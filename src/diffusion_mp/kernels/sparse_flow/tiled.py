"""The fast path: complete rows tile by tile, small graphs of equal size stacked; nothing of size N² is kept.

In logarithms, with M = log Σ e^{−s}, U = log Σ e^{u} and the potential μ of a row,

    z_ij = e^{s_ij + a_i} max(1 − λ_i e^{u_ij − w_i}, 0),   a = M + log μ,   w = U + log μ,

so two numbers per row, a and w, say all about the solution, and no conductance, which may overflow, is ever formed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.precision import accumulating, exp_limit
from diffusion_mp.kernels.segments import Rows, gather, row_blocks, scatter
from diffusion_mp.kernels.sparse_flow.newton import newton
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms

# Entries of one tile over all heads on a CPU: 1 MiB in float32, for half a dozen of them to stay in cache.
TILE = 1 << 18
# A GPU wants tiles this many times as large.
ON_GPU = 64


def tiles(ptr: Tensor | None, like: Tensor) -> Iterator[tuple[Rows, Rows]]:
    """(rows, columns) over the graphs of features ``like`` [N, H, F]: every row once, with all columns of its graph."""
    entries = (TILE if like.device.type == "cpu" else TILE * ON_GPU) // like.size(1)
    for _, cols, blocks in row_blocks(ptr, like.size(0), lambda size: entries // size, like.device):
        for rows in blocks:
            yield rows, cols


def _inner(a: Tensor, b: Tensor, rows: Rows, cols: Rows) -> Tensor:
    return gather(a, rows) @ gather(b, cols).transpose(2, 3)


def _scalar(x: Tensor, rows: Rows) -> Tensor:
    """[N, H] → [b, H, size, 1], beside the entries of a tile."""
    return gather(x.unsqueeze(2), rows)


def _put(out: Tensor, rows: Rows, value: Tensor) -> None:
    scatter(out.unsqueeze(2), rows, value)


def _together(features: Features, terms: RowTerms, *others: Tensor) -> Any:
    """All in one dtype, float32 at least."""
    wide, _ = accumulating(*features, *terms, *others)
    return Features(*wide[:4]), RowTerms(*wide[4:7]), *wide[7:]


def potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    """The solved rows; ``leak`` is 1/α.

    Rows are normalised last: given w as it is rounded, a makes the row sum 1 − μ/α to the last bit.
    """
    (q, k, fq, fk, lam, leak), _ = accumulating(*features, lam, leak)
    out = RowPotentials(*empty_like(*7 * [lam]))
    for rows, cols in tiles(ptr, q):
        s, u = _inner(q, k, rows, cols), _inner(fq, fk, rows, cols)
        solution = solve(s, u, _scalar(lam, rows), _scalar(leak, rows))
        for tensor, value in zip(out, solution, strict=True):
            _put(tensor, rows, value)
    return out


def solve(s: Tensor, u: Tensor, lam: Tensor, leak: Tensor) -> RowPotentials:
    """Complete rows of scores [..., n] with λ and 1/α [..., 1]; three tiles of memory are written again and again."""
    info, limit = torch.finfo(s.dtype), exp_limit(s.dtype)
    log_lam = lam.log()
    bottom, top, lowest = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True), u.amin(-1, keepdim=True)
    resistance = (bottom - s).exp_().sum(-1, keepdim=True).log_() - bottom
    easiest = u.amax(-1, keepdim=True)
    friction = (u - easiest).exp_().sum(-1, keepdim=True).log_() + easiest

    # In units of the largest conductance no weight of Newton's equation exceeds one, and no threshold overflows.
    log_scale = resistance + top
    weight = (s - top).exp_()
    threshold = (u + (log_lam - friction + log_scale)).clamp_(max=limit).exp_()
    scaled, _ = newton(weight, threshold, leak * (-log_scale).exp())
    log_mu = scaled.log() - log_scale

    # The entry of least friction keeps its flow where the rounding of w would close it.
    least = lowest + log_lam - friction
    slack = 8 * info.eps * (1 + lowest.abs() + log_lam.abs() + friction.abs())
    held = (least.exp() * leak < 1) & (lam > 0)
    log_mu = torch.where(held, log_mu.maximum(least + slack), log_mu)
    w = friction + log_mu

    theta = (u - w).clamp_(max=limit).exp_().mul_(lam)  # θ/μ
    active = torch.lt(theta, 1, out=threshold)  # 1 or 0: several times faster than a mask of booleans
    weight.mul_(active)
    through = weight.sum(-1, keepdim=True)
    if bool((through < info.tiny**0.5).any()):
        # All that flows conducts far less than the largest conductance: take the largest that flows for the unit.
        top = torch.where(active > 0, s, -torch.inf).amax(-1, keepdim=True)
        top = torch.where(top > -torch.inf, top, 0.0)
        weight = (s - top).clamp_(max=0).exp_().mul_(active)
        through = weight.sum(-1, keepdim=True)
    entries = weight.mul_(1 - theta)
    flow = entries.sum(-1, keepdim=True)
    work = entries.mul_(theta.mul_(active)).sum(-1, keepdim=True)

    lost = log_mu.exp() * leak  # μ/α
    kept = (1 - lost).clamp_min(info.tiny)
    norm = torch.where(flow > 0, kept / flow, 0.0)
    return RowPotentials(
        a=torch.where(flow > 0, norm.log() - top, resistance + log_mu),
        w=w,
        log_mu=log_mu,
        resistance=resistance,
        slope=through * norm + lost,
        work=work * norm * log_mu.exp(),
        support=active.sum(-1, keepdim=True),
    )


def _entries(features: Features, terms: RowTerms, rows: Rows, cols: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One tile of s, u, e^{s + a} on the support (0 elsewhere) and e^{u − w} (cut off beyond it)."""
    q, k, fq, fk = features
    lam, a, w = terms
    limit = exp_limit(q.dtype)
    s, u = _inner(q, k, rows, cols), _inner(fq, fk, rows, cols)
    force = (u - _scalar(w, rows)).clamp_(max=limit).exp_()
    through = (s + _scalar(a, rows)).clamp_(max=limit).exp_()
    active = force * _scalar(lam, rows)
    through.mul_(torch.lt(active, 1, out=active))
    return s, u, through, force


def product(features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool) -> Tensor:
    """Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D], in the dtype of v."""
    dtype = v.dtype
    features, terms, v = _together(features, terms, v)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for rows, cols in tiles(ptr, features.q):
        _, _, through, force = _entries(features, terms, rows, cols)
        flow = through.mul_(1 - force * _scalar(terms.lam, rows))
        if transpose:
            scatter(out, cols, flow.transpose(2, 3) @ gather(v, rows), add=True)
        else:
            scatter(out, rows, flow @ gather(v, cols))
    return out.to(dtype)


def product_backward(
    grad: Tensor, features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k, the friction's q and k, v, λ, a and w; every tile is computed anew.

    With y_ij = λ e^{s + a + u − w} on the support and G_ij = grad_i·v_j (transposed v_i·grad_j):
    ds = da = zG, du = −dw = −yG, dλ = −(y/λ) G.
    """
    dtype = v.dtype
    features, terms, v, grad = _together(features, terms, v, grad)
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (*features, v, *terms)]
    dv, dlam, da, dw = grads[4:]
    left, right = (v, grad) if transpose else (grad, v)
    for rows, cols in tiles(ptr, features.q):
        _, _, through, force = _entries(features, terms, rows, cols)
        force = force.mul_(through)  # y/λ, 0 beyond the support
        drag = force * _scalar(terms.lam, rows)
        flow = through.sub_(drag)
        if transpose:
            scatter(dv, rows, flow @ gather(grad, cols), add=True)
        else:
            scatter(dv, cols, flow.transpose(2, 3) @ gather(grad, rows), add=True)
        outer = _inner(left, right, rows, cols)
        _put(dlam, rows, -(force.mul_(outer)).sum(3, keepdim=True))
        ds, du = flow.mul_(outer), drag.mul_(outer).neg_()
        _put(da, rows, ds.sum(3, keepdim=True))
        _put(dw, rows, -du.sum(3, keepdim=True))
        _add_score_gradients(grads, ds, du, features, rows, cols)
    return *(t.to(dtype) for t in grads[:5]), dlam, da, dw


def _add_score_gradients(
    grads: list[Tensor], ds: Tensor, du: Tensor, features: Features, rows: Rows, cols: Rows
) -> None:
    """Pass gradients of s = q·k and u = q̃·k̃ on to the four features."""
    q, k, fq, fk = features
    scatter(grads[0], rows, ds @ gather(k, cols), add=True)
    scatter(grads[1], cols, ds.transpose(2, 3) @ gather(q, rows), add=True)
    scatter(grads[2], rows, du @ gather(fk, cols), add=True)
    scatter(grads[3], cols, du.transpose(2, 3) @ gather(fq, rows), add=True)


def pulls(
    grad_a: Tensor, grad_w: Tensor, grad_mu: Tensor, leak: Tensor, solution: RowPotentials
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By how much log μ of a row is wanted to move, what then belongs to r and to f, and the gradient of 1/α; [N, H].

    Σ_j z_j + μ/α = 1 says by how much log μ moves with the scores (S3 of docs/errata.md): with y = z's share that
    friction took, Σ_J y = A − 1,

        A dlog μ = −Σ z (ds + dM) + Σ y (du − dU) + Σ (y/λ) dλ − μ d(1/α),   dM = −Σ r ds,  dU = Σ f du.
    """
    moved = (grad_a + grad_w + grad_mu) / solution.slope
    mu = solution.log_mu.exp()
    return moved, grad_a - moved * (1 - leak * mu), grad_w - moved * (solution.slope - 1), -moved * mu


def potentials_backward(
    grad_a: Tensor, grad_w: Tensor, grad_mu: Tensor, features: Features, lam: Tensor, leak: Tensor,
    solution: RowPotentials, ptr: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, the friction's q and k, λ and 1/α, from those of a, w and log μ.

    ds = −step z − ρ r, du = step y + φ f and dλ = step Σ y/λ, with the row's step, ρ and φ from :func:`pulls`.
    """
    dtype = features.q.dtype
    features, terms = _together(features, RowTerms(lam, solution.a, solution.w))
    *grads, dlam = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (*features, terms.lam))
    moved, by_resistance, by_friction, dleak = pulls(grad_a, grad_w, grad_mu, leak, solution)
    log_friction = solution.w - solution.log_mu
    for rows, cols in tiles(ptr, features.q):
        s, u, through, force = _entries(features, terms, rows, cols)
        force = force.mul_(through)
        drag = force * _scalar(terms.lam, rows)
        flow = through.sub_(drag)
        step = _scalar(moved, rows)
        _put(dlam, rows, step * force.sum(3, keepdim=True))
        r = s.neg_().sub_(_scalar(solution.resistance, rows)).exp_()
        ds = flow.mul_(-step).sub_(r.mul_(_scalar(by_resistance, rows)))
        f = u.sub_(_scalar(log_friction, rows)).exp_()
        du = drag.mul_(step).add_(f.mul_(_scalar(by_friction, rows)))
        _add_score_gradients(grads, ds, du, features, rows, cols)
    return *(t.to(dtype) for t in grads), dlam, dleak


def support(features: Features, terms: RowTerms, ptr: Tensor | None) -> Tensor:
    """[2, E]: the pairs (j, i), source and target, with z_ij > 0 in some head, sorted by target in each tile."""
    device = features.q.device
    found = [torch.empty(2, 0, dtype=torch.long, device=device)]
    for rows, cols in tiles(ptr, features.q):
        through, _ = _entries(features, terms, rows, cols)[2:]
        graph, target, source = (through > 0).any(1).nonzero().unbind(1)
        row, col = (
            torch.arange(r.start, r.stop, device=device)[None] if isinstance(r, slice) else r for r in (rows, cols)
        )
        found.append(torch.stack([col[graph, source], row[graph, target]]))
    return torch.cat(found, dim=1)
