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

from diffusion_mp.kernels.log_linear_attention.reference import Attended, Pooled, Receivers, Senders
from diffusion_mp.kernels.operation import empty_like
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


class Sums(NamedTuple):
    """The sums over the senders of b graphs, or their gradients."""

    values: Tensor
    """U, [b, H, K F, D]."""
    counts: Tensor
    """c, [b, H, 1, K, F]."""


class Group(NamedTuple):
    """One graph, or several of equal size."""

    rows: Rows
    blocks: list[Rows]
    """The same rows in blocks."""


def attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> Attended:
    """Every graph of a batch: pooled, then read."""
    out = empty_results(receivers, senders.col_shift.size(2), senders.v.size(2))
    for group in _groups(senders.log_k, senders.col_shift.size(2), senders.v.size(2), ptr):
        bound = _bound(senders, group)
        _read(out, receivers, _pool(senders, bound, group), bound, group)
    return out


def attention_backward(
    grad: Attended, receivers: Receivers, senders: Senders, ptr: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of the receivers ([0, H, K] for shifts that are not given) and of the senders."""
    by_receivers = empty_gradients(receivers, senders.col_shift.size(2))
    by_senders = Senders(*empty_like(*senders))
    for group in _groups(senders.log_k, senders.col_shift.size(2), senders.v.size(2), ptr):
        bound = _bound(senders, group)
        by_sums = _read_backward(by_receivers, grad, receivers, _pool(senders, bound, group), bound, group)
        _pool_backward(by_senders, by_sums, senders, bound, group)
    return (*by_receivers, *by_senders)


def pool(senders: Senders) -> Pooled:
    """The sums of one graph."""
    log_k, col_shift, v = senders
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    if not log_k.size(0):
        return Pooled(v.new_zeros(*shape, v.size(2) + 1), v.new_full((*shape, 1), -torch.inf, dtype=torch.float64))
    (group,) = _groups(log_k, shape[1], 1, None)
    bound = _bound(senders, group)
    shift = _exponents(bound.features.double(), bound.samples.double())
    shift = shift if bound.rest is None else shift + bound.rest
    return Pooled(_joined(_pool(senders, bound, group)), shift.view(*shape, 1))


def pool_backward(grad: Tensor, senders: Senders) -> tuple[Tensor, ...]:
    """Gradients of the senders."""
    by_senders = Senders(*empty_like(*senders))
    for group in _groups(senders.log_k, senders.col_shift.size(2), 1, None):
        _pool_backward(by_senders, _split(grad), senders, _bound(senders, group), group)
    return by_senders


def read(receivers: Receivers, pooled: Pooled) -> Attended:
    """The rows from such sums, which may be those of more nodes."""
    out = empty_results(receivers, pooled.sums.size(1), pooled.sums.size(3) - 1)
    for group in _groups(receivers.log_q, pooled.sums.size(1), 1, None):
        _read(out, receivers, _split(pooled.sums), _merged_bound(pooled), group)
    return out


def read_backward(grad: Attended, receivers: Receivers, pooled: Pooled) -> tuple[Tensor, ...]:
    """Gradients of the receivers ([0, H, K] for shifts that are not given) and of the sums."""
    by_receivers, by_sums = empty_gradients(receivers, pooled.sums.size(1)), torch.zeros_like(pooled.sums)
    for group in _groups(receivers.log_q, pooled.sums.size(1), 1, None):
        sums, bound = _split(pooled.sums), _merged_bound(pooled)
        by_sums = _joined(_read_backward(by_receivers, grad, receivers, sums, bound, group))
    return (*by_receivers, by_sums)


# ---------------------------------------------------------------- what these are made of


def empty_results(receivers: Receivers, samples: int, channels: int) -> Attended:
    """Without a row of L where shifts are given: it is not needed then."""
    nodes, heads, _ = receivers.log_q.shape
    new = receivers.log_q.new_empty
    return Attended(new(nodes, heads, channels), new(nodes if receivers.row_shift is None else 0, heads, samples))


def empty_gradients(receivers: Receivers, samples: int) -> tuple[Tensor, Tensor]:
    """By log_q and a; without a row of the latter where no shifts are given."""
    nodes, heads, _ = receivers.log_q.shape
    rows = 0 if receivers.row_shift is None else nodes
    return empty_like(receivers.log_q), receivers.log_q.new_empty(rows, heads, samples)


def _groups(log_features: Tensor, samples: int, channels: int, ptr: Tensor | None) -> Iterator[Group]:
    """A node has H K F factors, and a graph as many sums over its nodes in each of ``channels``."""
    num_nodes, heads, features = log_features.shape
    height = BLOCK // (heads * samples * features)
    for _, rows, blocks in row_blocks(ptr, num_nodes, height, log_features.device, channels):
        yield Group(rows, blocks)


def _bound(senders: Senders, group: Group) -> Bound:
    """m_r = max_j log_k_jr and β_s = max_j b_js, if for each s the node that attains β_s is within SLACK of every m_r;
    else δ makes their sum the maximum itself.
    """
    keys = gather(senders.log_k, group.rows)
    features = keys.amax(2, keepdim=True)
    samples, at = gather(senders.col_shift, group.rows).max(2, keepdim=True)
    attained = keys.gather(2, at.transpose(2, 3).expand(-1, -1, -1, keys.size(3)))
    if not (features - attained > SLACK).any():  # so put, a NaN of one graph does not decide for others
        return Bound(features, samples, None)
    rest = torch.full_like(_exponents(features, samples), -torch.inf)
    for b in group.blocks:
        exponents = _exponents(gather(senders.log_k, b) - features, gather(senders.col_shift, b) - samples)
        rest = torch.maximum(rest, exponents.amax(2, keepdim=True))
    return Bound(features, samples, rest)


def _merged_bound(pooled: Pooled) -> Bound:
    """The bound of sums that may be merged ones; M_sr − max_r M_sr is small, and cancels nothing."""
    shift = pooled.shift.squeeze(3)[None, :, None]
    samples = shift.amax(4)
    rest = (shift - samples.unsqueeze(4)).to(pooled.sums.dtype)
    return Bound(torch.zeros_like(rest[:, :, :, 0]), samples.to(rest.dtype), rest)


def _split(sums: Tensor) -> Sums:
    """U and c of one graph, [H, K, F, D + 1], apart."""
    return Sums(sums[..., :-1].flatten(1, 2).unsqueeze(0), sums[None, :, None, :, :, -1])


def _joined(sums: Sums) -> Tensor:
    """And back."""
    counts = sums.counts[0, :, 0].unsqueeze(3)
    return torch.cat([sums.values.view(*counts.shape[:3], -1), counts], dim=3)


def _pool(senders: Senders, bound: Bound, group: Group) -> Sums:
    """The sums over the senders of each graph."""

    def part(b: Rows) -> Sums:
        factor = _factor(gather(senders.log_k, b), gather(senders.col_shift, b), bound, -1)
        return Sums(factor.flatten(3).transpose(2, 3) @ gather(senders.v, b), factor.sum(2, keepdim=True))

    sums = part(group.blocks[0])
    for b in group.blocks[1:]:
        for total, more in zip(sums, part(b), strict=True):
            total += more
    return sums


def _read(out: Attended, receivers: Receivers, sums: Sums, bound: Bound, group: Group) -> None:
    """Writes the rows of the receivers."""
    for b in group.blocks:
        weights, log_sum = _weights(receivers, sums, bound, b)
        scatter(out.values, b, weights.flatten(3) @ sums.values)
        if log_sum is not None:
            scatter(out.log_sum, b, log_sum)


def _read_backward(
    by_receivers: tuple[Tensor, Tensor],
    grad: Attended,
    receivers: Receivers,
    sums: Sums,
    bound: Bound,
    group: Group,
) -> Sums:
    """Writes the gradients of the receivers, and returns those of the sums: W and Σ_i A_isr t_is."""
    by_log_q, by_row_shift = by_receivers
    by_sums = Sums(torch.zeros_like(sums.values), torch.zeros_like(sums.counts))
    for b in group.blocks:
        weights, log_sum = _weights(receivers, sums, bound, b)
        g = gather(grad.values, b)
        if log_sum is not None and not g.size(3):  # there is nothing but L
            weights.mul_(gather(grad.log_sum, b).mul(weights.size(3)).unsqueeze(4))
            by_sums.counts.add_(weights.sum(2, keepdim=True))
            scatter(by_log_q, b, weights.mul_(sums.counts).sum(3))
            continue
        by_sums.values.add_(weights.flatten(3).transpose(2, 3) @ g)
        by_exponents = (g @ sums.values.transpose(2, 3)).view_as(weights).mul_(weights)
        by_shift = by_exponents.sum(4)
        if log_sum is None:
            scatter(by_row_shift, b, by_shift)
        else:
            through = (gather(grad.log_sum, b) - by_shift).mul_(by_shift.size(3))  # t
            weights.mul_(through.unsqueeze(4))
            by_sums.counts.add_(weights.sum(2, keepdim=True))
            by_exponents.addcmul_(weights, sums.counts)
        scatter(by_log_q, b, by_exponents.sum(3))
    return by_sums


def _pool_backward(by_senders: Senders, by_sums: Sums, senders: Senders, bound: Bound, group: Group) -> None:
    """Writes the gradients of the senders."""
    for b in group.blocks:
        factor = _factor(gather(senders.log_k, b), gather(senders.col_shift, b), bound, -1)
        scatter(by_senders.v, b, factor.flatten(3) @ by_sums.values)
        by_factor = by_sums.counts
        if senders.v.size(2):
            by_factor = by_factor + (gather(senders.v, b) @ by_sums.values.transpose(2, 3)).view_as(factor)
        by_exponents = factor.mul_(by_factor)
        scatter(by_senders.log_k, b, by_exponents.sum(3))
        scatter(by_senders.col_shift, b, by_exponents.sum(4))


def _weights(receivers: Receivers, sums: Sums, bound: Bound, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """A of a block [b, H, n, K, F], and L [b, H, n, K] where no shifts are given."""
    queries = gather(receivers.log_q, rows)
    if receivers.row_shift is not None:
        return _factor(queries, gather(receivers.row_shift, rows), bound, 1), None
    # The largest factor of a row and sample is 1, before they are divided by their sum.
    queries = queries + bound.features
    if bound.rest is None:  # factors of all samples are proportional, so that they are the same once divided
        top = queries.amax(3, keepdim=True)
        factor = queries.sub_(top).exp_()
        total = factor @ sums.counts.squeeze(2).transpose(2, 3)
        factor = factor.unsqueeze(3) * total.mul(total.size(3)).reciprocal_().unsqueeze(4)
    else:
        factor = queries.unsqueeze(3) + bound.rest
        top = factor.amax(4)
        factor = _exp(factor.sub_(top.unsqueeze(4)))
        total = (factor * sums.counts).sum(4)
        factor.div_(total.mul(total.size(3)).unsqueeze(4))
    return factor, total.log() + top + bound.samples


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
    return _exp(_exponents(log_features, shift).add_(bound.rest, alpha=sign))


def _exp(exponents: Tensor) -> Tensor:
    """In place; zero for what is below the normal numbers, which are slow."""
    return torch.threshold_(exponents, math.log(torch.finfo(exponents.dtype).tiny), -math.inf).exp_()
