"""The GPU path: one program per run of rows meets all columns of its graph once per pass; no score is kept.

Rows are solved as in ``rows.solve``, in its notation. In the backward passes receivers and senders have a program each,
with the roles exchanged (``TURNED``: the terms belong to the columns), so that sums need no atomics.
"""

import math
from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_mp.kernels.gpu import Tiles, contiguous, padded, tiles
from diffusion_mp.kernels.precision import exp_limit
from diffusion_mp.kernels.sparse_flow import rows, tiled
from diffusion_mp.kernels.sparse_flow.rows import (
    Features,
    RowPotentials,
    RowTerms,
    empty_potentials,
)
from diffusion_mp.kernels.triton_rows import load, operands, own_rows, store

LIMIT = tl.constexpr(exp_limit(torch.float32))
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
SMALL = tl.constexpr(torch.finfo(torch.float32).tiny ** 0.5)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
MAX_STEPS = tl.constexpr(rows.MAX_STEPS)
UNIT = tl.constexpr(rows.unit_limit(torch.float32))
CLOSED = tl.constexpr(math.exp(exp_limit(torch.float32)))


@triton.jit
@no_type_check
def _scores(
    xs, fxs, y, fy, start, end, head, H, F, G, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The columns from ``start`` and which exist, tiles of s = x·y and u = x̃·ỹ, and the rows y and ỹ."""
    col = start + tl.arange(0, BLOCK_N)
    inside = col < end
    ys = load(y, col, inside, head, H * F, F, tl.arange(0, xs.shape[1]), F, xs.dtype)
    fys = load(fy, col, inside, head, H * G, G, tl.arange(0, fxs.shape[1]), G, fxs.dtype)
    s = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
    return col, inside, s, tl.dot(fxs, tl.trans(fys), input_precision=PRECISION), ys, fys


@triton.jit
@no_type_check
def _add_exp(level, total, x, inside):
    """Add the columns inside to Σ e^{x − ℓ} of every row; the level ℓ is the largest x so far."""
    above = tl.maximum(level, tl.max(tl.where(inside[None, :], x, float("-inf")), axis=1))
    new = tl.sum(
        tl.where(inside[None, :], tl.exp(tl.minimum(x - above[:, None], 0.0)), 0.0), axis=1
    )
    return above, total * tl.exp(level - above) + new


@triton.jit
@no_type_check
def _best(level, best, w, s, u, col, open_):
    """Update the largest s of every row, its column and its u, by the columns that are open."""
    largest = tl.max(tl.where(open_, s, float("-inf")), axis=1)
    place = tl.max(tl.where(open_ & (s == largest[:, None]), col[None, :], -1), axis=1)
    friction = tl.sum(tl.where(col[None, :] == place[:, None], u, 0.0), axis=1)
    return (
        tl.maximum(level, largest),
        tl.where(largest > level, place, best),
        tl.where(largest > level, friction, w),
    )


@triton.jit
@no_type_check
def _potentials(
    q,
    k,
    fq,
    fk,
    lam,
    leak,
    table,
    nodes,
    a,
    w,
    rho,
    nu,
    lift,
    reach,
    best,
    log_mu,
    resistances,
    frictions,
    slopes,
    drags,
    works,
    supports,
    H,
    F,
    G,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """The row problems of one run of rows: see ``rows.solve``."""
    head, row, within, begin, end = own_rows(table, nodes, H, BLOCK_M)
    place = row * H + head
    xs = load(q, row, within, head, H * F, F, tl.arange(0, BLOCK_F), F, OPERAND)
    fxs = load(fq, row, within, head, H * G, G, tl.arange(0, BLOCK_G), G, OPERAND)
    lams = tl.load(lam + place, mask=within, other=0.0)
    leaks = tl.load(leak + place, mask=within, other=0.0)

    nothing = tl.zeros([BLOCK_M], tl.float32)
    # The largest −s, u, s and s + u, and sums relative to them.
    steepest = nothing + LOWEST
    easiest = nothing + LOWEST
    top = nothing + LOWEST
    both = nothing + LOWEST
    resistance = nothing
    friction = nothing
    weights = nothing
    moments = nothing
    for start in range(begin, end, BLOCK_N):
        col, inside, s, u, _, _ = _scores(
            xs, fxs, k, fk, start, end, head, H, F, G, PRECISION, BLOCK_N
        )
        steepest, resistance = _add_exp(steepest, resistance, -s, inside)
        easiest, friction = _add_exp(easiest, friction, u, inside)
        top, weights = _add_exp(top, weights, s, inside)
        both, moments = _add_exp(both, moments, s + u, inside)
    resistance = tl.log(resistance) + steepest
    friction = tl.log(friction) + easiest
    log_lam = tl.where(lams > 0, tl.log(tl.where(lams > 0, lams, 1.0)), float("-inf"))
    # Newton's method from the right, where every entry is active: see ``rows.newton``.
    moments *= tl.exp(tl.minimum(both + log_lam - friction + resistance, LIMIT))
    root = (1.0 + moments) / (weights + leaks * tl.exp(-resistance - top))

    # The solution, so far nothing.
    bests = tl.zeros([BLOCK_M], tl.int64) + begin
    some = nothing > 0
    ceiling = nothing + float("inf")
    ws = nothing
    unit = nothing
    shift = nothing
    lifts = nothing
    nus = nothing
    rhos = nothing
    log_f = nothing
    reaches = nothing
    slope = nothing
    driven = nothing
    drag = nothing
    resisted = nothing
    support = nothing
    hidden = nothing
    searching = tl.max(nothing) == 0
    while searching:
        offset = log_lam - friction + resistance + top
        falling = tl.max(nothing) == 0
        steps = 0
        while falling & (steps < MAX_STEPS):
            slope = leaks * tl.exp(-resistance - top)
            driven = nothing + 1.0
            for start in range(begin, end, BLOCK_N):
                col, inside, s, u, _, _ = _scores(
                    xs, fxs, k, fk, start, end, head, H, F, G, PRECISION, BLOCK_N
                )
                threshold = tl.exp(tl.minimum(u + offset[:, None], LIMIT))
                active = inside[None, :] & (threshold < root[:, None]) & (u < ceiling[:, None])
                weight = tl.where(active, tl.exp(tl.minimum(s - top[:, None], 0.0)), 0.0)
                slope += tl.sum(weight, axis=1)
                driven += tl.sum(weight * threshold, axis=1)
            following = driven / tl.where(slope > 0, slope, 1.0)
            falls = (slope > 0) & (following < root)
            root = tl.where(falls, following, root)
            falling = tl.max(falls.to(tl.int32)) > 0
            steps += 1
        log_root = tl.log(root)
        slack = 32 * EPS * (1 + tl.abs(log_root) + tl.abs(offset))
        reaches = tl.where(log_root > LIMIT - 1, float("inf"), log_root - offset + slack)
        reaches = tl.minimum(reaches, ceiling)

        level = nothing + LOWEST
        bests = tl.zeros([BLOCK_M], tl.int64) + begin
        us = nothing
        for start in range(begin, end, BLOCK_N):
            col, inside, s, u, _, _ = _scores(
                xs, fxs, k, fk, start, end, head, H, F, G, PRECISION, BLOCK_N
            )
            level, bests, us = _best(
                level, bests, us, s, u, col, inside[None, :] & (u < reaches[:, None])
            )
        some = level > LOWEST
        level = tl.where(some, level, 0.0)

        log_c = resistance + level
        log_drag = log_c + log_lam + (us - friction)
        unit = tl.minimum(tl.maximum(log_drag, 0.0), UNIT)
        lifts = tl.maximum(log_drag - UNIT, 0.0)
        # The tensor stands first: with the constant first, the interpreter of Triton 3.7 makes a constant of the sum.
        ws = us + tl.where(lams > 0, tl.maximum(-log_drag - UNIT, 0.0), 0.0)
        log_f = tl.where(ws > us, -log_c - log_lam - UNIT, us - friction)
        shift = unit - level
        nus = tl.where(lams > 0, tl.exp(tl.minimum(tl.maximum(log_drag, -UNIT), 0.0)), 0.0)
        by_leak = leaks * tl.exp(unit - log_c)
        total = 1 - leaks * lams * tl.exp(log_f)

        rhos = nothing + float("inf")
        falling = tl.max(nothing) == 0
        steps = 0
        while falling & (steps < MAX_STEPS):
            slope = by_leak
            driven = total
            drag = nothing
            resisted = nothing
            support = nothing
            hidden = nothing
            for start in range(begin, end, BLOCK_N):
                col, inside, s, u, _, _ = _scores(
                    xs, fxs, k, fk, start, end, head, H, F, G, PRECISION, BLOCK_N
                )
                share = tl.exp(tl.minimum(u - ws[:, None], LIMIT))
                threshold = tl.minimum((share - 1) * nus[:, None], 2.0)
                open_ = inside[None, :] & (threshold < rhos[:, None])
                active = open_ & (u < reaches[:, None])
                exponent = s + shift[:, None] + tl.where(u < ws[:, None], lifts[:, None], 0.0)
                weight = tl.where(active, tl.exp(tl.minimum(exponent, UNIT)), 0.0)
                slope += tl.sum(weight, axis=1)
                driven += tl.sum(weight * threshold, axis=1)
                support += tl.sum(active.to(tl.float32), axis=1)
                hidden += tl.sum((open_ & (active == 0)).to(tl.float32), axis=1)
                weight = tl.where(col[None, :] == bests[:, None], 0.0, weight * share)
                drag += tl.sum(weight, axis=1)
                resisted += tl.sum(weight * threshold, axis=1)
            following = driven / tl.where(slope > 0, slope, 1.0)
            falls = (slope > 0) & (following < rhos)
            rhos = tl.where(falls, following, rhos)
            falling = tl.max(falls.to(tl.int32)) > 0
            steps += 1

        excess = tl.abs(driven - rhos * slope)
        flows = (rhos > 0) | ((slope - by_leak > SMALL) & (lifts == 0) & (excess < 8 * EPS))
        closed = some & (flows == 0)
        some = some & flows
        ceiling = tl.where(closed, us, ceiling)
        searching = tl.max(closed.to(tl.int32)) > 0
        if searching:
            root = nothing + float("inf")
            top = nothing + LOWEST
            for start in range(begin, end, BLOCK_N):
                col, inside, s, u, _, _ = _scores(
                    xs, fxs, k, fk, start, end, head, H, F, G, PRECISION, BLOCK_N
                )
                s = tl.where(inside[None, :] & (u < ceiling[:, None]), s, float("-inf"))
                top = tl.maximum(top, tl.max(s, axis=1))

    # Where nothing flows μ is α.
    # log θ_o, and of what multiplies ρ
    theta = log_lam + log_f
    height = shift - resistance
    above = tl.log(tl.where(rhos > 0, rhos, 1.0)) + height
    above = tl.maximum(theta, above) + tl.log(1 + tl.exp(-tl.abs(theta - above)))
    below = theta + tl.log(1 + tl.where(rhos > 0, 0.0, rhos) / tl.where(nus > 0, nus, 1.0))
    tl.store(a + place, tl.where(some, shift, 0.0), mask=within)
    tl.store(w + place, tl.where(some, ws, friction), mask=within)
    tl.store(rho + place, tl.where(some, rhos, 0.0), mask=within)
    tl.store(nu + place, tl.where(some, nus, 0.0), mask=within)
    tl.store(lift + place, tl.where(some, lifts, 0.0), mask=within)
    tl.store(reach + place, tl.where(some & (hidden > 0), reaches, float("inf")), mask=within)
    tl.store(best + place, tl.where(some, bests, begin), mask=within)
    tl.store(
        log_mu + place,
        tl.where(some, tl.where(rhos > 0, above, below), -tl.log(leaks)),
        mask=within,
    )
    tl.store(resistances + place, resistance, mask=within)
    tl.store(frictions + place, friction, mask=within)
    tl.store(slopes + place, tl.where(some, slope, 1.0), mask=within)
    tl.store(drags + place, tl.where(some, nus * drag, 0.0), mask=within)
    work = tl.exp(theta) * (rhos * (drag + tl.where(rhos > 0, tl.exp(unit), 0.0)) - resisted)
    tl.store(works + place, tl.where(some, work, 0.0), mask=within)
    tl.store(supports + place, support, mask=within)


@triton.jit
@no_type_check
def _entries(s, u, a, w, rho, nu, lift, reach, best, place, mask, inside, node):
    """e^{s + a} on the support (0 elsewhere), e^{u − w}, z, ν, and which entry is the best of its row."""
    is_best = tl.load(best + place, mask=mask, other=-1) == node
    share = tl.exp(tl.minimum(u - tl.load(w + place, mask=mask, other=0.0), LIMIT))
    share = tl.where(u < tl.load(reach + place, mask=mask, other=0.0), share, CLOSED)
    share = tl.where(is_best, 1.0, share)
    nus = tl.load(nu + place, mask=mask, other=0.0)
    driven = tl.load(rho + place, mask=mask, other=0.0) - (share - 1) * nus
    lifts = tl.where(share < 1, tl.load(lift + place, mask=mask, other=0.0), 0.0)
    through = tl.exp(tl.minimum(s + tl.load(a + place, mask=mask, other=0.0) + lifts, UNIT))
    through = tl.where(inside[None, :] & (driven > 0), through, 0.0)
    return through, share, through * driven, nus, is_best


@triton.jit
@no_type_check
def _sums(
    x,
    y,
    fx,
    fy,
    left,
    right,
    a,
    w,
    rho,
    nu,
    lift,
    reach,
    best,
    resistance,
    friction,
    step,
    by_resistance,
    by_friction,
    at_s,
    at_u,
    table,
    nodes,
    dx,
    dfx,
    da,
    dw,
    drho,
    dnu,
    product,
    H,
    F,
    G,
    D,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """product_i = Σ_j z_ij right_j, dx_i = Σ_j ds_ij y_j and dx̃_i = Σ_j du_ij ỹ_j, and row sums, as far as requested.

    For gradients of a product ds = z g and du = −y g with g_ij = left_i·right_j; for those of potentials see
    ``tiled.Pulls``, with g = −step.
    """
    head, row, within, begin, end = own_rows(table, nodes, H, BLOCK_M)
    f = tl.arange(0, BLOCK_F)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    xs = load(x, row, within, head, H * F, F, f, F, OPERAND)
    fxs = load(fx, row, within, head, H * G, G, g, G, OPERAND)
    if left is not None:
        lefts = load(left, row, within, head, H * D, D, d, D, OPERAND)
    dxs = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    dfxs = tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    nothing = tl.zeros([BLOCK_M], tl.float32)
    das = nothing
    dws = nothing
    drhos = nothing
    dnus = nothing
    for start in range(begin, end, BLOCK_N):
        col, inside, s, u, ys, fys = _scores(
            xs, fxs, y, fy, start, end, head, H, F, G, PRECISION, BLOCK_N
        )
        place = (row * H + head)[:, None]
        mask = within[:, None]
        node = col[None, :]
        if TURNED:
            place = (col * H + head)[None, :]
            mask = inside[None, :]
            node = row[:, None]
        through, share, flow, nus, is_best = _entries(
            s, u, a, w, rho, nu, lift, reach, best, place, mask, inside, node
        )
        if right is not None:
            rights = load(right, col, inside, head, H * D, D, d, D, OPERAND)
        if product is not None:
            sums = tl.dot(flow.to(OPERAND), rights, sums, input_precision=PRECISION)
        if dx is not None:
            if left is not None:
                outer = tl.dot(lefts, tl.trans(rights), input_precision=PRECISION)
            else:
                outer = -tl.load(step + place, mask=mask, other=0.0)
            through *= outer
            ds = flow * outer
            du = tl.where(is_best, 0.0, -nus * share * through)
            das = das + tl.sum(ds, axis=1)
            dws = dws - tl.sum(du, axis=1)
            drhos += tl.sum(through, axis=1)
            dnus -= tl.sum((share - 1) * through, axis=1)
            if resistance is not None:
                # At most one: a recomputed score may be rounded differently.
                resist = tl.exp(
                    tl.minimum(-s - tl.load(resistance + place, mask=mask, other=0.0), 0.0)
                )
                resist *= tl.load(by_resistance + place, mask=mask, other=0.0)
                resist = (
                    tl.where(is_best, tl.load(at_s + place, mask=mask, other=0.0), 0.0) - resist
                )
                rub = tl.exp(tl.minimum(u - tl.load(friction + place, mask=mask, other=0.0), 0.0))
                rub *= tl.load(by_friction + place, mask=mask, other=0.0)
                rub = tl.where(is_best, tl.load(at_u + place, mask=mask, other=0.0), 0.0) - rub
                ds = ds + tl.where(inside[None, :], resist, 0.0)
                du = du + tl.where(inside[None, :], rub, 0.0)
            dxs = tl.dot(ds.to(OPERAND), ys, dxs, input_precision=PRECISION)
            dfxs = tl.dot(du.to(OPERAND), fys, dfxs, input_precision=PRECISION)
    if dx is not None:
        store(dx, row, within, head, H, f, F, dxs)
        store(dfx, row, within, head, H, g, G, dfxs)
    if dnu is not None:
        tl.store(dnu + row * H + head, dnus, mask=within)
    if da is not None:
        tl.store(da + row * H + head, das, mask=within)
        tl.store(dw + row * H + head, dws, mask=within)
        tl.store(drho + row * H + head, drhos, mask=within)
    if product is not None:
        store(product, row, within, head, H, d, D, sums)


def _plan(
    q: Tensor, fq: Tensor, channels: int, ptr: Tensor | None
) -> tuple[Tiles, tuple[int], dict[str, Any]]:
    size, options = operands(q.dtype)
    blocks = [padded(width) for width in (q.size(2), fq.size(2), channels)]
    wide = (
        max(blocks) * size
    )  # bytes of a row; tiles of all three kinds have to fit into shared memory
    if wide <= 128:
        side = 64
    elif wide <= 256:
        side = 32
    else:
        side = 16
    options |= {"BLOCK_M": side, "BLOCK_N": side, "BLOCK_F": blocks[0], "BLOCK_G": blocks[1]}
    options |= {"num_warps": 4, "num_stages": 2 if wide <= 256 else 1}
    runs = tiles(ptr, q.size(0), side, q.device)
    return runs, (runs.number * q.size(1),), options


def potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    q, k, fq, fk, lam, leak = contiguous(*features, lam, leak)
    out = empty_potentials(lam)
    with torch.cuda.device_of(q):
        runs, grid, options = _plan(q, fq, 0, ptr)
        _potentials[grid](
            q, k, fq, fk, lam, leak, *runs.bounds, *out, q.size(1), q.size(2), fq.size(2), **options
        )
    return out


def product(
    features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool
) -> Tensor:
    q, k, fq, fk, v, *of_rows = contiguous(*features, v, *terms)
    out = torch.empty_like(v)
    with torch.cuda.device_of(q):
        runs, grid, options = _plan(q, fq, v.size(2), ptr)
        sizes = (q.size(1), q.size(2), fq.size(2), v.size(2))
        pairs = (k, q, fk, fq) if transpose else (q, k, fq, fk)
        options |= {"BLOCK_D": padded(v.size(2)), "TURNED": transpose}
        _sums[grid](
            *pairs,
            None,
            v,
            *of_rows,
            *7 * [None],
            *runs.bounds,
            *6 * [None],
            out,
            *sizes,
            **options,
        )
    return out


def _gradients(
    features: list[Tensor],
    terms: list[Tensor],
    pulls: Sequence[Tensor | None],
    values: tuple[Tensor | None, Tensor | None],
    products: tuple[Tensor | None, Tensor | None],
    sums: Sequence[Tensor | None],
    ptr: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return gradients of q, k, q̃ and k̃; receivers write ``sums`` and the first of ``products``, senders the second."""
    q, k, fq, fk = features
    grads = [torch.empty_like(x) for x in features]
    left, right = values
    channels = 0 if left is None else left.size(2)
    with torch.cuda.device_of(q):
        runs, grid, options = _plan(q, fq, channels, ptr)
        options |= {"BLOCK_D": padded(channels)}
        sizes = (q.size(1), q.size(2), fq.size(2), channels)
        of_rows = (*terms, *pulls, *runs.bounds)
        to = (grads[0], grads[2], *sums, products[0])
        of = (grads[1], grads[3], *4 * [None], products[1])
        _sums[grid](q, k, fq, fk, left, right, *of_rows, *to, *sizes, TURNED=False, **options)
        _sums[grid](k, q, fk, fq, right, left, *of_rows, *of, *sizes, TURNED=True, **options)
    return tuple(grads)


def product_backward(
    grad: Tensor,
    features: Features,
    v: Tensor,
    terms: RowTerms,
    ptr: Tensor | None,
    transpose: bool,
) -> tuple[Tensor, ...]:
    pairs = contiguous(*features)
    of_rows = contiguous(*terms)
    (grad, v) = contiguous(grad, v)
    dv, *sums = (torch.empty_like(x) for x in (v, *of_rows[:4]))
    values, products = ((v, grad), (dv, None)) if transpose else ((grad, v), (None, dv))
    return *_gradients(pairs, of_rows, 7 * [None], values, products, sums, ptr), dv, *sums


def potentials_backward(
    grad_a: Tensor,
    grad_w: Tensor,
    grad_rho: Tensor,
    grad_nu: Tensor,
    grad_mu: Tensor,
    features: Features,
    lam: Tensor,
    leak: Tensor,
    solution: RowPotentials,
    ptr: Tensor | None,
) -> tuple[Tensor, ...]:
    pull = tiled.pulls(grad_a, grad_w, grad_rho, grad_nu, grad_mu, lam, leak, solution)
    of_rows = contiguous(solution.resistance, solution.friction, *pull[:5])
    terms = contiguous(*solution.terms)
    dnu = torch.empty_like(lam)
    nothing = (None, None)
    grads = _gradients(
        contiguous(*features), terms, of_rows, nothing, nothing, (None, None, None, dnu), ptr
    )
    return *grads, dnu * pull.nu + pull.by_lam, pull.leak
