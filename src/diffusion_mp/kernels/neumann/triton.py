"""The GPU path: a run of rows computes where its neighbours are and reads them, for all strides at once.

No index exists in memory, and a row that several strides read is cached after the first.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffusion_mp.kernels.gpu import Tiles, padded, tiles
from diffusion_mp.kernels.neumann.stencil import Stencil
from diffusion_mp.kernels.triton_rows import load, own_rows, store

# Rows of one run.
ROWS = 64


@triton.jit
@no_type_check
def _read(v, row, mask, channel, channels):
    return load(v, row, mask, 0, channels, 0, channel, channels, tl.float32)


@triton.jit
@no_type_check
def _sum_rows(v, first, count, channel, channels, ROWS: tl.constexpr):
    """The sum of ``count`` rows, as one row."""
    place = tl.arange(0, ROWS)
    total = tl.sum(_read(v, first + place, place < count, channel, channels), axis=0)
    for start in range(ROWS, count, ROWS):
        total += tl.sum(
            _read(v, first + start + place, start + place < count, channel, channels), axis=0
        )
    return total[None, :]


@triton.jit
@no_type_check
def _neighbours(v, row, inside, begin, end, stride, channel, channels, BOUNDARY: tl.constexpr):
    """v_left + v_right of rows of the sequence [begin, end); the cases are those of ``stencil.neighbours``."""
    place = row - begin
    length = tl.maximum(end - begin, 1)
    if BOUNDARY == "symmetric":
        step = stride % (2 * length)
        left = (place + 2 * length - step) % (2 * length)
        right = (place + step) % (2 * length)
        left = tl.minimum(left, 2 * length - 1 - left)
        right = tl.minimum(right, 2 * length - 1 - right)
    elif BOUNDARY == "replicate":
        left = tl.maximum(place - stride, 0)
        right = tl.minimum(place + stride, length - 1)
    elif BOUNDARY == "periodic":
        left = (place + length - stride % length) % length
        right = (place + stride) % length
    else:
        left = tl.where(place < stride, place, place - stride)
        right = place
        if BOUNDARY == "drop":
            right = tl.where(place + stride < length, place + stride, place)
    lefts = _read(v, begin + left, inside, channel, channels)
    return lefts + _read(v, begin + right, inside, channel, channels)


@triton.jit
@no_type_check
def _receivers(
    v,
    row,
    inside,
    begin,
    end,
    stride,
    channel,
    channels,
    BOUNDARY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The transpose, for the two boundaries that are not symmetric: the sum over those whose neighbour a row is."""
    result = _read(v, row + stride, inside & (row + stride < end), channel, channels)
    if BOUNDARY == "causal":
        times = 1.0 + (row - begin < stride).to(tl.float32)
        result += times[:, None] * _read(v, row, inside, channel, channels)
    else:
        result += _read(v, row - stride, inside & (row - stride >= begin), channel, channels)
        count = tl.minimum(stride, end - begin)
        head = (inside & (row == begin)).to(tl.float32)
        tail = (inside & (row == end - 1)).to(tl.float32)
        if tl.max(head) > 0:
            result += head[:, None] * _sum_rows(v, begin, count, channel, channels, ROWS)
        if tl.max(tail) > 0:
            result += tail[:, None] * _sum_rows(v, end - count, count, channel, channels, ROWS)
    return result


@triton.jit
@no_type_check
def _product(
    v,
    alpha,
    table,
    nodes,
    out,
    channels,
    H,
    D,
    STRIDES: tl.constexpr,
    BOUNDARY: tl.constexpr,
    TURNED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Σ_k α_k A_{h_k} v of one run of rows and BLOCK_C channels of all heads."""
    part, row, inside, begin, end = own_rows(table, nodes, PARTS, ROWS)
    channel = part * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for k in tl.static_range(len(STRIDES)):
        weight = tl.load(alpha + k * H + channel // D, mask=channel < channels, other=0.0).to(
            tl.float32
        )
        if TURNED:
            pair = _receivers(
                v, row, inside, begin, end, STRIDES[k], channel, channels, BOUNDARY, ROWS
            )
        else:
            pair = _neighbours(v, row, inside, begin, end, STRIDES[k], channel, channels, BOUNDARY)
        total += weight[None, :] * pair
    store(out, row, inside, 0, 1, channel, channels, total)


@triton.jit
@no_type_check
def _inner(
    g,
    v,
    table,
    nodes,
    out,
    channels,
    STRIDES: tl.constexpr,
    BOUNDARY: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Σ_i g_i (A_{h_k} v)_i of one run of rows, for every stride and channel."""
    part, row, inside, begin, end = own_rows(table, nodes, PARTS, ROWS)
    channel = part * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = tl.program_id(0).to(tl.int64) // PARTS
    left = _read(g, row, inside, channel, channels)
    for k in tl.static_range(len(STRIDES)):
        right = _neighbours(v, row, inside, begin, end, STRIDES[k], channel, channels, BOUNDARY)
        at = (tile * len(STRIDES) + k) * channels + channel
        tl.store(out + at, tl.sum(left * right, axis=0), mask=channel < channels)


def _plan(v: Tensor, stencil: Stencil) -> tuple[Tiles, tuple[int], dict[str, Any]]:
    channels = v.size(1) * v.size(2)
    block = min(64, padded(channels))
    parts = triton.cdiv(channels, block)
    runs = tiles(stencil.ptr, v.size(0), ROWS, v.device)
    options = {
        "STRIDES": tuple(stencil.strides),
        "BOUNDARY": stencil.boundary,
        "PARTS": parts,
        "num_warps": 4,
    }
    return runs, (runs.number * parts,), {**options, "ROWS": ROWS, "BLOCK_C": block}


def product(v: Tensor, alpha: Tensor, stencil: Stencil, transpose: bool) -> Tensor:
    v = v.contiguous()
    alpha = alpha.contiguous()
    out = torch.empty_like(v)
    with torch.cuda.device_of(v):
        runs, grid, options = _plan(v, stencil)
        turned = transpose and stencil.boundary in (
            "replicate",
            "causal",
        )  # the others are symmetric
        _product[grid](
            v,
            alpha,
            *runs.bounds,
            out,
            v.size(1) * v.size(2),
            *v.shape[1:],
            TURNED=turned,
            **options,
        )
    return out


def inner(g: Tensor, v: Tensor, stencil: Stencil) -> Tensor:
    """Return ⟨g, A_{h_k} v⟩ of every stride and head, [K, H], summed over runs, then over the channels of a head."""
    g = g.contiguous()
    v = v.contiguous()
    with torch.cuda.device_of(v):
        runs, grid, options = _plan(v, stencil)
        sums = torch.empty(
            runs.number, len(stencil.strides), *v.shape[1:], dtype=torch.float32, device=v.device
        )
        _inner[grid](g, v, *runs.bounds, sums, v.size(1) * v.size(2), **options)
    return sums.sum((0, 3))
