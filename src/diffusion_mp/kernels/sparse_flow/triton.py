"""The GPU path: one program per run of rows meets all columns of its graph once per pass; no score is kept.

The row problems are solved as ``tiled.py`` solves them, in its notation: a pass for the normalisers, one for every step
of Newton's method, which ends when no row of the run falls any more, and one that normalises the rows. In the backward
passes receivers and senders are gathered by a program each, with the roles exchanged (``TURNED``: λ, a and w belong to
the columns), so that no sum needs atomics and every one has a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_mp.kernels.gpu import contiguous, padded, tiles
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.precision import exp_limit
from diffusion_mp.kernels.sparse_flow import newton, tiled
from diffusion_mp.kernels.sparse_flow.rows import Features, RowPotentials, RowTerms
from diffusion_mp.kernels.triton_rows import load, operands, own_rows, store

LIMIT = tl.constexpr(exp_limit(torch.float32))
EPS = tl.constexpr(torch.finfo(torch.float32).eps)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
MAX_STEPS = tl.constexpr(newton.MAX_STEPS)


@triton.jit
@no_type_check
def _scores(
    xs, fxs, y, fy, col, inside, head, H, F, G,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Tiles of s = x·y and u = x̃·ỹ, and the rows y and ỹ."""
    ys = load(y, col, inside, head, H * F, F, tl.arange(0, BLOCK_F), F, OPERAND)
    fys = load(fy, col, inside, head, H * G, G, tl.arange(0, BLOCK_G), G, OPERAND)
    s = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
    return s, tl.dot(fxs, tl.trans(fys), input_precision=PRECISION), ys, fys


@triton.jit
@no_type_check
def _add_exp(level, total, x, inside):
    """Add the columns inside to Σ e^{x − ℓ} of every row; the level ℓ is the largest x so far, and rises."""
    above = tl.maximum(level, tl.max(tl.where(inside[None, :], x, float("-inf")), axis=1))
    new = tl.sum(tl.where(inside[None, :], tl.exp(tl.minimum(x - above[:, None], 0.0)), 0.0), axis=1)
    return above, total * tl.exp(level - above) + new


@triton.jit
@no_type_check
def _potentials(
    q, k, fq, fk, lam, leak, table, a, w, log_mu, resistances, slopes, works, supports, H, F, G,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The row problems of one run of rows: see ``tiled.solve``."""
    head, row, within, begin, end = own_rows(table, H, BLOCK_M)
    place = row * H + head
    xs = load(q, row, within, head, H * F, F, tl.arange(0, BLOCK_F), F, OPERAND)
    fxs = load(fq, row, within, head, H * G, G, tl.arange(0, BLOCK_G), G, OPERAND)
    lams = tl.load(lam + place, mask=within, other=0.0)
    leaks = tl.load(leak + place, mask=within, other=0.0)

    nothing = tl.zeros([BLOCK_M], tl.float32)
    # The largest −s, s, u and −u, and sums relative to the first and third.
    steepest, top, easiest, hardest = nothing + LOWEST, nothing + LOWEST, nothing + LOWEST, nothing + LOWEST
    resistance, friction = nothing, nothing
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        inside = col < end
        s, u, _, _ = _scores(xs, fxs, k, fk, col, inside, head, H, F, G, PRECISION, OPERAND, BLOCK_F, BLOCK_G)
        steepest, resistance = _add_exp(steepest, resistance, -s, inside)
        easiest, friction = _add_exp(easiest, friction, u, inside)
        top = tl.maximum(top, tl.max(tl.where(inside[None, :], s, float("-inf")), axis=1))
        hardest = tl.maximum(hardest, tl.max(tl.where(inside[None, :], -u, float("-inf")), axis=1))
    resistance = tl.log(resistance) + steepest
    friction = tl.log(friction) + easiest
    log_scale = resistance + top  # log of the largest conductance
    log_lam = tl.where(lams > 0, tl.log(tl.where(lams > 0, lams, 1.0)), float("-inf"))
    offset = log_lam - friction + log_scale
    scaled_leak = leaks * tl.exp(-log_scale)

    # Newton's method from the right, where every entry is active: see ``newton.py``.
    root = nothing + float("inf")
    falling = tl.max(nothing) == 0
    steps = 0
    while falling & (steps < MAX_STEPS):
        slope, driven = scaled_leak, nothing + 1.0
        for start in range(begin, end, BLOCK_N):
            col = start + tl.arange(0, BLOCK_N)
            inside = col < end
            s, u, _, _ = _scores(xs, fxs, k, fk, col, inside, head, H, F, G, PRECISION, OPERAND, BLOCK_F, BLOCK_G)
            threshold = tl.exp(tl.minimum(u + offset[:, None], LIMIT))
            active = inside[None, :] & (threshold < root[:, None])
            weight = tl.where(active, tl.exp(s - top[:, None]), 0.0)
            slope += tl.sum(weight, axis=1)
            driven += tl.sum(weight * threshold, axis=1)
        following = driven / tl.where(slope > 0, slope, 1.0)
        falls = (slope > 0) & (following < root)
        root = tl.where(falls, following, root)
        falling = tl.max(falls.to(tl.int32)) > 0
        steps += 1
    mu = tl.log(root) - log_scale

    # The entry of least friction keeps its flow where the rounding of w would close it.
    least = log_lam - hardest - friction
    slack = 8 * EPS * (1 + tl.abs(hardest) + tl.abs(log_lam) + tl.abs(friction))
    held = (tl.exp(least) * leaks < 1) & (lams > 0)
    mu = tl.where(held, tl.maximum(mu, least + slack), mu)
    ws = friction + mu

    level = nothing + LOWEST  # the largest s of an entry that flows
    through, flow, work, support = nothing, nothing, nothing, nothing
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        inside = col < end
        s, u, _, _ = _scores(xs, fxs, k, fk, col, inside, head, H, F, G, PRECISION, OPERAND, BLOCK_F, BLOCK_G)
        theta = tl.exp(tl.minimum(u - ws[:, None], LIMIT)) * lams[:, None]
        active = inside[None, :] & (theta < 1)
        above = tl.maximum(level, tl.max(tl.where(active, s, float("-inf")), axis=1))
        shrink = tl.exp(level - above)
        level = above
        weight = tl.where(active, tl.exp(tl.minimum(s - level[:, None], 0.0)), 0.0)
        through = through * shrink + tl.sum(weight, axis=1)
        weight *= 1 - theta
        flow = flow * shrink + tl.sum(weight, axis=1)
        work = work * shrink + tl.sum(weight * tl.where(active, theta, 0.0), axis=1)
        support += tl.sum(active.to(tl.float32), axis=1)
    lost = tl.exp(mu) * leaks
    flows = flow > 0
    norm = tl.where(flows, tl.maximum(1 - lost, TINY) / tl.where(flows, flow, 1.0), 0.0)
    tl.store(a + place, tl.where(flows, tl.log(tl.where(flows, norm, 1.0)) - level, resistance + mu), mask=within)
    tl.store(w + place, ws, mask=within)
    tl.store(log_mu + place, mu, mask=within)
    tl.store(resistances + place, resistance, mask=within)
    tl.store(slopes + place, through * norm + lost, mask=within)
    tl.store(works + place, work * norm * tl.exp(mu), mask=within)
    tl.store(supports + place, support, mask=within)


@triton.jit
@no_type_check
def _entries(s, u, lam, a, w, place, mask, inside):
    """e^{s + a} on the support (0 elsewhere), e^{u − w} (cut off beyond it), and λ."""
    lams = tl.load(lam + place, mask=mask, other=0.0)
    force = tl.exp(tl.minimum(u - tl.load(w + place, mask=mask, other=0.0), LIMIT))
    through = tl.exp(tl.minimum(s + tl.load(a + place, mask=mask, other=0.0), LIMIT))
    return tl.where(inside[None, :] & (lams * force < 1), through, 0.0), force, lams


@triton.jit
@no_type_check
def _product(
    x, y, fx, fy, v, lam, a, w, table, out, H, F, G, D,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Σ_j z_ij v_j."""
    head, row, within, begin, end = own_rows(table, H, BLOCK_M)
    f, g, d = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    xs = load(x, row, within, head, H * F, F, f, F, OPERAND)
    fxs = load(fx, row, within, head, H * G, G, g, G, OPERAND)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        inside = col < end
        place, mask = (row * H + head)[:, None], within[:, None]
        if TURNED:
            place, mask = (col * H + head)[None, :], inside[None, :]
        s, u, _, _ = _scores(xs, fxs, y, fy, col, inside, head, H, F, G, PRECISION, OPERAND, BLOCK_F, BLOCK_G)
        through, force, lams = _entries(s, u, lam, a, w, place, mask, inside)
        flow = through * (1 - force * lams)
        values = load(v, col, inside, head, H * D, D, d, D, OPERAND)
        sums = tl.dot(flow.to(OPERAND), values, sums, input_precision=PRECISION)
    store(out, row, within, head, H, d, D, sums)


@triton.jit
@no_type_check
def _gradient(
    x, y, fx, fy, left, right, lam, a, w, step, resistance, by_resistance, friction, by_friction,
    table, dx, dfx, dlam, da, dw, product, H, F, G, D,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx_i = Σ_j ds_ij y_j and dx̃_i = Σ_j du_ij ỹ_j; where they are wanted, row sums and product_i = Σ_j z_ij right_j.

    ds = z g − ρ r and du = −y g + φ f. Of a product g_ij = left_i·right_j, and ρ = φ = 0; of the potentials g = −step.
    """
    head, row, within, begin, end = own_rows(table, H, BLOCK_M)
    f, g, d = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    xs = load(x, row, within, head, H * F, F, f, F, OPERAND)
    fxs = load(fx, row, within, head, H * G, G, g, G, OPERAND)
    if left is not None:
        lefts = load(left, row, within, head, H * D, D, d, D, OPERAND)
    dxs, dfxs = tl.zeros([BLOCK_M, BLOCK_F], tl.float32), tl.zeros([BLOCK_M, BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    nothing = tl.zeros([BLOCK_M], tl.float32)
    das, dws, dlams = nothing, nothing, nothing
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        inside = col < end
        place, mask = (row * H + head)[:, None], within[:, None]
        if TURNED:
            place, mask = (col * H + head)[None, :], inside[None, :]
        s, u, ys, fys = _scores(xs, fxs, y, fy, col, inside, head, H, F, G, PRECISION, OPERAND, BLOCK_F, BLOCK_G)
        through, force, lams = _entries(s, u, lam, a, w, place, mask, inside)
        force *= through  # y/λ, 0 beyond the support
        drag = force * lams
        flow = through - drag
        if left is not None:
            rights = load(right, col, inside, head, H * D, D, d, D, OPERAND)
            if product is not None:
                sums = tl.dot(flow.to(OPERAND), rights, sums, input_precision=PRECISION)
            outer = tl.dot(lefts, tl.trans(rights), input_precision=PRECISION)
        else:
            outer = -tl.load(step + place, mask=mask, other=0.0)
        ds, du = flow * outer, -drag * outer
        das, dws = das + tl.sum(ds, axis=1), dws - tl.sum(du, axis=1)
        dlams -= tl.sum(force * outer, axis=1)
        if resistance is not None:
            r = tl.exp(-s - tl.load(resistance + place, mask=mask, other=0.0))
            ds -= tl.load(by_resistance + place, mask=mask, other=0.0) * tl.where(inside[None, :], r, 0.0)
            share = tl.exp(u - tl.load(friction + place, mask=mask, other=0.0))
            du += tl.load(by_friction + place, mask=mask, other=0.0) * tl.where(inside[None, :], share, 0.0)
        dxs = tl.dot(ds.to(OPERAND), ys, dxs, input_precision=PRECISION)
        dfxs = tl.dot(du.to(OPERAND), fys, dfxs, input_precision=PRECISION)
    store(dx, row, within, head, H, f, F, dxs)
    store(dfx, row, within, head, H, g, G, dfxs)
    if dlam is not None:
        tl.store(dlam + row * H + head, dlams, mask=within)
    if da is not None:
        tl.store(da + row * H + head, das, mask=within)
        tl.store(dw + row * H + head, dws, mask=within)
    if product is not None:
        store(product, row, within, head, H, d, D, sums)


def _plan(q: Tensor, fq: Tensor, channels: int, ptr: Tensor | None) -> tuple[Tensor, tuple[int], dict[str, Any]]:
    """Runs of rows, the number of programs, and what all kernels are told."""
    size, options = operands(q.dtype)
    blocks = [padded(width) for width in (q.size(2), fq.size(2), channels)]
    wide = max(blocks) * size  # bytes of a row; tiles of all three kinds have to fit into shared memory
    side = 64 if wide <= 128 else 32 if wide <= 256 else 16
    options |= {
        "BLOCK_M": side,
        "BLOCK_N": side,
        "BLOCK_F": blocks[0],
        "BLOCK_G": blocks[1],
        "num_warps": 4,
        "num_stages": 2 if wide <= 256 else 1,
    }
    table = tiles(ptr, q.size(0), side, q.device).table
    return table, (table.size(0) * q.size(1),), options


def potentials(features: Features, lam: Tensor, leak: Tensor, ptr: Tensor | None) -> RowPotentials:
    """The solved rows, [N, H] in float32: see ``tiled.potentials``."""
    q, k, fq, fk, lam, leak = contiguous(*features, lam, leak)
    out = RowPotentials(*empty_like(*7 * [lam]))
    with torch.cuda.device_of(q):
        table, grid, options = _plan(q, fq, 0, ptr)
        _potentials[grid](q, k, fq, fk, lam, leak, table, *out, q.size(1), q.size(2), fq.size(2), **options)
    return out


def product(features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool) -> Tensor:
    """Σ_j z_ij v_j, or with ``transpose`` Σ_i z_ij v_i, [N, H, D], in the dtype of v."""
    q, k, fq, fk, v, *of_rows = contiguous(*features, v, *terms)
    out = torch.empty_like(v)
    with torch.cuda.device_of(q):
        table, grid, options = _plan(q, fq, v.size(2), ptr)
        sizes = (q.size(1), q.size(2), fq.size(2), v.size(2))
        pairs = (k, q, fk, fq) if transpose else (q, k, fq, fk)
        _product[grid](*pairs, v, *of_rows, table, out, *sizes, TURNED=transpose, BLOCK_D=padded(v.size(2)), **options)
    return out


def _gradients(
    features: list[Tensor], terms: list[Tensor], pulls: Sequence[Tensor | None],
    values: tuple[Tensor | None, Tensor | None], products: tuple[Tensor | None, Tensor | None],
    sums: Sequence[Tensor | None], ptr: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, q̃ and k̃; receivers write ``sums`` and the first of ``products``, senders the second."""
    q, k, fq, fk = features
    grads = [torch.empty_like(x) for x in features]
    left, right = values
    channels = 0 if left is None else left.size(2)
    with torch.cuda.device_of(q):
        table, grid, options = _plan(q, fq, channels, ptr)
        options |= {"BLOCK_D": padded(channels)}
        sizes = (q.size(1), q.size(2), fq.size(2), channels)
        _gradient[grid](
            q, k, fq, fk, left, right, *terms, *pulls, table, grads[0], grads[2], *sums, products[0], *sizes,
            TURNED=False, **options,
        )  # fmt: skip
        _gradient[grid](
            k, q, fk, fq, right, left, *terms, *pulls, table, grads[1], grads[3], None, None, None, products[1],
            *sizes, TURNED=True, **options,
        )  # fmt: skip
    return tuple(grads)


def product_backward(
    grad: Tensor, features: Features, v: Tensor, terms: RowTerms, ptr: Tensor | None, transpose: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k, the friction's q and k, v, λ, a and w: see ``tiled.product_backward``."""
    pairs, of_rows, (grad, v) = contiguous(*features), contiguous(*terms), contiguous(grad, v)
    dv, *sums = (torch.empty_like(x) for x in (v, *of_rows))
    values, products = ((v, grad), (dv, None)) if transpose else ((grad, v), (None, dv))
    return *_gradients(pairs, of_rows, 5 * [None], values, products, sums, ptr), dv, *sums


def potentials_backward(
    grad_a: Tensor, grad_w: Tensor, grad_mu: Tensor, features: Features, lam: Tensor, leak: Tensor,
    solution: RowPotentials, ptr: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, the friction's q and k, λ and 1/α: see ``tiled.potentials_backward``."""
    moved, by_resistance, by_friction, dleak = tiled.pulls(grad_a, grad_w, grad_mu, leak, solution)
    log_friction = solution.w - solution.log_mu
    terms = contiguous(lam, solution.a, solution.w)
    pulls = contiguous(moved, solution.resistance, by_resistance, log_friction, by_friction)
    dlam, nothing = torch.empty_like(terms[0]), (None, None)
    grads = _gradients(contiguous(*features), terms, pulls, nothing, nothing, (dlam, None, None), ptr)
    return *grads, dlam, dleak
