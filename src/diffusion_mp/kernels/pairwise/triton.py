"""The GPU path: one program per run of rows meets all columns of its graph; scores never leave the registers.

Weights and levels are as in ``tiled.py``. In the backward pass receivers and senders have a program each, with the
roles exchanged, so that sums need no atomics and have a fixed order.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_mp.kernels.gpu import (
    contiguous,
    padded,
    tiles,
)
from diffusion_mp.kernels.pairwise.scores import PairwiseRows, Weighting
from diffusion_mp.kernels.triton_rows import load, operands, own_rows, store
from diffusion_mp.runtime.precision import exp_limit

LIMIT = tl.constexpr(exp_limit(torch.float32))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# Two for each processor of a large GPU; with fewer, programs have fewer rows.
PROGRAMS = 256


@triton.jit
@no_type_check
def _pairs(row, col, end, LOOPS: tl.constexpr):
    """Return which pairs of a tile count: columns of the graph, without loops no node with itself."""
    inside = col[None, :] < end
    # A constant of the compiled kernel, so that attention with loops pays for no comparison.
    if not LOOPS:
        inside = inside & (row[:, None] != col[None, :])
    return inside


@triton.jit
@no_type_check
def _weights(s, level, pairs, SIGMOID: tl.constexpr):
    """w = f(s) e^{−ℓ}, zero for pairs that do not count, and φ = (log f)′: σ(−s) = w e^{ℓ − s}, or 1 for exp."""
    if SIGMOID:
        # A NaN stays NaN: by default the smaller of a NaN and a number is the number.
        least = tl.minimum(level - s, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        odds = tl.exp(least)
        w = tl.where(pairs, 1.0 / (odds + tl.exp(level)), 0.0)
        slope = w * odds
    else:
        w = tl.where(pairs, tl.exp(s - level), 0.0)
        slope = 1.0
    return w, slope


@triton.jit
@no_type_check
def _attention(
    q,
    k,
    v,
    table,
    nodes,
    out,
    lse,
    H,
    F,
    D,
    SIGMOID: tl.constexpr,
    LOOPS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Σ_j w_ij v_j / Σ_j w_ij and log Σ_j f(s_ij). The level is the largest log f so far; sums shrink as it rises."""
    head, row, within, begin, end = own_rows(table, nodes, H, BLOCK_M)
    f = tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    queries = load(q, row, within, head, H, f, F, OPERAND)
    level = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        inside = col < end
        keys = load(k, col, inside, head, H, f, F, OPERAND)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        pairs = _pairs(row, col, end, LOOPS)
        # Of the scores, since log f rises with them: one logarithm per row and tile.
        above = tl.max(tl.where(pairs, s, float("-inf")), axis=1)
        if SIGMOID:
            above = tl.minimum(above, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(above)))
        above = tl.maximum(level, above)
        # What has been summed at the lower level is scaled down to the new one.
        shrink = tl.exp(level - above)
        level = above
        w, _ = _weights(s, level[:, None], pairs, SIGMOID)
        total = total * shrink + tl.sum(w, axis=1)
        if VALUES:
            values = load(v, col, inside, head, H, d, D, OPERAND)
            sums = tl.dot(
                w.to(OPERAND), values, sums * shrink[:, None], input_precision=PRECISION
            )
    total = tl.where(within, total, 1.0)
    tl.store(lse + row * H + head, tl.log(total) + level, mask=within)
    if VALUES:
        # The largest weight of a row is one. Only a node that is alone has no pair, and stays zero.
        sums /= tl.maximum(total, 0.5)[:, None]
        store(out, row, within, head, H, d, D, sums)


@triton.jit
@no_type_check
def _sums(
    x,
    y,
    left,
    right,
    row_shift,
    col_shift,
    row_delta,
    col_delta,
    table,
    nodes,
    dx,
    product,
    H,
    F,
    D,
    SIGMOID: tl.constexpr,
    LOOPS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """product_i = Σ_j w_ij right_j and dx_i = Σ_j w_ij φ_ij (left_i·right_j − δ_i − δ_j) y_j, or one of them."""
    head, row, within, begin, end = own_rows(table, nodes, H, BLOCK_M)
    f = tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    xs = load(x, row, within, head, H, f, F, OPERAND)
    # Only a gradient needs them, and Triton compiles a branch on ``None`` away.
    if dx is not None:
        lefts = load(left, row, within, head, H, d, D, OPERAND)
    # A level is subtracted, and a shift is added.
    row_level = tl.zeros([BLOCK_M], tl.float32)
    if row_shift is not None:
        row_level -= tl.load(row_shift + row * H + head, mask=within, other=0.0)
    gradient = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        inside = col < end
        ys = load(y, col, inside, head, H, f, F, OPERAND)
        rights = load(right, col, inside, head, H, d, D, OPERAND)
        level = row_level[:, None]
        if col_shift is not None:
            level -= tl.load(col_shift + col * H + head, mask=inside, other=0.0)[
                None, :
            ]
        s = tl.dot(xs, tl.trans(ys), input_precision=PRECISION)
        w, slope = _weights(s, level, _pairs(row, col, end, LOOPS), SIGMOID)
        if product is not None:
            sums = tl.dot(w.to(OPERAND), rights, sums, input_precision=PRECISION)
        if dx is not None:
            g = tl.dot(lefts, tl.trans(rights), input_precision=PRECISION)
            if row_delta is not None:
                g -= tl.load(row_delta + row * H + head, mask=within, other=0.0)[
                    :, None
                ]
            if col_delta is not None:
                g -= tl.load(col_delta + col * H + head, mask=inside, other=0.0)[
                    None, :
                ]
            g *= w * slope
            gradient = tl.dot(g.to(OPERAND), ys, gradient, input_precision=PRECISION)
    if dx is not None:
        store(dx, row, within, head, H, f, F, gradient)
    if product is not None:
        store(product, row, within, head, H, d, D, sums)


def _plan(q: Tensor, v: Tensor, weighting: Weighting) -> tuple[Any, Any, Any, Any]:
    """Return the bounds of the runs of rows, the grid of programs, H, F and D, and options of the kernels."""
    features = padded(q.size(2))
    channels = padded(v.size(2))
    size, options = operands(q.dtype, min(features, channels))
    # Parts in bfloat16 take less shared memory than TF32 numbers.
    halves = options["PRECISION"] == "bf16x6"
    # Bytes of a row; tiles of rows have to fit into shared memory.
    wide = max(features, channels) * size
    if wide <= 256:
        height = 64
    elif wide <= 512:
        height = 32
    else:
        height = 16
    # Few rows are cut into more programs, or most processors would have none.
    while height > 16 and q.size(0) * q.size(1) < PROGRAMS * height:
        height //= 2
    if wide <= (256 if halves else 128):
        width = 64
    elif wide <= 512:
        width = 32
    else:
        width = 16
    if wide > 256 or (halves and height == 64):
        stages = 1
    elif size == 2 and wide <= 128:
        stages = 3
    else:
        stages = 2
    options |= {
        "SIGMOID": weighting.score == "sigmoid",
        "LOOPS": weighting.loops,
        "BLOCK_M": height,
        "BLOCK_N": width,
        "BLOCK_F": features,
        "BLOCK_D": channels,
        # Four warps have 64 rows between them; eight made a product of the matrix units read past its tile on an H100.
        "num_warps": 4,
        "num_stages": stages,
    }
    runs = tiles(weighting.ptr, q.size(0), height, q.device)
    sizes = (*q.shape[1:], v.size(2))
    return runs.bounds, (runs.number * q.size(1),), sizes, options


def attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> PairwiseRows:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in float32."""
    q, k, v = contiguous(q, k, v)
    out = torch.empty_like(v)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        bounds, grid, sizes, options = _plan(q, v, weighting)
        options["VALUES"] = v.size(2) > 0
        _attention[grid](q, k, v, *bounds, out, lse, *sizes, **options)
    return PairwiseRows(out, lse)


def product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    q, k, v, a, b = contiguous(q, k, v, *weighting[:2])
    out = torch.empty_like(v)
    with torch.cuda.device_of(q):
        bounds, grid, sizes, options = _plan(q, v, weighting)
        # Only a gradient reads rows on the left, and a δ of rows or columns.
        receivers = (q, k, None, v, a, b, None, None, *bounds)
        _sums[grid](*receivers, None, out, *sizes, **options)
    return out


def backward(
    grad: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
) -> tuple[Tensor, ...]:
    grad, delta, q, k, v, a, b = contiguous(grad, delta, q, k, v, *weighting[:2])
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    with torch.cuda.device_of(q):
        bounds, grid, sizes, options = _plan(q, v, weighting)
        # The rows of a program are receivers, which meet senders, and then senders, which meet receivers.
        receivers = (q, k, grad, v, a, b, delta, None, *bounds)
        senders = (k, q, v, grad, b, a, None, delta, *bounds)
        _sums[grid](*receivers, dq, None, *sizes, **options)
        _sums[grid](*senders, dk, dv, *sizes, **options)
    return dq, dk, dv
