"""The GPU path: a sum over senders, and a pass over receivers, each reading its rows once.

The state of n rows x̃ (k, or k/‖k‖) and y is [[M, m], [rᵀ, n]], [F + 1, D + 1], with M = Σ x̃ yᵀ, m = Σ w x̃ and r = Σ y,
summed in a fixed order without atomics. Forward the state of k and v meets q. Backward, with g_i = grad_i/d_i and
h_i = −grad_i·out_i/d_i, the state of q and g (w = h) meets k, and the first state, recomputed in a batch, meets q.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_mp.kernels.gpu import padded, precision, row_contiguous, tiles
from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.triton_rows import load, store

# The smallest normal number: a vector whose entries are all below it counts as zero.
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Programs that share a sum over all rows: some for each processor of a large GPU.
PROGRAMS = 1024


@triton.jit
@no_type_check
def _unit(x):
    """x/‖x‖, zero for zero; the largest entry of x, and the norm of x divided by that, whose squares are in range."""
    size = tl.max(tl.abs(x), axis=1)[:, None]
    size = tl.where(size < TINY, float("inf"), size)
    x = x / size
    norm = tl.sqrt(tl.sum(x * x, axis=1))[:, None]
    norm = tl.where(norm == 0, float("inf"), norm)
    return x / norm, size, norm


@triton.jit
@no_type_check
def _sum_rows(
    x, y, scale, weight, table, out, x_n, x_h, y_n, y_h, H, F, D,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The state of one run of rows, for one head and BLOCK_D channels of y, which are multiplied by ``scale``."""
    program = tl.program_id(0).to(tl.int64)
    part, head, tile = program % PARTS, program // PARTS % H, program // (PARTS * H)
    f, d = tl.arange(0, BLOCK_F), part * BLOCK_D + tl.arange(0, BLOCK_D)
    outer = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    left, right = tl.zeros([BLOCK_F], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    last = tl.load(table + 5 * tile + 1)
    for start in range(tl.load(table + 5 * tile), last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        xs = load(x, row, inside, head, x_n, x_h, f, F, tl.float32)
        ys = load(y, row, inside, head, y_n, y_h, d, D, tl.float32)
        if UNIT:
            xs, _, _ = _unit(xs)
        if scale is not None:
            ys *= tl.load(scale + row * H + head, mask=inside, other=0.0)[:, None]
        outer = tl.dot(tl.trans(xs), ys, outer, input_precision=PRECISION)
        right += tl.sum(ys, axis=0)
        if weight is not None:
            xs *= tl.load(weight + row * H + head, mask=inside, other=0.0)[:, None]
        left += tl.sum(xs, axis=0)
    out += (tile * H + head) * (F + 1) * (D + 1)
    tl.store(out + f[:, None] * (D + 1) + d[None, :], outer, mask=(f[:, None] < F) & (d[None, :] < D))
    tl.store(out + F * (D + 1) + d, right, mask=d < D)
    if part == 0:
        tl.store(out + f * (D + 1) + D, left, mask=f < F)
        tl.store(out + F * (D + 1) + D, (last - tl.load(table + 5 * tile)).to(tl.float32))


@triton.jit
@no_type_check
def _meet(
    x, y, scale, state, table, out, den, x_n, x_h, y_n, y_h, H, F, D, constant, own,
    OWN: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = Mᵀx̃ + c r + own n y for a run of rows; with ``den`` divided by it, m·x̃ + (c + own) n."""
    program = tl.program_id(0).to(tl.int64)
    part, head, tile = program % PARTS, program // PARTS % H, program // (PARTS * H)
    f, d = tl.arange(0, BLOCK_F), part * BLOCK_D + tl.arange(0, BLOCK_D)
    state += (tl.load(table + 5 * tile + 4) * H + head) * (F + 1) * (D + 1)
    outer = tl.load(state + f[:, None] * (D + 1) + d[None, :], mask=(f[:, None] < F) & (d[None, :] < D), other=0.0)
    left = tl.load(state + f * (D + 1) + D, mask=f < F, other=0.0)
    right = constant * tl.load(state + F * (D + 1) + d, mask=d < D, other=0.0)
    size = tl.load(state + F * (D + 1) + D)
    last = tl.load(table + 5 * tile + 1)
    for start in range(tl.load(table + 5 * tile), last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        xs = load(x, row, inside, head, x_n, x_h, f, F, tl.float32)
        if UNIT:
            xs, _, _ = _unit(xs)
        result = tl.dot(xs, outer, input_precision=PRECISION) + right[None, :]
        if OWN:
            ys = load(y, row, inside, head, y_n, y_h, d, D, tl.float32)
            if scale is not None:
                ys *= tl.load(scale + row * H + head, mask=inside, other=0.0)[:, None]
            result += own * size * ys
        if den is not None:
            total = tl.sum(xs * left[None, :], axis=1) + (constant + own) * size
            result = tl.where(total[:, None] == 0, 0.0, result / tl.where(total == 0, 1.0, total)[:, None])
            if part == 0:
                tl.store(den + row * H + head, total, mask=inside)
        store(out, row, inside, head, H, d, D, result)


@triton.jit
@no_type_check
def _feature_gradient(
    x, y, scale, weight, state, table, dx, x_n, x_h, y_n, y_h, H, F, D,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx̃ = M y + w m for a run of rows, with y multiplied by ``scale``; then dx, through x̃ = x/‖x‖."""
    program = tl.program_id(0).to(tl.int64)
    head, tile = program % H, program // H
    f = tl.arange(0, BLOCK_F)
    state += (tl.load(table + 5 * tile + 4) * H + head) * (F + 1) * (D + 1)
    left = tl.load(state + f * (D + 1) + D, mask=f < F, other=0.0)
    last = tl.load(table + 5 * tile + 1)
    for start in range(tl.load(table + 5 * tile), last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        inside = row < last
        result = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
        for channel in range(0, D, BLOCK_D):
            d = channel + tl.arange(0, BLOCK_D)
            ys = load(y, row, inside, head, y_n, y_h, d, D, tl.float32)
            inside_state = (f[:, None] < F) & (d[None, :] < D)
            outer = tl.load(state + f[:, None] * (D + 1) + d[None, :], mask=inside_state, other=0.0)
            result = tl.dot(ys, tl.trans(outer), result, input_precision=PRECISION)
        if scale is not None:
            result *= tl.load(scale + row * H + head, mask=inside, other=0.0)[:, None]
        if weight is not None:
            result += tl.load(weight + row * H + head, mask=inside, other=0.0)[:, None] * left[None, :]
        else:
            result += left[None, :]
        if UNIT:
            xs = load(x, row, inside, head, x_n, x_h, f, F, tl.float32)
            xs, size, norm = _unit(xs)
            result = (result - tl.sum(result * xs, axis=1)[:, None] * xs) / norm / size
        store(dx, row, inside, head, H, f, F, result)


@triton.jit
@no_type_check
def _row_terms(grad, out, den, scale, weight, rows, g_n, g_h, H, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """1/d_i and h_i = −grad_i·out_i/d_i of rows and heads; both 0 where d_i = 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < rows
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d[None, :] < D)
    gs = tl.load(grad + (at // H * g_n + at % H * g_h)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    outs = tl.load(out + at[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    dens = tl.load(den + at, mask=inside, other=0.0)
    inverse = tl.where(dens == 0, 0.0, 1.0 / tl.where(dens == 0, 1.0, dens))
    tl.store(scale + at, inverse, mask=inside)
    tl.store(weight + at, -tl.sum(gs * outs, axis=1) * inverse, mask=inside)


class _Launch:
    """The sizes [N, H, F] and [N, H, D] of one operation, its runs of rows, and the options of all kernels."""

    def __init__(self, x: Tensor, y: Tensor, terms: Terms) -> None:
        (self.nodes, self.heads, self.features), self.channels = x.shape, y.size(2)
        # Enough rows for the states of all runs to be small compared to the inputs.
        least = max(256, 4 * padded(self.features), 4 * padded(self.channels))
        rows = max(least, 1 << (triton.cdiv(self.nodes * self.heads, PROGRAMS) - 1).bit_length())
        self.table, self.offset = tiles(terms.ptr, self.nodes, rows, x.device)
        self.runs, self.graphs = len(self.table), len(self.offset) - 1
        wide = padded(self.features)
        block = min(64 if wide <= 64 else 32, padded(self.channels))
        self.parts = max(1, triton.cdiv(self.channels, block))  # denominators also where there is no channel
        self.sizes = (self.heads, self.features, self.channels)
        self.options: dict[str, Any] = {
            "UNIT": terms.unit,
            "PRECISION": precision(x.dtype),
            "BLOCK_N": 64 if wide <= 64 else 32 if wide <= 128 else 16,
            "BLOCK_F": wide,
            "BLOCK_D": block,
            "num_warps": 4 if wide <= 64 else 8,
            "num_stages": 2 if wide <= 128 else 1,
        }

    def state(self, x: Tensor, y: Tensor, scale: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Return the state of every graph and head, [B, H, F + 1, D + 1] in float32."""
        shape = (self.heads, self.features + 1, self.channels + 1)
        runs = torch.empty(self.runs, *shape, dtype=torch.float32, device=x.device)
        sizes = (*x.stride()[:2], *y.stride()[:2], *self.sizes)
        options = {"PARTS": self.parts, **self.options}
        _sum_rows[(self.runs * self.heads * self.parts,)](x, y, scale, weight, self.table, runs, *sizes, **options)
        if self.runs == self.graphs:
            return runs
        if self.graphs == 1:
            return runs.sum(0, keepdim=True)
        return torch.segment_reduce(runs.flatten(1), "sum", offsets=self.offset).unflatten(1, shape)

    def meet(
        self, x: Tensor, y: Tensor, scale: Tensor | None, state: Tensor, den: Tensor | None, constant: float, own: float
    ) -> Tensor:
        """Return Mᵀx̃ + c r + own n y of every row, divided by denominators if these are requested."""
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        _meet[(self.runs * self.heads * self.parts,)](
            x, y, scale, state, self.table, out, den, *x.stride()[:2], *y.stride()[:2], *self.sizes,
            constant, own, OWN=own != 0, PARTS=self.parts, **self.options,
        )  # fmt: skip
        return out

    def feature_gradient(
        self, x: Tensor, y: Tensor, state: Tensor, scale: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Return M y + w m of every row, through the norm of x."""
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        grid, strides = (self.runs * self.heads,), (*x.stride()[:2], *y.stride()[:2])
        _feature_gradient[grid](x, y, scale, weight, state, self.table, dx, *strides, *self.sizes, **self.options)
        return dx


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the result in the dtype of v, and in float32 the denominators and the state of a single graph."""
    q, k, v = (row_contiguous(x) for x in (q, k, v))
    with torch.cuda.device_of(q):
        launch = _Launch(k, v, terms)
        state = launch.state(k, v)
        den = torch.empty(v.shape[:2], dtype=torch.float32, device=v.device)
        out = launch.meet(q, v, None, state, den, terms.constant, terms.own)
        return LinearRows(out, den, state.squeeze(0) if terms.ptr is None else state.new_empty(0, *state.shape[2:]))


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: LinearRows, terms: Terms) -> tuple[Tensor, ...]:
    grad, q, k, v = (row_contiguous(x) for x in (grad, q, k, v))
    with torch.cuda.device_of(q):
        values, den = out.values.contiguous(), out.den.contiguous()
        scale, weight = torch.empty_like(den), torch.empty_like(den)
        sizes = (den.numel(), *grad.stride()[:2], *grad.shape[1:])
        options = {"BLOCK_N": 32, "BLOCK_D": padded(grad.size(2)), "num_warps": 4}
        _row_terms[(triton.cdiv(den.numel(), 32),)](grad, values, den, scale, weight, *sizes, **options)
        launch = _Launch(k, v, terms)
        state = out.pooled if terms.ptr is None else launch.state(k, v)
        dq = launch.feature_gradient(q, grad, state, scale, weight)
        state = launch.state(q, grad, scale, weight)
        dk = launch.feature_gradient(k, v, state)
        return dq, dk, launch.meet(k, grad, scale, state, None, terms.constant, terms.own)
