"""The fast path: tiles of rows by columns of one graph that stay in cache, or of many small graphs at once.

With a level ℓ a tile has the weights w_ij = f(s_ij) e^{−ℓ}. The level is subtracted before anything is exponentiated,
so no weight overflows where ℓ is the logarithm of the row's largest score or of its sum. Most rows need no level.

Graphs lie in stacks [B, n, F], one for every graph and head. A short one is filled up with copies of a row of its own:
their scores are in no other range, and they count for nothing, since ``valid`` [B, n, 1], their values and their
gradients are zero there.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from diffusion_mp.kernels.pairwise.scores import Attended, Weighting, log_score
from diffusion_mp.kernels.precision import accumulating, exp_limit
from diffusion_mp.kernels.segments import batch_plan

# Entries of a tile: 1 MiB in float32, so that it stays in cache from one pass over it to the next.
TILE = 1 << 18
# A GPU wants tiles this many times as large.
ON_GPU = 64
# Rows that sum to between e^−FAR and e^FAR need no level: nothing overflowed, and what vanished is nothing beside that.
FAR = 60.0
# Rows of small graphs that are stacked together: a few MiB, whatever the batch is.
ROWS = 1 << 13

Compute = Callable[..., tuple[Tensor, ...]]
"""Takes stacks, and ``valid`` or ``None``, and returns stacks."""


class _Weights:
    """How weights are made of scores."""

    def __init__(self, score: str, loops: bool) -> None:
        self.score, self.loops = score, loops
        self.far = False
        """Whether some row needed a level, and so will others."""

    def tile(
        self, left: Tensor, right: Tensor, shift: Tensor | None, offset: int, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """w [b, n, m] at the level −shift, for left [b, n, F] and right [b, m, F], of which row i is row i + offset.

        And e^{ℓ − s} for the sigmoid with a level, where (log f)′ = σ(−s) is w times that.
        """
        if shift is None:
            s = torch.bmm(left, right.transpose(1, 2))
            w = odds = s.sigmoid_() if self.score == "sigmoid" else s.exp_()
        else:
            sign = -1 if self.score == "sigmoid" else 1
            w = odds = torch.baddbmm(shift, left, right.transpose(1, 2), beta=sign, alpha=sign).exp_()
            if self.score == "sigmoid":
                w = torch.add(odds, shift.neg().exp()).reciprocal_()
        return self.only_pairs(w, offset, valid, 0.0), odds

    def top(self, left: Tensor, right: Tensor, offset: int, valid: Tensor | None) -> Tensor:
        """The largest log f(s_ij) of every row [b, n, 1], finite even where there is none."""
        s = self.only_pairs(torch.bmm(left, right.transpose(1, 2)), offset, valid, -torch.inf)
        return log_score(s.amax(2, keepdim=True), self.score).clamp_(min=torch.finfo(s.dtype).min)

    def only_pairs(self, tile: Tensor, offset: int, valid: Tensor | None, fill: float) -> Tensor:
        """Without loops, a copy of a row is not to be met either: what it has for itself may be in any range."""
        if not self.loops:
            tile.diagonal(offset, 1, 2).fill_(fill)
            if valid is not None:
                tile.masked_fill_(valid.transpose(1, 2) == 0, fill)
        return tile


def _even(size: int, most: int) -> list[slice]:
    """0 … size in as few parts of at most ``most`` as there can be, all about equal."""
    if size <= most:
        return [slice(0, size)]
    count = -(-size // most)
    return [slice(*bounds) for bounds in pairwise([size * part // count for part in range(count + 1)])]


def _entries(like: Tensor) -> int:
    return TILE if like.device.type == "cpu" else TILE * ON_GPU


def _grid(x: Tensor) -> tuple[list[slice], list[slice]]:
    """Blocks of rows, and blocks of columns, of the graphs of a stack."""
    entries, size = _entries(x), x.size(1)
    if size * size <= entries:
        return [slice(0, size)], [slice(0, size)]
    cols = _even(size, 2 * math.isqrt(entries))
    return _even(size, max(1, entries // cols[0].stop)), cols


def _cut(x: Tensor, rows: slice) -> Tensor:
    """Rows of a stack, which are often all of them."""
    return x if rows.stop - rows.start == x.size(1) else x[:, rows]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """a b, added to the total if there is one already."""
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)


def _near(sums: Tensor) -> bool:
    """Whether all lie between e^−FAR and e^FAR."""
    if not sums.numel():
        return True
    least, most = torch.aminmax(sums)
    return math.exp(-FAR) < float(least) and float(most) < math.exp(FAR)


def _attend(weights: _Weights, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ_j p_ij v_j and log Σ_j f(s_ij) of a stack; where rows need a level it is their largest log f(s_ij)."""
    out, lse = [], []
    row_blocks, col_blocks = _grid(q)
    for rows in row_blocks:
        queries = _cut(q, rows)
        while True:
            shift = sums = total = None
            if weights.far:
                tops = [
                    weights.top(queries, _cut(k, cols), rows.start - cols.start, _some(valid, cols))
                    for cols in col_blocks
                ]
                shift = -_joined(tops, 2).amax(2, keepdim=True)
            for cols in col_blocks:
                counted = _some(valid, cols)
                w, _ = weights.tile(queries, _cut(k, cols), shift, rows.start - cols.start, counted)
                part = w.sum(2, keepdim=True) if counted is None else torch.bmm(w, counted)
                total = part if total is None else total.add_(part)
                sums = _plus_product(sums, w, _cut(v, cols))
                del w, _
            if weights.far or _near(total):
                break
            weights.far = True
        out.append(sums.div_(total))
        lse.append(total.log_() if shift is None else total.log_().sub_(shift))
    return _joined(out, 1), _joined(lse, 1)


def _some(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else _cut(x, rows)


def attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str, loops: bool = True) -> Attended:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in at least float32."""
    (q, k, v), dtype = accumulating(q, k, v)
    weights = _Weights(score, loops)
    out, lse = _everywhere(lambda *x: _attend(weights, *x), ptr, (q, k), (v,))
    return Attended(out.to(dtype), lse.squeeze(2))


def logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str, loops: bool) -> Tensor:
    """log Σ_j f(s_ij), [N, H]: attention to values without a channel."""
    return attention(q, k, q.new_empty(*q.shape[:2], 0), ptr, score, loops).lse


def product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j, [N, H, D], with the level −a_i − b_j, in the dtype of v."""
    ptr, score, loops = weighting[2:]
    dtype = v.dtype
    (q, k, v, *shifts), _ = accumulating(q, k, v, *_columns(weighting))
    weights = _Weights(score, loops)

    def compute(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor]:
        *shifts, v, valid = rest
        out = []
        row_blocks, col_blocks = _grid(q)
        for rows in row_blocks:
            queries, sums = _cut(q, rows), None
            for cols in col_blocks:
                shift, counted = _shift(shifts, rows, cols), _some(valid, cols)
                w, _ = weights.tile(queries, _cut(k, cols), shift, rows.start - cols.start, counted)
                sums = _plus_product(sums, w, _cut(v, cols))
                del w, _
            out.append(sums)
        return (_joined(out, 1),)

    return _everywhere(compute, ptr, (q, k, *shifts), (v,))[0].to(dtype)


def _columns(weighting: Weighting) -> list[Tensor]:
    """a, and b if there is one, [N, H, 1]."""
    return [shift.unsqueeze(2) for shift in weighting[:2] if shift is not None]


def _shift(shifts: Sequence[Tensor], rows: slice, cols: slice) -> Tensor:
    """a_i, or a_i + b_j."""
    a = _cut(shifts[0], rows)
    return a if len(shifts) == 1 else a + _cut(shifts[1], cols).transpose(1, 2)


def backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its dtype; every tile is computed anew, nothing of size N² is kept.

    With g_ij = w_ij (grad_i·v_j − δ_i) and φ = (log f)′, which is 1 for exp and σ(−s) for the sigmoid:
    dv_j = Σ_i w_ij grad_i, dq_i = Σ_j g_ij φ_ij k_j and dk_j = Σ_i g_ij φ_ij q_i.
    """
    ptr, score, loops = weighting[2:]
    dtype = q.dtype
    (grad, q, k, v, delta, *shifts), _ = accumulating(grad, q, k, v, delta.unsqueeze(2), *_columns(weighting))
    weights, most = _Weights(score, loops), math.exp(exp_limit(q.dtype))

    def compute(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *shifts, v, grad, minus_delta, valid = rest
        row_blocks, col_blocks = _grid(q)
        dq: list[Tensor] = []
        dk: list[Tensor | None] = [None] * len(col_blocks)
        dv = list(dk)
        for rows in row_blocks:
            queries, grads, deltas, of_queries = *(_cut(x, rows) for x in (q, grad, minus_delta)), None
            for place, cols in enumerate(col_blocks):
                keys, counted = _cut(k, cols), _some(valid, cols)
                w, odds = weights.tile(queries, keys, _shift(shifts, rows, cols), rows.start - cols.start, counted)
                dv[place] = _plus_product(dv[place], w.transpose(1, 2), grads)
                g = torch.baddbmm(deltas, grads, _cut(v, cols).transpose(1, 2)).mul_(w)
                if counted is not None:
                    g.mul_(counted.transpose(1, 2))
                if score == "sigmoid":  # a weight of zero times odds without end is no slope
                    g.mul_(odds.clamp_(max=most).mul_(w))
                of_queries = _plus_product(of_queries, g, keys)
                dk[place] = _plus_product(dk[place], g.transpose(1, 2), queries)
            dq.append(of_queries)
        return _joined(dq, 1), _joined(dk, 1), _joined(dv, 1)

    dq, dk, dv = (x.to(dtype) for x in _everywhere(compute, ptr, (q, k, *shifts), (v, grad, -delta)))
    return dq, dk, dv


def _everywhere(
    compute: Compute, ptr: Tensor | None, copied: Sequence[Tensor], zeroed: Sequence[Tensor]
) -> list[Tensor]:
    """What is computed of stacks, [N, H, D] each; beyond the end of a graph tensors are copied, or zero."""
    n, heads = copied[0].shape[:2]
    if ptr is None or not n:
        found = _by_graphs(compute, [x.transpose(0, 1) for x in (*copied, *zeroed)], None)
        return [x.transpose(0, 1).contiguous() for x in found]
    results: list[Tensor] = []
    for part in batch_plan(ptr, n).parts(ROWS):
        stacks = [part.stack(x[part.rows]) for x in copied]
        padded = stacks[0].numel() > copied[0][part.rows].numel()
        ones = [copied[0].new_ones(part.rows.stop - part.rows.start, heads, 1)] if padded else []
        stacks += [part.stack(x, zeros=True) for x in (*(x[part.rows] for x in zeroed), *ones)]
        found = [
            _by_graphs(compute, bucket[: len(bucket) - padded], bucket[-1] if padded else None)
            for bucket in zip(*map(part.views, stacks), strict=True)
        ]
        results = results or [x.new_empty(n, heads, x.size(2)) for x in found[0]]
        for result, values in zip(results, zip(*found, strict=True), strict=True):
            rows = result[part.rows]
            room = part.room(rows)
            if room is rows:
                part.views(rows)[0].copy_(values[0])
            else:
                part.unstack(torch.cat([value.flatten(0, 1) for value in values], out=room), rows)
    return results


def _by_graphs(compute: Compute, stacks: Sequence[Tensor], valid: Tensor | None) -> tuple[Tensor, ...]:
    """As many graphs of stacks at once as make a tile."""
    first = stacks[0]
    parts = _even(first.size(0), max(1, _entries(first) // max(1, first.size(1) ** 2)))
    if len(parts) == 1:
        return compute(*stacks, valid)
    found = [compute(*(x[some] for x in stacks), None if valid is None else valid[some]) for some in parts]
    return tuple(map(torch.cat, zip(*found, strict=True)))
