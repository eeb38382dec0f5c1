"""The fast path: tiles of rows by columns of one graph that stay in cache, small graphs of equal size stacked.

With a level ℓ a tile has the weights w_ij = f(s_ij) e^{−ℓ}. The level is subtracted before anything is exponentiated,
so no weight overflows where ℓ is the logarithm of the row's largest score or of its sum.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from diffusion_mp.kernels.buffers import Buffers
from diffusion_mp.kernels.pairwise.scores import Attended, Weighting, log_score
from diffusion_mp.kernels.precision import accumulating, exp_limit
from diffusion_mp.kernels.segments import Rows, put, row_blocks, stack

# Entries of one tile over all heads: 2 MiB in float32, so that two or three of them stay in cache.
TILE = 1 << 19
# A GPU wants tiles this many times as large.
ON_GPU = 64


def _tiles(ptr: Tensor | None, like: Tensor) -> Iterator[tuple[Rows, list[Rows]]]:
    """Yield rows, and the blocks of columns of their graph, until every pair of nodes of a graph was met once."""
    entries = (TILE if like.device.type == "cpu" else TILE * ON_GPU) // like.size(1)
    # Tiles of large graphs are square; those of small ones hold as many whole graphs as there is room for.
    height = lambda size: max(math.isqrt(entries), entries // size)  # noqa: E731
    for _, _, blocks in row_blocks(ptr, like.size(0), height, like.device):
        for block in blocks:
            yield block, blocks


def _tile(left: Tensor, right: Tensor) -> tuple[int, int, int]:
    """The shape [b, n, m] of a tile, for left [b, n, F] and right [b, m, F]."""
    return left.size(0), left.size(1), right.size(1)


def _add_product(out: Tensor, rows: Rows, a: Tensor, b: Tensor) -> None:
    """Add a b to rows of ``out``; those of stacked graphs are met once, so there is nothing to add to."""
    if isinstance(rows, slice):
        stack(out, rows).baddbmm_(a, b)
    else:
        put(out, rows, a @ b)


def _loops(tile: Tensor, rows: Rows, cols: Rows) -> Tensor:
    """The entries of a tile [b, n, m] whose node meets itself, a view: none unless rows and columns are the same."""
    return tile.diagonal(dim1=1, dim2=2) if rows is cols else tile[:, :0]


def _weights(below: Tensor, level: Tensor, score: str, out: Tensor) -> Tensor:
    """w = f(s) e^{−ℓ}; ``below`` is ℓ − s, and e^{ℓ − s} afterwards for the sigmoid, where σ(−s) = w e^{ℓ − s}."""
    if score == "exp":
        return torch.exp(below.neg_(), out=out)
    return torch.add(below.exp_(), level.exp(), out=out).reciprocal_()


def attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str, loops: bool = True) -> Attended:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in at least float32.

    The level of a row is the largest log f(s_ij) so far, finite even where there is none; where it rises, the sums
    shrink.
    """
    (q, k, v), dtype = accumulating(q, k, v)
    out, lse = torch.empty_like(v, memory_format=torch.contiguous_format), q.new_empty(*q.shape[:2], 1)
    buffer = Buffers(q, q.dtype)
    for rows, blocks in _tiles(ptr, q):
        queries = stack(q, rows)
        level = queries.new_full((*queries.shape[:2], 1), torch.finfo(q.dtype).min)
        total, sums = torch.zeros_like(level), queries.new_zeros(*queries.shape[:2], v.size(2))
        for cols in blocks:
            keys, values = stack(k, cols), stack(v, cols)
            tile = _tile(queries, keys)
            s = torch.bmm(queries, keys.transpose(1, 2), out=buffer("scores", *tile))
            if not loops:
                _loops(s, rows, cols).fill_(-torch.inf)
            above = torch.maximum(level, log_score(s.amax(2, keepdim=True), score))
            shrink = (level - above).exp_()
            level = above
            w = _weights(torch.sub(level, s, out=s), level, score, buffer("weights", *tile))
            total = total.mul_(shrink).add_(w.sum(2, keepdim=True))
            sums = sums.mul_(shrink).baddbmm_(w, values)
        put(out, rows, sums.div_(total))
        put(lse, rows, total.log_().add_(level))
    return Attended(out.to(dtype), lse.squeeze(2))


def logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str, loops: bool) -> Tensor:
    """log Σ_j f(s_ij), [N, H]: attention to values without a channel."""
    return attention(q, k, q.new_empty(*q.shape[:2], 0), ptr, score, loops).lse


def product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j, [N, H, D], with the level −a_i − b_j, in the dtype of v."""
    row_shift, col_shift, ptr, score, loops = weighting
    dtype = v.dtype
    (q, k, v, row_shift), _ = accumulating(q, k, v, row_shift)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    buffer = Buffers(q, q.dtype)
    for rows, blocks in _tiles(ptr, q):
        queries, row = stack(q, rows), stack(row_shift.unsqueeze(2), rows)
        sums = queries.new_zeros(*queries.shape[:2], v.size(2))
        for cols in blocks:
            keys = stack(k, cols)
            level = -row if col_shift is None else -row - stack(col_shift.unsqueeze(2), cols).transpose(1, 2)
            tile = _tile(queries, keys)
            below = torch.baddbmm(level, queries, keys.transpose(1, 2), alpha=-1, out=buffer("scores", *tile))
            w = _weights(below, level, score, buffer("weights", *tile))
            if not loops:
                _loops(w, rows, cols).zero_()
            sums.baddbmm_(w, stack(v, cols))
        put(out, rows, sums)
    return out.to(dtype)


def backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its dtype; every tile is computed anew, nothing of size N² is kept.

    With g_ij = w_ij (grad_i·v_j − δ_i) and φ = (log f)′, which is 1 for exp and σ(−s) for the sigmoid:
    dv_j = Σ_i w_ij grad_i, dq_i = Σ_j g_ij φ_ij k_j and dk_j = Σ_i g_ij φ_ij q_i. Tiles are transposed, so that two of
    these three products have both factors as they lie in memory.
    """
    row_shift, col_shift, ptr, score, loops = weighting
    dtype = q.dtype
    (grad, q, k, v, row_shift, delta), _ = accumulating(grad, q, k, v, row_shift, delta)
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    buffer = Buffers(q, q.dtype)
    for rows, blocks in _tiles(ptr, q):
        queries, grads = stack(q, rows), stack(grad, rows)
        row, minus_delta = (-stack(t.unsqueeze(2), rows).transpose(1, 2) for t in (row_shift, delta))
        for cols in blocks:
            keys, values = stack(k, cols), stack(v, cols)
            level = row if col_shift is None else row - stack(col_shift.unsqueeze(2), cols)
            tile = _tile(keys, queries)
            below = torch.baddbmm(level, keys, queries.transpose(1, 2), alpha=-1, out=buffer("scores", *tile))
            if score == "sigmoid":  # a weight of zero times odds without end is no slope
                below.clamp_(max=exp_limit(q.dtype))
            w = _weights(below, level, score, buffer("weights", *tile))
            if not loops:
                _loops(w, rows, cols).zero_()
            _add_product(dv, cols, w, grads)
            g = torch.baddbmm(
                minus_delta, values, grads.transpose(1, 2), out=buffer("gradients", *_tile(keys, queries))
            ).mul_(w)
            if score == "sigmoid":
                g.mul_(below.mul_(w))
            _add_product(dk, cols, g, queries)
            _add_product(dq, rows, g.transpose(1, 2), keys)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
