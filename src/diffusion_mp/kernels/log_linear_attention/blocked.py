"""The fast path: samples and features are one axis of a low-rank product; its factors exist for a block of nodes only.

With M_sr = m_r + β_s the weight of i and j is Σ_sr A_isr B_jsr, A_isr = exp(log_q_ir + a_is + M_sr) and B_jsr =
exp(log_k_jr + b_js − M_sr). Where M_sr is max_j (log_k_jr + b_js) or a few nats above, B_jsr ≤ 1 and Σ_j B_jsr does not
underflow, so no row of weights does. Both factors are products of two, A_isr = x_is f_ir and B_jsr = w_js e_jr.

The senders are pooled, U_sr = Σ_j B_jsr v_j and c_sr = Σ_j B_jsr, and the rows read these sums: out = A U. Where no
shifts a of the rows are given, each row of each of K samples is divided by its sum: a_is = −L_is − log K with
L_is = log Σ_r exp(log_q_ir + M_sr) c_sr. Backward, with the gradients g of out and ℓ of L, W_sr = Σ_i A_isr g_i and
da_is = Σ_r A_isr g_i·U_sr, the derivatives

    by an exponent of sender j are B_jsr v_j·W_sr,  of row i A_isr g_i·U_sr,

and without given shifts, through L, t_is = K (ℓ_is − da_is) adds B_jsr Σ_i A_isr t_is and A_isr t_is c_sr. Their sums
over s are the derivatives by the log features, those over r by the shifts; and dv = B W. All factors are computed anew.

U and W of a small graph are larger than its nodes: there they stay products of two factors (`Paired`), and all pairs of
nodes are multiplied, Σ_sr A_isr B_jsr = (Σ_s x_is w_js)(Σ_r f_ir e_jr).
Graphs of a batch that are stacked, with others of nearly one size, are heads of one graph: only their nodes meet. Below
the end of a graph senders weigh nothing, b = −∞, and the gradients of receivers are zero.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.graph.ops import Size
from diffusion_mp.kernels.log_linear_attention.reference import Attended, Pooled, Receivers, Senders
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import stacks

# Entries of one block of factors over all heads: 2 MiB in float32, so that it stays in cache from exp to product.
BLOCK = 1 << 19

# Nats by which a bound of all samples may exceed a maximum. float32 holds 87 below one; the rest is for small weights.
SLACK = 40.0


class Bound(NamedTuple):
    """M_sr = m_r + ρ_r + β_s. Logarithms may be large and close together, so factors take differences to one by one."""

    chosen: slice
    """The samples that it is for: all, or one."""
    features: Tensor
    """m, [B, 1, F]."""
    samples: Tensor
    """β, [B, 1, K]."""
    total: int
    """How many samples there are."""
    rest: Tensor | None = None
    """ρ, [B, 1, F]; ``None`` is zero."""


class Factor:
    """A or B of a block of nodes, a product of two."""

    def __init__(self, samples: Tensor, features: Tensor) -> None:
        self.samples = samples  # x or w, [B, n, K]
        self.features = features  # f or e, [B, n, F]

    @cached_property
    def whole(self) -> Tensor:
        """[B, n, K F]."""
        return (self.samples.unsqueeze(3) * self.features.unsqueeze(2)).flatten(2)


class Summed:
    """U = Σ_j B_jsr v_j, or W."""

    def __init__(self, total: Tensor) -> None:
        self.total = total  # [B, K F, D]

    def rows(self, by: Factor) -> Tensor:
        """Σ_sr A_isr U_sr for the rows i of A, [B, n, D]."""
        return torch.bmm(by.whole, self.total)

    def exponents(self, by: Factor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A_isr y_i·U_sr, summed over the features [B, n, K] and over the samples [B, n, F]."""
        products = torch.bmm(y, self.total.transpose(1, 2)).mul_(by.whole)
        products = products.unflatten(2, (by.samples.size(2), by.features.size(2)))
        return products.sum(3), products.sum(2)


class Paired:
    """The same, not summed."""

    def __init__(self, factor: Factor, y: Tensor) -> None:
        self.factor, self.y = factor, y

    @cached_property
    def total(self) -> Tensor:
        """The sum, [B, K F, D]."""
        return torch.bmm(self.factor.whole.transpose(1, 2), self.y)

    def rows(self, by: Factor) -> Tensor:
        """As above."""
        samples, features = self._products(by)
        return torch.bmm(samples.mul_(features), self.y)

    def exponents(self, by: Factor, y: Tensor) -> tuple[Tensor, Tensor]:
        """As above."""
        samples, features = self._products(by)
        channels = torch.bmm(y, self.y.transpose(1, 2))
        by_samples = torch.bmm(features.mul_(channels), self.factor.samples).mul_(by.samples)
        return by_samples, torch.bmm(samples.mul_(channels), self.factor.features).mul_(by.features)

    def _products(self, by: Factor) -> tuple[Tensor, Tensor]:
        """Those of all pairs, over the samples and over the features, [B, n, n]."""
        samples = torch.bmm(by.samples, self.factor.samples.transpose(1, 2))
        return samples, torch.bmm(by.features, self.factor.features.transpose(1, 2))


class Sums(NamedTuple):
    """The sums over the senders of B graphs and heads, or their gradients."""

    values: Summed | Paired
    counts: Tensor
    """c, [B, K, F]."""


def attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> Attended:
    """Every graph of a batch: pooled, then read."""
    out = empty_results(receivers, senders.col_shift.size(2), senders.v.size(2))
    results = list(out if receivers.row_shift is None else out[:1])
    for to, of, rows, _ in _graphs(ptr, receivers, senders, results):
        for bound in _bounds(of):
            _read(Attended(rows[0], rows[-1]), to, _pool(of, bound), bound)
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
        by_out = Attended(by_rows[0], by_rows[-1])
        for bound in _bounds(of):
            by_sums = _read_backward((rows[3], rows[-1]), by_out, to, _pool(of, bound), bound)
            _pool_backward(Senders(*rows[:3]), by_sums, of, bound)
    return (*by_receivers, *by_senders)


def pool(senders: Senders) -> Pooled:
    """The sums of one graph."""
    log_k, col_shift, v = senders
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    if not log_k.size(0):
        return Pooled(v.new_zeros(*shape, v.size(2) + 1), v.new_full((*shape, 1), -torch.inf, dtype=torch.float64))
    of = Senders(*(x.transpose(0, 1) for x in senders))
    bounds = _bounds(of)
    shifts = [bound.features.double() + bound.samples.double().transpose(1, 2) for bound in bounds]
    shifts = [shift if bound.rest is None else shift + bound.rest for shift, bound in zip(shifts, bounds, strict=True)]
    return Pooled(_joined([_pool(of, bound) for bound in bounds]), torch.cat(shifts, 1).unsqueeze(3))


def pool_backward(grad: Tensor, senders: Senders) -> tuple[Tensor, ...]:
    """Gradients of the senders."""
    by_senders = Senders(*empty_like(*senders))
    if senders.log_k.size(0):
        to, of = (Senders(*(x.transpose(0, 1) for x in tensors)) for tensors in (by_senders, senders))
        for bound in _bounds(of):
            _pool_backward(to, _split(grad, bound), of, bound)
    return by_senders


def read(receivers: Receivers, pooled: Pooled) -> Attended:
    """The rows from such sums, which may be those of more nodes."""
    out = empty_results(receivers, pooled.sums.size(1), pooled.sums.size(3) - 1)
    rows = Attended(*(x.transpose(0, 1) for x in out))
    for bound in _merged_bounds(pooled):
        _read(rows, _by_head(receivers), _split(pooled.sums, bound), bound)
    return out


def read_backward(grad: Attended, receivers: Receivers, pooled: Pooled) -> tuple[Tensor, ...]:
    """Gradients of the receivers ([0, H, K] for shifts that are not given) and of the sums."""
    by_log_q, by_row_shift = empty_gradients(receivers, pooled.sums.size(1))
    rows, by_rows = (
        (by_log_q.transpose(0, 1), by_row_shift.transpose(0, 1)),
        Attended(*(x.transpose(0, 1) for x in grad)),
    )
    by_sums = [
        _read_backward(rows, by_rows, _by_head(receivers), _split(pooled.sums, bound), bound)
        for bound in _merged_bounds(pooled)
    ]
    return by_log_q, by_row_shift, _joined(by_sums)


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


def _by_head(receivers: Receivers) -> Receivers:
    log_q, row_shift = receivers
    return Receivers(log_q.transpose(0, 1), None if row_shift is None else row_shift.transpose(0, 1))


def _graphs(
    ptr: Tensor | None, receivers: Receivers, senders: Senders, results: list[Tensor], grads: list[Tensor] | None = None
) -> Iterator[tuple[Receivers, Senders, list[Tensor], list[Tensor]]]:
    """Yield receivers, senders, rows of results and of gradients of graphs that are stacked, all [B, n, F]."""
    grads, given = grads or [], [] if receivers.row_shift is None else [receivers.row_shift]
    _, heads, features = senders.log_k.shape
    height = BLOCK // (heads * senders.col_shift.size(2) * features)
    for mask, rows, views in stacks(ptr, height, results, [*senders, receivers.log_q, *grads, *given]):
        log_k, col_shift, v, log_q, *more = views
        by_rows, shifts = more[: len(grads)], more[len(grads) :]
        if mask is not None:
            col_shift = col_shift.masked_fill(mask == 0, -torch.inf)
            by_rows = [grad * mask for grad in by_rows]
        yield Receivers(log_q, shifts[0] if shifts else None), Senders(log_k, col_shift, v), rows, by_rows


def _blocks(log_features: Tensor, bound: Bound) -> list[slice]:
    """The nodes in runs whose factors are a block."""
    graphs, nodes, features = log_features.shape
    height = max(1, BLOCK // (graphs * bound.samples.size(2) * features))
    return [slice(first, min(first + height, nodes)) for first in range(0, nodes, height)] or [slice(0, 0)]


def _bounds(senders: Senders) -> list[Bound]:
    """m_r = max_j log_k_jr and β_s = max_j b_js, if for each s the node that attains β_s is within SLACK of every m_r;
    else a bound for every sample, with m_r such that the sum is the maximum itself.
    """
    log_k, col_shift, _ = senders
    features = log_k.amax(1, keepdim=True)
    samples, at = col_shift.max(1, keepdim=True)
    attained = log_k.gather(1, at.transpose(1, 2).expand(-1, -1, log_k.size(2)))
    count = samples.size(2)
    if not (features - attained > SLACK).any():  # so put, a NaN of one graph does not decide for others
        return [Bound(slice(0, count), features, samples, count)]
    found, keys, shifts = [], log_k - features, col_shift - samples
    for s in range(count):
        chosen = slice(s, s + 1)
        most = (keys + shifts[:, :, chosen]).amax(1, keepdim=True)
        found.append(Bound(chosen, features, samples[:, :, chosen], count, most))
    return found


def _merged_bounds(pooled: Pooled) -> list[Bound]:
    """The bounds of sums that may be merged ones; M_sr − max_r M_sr is small, and cancels nothing."""
    found, shifts = [], pooled.shift.transpose(2, 3).unbind(1)
    for s, shift in enumerate(shifts):
        most = shift.amax(2, keepdim=True)
        found.append(Bound(slice(s, s + 1), (shift - most).to(pooled.sums), most.to(pooled.sums), len(shifts)))
    return found


def _split(sums: Tensor, bound: Bound) -> Sums:
    """U and c of one graph, [H, K, F, D + 1], apart."""
    some = sums[:, bound.chosen]
    return Sums(Summed(some[..., :-1].flatten(1, 2)), some[..., -1])


def _joined(parts: list[Sums]) -> Tensor:
    """And back."""
    found = []
    for sums in parts:
        total = sums.values.total.unflatten(1, sums.counts.shape[1:])
        found.append(torch.cat([total, sums.counts.unsqueeze(3)], 3))
    return torch.cat(found, 1)


def _outer(x: Factor, y: Tensor, nodes: int) -> Summed | Paired:
    """All pairs of so few nodes as are fewer steps than the products with the sum."""
    samples, features, channels = x.samples.size(2), x.features.size(2), y.size(2)
    few = x.features.size(1) == nodes and nodes * (samples + features + channels) <= 2 * samples * features * channels
    return Paired(x, y) if few else Summed(torch.bmm(x.whole.transpose(1, 2), y))


def _added(parts: list[Sums]) -> Sums:
    """Into the first; there are no others of pairs."""
    total, *others = parts
    for more in others:
        total.values.total.add_(more.values.total)
        total.counts.add_(more.counts)
    return total


def _write(out: Tensor, rows: slice, value: Tensor, bound: Bound) -> None:
    """What comes of some samples: the first, or more of them."""
    if bound.chosen.start:
        out[:, rows] += value
    else:
        out[:, rows] = value


def _pool(senders: Senders, bound: Bound) -> Sums:
    """The sums over the senders of each graph."""
    parts = []
    for b in _blocks(senders.log_k, bound):
        factor, v = _sending(senders, b, bound), senders.v[:, b]
        counts = torch.bmm(factor.samples.transpose(1, 2), factor.features)
        parts.append(Sums(_outer(factor, v, senders.v.size(1)), counts))
    return _added(parts)


def _read(out: Attended, receivers: Receivers, sums: Sums, bound: Bound) -> None:
    """Writes the rows of the receivers."""
    for b in _blocks(receivers.log_q, bound):
        factor, log_sum = _receiving(receivers, sums, b, bound)
        _write(out.values, b, sums.values.rows(factor), bound)
        if log_sum is not None:
            out.log_sum[:, b, bound.chosen] = log_sum


def _read_backward(
    by_receivers: tuple[Tensor, Tensor], grad: Attended, receivers: Receivers, sums: Sums, bound: Bound
) -> Sums:
    """Writes the gradients of the receivers, and returns those of the sums: W and Σ_i A_isr t_is."""
    by_log_q, by_row_shift = by_receivers
    parts = []
    for b in _blocks(receivers.log_q, bound):
        factor, log_sum = _receiving(receivers, sums, b, bound)
        g = grad.values[:, b]
        by_samples, by_features = sums.values.exponents(factor, g)
        if log_sum is None:
            by_row_shift[:, b, bound.chosen] = by_samples
            by_counts = torch.zeros_like(sums.counts)
        else:
            through = (grad.log_sum[:, b, bound.chosen] - by_samples).mul_(bound.total).mul_(factor.samples)  # x t
            by_features.addcmul_(torch.bmm(through, sums.counts), factor.features)
            by_counts = torch.bmm(through.transpose(1, 2), factor.features)
        parts.append(Sums(_outer(factor, g, receivers.log_q.size(1)), by_counts))
        _write(by_log_q, b, by_features, bound)
    return _added(parts)


def _pool_backward(by_senders: Senders, by_sums: Sums, senders: Senders, bound: Bound) -> None:
    """Writes the gradients of the senders."""
    for b in _blocks(senders.log_k, bound):
        factor = _sending(senders, b, bound)
        _write(by_senders.v, b, by_sums.values.rows(factor), bound)
        by_samples, by_features = by_sums.values.exponents(factor, senders.v[:, b])
        by_samples.addcmul_(torch.bmm(factor.features, by_sums.counts.transpose(1, 2)), factor.samples)
        by_features.addcmul_(torch.bmm(factor.samples, by_sums.counts), factor.features)
        by_senders.col_shift[:, b, bound.chosen] = by_samples
        _write(by_senders.log_k, b, by_features, bound)


def _sending(senders: Senders, rows: slice, bound: Bound) -> Factor:
    """B of a block, as w and e ≤ 1."""
    keys = senders.log_k[:, rows] - bound.features
    if bound.rest is not None:
        keys -= bound.rest
    top = keys.amax(2, keepdim=True)
    shift = senders.col_shift[:, rows, bound.chosen] - bound.samples
    return Factor(shift.add_(top).clamp_max_(0.0).exp_(), keys.sub_(top).exp_())


def _receiving(receivers: Receivers, sums: Sums, rows: slice, bound: Bound) -> tuple[Factor, Tensor | None]:
    """A of a block, as x and f ≤ 1, and L [B, n, K] where no shifts are given."""
    queries = receivers.log_q[:, rows] + bound.features
    if bound.rest is not None:
        queries += bound.rest
    top = queries.amax(2, keepdim=True)
    features = queries.sub_(top).exp_()
    top = top + bound.samples
    if receivers.row_shift is not None:
        return Factor(top.add_(receivers.row_shift[:, rows, bound.chosen]).exp_(), features), None
    total = torch.bmm(features, sums.counts.transpose(1, 2))
    return Factor(total.mul(bound.total).reciprocal_(), features), top.add_(total.log_())


# Entries gathered at once: 4 MiB in float32.
CHUNK = 1 << 20


def entries(edge_index: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r), [E, H]."""
    out = log_q.new_empty(edge_index.size(1), log_q.size(1))
    for part, (source, target) in _chunks(edge_index, log_q):
        out[part] = (log_q[target] + log_k[source]).logsumexp(2)
    return out


def entries_backward(
    grad: Tensor, out: Tensor, edge_index: Tensor, log_q: Tensor, log_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of log_q and log_k: every entry's softmax over the features, times its gradient, summed at its ends."""
    dq, dk = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k))
    for part, (source, target) in _chunks(edge_index, log_q):
        exponents = log_q[target] + log_k[source]
        share = exponents.sub_(out[part].unsqueeze(2)).exp_().mul_(grad[part].unsqueeze(2))
        dq.index_add_(0, target, share)
        dk.index_add_(0, source, share)
    return dq, dk


def _chunks(edge_index: Tensor, log_features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Runs of edges, and their ends."""
    edges = max(1, CHUNK // max(1, log_features[:1].numel()))
    for first in range(0, edge_index.size(1), edges):
        part = slice(first, first + edges)
        yield part, edge_index[:, part]
