"""The fast path: tiles of rows by columns of one graph that stay in cache, small graphs of equal size stacked.

With a level ℓ a tile has the weights w_ij = f(s_ij) e^{−ℓ}. The level is subtracted before anything is exponentiated,
so no weight overflows where ℓ is the logarithm of the row's largest score or of its sum. Most rows need no level.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from diffusion_mp.kernels.buffers import Buffers
from diffusion_mp.kernels.pairwise.scores import Attended, Weighting, log_score
from diffusion_mp.kernels.precision import accumulating, exp_limit
from diffusion_mp.kernels.segments import Rows, put, row_blocks, stack

# Entries of one tile over all heads: 1 MiB in float32, so that it stays in cache from one pass over it to the next.
TILE = 1 << 18
# A GPU wants tiles this many times as large.
ON_GPU = 64
# Rows that sum to between e^−FAR and e^FAR need no level: nothing overflowed, and what vanished is nothing beside that.
FAR = 60.0


def _tiles(ptr: Tensor | None, like: Tensor) -> Iterator[tuple[Rows, list[Rows]]]:
    """Yield rows, and the blocks of columns of their graph, until every pair of nodes of a graph was met once."""
    entries = (TILE if like.device.type == "cpu" else TILE * ON_GPU) // like.size(1)
    side = math.isqrt(entries)
    # Tiles of large graphs are square, and all alike; others hold as many whole graphs as there is room for.
    height = lambda size: entries // size if size <= side else math.ceil(size / math.ceil(size / side))  # noqa: E731
    for _, _, blocks in row_blocks(ptr, like.size(0), height, like.device):
        for block in blocks:
            yield block, blocks


class _Tile:
    """Makes tiles [b, n, m] of left [b, n, F] and right [b, m, F], one after the other in the same memory."""

    def __init__(self, like: Tensor, score: str, loops: bool) -> None:
        self.score, self.loops = score, loops
        self.buffer = Buffers(like, like.dtype)

    def products(self, name: str, left: Tensor, right: Tensor, plus: Tensor | None = None, sign: int = 1) -> Tensor:
        """±(s + plus), s the inner products."""
        out = self.buffer(name, left.size(0), left.size(1), right.size(1))
        beta = 0 if plus is None else sign
        return torch.baddbmm(out if plus is None else plus, left, right.transpose(1, 2), beta=beta, alpha=sign, out=out)

    def odds(self, left: Tensor, right: Tensor, minus_level: Tensor | None) -> Tensor:
        """e^{ℓ − s} for the sigmoid, where (log f)′ = σ(−s) is that times w; e^{s − ℓ} for exp, which is w itself."""
        sign = -1 if self.score == "sigmoid" else 1
        return self.products("odds", left, right, minus_level, sign).exp_()

    def weights(self, odds: Tensor, minus_level: Tensor | None, same: bool, out: Tensor) -> Tensor:
        """f(s) e^{−ℓ}; ``same``: rows and columns are the same nodes."""
        w = odds
        if self.score == "sigmoid":
            w = torch.add(odds, 1 if minus_level is None else minus_level.neg().exp(), out=out).reciprocal_()
        if same and not self.loops:
            w.diagonal(dim1=1, dim2=2).zero_()
        return w

    def top(self, left: Tensor, right: Tensor, same: bool) -> Tensor:
        """The largest log f(s) of every row, [b, n, 1]."""
        s = self.products("odds", left, right)
        if same and not self.loops:
            s.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        return log_score(s.amax(2, keepdim=True), self.score)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The total, if there is one already, and a b."""
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)


def _add_product(out: Tensor, rows: Rows, a: Tensor, b: Tensor) -> None:
    """Add a b to rows of ``out``; those of stacked graphs are met once, so there is nothing to add to."""
    if isinstance(rows, slice):
        stack(out, rows).baddbmm_(a, b)
    else:
        put(out, rows, a @ b)


def attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str, loops: bool = True) -> Attended:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in at least float32.

    The level of a row that needs one is its largest log f(s_ij), finite even where there is none.
    """
    (q, k, v), dtype = accumulating(q, k, v)
    out, lse = torch.empty_like(v, memory_format=torch.contiguous_format), q.new_empty(*q.shape[:2], 1)
    tile, far = _Tile(q, score, loops), False
    for rows, blocks in _tiles(ptr, q):
        queries = stack(q, rows)
        while True:
            minus_level = None
            if far:
                tops = [tile.top(queries, stack(k, cols), rows is cols) for cols in blocks]
                minus_level = -torch.stack(tops).amax(0).clamp_min(torch.finfo(q.dtype).min)
            sums = total = None
            for cols in blocks:
                odds = tile.odds(queries, stack(k, cols), minus_level)
                w = tile.weights(odds, minus_level, rows is cols, out=odds)
                part = w.sum(2, keepdim=True)
                total = part if total is None else total.add_(part)
                sums = _plus_product(sums, w, stack(v, cols))
            if far or _near(total):
                break
            far = True  # and so are other rows, most likely
        put(out, rows, sums.div_(total))
        total = total.log_()
        put(lse, rows, total if minus_level is None else total.sub_(minus_level))
    return Attended(out.to(dtype), lse.squeeze(2))


def _near(sums: Tensor) -> bool:
    """Whether all sums of rows lie between e^−FAR and e^FAR."""
    least, most = torch.aminmax(sums)
    return math.exp(-FAR) < float(least) and float(most) < math.exp(FAR)


def logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str, loops: bool) -> Tensor:
    """log Σ_j f(s_ij), [N, H]: attention to values without a channel."""
    return attention(q, k, q.new_empty(*q.shape[:2], 0), ptr, score, loops).lse


def product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j, [N, H, D], with the level −a_i − b_j, in the dtype of v."""
    row_shift, col_shift, ptr, score, loops = weighting
    dtype = v.dtype
    (q, k, v, row_shift), _ = accumulating(q, k, v, row_shift)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    tile = _Tile(q, score, loops)
    for rows, blocks in _tiles(ptr, q):
        queries, row = stack(q, rows), stack(row_shift.unsqueeze(2), rows)
        sums = None
        for cols in blocks:
            shift = row if col_shift is None else row + stack(col_shift.unsqueeze(2), cols).transpose(1, 2)
            odds = tile.odds(queries, stack(k, cols), shift)
            w = tile.weights(odds, shift, rows is cols, out=odds)
            sums = _plus_product(sums, w, stack(v, cols))
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
    tile, most = _Tile(q, score, loops), math.exp(exp_limit(q.dtype))
    for rows, blocks in _tiles(ptr, q):
        queries, grads = stack(q, rows), stack(grad, rows)
        row, minus_delta = (stack(t.unsqueeze(2), rows).transpose(1, 2) for t in (row_shift, -delta))
        for cols in blocks:
            keys = stack(k, cols)
            shift = row if col_shift is None else row + stack(col_shift.unsqueeze(2), cols)
            odds = tile.odds(keys, queries, shift)
            w = tile.weights(odds, shift, rows is cols, out=tile.buffer("weights", *odds.shape))
            _add_product(dv, cols, w, grads)
            g = tile.products("gradients", stack(v, cols), grads, minus_delta).mul_(w)
            if score == "sigmoid":  # a weight of zero times odds without end is no slope
                g.mul_(odds.clamp_(max=most).mul_(w))
            _add_product(dk, cols, g, queries)
            _add_product(dq, rows, g.transpose(1, 2), keys)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
