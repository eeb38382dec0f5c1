"""The fast path: samples and features are one axis of a low-rank product; its factors exist for a block of nodes only.

With M_sr ≥ max_j (log_k_jr + b_js) the weight of i and j is Σ_sr A_isr B_jsr, A_isr = exp(log_q_ir + a_is + M_sr) and
B_jsr = exp(log_k_jr + b_js − M_sr) ≤ 1. Where M_sr is the maximum or a few nats above, Σ_j B_jsr does not underflow, so
no row of weights does.

The senders are pooled, U_sr = Σ_j B_jsr v_j and c_sr = Σ_j B_jsr, and the rows read these sums: out = A U. Where no
shifts a of the rows are given, each row of each of K samples is divided by its sum: a_is = −L_is − log K with
L_is = log Σ_r exp(log_q_ir + M_sr) c_sr. Backward, with the gradients g of out and ℓ of L, W_sr = Σ_i A_isr g_i and
da_is = Σ_r A_isr g_i·U_sr, the derivatives

    by an exponent of sender j are B_jsr v_j·W_sr,  of row i A_isr g_i·U_sr,

and without given shifts, through L, t_is = K (ℓ_is − da_is) adds B_jsr Σ_i A_isr t_is and A_isr t_is c_sr. Their sums
over s are the derivatives by the log features, those over r by the shifts; and dv = B W. All factors are computed anew.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import Rows, gather, row_blocks, scatter

# Entries of one block of factors over all heads: 2 MiB in float32, so that it stays in cache from exp to product.
BLOCK = 1 << 19

# Nats by which a separable bound may exceed a maximum. float32 holds 87 below one; the rest is for small weights.
SLACK = 40.0


class Bound(NamedTuple):
    """M_sr = m_r + β_s + δ_sr. Logarithms may be large and close together, so factors take differences to m and β."""

    features: Tensor
    """m, [b, H, 1, F]."""
    samples: Tensor
    """β, [b, H, 1, K]."""
    rest: Tensor | None
    """δ, [b, H, 1, K, F]; ``None``, for zero: one exp per feature and one per sample instead of one for every pair."""


class Pooled(NamedTuple):
    """The sums over the senders of a graph, or their gradients."""

    values: Tensor
    """U, [b, H, K F, D]."""
    counts: Tensor
    """c, [b, H, 1, K, F]."""


# ---------------------------------------------------------------- a batch at once, both halves for a graph at a time


def forward(
    log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor | None, col_shift: Tensor, ptr: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result [N, H, D] and L [N, H, K]; with given shifts L is not computed, and [0, H, K]."""
    out, log_sum = _results(log_q, row_shift, col_shift.size(2), v.size(2))
    for rows, blocks in _graphs(log_q, col_shift.size(2), v.size(2), ptr):
        bound = _bound(log_k, col_shift, rows, blocks)
        _read(out, log_sum, log_q, row_shift, _pool(log_k, col_shift, v, bound, blocks), bound, blocks)
    return out, log_sum


def backward(
    grad: Tensor,
    grad_log_sum: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor | None,
    col_shift: Tensor,
    ptr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of log_q, log_k, v, a ([0, H, K] where none was given) and b."""
    dq, dk, dv, db = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k, v, col_shift))
    da = db.new_empty(0 if row_shift is None else db.size(0), *db.shape[1:])
    for rows, blocks in _graphs(log_q, col_shift.size(2), v.size(2), ptr):
        bound = _bound(log_k, col_shift, rows, blocks)
        sums = _pool(log_k, col_shift, v, bound, blocks)
        sums_grad = _read_backward(dq, da, grad, grad_log_sum, log_q, row_shift, sums, bound, blocks)
        _pool_backward(dk, db, dv, sums_grad, log_k, col_shift, v, bound, blocks)
    return dq, dk, dv, da, db


# ---------------------------------------------------------------- the halves of one graph


def pool(log_k: Tensor, col_shift: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """[U, c] and M, [H, K, F, D + 1 and 1]; M in double precision, and −∞ where there is no sender."""
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    if not log_k.size(0):
        return v.new_zeros(*shape, v.size(2) + 1), v.new_full((*shape, 1), -torch.inf, dtype=torch.float64)
    rows, blocks = _one_graph(log_k, col_shift.size(2))
    bound = _bound(log_k, col_shift, rows, blocks)
    values, counts = _pool(log_k, col_shift, v, bound, blocks)
    shift = _exponents(bound.features.double(), bound.samples.double())
    shift = shift if bound.rest is None else shift + bound.rest
    return torch.cat([values.view(*shape, -1), counts.view(*shape, 1)], dim=3), shift.view(*shape, 1)


def pool_backward(grad: Tensor, log_k: Tensor, col_shift: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_k, b and v from that of [U, c]."""
    dk, db, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (log_k, col_shift, v))
    if log_k.size(0):
        rows, blocks = _one_graph(log_k, col_shift.size(2))
        bound = _bound(log_k, col_shift, rows, blocks)
        _pool_backward(dk, db, dv, _split(grad), log_k, col_shift, v, bound, blocks)
    return dk, db, dv


def read(log_q: Tensor, row_shift: Tensor | None, sums: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The result and L, as ``forward`` gives them, from such sums, which may be those of more rows."""
    samples, channels = sums.size(1), sums.size(3) - 1
    out, log_sum = _results(log_q, row_shift, samples, channels)
    _, blocks = _one_graph(log_q, samples)
    _read(out, log_sum, log_q, row_shift, _split(sums), _shifted(shift, log_q.dtype), blocks)
    return out, log_sum


def read_backward(
    grad: Tensor, grad_log_sum: Tensor, log_q: Tensor, row_shift: Tensor | None, sums: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_q, a ([0, H, K] where none was given) and the sums."""
    dq, samples = torch.empty_like(log_q, memory_format=torch.contiguous_format), sums.size(1)
    da = dq.new_empty(0 if row_shift is None else dq.size(0), dq.size(1), samples)
    _, blocks = _one_graph(log_q, samples)
    bound = _shifted(shift, log_q.dtype)
    values, counts = _read_backward(dq, da, grad, grad_log_sum, log_q, row_shift, _split(sums), bound, blocks)
    return dq, da, torch.cat([values.view(*shift.shape[:3], -1), counts.view_as(shift)], dim=3)


def _shifted(shift: Tensor, dtype: torch.dtype) -> Bound:
    """The bound of sums that may be merged; M_sr − max_r M_sr is small, and cancels nothing."""
    shift = shift.squeeze(3)[None, :, None]
    samples = shift.amax(4)
    rest = (shift - samples.unsqueeze(4)).to(dtype)
    return Bound(torch.zeros_like(rest[:, :, :, 0]), samples.to(dtype), rest)


def _split(sums: Tensor) -> Pooled:
    return Pooled(sums[..., :-1].flatten(1, 2).unsqueeze(0), sums[None, :, None, :, :, -1])


# ---------------------------------------------------------------- what both are made of


def _graphs(log_features: Tensor, samples: int, channels: int, ptr: Tensor | None) -> Iterator[tuple[Rows, list[Rows]]]:
    """Yield the rows of one graph, or of several of equal size, and the same rows in blocks.

    A node has H K F factors, and a graph as many sums over its nodes in each of ``channels``.
    """
    num_nodes, heads, features = log_features.shape
    height = BLOCK // (heads * samples * features)
    for _, rows, blocks in row_blocks(ptr, num_nodes, height, log_features.device, channels):
        yield rows, blocks


def _one_graph(log_features: Tensor, samples: int) -> tuple[Rows, list[Rows]]:
    """All rows, and the same in blocks."""
    return next(_graphs(log_features, samples, 1, None), (slice(0), []))


def _results(log_q: Tensor, row_shift: Tensor | None, samples: int, channels: int) -> tuple[Tensor, Tensor]:
    nodes, heads, _ = log_q.shape
    return log_q.new_empty(nodes, heads, channels), log_q.new_empty(nodes if row_shift is None else 0, heads, samples)


def _bound(log_k: Tensor, col_shift: Tensor, rows: Rows, blocks: list[Rows]) -> Bound:
    """m_r = max_j log_k_jr and β_s = max_j b_js, if for each s the node that attains β_s is within SLACK of every m_r;
    else δ makes their sum the maximum itself.
    """
    keys = gather(log_k, rows)
    features = keys.amax(2, keepdim=True)
    samples, at = gather(col_shift, rows).max(2, keepdim=True)
    attained = keys.gather(2, at.transpose(2, 3).expand(-1, -1, -1, keys.size(3)))
    if not (features - attained > SLACK).any():  # so put, a NaN of one graph does not decide for others
        return Bound(features, samples, None)
    rest = torch.full_like(_exponents(features, samples), -torch.inf)
    for b in blocks:
        exponents = _exponents(gather(log_k, b) - features, gather(col_shift, b) - samples)
        rest = torch.maximum(rest, exponents.amax(2, keepdim=True))
    return Bound(features, samples, rest)


def _pool(log_k: Tensor, col_shift: Tensor, v: Tensor, bound: Bound, blocks: list[Rows]) -> Pooled:
    """The sums of the graphs that the blocks make up."""

    def part(b: Rows) -> tuple[Tensor, Tensor]:
        factor = _factor(gather(log_k, b), gather(col_shift, b), bound, -1)
        return factor.flatten(3).transpose(2, 3) @ gather(v, b), factor.sum(2, keepdim=True)

    values, counts = part(blocks[0])
    for b in blocks[1:]:
        more_values, more_counts = part(b)
        values += more_values
        counts += more_counts
    return Pooled(values, counts)


def _read(
    out: Tensor,
    log_sum: Tensor,
    log_q: Tensor,
    row_shift: Tensor | None,
    sums: Pooled,
    bound: Bound,
    blocks: list[Rows],
) -> None:
    """Writes the result, and L where no shifts are given."""
    for b in blocks:
        weights, log_sums = _weights(log_q, row_shift, sums, bound, b)
        scatter(out, b, weights.flatten(3) @ sums.values)
        if log_sums is not None:
            scatter(log_sum, b, log_sums)


def _read_backward(
    dq: Tensor,
    da: Tensor,
    grad: Tensor,
    grad_log_sum: Tensor,
    log_q: Tensor,
    row_shift: Tensor | None,
    sums: Pooled,
    bound: Bound,
    blocks: list[Rows],
) -> Pooled:
    """Writes the derivatives by log_q, and by the shifts where they are given; returns those by the sums."""
    sums_grad = Pooled(torch.zeros_like(sums.values), torch.zeros_like(sums.counts))
    for b in blocks:
        weights, log_sums = _weights(log_q, row_shift, sums, bound, b)
        g = gather(grad, b)
        sums_grad.values.add_(weights.flatten(3).transpose(2, 3) @ g)
        derivative = (g @ sums.values.transpose(2, 3)).view_as(weights).mul_(weights)
        by_shift = derivative.sum(4)
        if log_sums is None:
            scatter(da, b, by_shift)
        else:
            through = (gather(grad_log_sum, b) - by_shift).mul_(by_shift.size(3))
            weights.mul_(through.unsqueeze(4))
            sums_grad.counts.add_(weights.sum(2, keepdim=True))
            derivative.addcmul_(weights, sums.counts)
        scatter(dq, b, derivative.sum(3))
    return sums_grad


def _pool_backward(
    dk: Tensor,
    db: Tensor,
    dv: Tensor,
    sums_grad: Pooled,
    log_k: Tensor,
    col_shift: Tensor,
    v: Tensor,
    bound: Bound,
    blocks: list[Rows],
) -> None:
    """Writes the derivatives by log_k, b and v."""
    for b in blocks:
        factor = _factor(gather(log_k, b), gather(col_shift, b), bound, -1)
        scatter(dv, b, factor.flatten(3) @ sums_grad.values)
        derivative = (gather(v, b) @ sums_grad.values.transpose(2, 3)).view_as(factor)
        derivative.add_(sums_grad.counts).mul_(factor)
        scatter(dk, b, derivative.sum(3))
        scatter(db, b, derivative.sum(4))


def _weights(
    log_q: Tensor, row_shift: Tensor | None, sums: Pooled, bound: Bound, rows: Rows
) -> tuple[Tensor, Tensor | None]:
    """A of a block [b, H, n, K, F], and L [b, H, n, K] where no shifts are given."""
    queries = gather(log_q, rows)
    if row_shift is not None:
        return _factor(queries, gather(row_shift, rows), bound, 1), None
    top = _top(queries, bound)  # the largest factor of a row and sample is 1, then divided by the row's sum
    factor = _factor(queries, -top, bound, 1)
    total = (factor * sums.counts).sum(4)
    return factor.div_((total.size(3) * total).unsqueeze(4)), total.log() + top


def _exponents(log_features: Tensor, shift: Tensor) -> Tensor:
    """log_features_ir + shift_is, [b, H, n, K, F]."""
    return shift.unsqueeze(4) + log_features.unsqueeze(3)


def _factor(log_features: Tensor, shift: Tensor, bound: Bound, sign: int) -> Tensor:
    """exp(log_features_ir + shift_is ± M_sr), [b, H, n, K, F]: A with the upper sign, B with the lower."""
    log_features = log_features.add(bound.features, alpha=sign)
    shift = shift.add(bound.samples, alpha=sign)
    if bound.rest is None:
        top = log_features.amax(3, keepdim=True)
        return shift.add_(top).exp_().unsqueeze(4) * log_features.sub_(top).exp_().unsqueeze(3)
    exponents = _exponents(log_features, shift).add_(bound.rest, alpha=sign)
    least = math.log(torch.finfo(exponents.dtype).tiny)
    return torch.threshold_(exponents, least, -math.inf).exp_()  # numbers below the normal ones are slow


def _top(log_q: Tensor, bound: Bound) -> Tensor:
    """max_r (log_q_ir + M_sr), [b, H, n, K]."""
    log_q = log_q + bound.features
    if bound.rest is None:
        return log_q.amax(3, keepdim=True) + bound.samples
    return (log_q.unsqueeze(3) + bound.rest).amax(4) + bound.samples
