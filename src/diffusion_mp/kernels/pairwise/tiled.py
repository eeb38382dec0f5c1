"""The fast path: tiles of rows by columns of one graph that stay in cache, or of many small graphs at once.

A tile has the weights w_ij = f(s_ij) e^{−ℓ} at a level ℓ, subtracted before anything is exponentiated: none overflows
where ℓ is the logarithm of the row's largest score or of its sum. Most rows need no level. Where q_i·k_j = q_j·k_i, the
weights are symmetric without one, and only tiles on and above the diagonal are computed.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from itertools import product as pairs_of
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.kernels.pairwise.scores import KERNELS, PairwiseRows, Weighting
from diffusion_mp.kernels.segments import ALL, Buffers, at_once, by_stacks, cut, even
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
    """The weights between the rows of stacks q and k [b, n, F], in memory that all tiles share.

    ``shifts`` are none, a or (a, b), each [b, n, 1].
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        weighting: Weighting,
        shifts: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(q, q.dtype)
        self.q = q
        self.k = k
        self.mask = mask
        self.shifts = shifts
        self.kernel = KERNELS[weighting.score]
        self.loops = weighting.loops

    def tile(
        self,
        rows: slice,
        cols: slice,
        slopes: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return w of a tile, and s, which the weights overwrite unless its ``slopes`` are needed."""
        # With shifts the logarithm of f is taken, of the score itself.
        scale = 1.0 if self.shifts else self.kernel.scale
        s = self.inner(cut(self.q, rows), cut(self.k, cols), scale=scale)
        if self.shifts:
            w = self.kernel.log(s).add_(cut(self.shifts[0], rows))
            for shift in self.shifts[1:]:
                w.add_(cut(shift, cols).mT)
            w.exp_()
        else:
            w = self.kernel.weight(s, out=self("w", *s.shape) if slopes else s)
        if not self.loops:
            self.without_loops(w, rows, cols, 0.0)
        elif self.mask is not None:
            # A product may serve as a mask, since padding repeats a node and is finite where that is.
            w.mul_(cut(self.mask, cols).mT)
        return w, s

    def slopes(
        self,
        v: Tensor,
        grad: Tensor,
        delta: Tensor,
        rows: slice,
        cols: slice,
        both: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return w_ij and g_ij φ_ij of a tile, see `backward`; with ``both``, for a symmetric w, (g_ij + g_ji) φ_ij."""
        times_slope = self.kernel.times_slope
        w, s = self.tile(rows, cols, times_slope is not None)
        g = self("g", *w.shape)
        outer = cut(delta, rows), cut(grad, rows), cut(v, cols).mT
        torch.baddbmm(*outer, beta=-1, out=g)
        if both:
            g.baddbmm_(cut(v, rows), cut(grad, cols).mT).sub_(cut(delta, cols).mT)
        g.mul_(w)
        if times_slope is not None:
            times_slope(g, s)
        return w, g

    def levels(self) -> Tensor:
        """Return the largest log f(s_ij) of every row [b, n, 1], finite even without any pair."""
        q = self.q
        level = q.new_full((*q.shape[:2], 1), torch.finfo(q.dtype).min)
        for rows, cols in _tiles(q):
            s = self.inner(cut(q, rows), cut(self.k, cols))
            if not self.loops:
                self.without_loops(s, rows, cols, -torch.inf)
            # log f rises with the score, so that only the largest needs it.
            top = self.kernel.log(s.amax(2, keepdim=True))
            so_far = cut(level, rows)
            torch.maximum(so_far, top, out=so_far)
        return level

    def without_loops(
        self,
        tile: Tensor,
        rows: slice,
        cols: slice,
        fill: float,
    ) -> None:
        """Fill loops, and rows and columns of padding, which may repeat the node of the other end."""
        if self.mask is not None:
            nodes = cut(self.mask, rows) * cut(self.mask, cols).mT
            tile.masked_fill_(nodes == 0, fill)
        # `ALL` starts nowhere.
        offset = (rows.start or 0) - (cols.start or 0)
        tile.diagonal(offset, 1, 2).fill_(fill)

    def times(
        self,
        v: Tensor,
        symmetric: bool = False,
        total: Tensor | None = None,
    ) -> Tensor:
        """Return Σ_j w_ij v_j, add Σ_j w_ij to ``total``; a tile of a symmetric w serves its rows and its columns."""
        symmetric = symmetric and self.mask is None
        # Contiguous, unlike v with several heads, so that products are written in less time.
        # The first tile of every row writes, and the others add: see `_add_product`.
        sums = v.new_empty(v.shape)
        for rows, cols in _tiles(self.q, symmetric):
            w, _ = self.tile(rows, cols)
            turns = [(rows, w, cols)]
            # A tile on the diagonal is its own transpose.
            if symmetric and cols is not rows:
                turns.append((cols, w.mT, rows))
            for to, turned, of in turns:
                _add_product(sums, to, turned, v, of)
                if total is not None:
                    cut(total, to).add_(turned.sum(2, keepdim=True))
        return sums


def _add_product(out: Tensor, to: slice, w: Tensor, v: Tensor, of: slice) -> None:
    """Add w v to some rows of ``out``, which are uninitialised for the first rows of v."""
    cut(out, to).baddbmm_(w, cut(v, of), beta=float(bool(of.start)))


def attention(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> PairwiseRows:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in at least float32."""
    (q, k, v), dtype = accumulating(q, k, v)
    # Whether some row needed a level. Others of the batch probably will, and then try no sum without one.
    far = False

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        nonlocal far
        weights = _Weights(q, k, mask, weighting)
        while True:
            total = v.new_zeros(*v.shape[:2], 1)
            if far:
                level = weights.levels()
                weights.shifts = [-level]
                sums = weights.times(v, total=total)
                # The largest weight of a row is one. Only a node that is alone has no pair, and stays zero.
                return sums.div_(total.clamp(min=0.5)), total.log_().add_(level)
            sums = weights.times(v, weighting.mutual, total)
            lse = total.log()
            if _near(lse):
                return sums.div_(total), lse
            far = True

    widths = [v.size(2), 1]
    out, lse = by_stacks(compute, weighting.ptr, (q, k, v), widths, _entries(q))
    return PairwiseRows(out.to(dtype), lse.squeeze(2))


def _near(lse: Tensor) -> bool:
    """Return whether all rows sum to between e^−FAR and e^FAR."""
    return not lse.numel() or float(torch.linalg.vector_norm(lse, math.inf)) < FAR


def product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j, [N, H, D], with the level −a_i − b_j, in the dtype of v."""
    # One shift on both sides keeps the weights symmetric.
    mutual = weighting.mutual and weighting.row_shift is weighting.col_shift
    # The last tensor has the dtype of the result.
    (q, k, *shifts, v), dtype = accumulating(q, k, *_columns(weighting), v)

    def compute(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        # The inputs of one stack in their order, and the mask that `by_stacks` adds.
        *stacked_shifts, mask = rest
        weights = _Weights(q, k, mask, weighting, stacked_shifts)
        return [weights.times(v, mutual)]

    inputs = (q, k, v, *shifts)
    (out,) = by_stacks(compute, weighting.ptr, inputs, [v.size(2)], _entries(q))
    return out.to(dtype)


def _columns(weighting: Weighting) -> list[Tensor]:
    """Return the shifts a and b as columns [N, H, 1]: none, a, or both."""
    row_shift = weighting.row_shift
    col_shift = weighting.col_shift
    # A tile takes its first shift for the shift of the rows.
    if row_shift is None and col_shift is not None:
        row_shift = torch.zeros_like(col_shift)
    return [x.unsqueeze(2) for x in (row_shift, col_shift) if x is not None]


def backward(
    grad: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, each in its dtype; every tile is recomputed.

    With g_ij = w_ij (grad_i·v_j − δ_i) and φ = (log f)′, which is 1 for exp and σ(−s) for the sigmoid:
    dv_j = Σ_i w_ij grad_i, dq_i = Σ_j g_ij φ_ij k_j and dk_j = Σ_i g_ij φ_ij q_i.
    """
    row_shift, col_shift = weighting[:2]
    one = q is k
    (grad, k, v, delta, *shifts, q), dtype = accumulating(
        grad, k, v, delta.unsqueeze(2), *_columns(weighting), q
    )
    if row_shift is not None and col_shift is None and _near(row_shift):
        # The factors e^{a_i} of rows that are near one multiply the gradient, N D numbers, in place of the
        # weights, N² numbers.
        scale = shifts.pop().exp()
        grad = grad * scale
        delta = delta * scale

    def compute(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad: Tensor,
        delta: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        *shifts, mask = rest
        weights = _Weights(q, k, mask, weighting, shifts)
        if mask is not None:
            grad = grad * mask
            delta = delta * mask
        # Half of the tiles of a symmetric w, (g_ij + g_ji) φ_ij in place of g_ij φ_ij: all of it is the gradient of q.
        symmetric = one and not shifts and mask is None and q.size(1) > SMALL
        dq = q.new_empty(q.shape)
        dk = k.new_zeros(k.shape) if symmetric else k.new_empty(k.shape)
        dv = v.new_empty(v.shape)
        for rows, cols in _tiles(q, symmetric):
            w, g = weights.slopes(v, grad, delta, rows, cols, symmetric)
            _add_product(dv, cols, w.mT, grad, rows)
            _add_product(dq, rows, g, k, cols)
            if not symmetric:
                _add_product(dk, cols, g.mT, q, rows)
            elif cols is not rows:
                # A tile on the diagonal is its own transpose.
                _add_product(dv, rows, w, grad, cols)
                _add_product(dq, cols, g.mT, q, rows)
        return dq, dk, dv

    inputs = (q, k, v, grad, delta, *shifts)
    # Shifts have no gradient here: the gradient of a row's shift is its inner product with the result.
    widths = [x.size(2) for x in (q, k, v)]
    gradients = by_stacks(compute, weighting.ptr, inputs, widths, _entries(q))
    return tuple(x.to(dtype) for x in gradients)


def _entries(like: Tensor) -> int:
    """Return how many entries a tile has on the CPU; a GPU has a multiple."""
    return TILE * (min(THREADS, torch.get_num_threads()) if like.is_cpu else 1)


def _tiles(x: Tensor, symmetric: bool = False) -> Iterable[tuple[slice, slice]]:
    """Return rows and columns of tiles for all pairs of nodes of a stack, or those on and above the diagonal."""
    size = x.size(1)
    entries = at_once(_entries(x), x)
    # Half of a large symmetric matrix is saved by several tiles only.
    if size * size <= entries and not (symmetric and size > SMALL):
        return [(ALL, ALL)]
    if symmetric:
        side = min(SIDE, math.isqrt(entries), math.ceil(size / 2))
        return combinations_with_replacement(even(size, side), 2)
    # Wider than high, since every tile adds to the sums of its rows once more.
    cols = even(size, 2 * math.isqrt(entries))
    rows = even(size, entries // (size // len(cols)))
    return pairs_of(rows, cols)
