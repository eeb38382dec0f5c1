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

U and W of a small graph are larger than its nodes: there they stay products of two factors, and these are multiplied.
Graphs of a batch that are stacked, with others of nearly one size, are heads of one graph: only their nodes meet. Below
the end of a graph senders weigh nothing, b = −∞, and the gradients of receivers are zero.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.graph_ops import Size
from diffusion_mp.kernels.log_linear_attention.reference import Attended, Pooled, Receivers, Senders
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import gather, scatter, stacks

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


class Outer(NamedTuple):
    """Σ_j x_j y_jᵀ, [b, H, K F, D]."""

    x: Tensor
    """[b, H, n, K F], or the sum itself."""
    y: Tensor | None = None
    """[b, H, n, D]."""

    def by_features(self, x: Tensor) -> Tensor:
        """x U."""
        return x @ self.x if self.y is None else (x @ self.x.transpose(2, 3)) @ self.y

    def by_channels(self, y: Tensor) -> Tensor:
        """y Uᵀ."""
        return y @ self.x.transpose(2, 3) if self.y is None else (y @ self.y.transpose(2, 3)) @ self.x


class Sums(NamedTuple):
    """The sums over the senders of b graphs, or their gradients."""

    values: Outer
    """U, [b, H, K F, D]."""
    counts: Tensor
    """c, [b, H, 1, K, F]."""


class Group(NamedTuple):
    """All rows of one graph."""

    blocks: list[slice]
    pairs: bool = False
    """Whether products of all pairs of them are fewer steps than those with the sums."""


def attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> Attended:
    """Every graph of a batch: pooled, then read."""
    out = empty_results(receivers, senders.col_shift.size(2), senders.v.size(2))
    results = list(out if receivers.row_shift is None else out[:1])
    for to, of, rows, _ in _graphs(ptr, receivers, senders, results):
        group = _group(of.log_k, of.col_shift.size(2), of.v.size(2))
        bound = _bound(of, group)
        _read(Attended(rows[0], rows[-1]), to, _pool(of, bound, group), bound, group)
    return out


def attention_backward(
    grad: Attended, receivers: Receivers, senders: Senders, ptr: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of the receivers ([0, H, K] for shifts that are not given) and of the senders."""
    by_receivers = empty_gradients(receivers, senders.col_shift.size(2))
    by_senders = Senders(*empty_like(*senders))
    given = receivers.row_shift is not None
    results, grads = [*by_senders, *by_receivers[: 1 + given]], list(grad[: 2 - given])
    for to, of, rows, by_rows in _graphs(ptr, receivers, senders, results, grads):
        group = _group(of.log_k, of.col_shift.size(2), of.v.size(2))
        bound = _bound(of, group)
        by_out = Attended(by_rows[0], by_rows[-1])
        by_sums = _read_backward((rows[3], rows[-1]), by_out, to, _pool(of, bound, group), bound, group)
        _pool_backward(Senders(*rows[:3]), by_sums, of, bound, group)
    return (*by_receivers, *by_senders)


def pool(senders: Senders) -> Pooled:
    """The sums of one graph."""
    log_k, col_shift, v = senders
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    if not log_k.size(0):
        return Pooled(v.new_zeros(*shape, v.size(2) + 1), v.new_full((*shape, 1), -torch.inf, dtype=torch.float64))
    group = _group(log_k, shape[1])
    bound = _bound(senders, group)
    shift = _exponents(bound.features.double(), bound.samples.double())
    shift = shift if bound.rest is None else shift + bound.rest
    return Pooled(_joined(_pool(senders, bound, group)), shift.view(*shape, 1))


def pool_backward(grad: Tensor, senders: Senders) -> tuple[Tensor, ...]:
    """Gradients of the senders."""
    by_senders = Senders(*empty_like(*senders))
    if senders.log_k.size(0):
        group = _group(senders.log_k, senders.col_shift.size(2))
        _pool_backward(by_senders, _split(grad), senders, _bound(senders, group), group)
    return by_senders


def read(receivers: Receivers, pooled: Pooled) -> Attended:
    """The rows from such sums, which may be those of more nodes."""
    out = empty_results(receivers, pooled.sums.size(1), pooled.sums.size(3) - 1)
    group = _group(receivers.log_q, pooled.sums.size(1))
    _read(out, receivers, _split(pooled.sums), _merged_bound(pooled), group)
    return out


def read_backward(grad: Attended, receivers: Receivers, pooled: Pooled) -> tuple[Tensor, ...]:
    """Gradients of the receivers ([0, H, K] for shifts that are not given) and of the sums."""
    by_receivers = empty_gradients(receivers, pooled.sums.size(1))
    group = _group(receivers.log_q, pooled.sums.size(1))
    by_sums = _read_backward(by_receivers, grad, receivers, _split(pooled.sums), _merged_bound(pooled), group)
    return (*by_receivers, _joined(by_sums))


# ---------------------------------------------------------------- what these are made of


def empty_results(receivers: Receivers, samples: Size, channels: Size) -> Attended:
    """Without a row of L where shifts are given: it is not needed then."""
    nodes, heads, _ = receivers.log_q.shape
    new = receivers.log_q.new_empty
    return Attended(new(nodes, heads, channels), new(nodes if receivers.row_shift is None else 0, heads, samples))


def empty_gradients(receivers: Receivers, samples: Size) -> tuple[Tensor, Tensor]:
    """By log_q and a; without a row of the latter where no shifts are given."""
    nodes, heads, _ = receivers.log_q.shape
    rows = 0 if receivers.row_shift is None else nodes
    return empty_like(receivers.log_q), receivers.log_q.new_empty(rows, heads, samples)


def _rows_at_once(log_features: Tensor, samples: int) -> int:
    """A node has H K F factors."""
    _, heads, features = log_features.shape
    return max(1, BLOCK // (heads * samples * features))


def _group(log_features: Tensor, samples: int, channels: int | None = None) -> Group:
    """All rows of one graph, whose sums over the nodes are wanted where ``channels`` are not given."""
    nodes, _, features = log_features.shape
    height, wide = _rows_at_once(log_features, samples), samples * features
    blocks = [slice(first, min(first + height, nodes)) for first in range(0, nodes, height)]
    pairs = channels is not None and nodes <= height and nodes * (wide + channels) <= 2 * wide * channels
    return Group(blocks or [slice(0, 0)], pairs)


def _graphs(
    ptr: Tensor | None, receivers: Receivers, senders: Senders, results: list[Tensor], grads: list[Tensor] | None = None
) -> Iterator[tuple[Receivers, Senders, list[Tensor], list[Tensor]]]:
    """Yield receivers, senders, rows of results and of gradients of graphs that are stacked, as heads of one graph."""
    grads, given = grads or [], [] if receivers.row_shift is None else [receivers.row_shift]
    inputs = [*senders, receivers.log_q, *grads, *given]
    for mask, rows, views in stacks(ptr, _rows_at_once(senders.log_k, senders.col_shift.size(2)), results, inputs):
        log_k, col_shift, v, log_q, *more = (x.transpose(0, 1) for x in views)
        by_rows, shifts = more[: len(grads)], more[len(grads) :]
        if mask is not None:
            nodes = mask.transpose(0, 1)
            col_shift = col_shift.masked_fill(nodes == 0, -torch.inf)
            by_rows = [grad * nodes for grad in by_rows]
        to = Receivers(log_q, shifts[0] if shifts else None)
        yield to, Senders(log_k, col_shift, v), [x.transpose(0, 1) for x in rows], by_rows


def _bound(senders: Senders, group: Group) -> Bound:
    """m_r = max_j log_k_jr and β_s = max_j b_js, if for each s the node that attains β_s is within SLACK of every m_r;
    else δ makes their sum the maximum itself.
    """
    keys = gather(senders.log_k, slice(None))
    features = keys.amax(2, keepdim=True)
    samples, at = gather(senders.col_shift, slice(None)).max(2, keepdim=True)
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
    return Sums(Outer(sums[..., :-1].flatten(1, 2).unsqueeze(0)), sums[None, :, None, :, :, -1])


def _joined(sums: Sums) -> Tensor:
    """And back."""
    counts = sums.counts[0, :, 0].unsqueeze(3)
    return torch.cat([sums.values.x.view(*counts.shape[:3], -1), counts], dim=3)


def _pool(senders: Senders, bound: Bound, group: Group) -> Sums:
    """The sums over the senders of each graph."""
    parts = []
    for b in group.blocks:
        factor, v = _factor(gather(senders.log_k, b), gather(senders.col_shift, b), bound, -1), gather(senders.v, b)
        parts.append(Sums(_outer(factor.flatten(3), v, group), factor.sum(2, keepdim=True)))
    return _added(parts)


def _outer(x: Tensor, y: Tensor, group: Group) -> Outer:
    return Outer(x, y) if group.pairs else Outer(x.transpose(2, 3) @ y)


def _added(parts: list[Sums]) -> Sums:
    """Into the first; there are no others of pairs."""
    total, *others = parts
    for more in others:
        total.values.x.add_(more.values.x)
        total.counts.add_(more.counts)
    return total


def _read(out: Attended, receivers: Receivers, sums: Sums, bound: Bound, group: Group) -> None:
    """Writes the rows of the receivers."""
    for b in group.blocks:
        weights, log_sum = _weights(receivers, sums, bound, b)
        scatter(out.values, b, sums.values.by_features(weights.flatten(3)))
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
    parts = []
    for b in group.blocks:
        weights, log_sum = _weights(receivers, sums, bound, b)
        g = gather(grad.values, b)
        by_exponents = sums.values.by_channels(g).view_as(weights).mul_(weights)
        by_shift, shared = by_exponents.sum(4), weights
        if log_sum is None:
            scatter(by_row_shift, b, by_shift)
        else:
            through = (gather(grad.log_sum, b) - by_shift).mul_(by_shift.size(3))  # t
            shared = weights * through.unsqueeze(4)
            by_exponents.addcmul_(shared, sums.counts)
        by_counts = shared.sum(2, keepdim=True) if log_sum is not None else torch.zeros_like(sums.counts)
        parts.append(Sums(_outer(weights.flatten(3), g, group), by_counts))
        scatter(by_log_q, b, by_exponents.sum(3))
    return _added(parts)


def _pool_backward(by_senders: Senders, by_sums: Sums, senders: Senders, bound: Bound, group: Group) -> None:
    """Writes the gradients of the senders."""
    for b in group.blocks:
        factor = _factor(gather(senders.log_k, b), gather(senders.col_shift, b), bound, -1)
        scatter(by_senders.v, b, by_sums.values.by_features(factor.flatten(3)))
        by_factor = by_sums.counts
        if senders.v.size(2):
            by_factor = by_sums.values.by_channels(gather(senders.v, b)).view_as(factor).add_(by_factor)
        by_exponents = factor.mul_(by_factor)
        scatter(by_senders.log_k, b, by_exponents.sum(3))
        scatter(by_senders.col_shift, b, by_exponents.sum(4))


def _weights(receivers: Receivers, sums: Sums, bound: Bound, rows: slice) -> tuple[Tensor, Tensor | None]:
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
