"""The fast path: tiles of rows by columns of one graph that stay in cache, or of many small graphs at once.

A tile has the weights w_ij = f(s_ij) e^{−ℓ} at a level ℓ, subtracted before anything is exponentiated: none overflows
where ℓ is the logarithm of the row's largest score or of its sum. Most rows need no level. Where q_i·k_j = q_j·k_i, the
weights are symmetric without one, and only tiles on and above the diagonal are computed.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.kernels.pairwise.scores import KERNELS, PairwiseRows, Weighting
from diffusion_mp.kernels.segments import (
    ALL,
    Buffers,
    at_once,
    by_stacks,
    cut,
    even,
    joined,
    plus_product,
)
from diffusion_mp.runtime.precision import accumulating

# Entries of a tile for each thread: 2 MiB in float32, which stay in cache from one pass over them to the next. Threads
# wait for each other after every pass, and smaller tiles have more of them. At most eight threads count, since the
# memory of three tiles is kept.
TILE = 1 << 19
THREADS = 8
# A symmetric matrix of more than so many rows has tiles of so many rows and columns at most.
SMALL = 384
SIDE = 512
# Rows that sum to between e^−FAR and e^FAR need no level: nothing overflowed, and what underflowed is negligible.
FAR = 40.0


class _Weights(Buffers):
    """How weights are computed from scores, in memory that every tile uses again."""

    def __init__(
        self, like: Tensor, score: str, loops: bool, slopes: bool = False
    ) -> None:
        super().__init__(like, like.dtype)
        self.kernel = KERNELS[score]
        self.loops = loops
        # Whether the scores are still needed when there are weights, which otherwise overwrite them.
        self.slopes = slopes and self.kernel.times_slope is not None
        # Whether some row needed a level. Others of the batch probably will, and then try no sum without one.
        self.far = False

    def tile(
        self,
        left: Tensor,
        right: Tensor,
        shift: Tensor | None,
        rows: slice,
        cols: slice,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return w [b, n, m] at the level −shift for left [b, n, F] and right [b, m, F], and s, perhaps overwritten."""
        s = self.inner(left, right, scale=self.kernel.scale if shift is None else 1.0)
        out = self("w", *s.shape) if self.slopes else s
        if shift is None:
            w = self.kernel.weight(s, out=out)
        else:
            w = self.kernel.log(s).add_(shift).exp_()
        if not self.loops:
            if mask is not None:
                w.masked_fill_(cut(mask, rows) == 0, 0.0)
            w = self.without_loops(w, rows, cols, mask, 0.0)
        elif mask is not None:
            # A product may serve as a mask, since padding repeats a node and is finite where that is.
            w = w.mul_(cut(mask, cols).transpose(1, 2))
        return w, s

    def top(
        self, left: Tensor, right: Tensor, rows: slice, cols: slice, mask: Tensor | None
    ) -> Tensor:
        """Return the largest log f(s_ij) of every row [b, n, 1], finite even without any pair."""
        s = self.inner(left, right)
        if not self.loops:
            s = self.without_loops(s, rows, cols, mask, -torch.inf)
        return self.kernel.log(s.amax(2, keepdim=True)).clamp_(
            min=torch.finfo(s.dtype).min
        )

    def without_loops(
        self, tile: Tensor, rows: slice, cols: slice, mask: Tensor | None, fill: float
    ) -> Tensor:
        """Fill loops, and columns of padding, which may repeat the node of the row."""
        if mask is not None:
            tile.masked_fill_(cut(mask, cols).transpose(1, 2) == 0, fill)
        tile.diagonal((rows.start or 0) - (cols.start or 0), 1, 2).fill_(fill)
        return tile


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor | None,
    score: str,
    loops: bool,
    mutual: bool,
    log_sums: bool,
) -> PairwiseRows:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in at least float32."""
    (q, k, v), dtype = accumulating(q, k, v)
    weights = _Weights(q, score, loops)

    def compute(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        if mutual and not weights.far and len(blocks := _squares(q, mask)) > 1:
            total = v.new_zeros(*v.shape[:2], 1)
            sums = _symmetric(weights, q, k, v, [], blocks, total)
            if _near(lse := total.log()):
                return sums.div_(total), lse
            weights.far = True
        parts = [
            _attended(weights, q, rows, k, v, cols, mask) for rows, cols in _grid(q)
        ]
        return tuple(joined(found, 1) for found in zip(*parts, strict=True))

    out, lse = by_stacks(compute, ptr, (q, k, v), _entries(q))
    return PairwiseRows(out if out.dtype is dtype else out.to(dtype), lse.squeeze(2))


def _attended(
    weights: _Weights,
    q: Tensor,
    rows: slice,
    k: Tensor,
    v: Tensor,
    blocks: list[slice],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of rows; their level, where they need one, is their largest log f(s_ij)."""
    queries = cut(q, rows)
    shift = None
    while True:
        if weights.far:
            tops = [
                weights.top(queries, cut(k, cols), rows, cols, mask) for cols in blocks
            ]
            shift = -joined(tops, 2).amax(2, keepdim=True)
        sums: Tensor | None = None
        totals: list[Tensor] = []
        for cols in blocks:
            w = weights.tile(queries, cut(k, cols), shift, rows, cols, mask)[0]
            totals.append(w.sum(2, keepdim=True))
            sums = plus_product(sums, w, cut(v, cols))
        total = joined(totals, 2).sum(2, keepdim=True)
        lse = total.log()
        if weights.far or _near(lse):
            break
        weights.far = True
    assert sums is not None
    return sums.div_(total), lse if shift is None else lse.sub_(shift)


def _symmetric(
    weights: _Weights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shifts: Sequence[Tensor],
    blocks: list[slice],
    total: Tensor | None = None,
) -> Tensor:
    """Return Σ_j w_ij v_j, and add Σ_j w_ij to ``total``; a tile above the diagonal serves its rows and its columns."""
    sums = torch.zeros_like(v)
    for place, rows in enumerate(blocks):
        for cols in blocks[place:]:
            w, _ = weights.tile(
                cut(q, rows), cut(k, cols), _shift(shifts, rows, cols), rows, cols, None
            )
            turns = [(rows, w, cols)]
            if cols is not rows:
                turns.append((cols, w.mT, rows))
            for into, turned, source in turns:
                cut(sums, into).baddbmm_(turned, cut(v, source))
                if total is not None:
                    cut(total, into).add_(turned.sum(2, keepdim=True))
    return sums


def _near(lse: Tensor) -> bool:
    """Whether all rows sum to between e^−FAR and e^FAR."""
    return not lse.numel() or float(torch.linalg.vector_norm(lse, math.inf)) < FAR


def product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j, [N, H, D], with the level −a_i − b_j, in the dtype of v."""
    _, _, ptr, score, loops, mutual = weighting
    dtype = v.dtype
    # One shift on both sides keeps the weights symmetric.
    mutual = mutual and weighting.row_shift is weighting.col_shift
    (q, k, v, *shifts), _ = accumulating(q, k, v, *_columns(weighting))
    weights = _Weights(q, score, loops)

    def compute(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor]:
        *shifts, mask = rest
        if mutual and len(blocks := _squares(q, mask)) > 1:
            return (_symmetric(weights, q, k, v, shifts, blocks),)
        out: list[Tensor | None] = []
        for rows, blocks in _grid(q):
            sums: Tensor | None = None
            for cols in blocks:
                w, _ = weights.tile(
                    cut(q, rows),
                    cut(k, cols),
                    _shift(shifts, rows, cols),
                    rows,
                    cols,
                    mask,
                )
                sums = plus_product(sums, w, cut(v, cols))
            out.append(sums)
        return (joined(out, 1),)

    return by_stacks(compute, ptr, (q, k, v, *shifts), _entries(q))[0].to(dtype)


def _columns(weighting: Weighting) -> list[Tensor]:
    return [shift.unsqueeze(2) for shift in weighting[:2] if shift is not None]


def _shift(shifts: Sequence[Tensor], rows: slice, cols: slice) -> Tensor | None:
    """Return a_i or a_i + b_j of a tile, ``None`` without shifts."""
    if not shifts:
        return None
    a = cut(shifts[0], rows)
    if len(shifts) == 1:
        return a
    return a + cut(shifts[1], cols).transpose(1, 2)


def backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, each in its dtype; every tile is recomputed.

    With g_ij = w_ij (grad_i·v_j − δ_i) and φ = (log f)′, which is 1 for exp and σ(−s) for the sigmoid:
    dv_j = Σ_i w_ij grad_i, dq_i = Σ_j g_ij φ_ij k_j and dk_j = Σ_i g_ij φ_ij q_i.
    """
    row_shift, col_shift, ptr, score, loops, _ = weighting
    # Not ``mutual``: a symmetric tile serves as its transpose if k is q itself, whose gradient is a single sum.
    same = q is k
    (grad, k, v, delta, *shifts, q), dtype = accumulating(
        grad, k, v, delta.unsqueeze(2), *_columns(weighting), q
    )
    if row_shift is not None and col_shift is None and _near(row_shift):
        # The factors e^{a_i} of rows that are near one multiply the gradient, N D numbers, in place of the
        # weights, N² numbers. Weights without a level are symmetric, too.
        scale = shifts.pop().exp()
        grad = grad * scale
        delta = delta * scale
    weights = _Weights(q, score, loops, slopes=True)

    def compute(
        q: Tensor, k: Tensor, v: Tensor, grad: Tensor, delta: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        *shifts, mask = rest
        if same and not shifts and len(blocks := _squares(q, mask)) > 1:
            return _symmetric_backward(weights, q, v, grad, delta, blocks)
        if mask is not None and loops:
            grad = grad * mask
            delta = delta * mask
        grid = _grid(q)
        blocks = grid[0][1]
        dq: list[Tensor | None] = []
        dk: list[Tensor | None] = [None] * len(blocks)
        dv = list(dk)
        for rows, _ in grid:
            queries = cut(q, rows)
            grads = cut(grad, rows)
            deltas = cut(delta, rows)
            of_queries: Tensor | None = None
            for place, cols in enumerate(blocks):
                keys = cut(k, cols)
                w, s = weights.tile(
                    queries, keys, _shift(shifts, rows, cols), rows, cols, mask
                )
                dv[place] = plus_product(dv[place], w.transpose(1, 2), grads)
                g = torch.baddbmm(
                    deltas, grads, cut(v, cols).mT, beta=-1, out=weights("g", *w.shape)
                ).mul_(w)
                if weights.kernel.times_slope is not None:
                    weights.kernel.times_slope(g, s)
                of_queries = plus_product(of_queries, g, keys)
                dk[place] = plus_product(dk[place], g.transpose(1, 2), queries)
            dq.append(of_queries)
        return tuple(joined(parts, 1) for parts in (dq, dk, dv))

    found = by_stacks(compute, ptr, (q, k, v, grad, delta, *shifts), _entries(q))
    return tuple(x.to(dtype) for x in found)


def _symmetric_backward(
    weights: _Weights,
    q: Tensor,
    v: Tensor,
    grad: Tensor,
    delta: Tensor,
    blocks: list[slice],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of q = k in both roles, by g φ + (g φ)ᵀ, a zero for k, and that of v."""
    dq = torch.zeros_like(q)
    dv = torch.zeros_like(v)
    for place, rows in enumerate(blocks):
        for cols in blocks[place:]:
            w, s = weights.tile(cut(q, rows), cut(q, cols), None, rows, cols, None)
            g = torch.baddbmm(
                cut(delta, rows),
                cut(grad, rows),
                cut(v, cols).mT,
                beta=-1,
                out=weights("g", *w.shape),
            )
            g.baddbmm_(cut(v, rows), cut(grad, cols).mT).sub_(cut(delta, cols).mT).mul_(
                w
            )
            if weights.kernel.times_slope is not None:
                weights.kernel.times_slope(g, s)
            cut(dq, rows).baddbmm_(g, cut(q, cols))
            cut(dv, rows).baddbmm_(w, cut(grad, cols))
            if cols is not rows:
                cut(dq, cols).baddbmm_(g.mT, cut(q, rows))
                cut(dv, cols).baddbmm_(w.mT, cut(grad, rows))
    return dq, torch.zeros_like(q), dv


def _squares(x: Tensor, mask: Tensor | None) -> list[slice]:
    """Return the rows, and columns, of the tiles of a symmetric matrix; a small or padded one has a single tile."""
    size = x.size(1)
    if mask is not None or size <= SMALL:
        return [ALL]
    return even(size, min(SIDE, math.isqrt(at_once(_entries(x), x)), -(-size // 2)))


def _entries(like: Tensor) -> int:
    """Return how many entries a tile has on the CPU, of which a GPU has a multiple."""
    return TILE * (min(THREADS, torch.get_num_threads()) if like.is_cpu else 1)


def _grid(x: Tensor) -> list[tuple[slice, list[slice]]]:
    """Return runs of rows, each with the blocks of columns that cover all pairs of nodes of a stack."""
    size = x.size(1)
    entries = at_once(_entries(x), x)
    if size * size <= entries:
        return [(ALL, [ALL])]
    cols = even(size, 2 * math.isqrt(entries))
    return [(rows, cols) for rows in even(size, entries // cols[0].stop)]
