"""The fast path: complete rows tile by tile, small graphs of equal size stacked; nothing of size N² is kept.

One thing is not read off the scores of a tile but written into it: the friction of the best conductor of a row is the
one that all others are measured from, whatever a product of features rounds it to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.precision import accumulating, exp_limit
from diffusion_mp.kernels.segments import Rows, gather, row_blocks, scatter
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms, empty_potentials
from diffusion_mp.kernels.sparse_flow.solve import solve

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


def _first(cols: Rows) -> int | Tensor:
    """The first node of every graph of a tile."""
    return cols.start if isinstance(cols, slice) else cols[:, :1, None, None]


def _together(features: Features, terms: RowTerms, *others: Tensor) -> Any:
    """All in one dtype, float32 at least."""
    wide, _ = accumulating(*features, *terms[:5], *others)
    return Features(*wide[:4]), terms._replace(**dict(zip(RowTerms._fields[:5], wide[4:9], strict=True))), *wide[9:]


def potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    """The solved rows; ``leak`` is 1/α."""
    (q, k, fq, fk, lam, leak), _ = accumulating(*features, lam, leak)
    out = empty_potentials(lam)
    for rows, cols in tiles(ptr, q):
        s, u = _inner(q, k, rows, cols), _inner(fq, fk, rows, cols)
        solution = solve(s, u, _log_sum(-s), _log_sum(u), _scalar(lam, rows), _scalar(leak, rows))
        for tensor, value in zip(out, solution._replace(best=solution.best + _first(cols)), strict=True):
            _put(tensor, rows, value)
    return out


def _log_sum(x: Tensor) -> Tensor:
    """log Σ_j e^{x_ij}."""
    top = x.amax(-1, keepdim=True)
    return (x - top).exp_().sum(-1, keepdim=True).log_() + top


def _entries(features: Features, terms: RowTerms, rows: Rows, cols: Rows) -> tuple[Tensor, ...]:
    """Of one tile s, u, e^{s + a} on the support (0 elsewhere), e^{u − w} − 1, z, and the best conductors' places."""
    q, k, fq, fk = features
    limit, w, best = exp_limit(q.dtype), _scalar(terms.w, rows), _scalar(terms.best, rows) - _first(cols)
    s, u = _inner(q, k, rows, cols), _inner(fq, fk, rows, cols)
    above = (u - w).clamp_(max=limit).exp_().sub_(1).scatter_(3, best, 0.0)
    through = s + _scalar(terms.a, rows)
    lift = _scalar(terms.lift, rows)
    if bool(lift.any()):
        through += torch.lt(above, 0) * lift
    through.clamp_(max=limit).exp_()
    flow = (above * -_scalar(terms.nu, rows)).add_(_scalar(terms.rho, rows))
    through.mul_(torch.gt(flow, 0, out=torch.empty_like(flow)))
    return s, u, through, above, flow.mul_(through), best


def product(features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool) -> Tensor:
    """Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D], in the dtype of v."""
    dtype = v.dtype
    features, terms, v = _together(features, terms, v)
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for rows, cols in tiles(ptr, features.q):
        *_, flow, _ = _entries(features, terms, rows, cols)
        if transpose:
            scatter(out, cols, flow.transpose(2, 3) @ gather(v, rows), add=True)
        else:
            scatter(out, rows, flow @ gather(v, cols))
    return out.to(dtype)


def product_backward(
    grad: Tensor, features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k, the friction's q and k, v, a, w, ρ and ν; every tile is computed anew.

    With y_ij = ν e^{s + a + u − w} on the support, 0 at the best conductor, and G_ij = grad_i·v_j (transposed
    v_i·grad_j): ds = da = zG, du = −dw = −yG, dρ = e^{s + a} G, dν = e^{s + a}(1 − e^{u − w}) G.
    """
    dtype = v.dtype
    features, terms, v, grad = _together(features, terms, v, grad)
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (*features, v, *terms[:4])]
    dv, da, dw, drho, dnu = grads[4:]
    left, right = (v, grad) if transpose else (grad, v)
    for rows, cols in tiles(ptr, features.q):
        _, _, through, above, flow, best = _entries(features, terms, rows, cols)
        if transpose:
            scatter(dv, rows, flow @ gather(grad, cols), add=True)
        else:
            scatter(dv, cols, flow.transpose(2, 3) @ gather(grad, rows), add=True)
        outer = _inner(left, right, rows, cols)
        ds = flow.mul_(outer)
        by_rho = through.mul_(outer)
        _put(drho, rows, by_rho.sum(3, keepdim=True))
        by_nu = above.mul_(by_rho)
        _put(dnu, rows, -by_nu.sum(3, keepdim=True))
        du = by_nu.add_(by_rho).mul_(-_scalar(terms.nu, rows)).scatter_(3, best, 0.0)
        _put(da, rows, ds.sum(3, keepdim=True))
        _put(dw, rows, -du.sum(3, keepdim=True))
        _add_score_gradients(grads, ds, du, features, rows, cols)
    return *(t.to(dtype) for t in grads[:5]), da, dw, drho, dnu


def _add_score_gradients(
    grads: list[Tensor], ds: Tensor, du: Tensor, features: Features, rows: Rows, cols: Rows
) -> None:
    """Pass gradients of s = q·k and u = q̃·k̃ on to the four features."""
    q, k, fq, fk = features
    scatter(grads[0], rows, ds @ gather(k, cols), add=True)
    scatter(grads[1], cols, ds.transpose(2, 3) @ gather(q, rows), add=True)
    scatter(grads[2], rows, du @ gather(fk, cols), add=True)
    scatter(grads[3], cols, du.transpose(2, 3) @ gather(fq, rows), add=True)


class Pulls(NamedTuple):
    """What the gradients of a row's numbers do to its scores, λ and 1/α, [N, H].

    ds = −step z − by_resistance r, du = step y − by_friction f, and at the best conductor ``at_s`` and ``at_u`` more;
    dλ = by_lam − step nu Σ e^{s + a}(1 − e^{u − w}), and d(1/α) = ``leak``.
    """

    step: Tensor
    by_resistance: Tensor
    by_friction: Tensor
    at_s: Tensor
    at_u: Tensor
    nu: Tensor
    by_lam: Tensor
    leak: Tensor


def pulls(
    grad_a: Tensor, grad_w: Tensor, grad_rho: Tensor, grad_nu: Tensor, grad_mu: Tensor, lam: Tensor, leak: Tensor,
    solution: RowPotentials,
) -> Pulls:  # fmt: skip
    """Gradients of a, w, ρ, ν and log μ, passed on to what they are made of.

    In a unit e^h that is held fast a = h − s_o, w = u_o, ρ = ζe^{−h}, ν = γe^{−h}, γ = c_oθ_o and μ = θ_o + ζ/c_o. How
    ζ moves, Σ_j z_j + μ/α = 1 says (S3 of docs/errata.md): with y of :func:`product_backward`, D = Σ_J e^{s + a} ν(1 −
    e^{u − w}) and the slope Σ_J e^{s + a} + e^h/(αc_o)

        slope dρ = −Σ z (ds − ds_o) + Σ y (du − du_o) − D dlog γ − (θ_o dlog θ_o − ζ/c_o dlog c_o)/α − μ d(1/α),
        dlog c_o = ds_o − Σ r ds,   dlog θ_o = dlog λ + du_o − Σ f du.
    """
    a, w, rho, nu, lift, _, log_mu, resistance, friction, slope, drag, _, support = solution
    log_f, mu = w - friction, log_mu.exp()
    f, share = log_f.exp(), (log_f - log_mu).exp()  # of the best conductor; θ_o = λf, θ_o/μ = λ share
    alone = torch.where(support > 0, 0.0, grad_mu)  # where nothing flows μ is α
    grad_mu = grad_mu - alone
    step = (grad_rho + grad_mu * (a - resistance - log_mu).exp()) / slope
    both = grad_nu * nu - step * (1 - leak * lam * f - rho * slope)
    by_resistance = both + step * leak * (mu - lam * f) - grad_mu * (1 - lam * share)
    by_friction = both - step * leak * lam * f + grad_mu * lam * share
    nu_of_one = (resistance + log_f - a - lift).clamp_max(exp_limit(a.dtype)).exp()  # ν/λ
    return Pulls(
        step,
        by_resistance,
        by_friction,
        at_s=step * (1 - leak * mu) - grad_a + by_resistance,
        at_u=grad_w - step * drag + by_friction,
        nu=nu_of_one,
        by_lam=grad_nu * nu_of_one - step * leak * f + grad_mu * share,
        leak=-(step + alone) * mu,
    )


def potentials_backward(
    grad_a: Tensor, grad_w: Tensor, grad_rho: Tensor, grad_nu: Tensor, grad_mu: Tensor,
    features: Features, lam: Tensor, leak: Tensor, solution: RowPotentials, ptr: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, the friction's q and k, λ and 1/α, from those of a, w, ρ, ν and log μ: see :class:`Pulls`."""
    dtype = features.q.dtype
    features, terms, lam = _together(features, solution.terms, lam)
    *grads, dlam = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (*features, lam))
    pull = pulls(grad_a, grad_w, grad_rho, grad_nu, grad_mu, lam, leak, solution)
    for rows, cols in tiles(ptr, features.q):
        s, u, through, above, flow, best = _entries(features, terms, rows, cols)
        step = _scalar(pull.step, rows)
        r = s.neg_().sub_(_scalar(solution.resistance, rows)).exp_()
        ds = flow.mul_(-step).sub_(r.mul_(_scalar(pull.by_resistance, rows)))
        f = u.sub_(_scalar(solution.friction, rows)).exp_()
        dammed = above.mul_(through)
        moved = dammed.sum(3, keepdim=True) * step * _scalar(pull.nu, rows)
        _put(dlam, rows, moved + _scalar(pull.by_lam, rows))
        drag = dammed.add_(through).mul_(_scalar(terms.nu, rows) * step).scatter_(3, best, 0.0)
        du = drag.sub_(f.mul_(_scalar(pull.by_friction, rows)))
        ds.scatter_add_(3, best, _scalar(pull.at_s, rows))
        du.scatter_add_(3, best, _scalar(pull.at_u, rows))
        _add_score_gradients(grads, ds, du, features, rows, cols)
    return *(t.to(dtype) for t in grads), dlam, pull.leak


def support(features: Features, terms: RowTerms, ptr: Tensor | None) -> Tensor:
    """[2, E]: the pairs (j, i), source and target, with z_ij > 0 in some head, sorted by target in each tile."""
    device = features.q.device
    found = [torch.empty(2, 0, dtype=torch.long, device=device)]
    for rows, cols in tiles(ptr, features.q):
        flow = _entries(features, terms, rows, cols)[4]
        graph, target, source = (flow > 0).any(1).nonzero().unbind(1)
        row, col = (
            torch.arange(r.start, r.stop, device=device)[None] if isinstance(r, slice) else r for r in (rows, cols)
        )
        found.append(torch.stack([col[graph, source], row[graph, target]]))
    return torch.cat(found, dim=1)
