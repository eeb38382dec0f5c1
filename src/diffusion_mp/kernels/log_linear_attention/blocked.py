"""The fast path: samples and features are one axis of a low-rank product; its factors exist for a block of nodes only.

With M_sr = m_r + β_s the weight of i and j is Σ_sr A_isr B_jsr, A_isr = exp(log_q_ir + a_is + M_sr) and
B_jsr = exp(log_k_jr + b_js − M_sr). With M_sr at, or a few nats above, max_j (log_k_jr + b_js), B_jsr ≤ 1 and Σ_j B_jsr
does not underflow. Both factors are products of two, A_isr = x_is f_ir and B_jsr = w_js e_jr.

The sums over senders are U_sr = Σ_j B_jsr v_j and c_sr = Σ_j B_jsr, and out = A U. Without given shifts a_is = −L_is −
log K with L_is = log Σ_r exp(log_q_ir + M_sr) c_sr. Backward, with the gradients g of out and ℓ of L, W_sr = Σ_i A_isr
g_i and da_is = Σ_r A_isr g_i·U_sr, the derivatives

    by an exponent of sender j are B_jsr v_j·W_sr,  of row i A_isr g_i·U_sr,

and without given shifts t_is = K (ℓ_is − da_is) adds B_jsr Σ_i A_isr t_is and A_isr t_is c_sr. Their sums over s are
the derivatives by the log features, those over r by the shifts; and dv = B W.

U and W of a small graph are larger than its nodes: there they stay products of two factors (`Paired`), and all pairs of
nodes are multiplied, Σ_sr A_isr B_jsr = (Σ_s x_is w_js)(Σ_r f_ir e_jr).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diffusion_mp.graph.ops import Size
from diffusion_mp.kernels.log_linear_attention.reference import (
    LogLinearRows,
    Pooled,
    Receivers,
    Senders,
)
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import ON_GPU, even, stacks

# Entries of one block of factors over all heads on the CPU: 2 MiB in float32, so that it stays in cache.
BLOCK = 1 << 19

# Nats by which a bound of all samples may exceed a maximum. float32 has 87 below one; the rest is for small weights.
SLACK = 40.0


class Bound(NamedTuple):
    """M_sr = m_r + ρ_r + β_s. Logarithms may be large and close together, so their differences are taken one by one."""

    chosen: slice  # the samples that it is for: all, or one
    features: Tensor  # m, [B, 1, F]
    samples: Tensor  # β, [B, 1, K]
    total: int  # the number of all samples
    rest: Tensor | None = None  # ρ, [B, 1, F]; None is zero


@dataclass
class Factor:
    """A or B of a block of nodes: x or w [B, n, K], times f or e [B, n, F]."""

    samples: Tensor
    features: Tensor

    @cached_property
    def product(self) -> Tensor:
        return (self.samples.unsqueeze(3) * self.features.unsqueeze(2)).flatten(2)


@dataclass
class Summed:
    """U = Σ_j B_jsr v_j or W, [B, K F, D]."""

    total: Tensor

    def rows(self, by: Factor) -> Tensor:
        """Return Σ_sr A_isr U_sr for the rows i of A, [B, n, D]."""
        return torch.bmm(by.product, self.total)

    def exponents(self, by: Factor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return A_isr y_i·U_sr, summed over the features [B, n, K] and over the samples [B, n, F]."""
        products = torch.bmm(y, self.total.transpose(1, 2)).mul_(by.product)
        products = products.unflatten(2, (by.samples.size(2), by.features.size(2)))
        return products.sum(3), products.sum(2)


@dataclass
class Paired:
    """U or W as a product of two factors, with the interface of :class:`Summed`."""

    factor: Factor
    y: Tensor

    @cached_property
    def total(self) -> Tensor:
        return torch.bmm(self.factor.product.transpose(1, 2), self.y)

    def rows(self, by: Factor) -> Tensor:
        samples, features = self._products(by)
        return torch.bmm(samples.mul_(features), self.y)

    def exponents(self, by: Factor, y: Tensor) -> tuple[Tensor, Tensor]:
        samples, features = self._products(by)
        channels = torch.bmm(y, self.y.transpose(1, 2))
        by_samples = torch.bmm(features.mul_(channels), self.factor.samples).mul_(by.samples)
        return by_samples, torch.bmm(samples.mul_(channels), self.factor.features).mul_(by.features)

    def _products(self, by: Factor) -> tuple[Tensor, Tensor]:
        """Return the sums over samples and over features for all pairs, [B, n, n]."""
        samples = torch.bmm(by.samples, self.factor.samples.transpose(1, 2))
        return samples, torch.bmm(by.features, self.factor.features.transpose(1, 2))


class Sums(NamedTuple):
    """U, or W, and c [B, K, F] of B graphs and heads."""

    values: Summed | Paired
    counts: Tensor


def attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> LogLinearRows:
    out = empty_results(receivers, senders.col_shift.size(2), senders.v.size(2))
    results = list(out if receivers.row_shift is None else out[:1])
    for to, of, rows, _ in _graphs(ptr, receivers, senders, results):
        for bound in _bounds(of):
            _read(LogLinearRows(rows[0], rows[-1]), to, _pool(of, bound), bound)
    return out


def attention_backward(
    grad: LogLinearRows, receivers: Receivers, senders: Senders, ptr: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of the receivers ([0, H, K] for shifts that are not given) and of the senders."""
    by_receivers = empty_gradients(receivers, senders.col_shift.size(2))
    by_senders = Senders(*empty_like(*senders))
    given = receivers.row_shift is not None
    results = [*by_senders, *by_receivers[: 1 + given]]
    grads = list(grad[: 2 - given])
    for to, of, rows, by_rows in _graphs(ptr, receivers, senders, results, grads):
        by_out = LogLinearRows(by_rows[0], by_rows[-1])
        for bound in _bounds(of):
            by_sums = _read_backward((rows[3], rows[-1]), by_out, to, _pool(of, bound), bound)
            _pool_backward(Senders(*rows[:3]), by_sums, of, bound)
    return (*by_receivers, *by_senders)


def pool(senders: Senders) -> Pooled:
    log_k, col_shift, v = senders
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    if not log_k.size(0):
        return Pooled(
            v.new_zeros(*shape, v.size(2) + 1),
            v.new_full((*shape, 1), -torch.inf, dtype=torch.float64),
        )
    of = _by_head(senders)
    bounds = _bounds(of)
    shifts = [bound.features.double() + bound.samples.double().transpose(1, 2) for bound in bounds]
    shifts = [
        shift if bound.rest is None else shift + bound.rest
        for shift, bound in zip(shifts, bounds, strict=True)
    ]
    return Pooled(
        _joined([_pool(of, bound) for bound in bounds]), torch.cat(shifts, 1).unsqueeze(3)
    )


def pool_backward(grad: Tensor, senders: Senders, shift: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the senders; the shift is found again, with what it is made of."""
    by_senders = Senders(*empty_like(*senders))
    if senders.log_k.size(0):
        of = _by_head(senders)
        for bound in _bounds(of):
            _pool_backward(_by_head(by_senders), _split(grad, bound), of, bound)
    return by_senders


def read(receivers: Receivers, pooled: Pooled) -> LogLinearRows:
    out = empty_results(receivers, pooled.sums.size(1), pooled.sums.size(3) - 1)
    for bound in _merged_bounds(pooled):
        _read(_by_head(out), _by_head(receivers), _split(pooled.sums, bound), bound)
    return out


def read_backward(grad: LogLinearRows, receivers: Receivers, pooled: Pooled) -> tuple[Tensor, ...]:
    gradients = empty_gradients(receivers, pooled.sums.size(1))
    of = _by_head(receivers)
    by_rows = _by_head(grad)
    rows = gradients[0].transpose(0, 1), gradients[1].transpose(0, 1)
    bounds = _merged_bounds(pooled)
    by_sums = [
        _read_backward(rows, by_rows, of, _split(pooled.sums, bound), bound) for bound in bounds
    ]
    return *gradients, _joined(by_sums)


def empty_results(receivers: Receivers, samples: Size, channels: Size) -> LogLinearRows:
    """Return uninitialised results, without a row of L where shifts are given."""
    nodes, heads, _ = receivers.log_q.shape
    new = receivers.log_q.new_empty
    return LogLinearRows(
        new(nodes, heads, channels),
        new(nodes if receivers.row_shift is None else 0, heads, samples),
    )


def empty_gradients(receivers: Receivers, samples: Size) -> tuple[Tensor, Tensor]:
    """Return uninitialised gradients of log_q and a, without a row of the latter where no shifts are given."""
    nodes, heads, _ = receivers.log_q.shape
    rows = 0 if receivers.row_shift is None else nodes
    return empty_like(receivers.log_q), receivers.log_q.new_empty(rows, heads, samples)


T = TypeVar("T", Receivers, Senders, LogLinearRows)


def _by_head(tensors: T) -> T:
    return type(tensors)._make(None if x is None else x.transpose(0, 1) for x in tensors)


def _graphs(
    ptr: Tensor | None,
    receivers: Receivers,
    senders: Senders,
    results: list[Tensor],
    grads: list[Tensor] | None = None,
) -> Iterator[tuple[Receivers, Senders, list[Tensor], list[Tensor]]]:
    """Yield receivers, senders, results and gradients of stacked graphs, all [B, n, F]; padding sends nothing."""
    grads = grads or []
    given = [] if receivers.row_shift is None else [receivers.row_shift]
    _, heads, features = senders.log_k.shape
    height = (BLOCK if senders.v.is_cpu else ON_GPU * BLOCK) // (
        heads * senders.col_shift.size(2) * features
    )
    for mask, rows, views in stacks(
        ptr, height, results, [*senders, receivers.log_q, *grads, *given]
    ):
        log_k, col_shift, v, log_q, *more = views
        by_rows = more[: len(grads)]
        shifts = more[len(grads) :]
        if mask is not None:
            col_shift = col_shift.masked_fill(mask == 0, -torch.inf)
            by_rows = [grad * mask for grad in by_rows]
        yield (
            Receivers(log_q, shifts[0] if shifts else None),
            Senders(log_k, col_shift, v),
            rows,
            by_rows,
        )


def _blocks(log_features: Tensor, bound: Bound) -> list[slice]:
    graphs, nodes, features = log_features.shape
    entries = BLOCK if log_features.is_cpu else ON_GPU * BLOCK
    height = max(1, entries // (graphs * bound.samples.size(2) * features))
    return [slice(0, nodes)] if nodes <= height else even(nodes, height)


def _bounds(senders: Senders) -> list[Bound]:
    """Return a bound for all samples, m_r = max_j log_k_jr and β_s = max_j b_js, or one for each.

    The former if the node of each β_s is within SLACK of every m_r; in the latter ρ makes M_sr the maximum itself.
    """
    log_k, col_shift, _ = senders
    features = log_k.amax(1, keepdim=True)
    samples, at = col_shift.max(1, keepdim=True)
    attained = log_k.gather(1, at.transpose(1, 2).expand(-1, -1, log_k.size(2)))
    count = samples.size(2)
    if not (features - attained > SLACK).any():  # false for a NaN of another graph
        return [Bound(slice(0, count), features, samples, count)]
    found = []
    keys = log_k - features
    shifts = col_shift - samples
    for s in range(count):
        chosen = slice(s, s + 1)
        most = (keys + shifts[:, :, chosen]).amax(1, keepdim=True)
        found.append(Bound(chosen, features, samples[:, :, chosen], count, most))
    return found


def _merged_bounds(pooled: Pooled) -> list[Bound]:
    """Return the bounds of sums that may be merged; the differences M_sr − max_r M_sr are small."""
    found = []
    shifts = pooled.shift.transpose(2, 3).unbind(1)
    for s, shift in enumerate(shifts):
        most = shift.amax(2, keepdim=True)
        found.append(
            Bound(
                slice(s, s + 1), (shift - most).to(pooled.sums), most.to(pooled.sums), len(shifts)
            )
        )
    return found


def _split(sums: Tensor, bound: Bound) -> Sums:
    """Split [H, K, F, D + 1] of one graph into U and c."""
    some = sums[:, bound.chosen]
    return Sums(Summed(some[..., :-1].flatten(1, 2)), some[..., -1])


def _joined(parts: list[Sums]) -> Tensor:
    """Invert :func:`_split`."""
    totals = torch.cat([sums.values.total.unflatten(1, sums.counts.shape[1:]) for sums in parts], 1)
    return torch.cat([totals, torch.cat([sums.counts for sums in parts], 1).unsqueeze(3)], 3)


def _sums(x: Factor, y: Tensor, weights: Tensor, nodes: int) -> Sums:
    """Return Σ_i x_i y_iᵀ, unsummed for nodes so few that all pairs are fewer steps, and Σ_i of weights and features.

    On a GPU long sums go matrix by matrix, since cuBLAS does not divide those of a batch among its processors.
    """
    samples = x.samples.size(2)
    features = x.features.size(2)
    channels = y.size(2)
    product = torch.bmm if y.is_cpu or y.size(1) < 1024 * y.size(0) else _one_by_one
    few = (
        x.features.size(1) == nodes
        and nodes * (samples + features + channels) <= 2 * samples * features * channels
    )
    values = Paired(x, y) if few else Summed(product(x.product.transpose(1, 2), y))
    return Sums(values, product(weights.transpose(1, 2), x.features))


def _one_by_one(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([torch.mm(left, right) for left, right in zip(x, y, strict=True)])


def _add(total: Sums, more: Sums) -> Sums:
    total.values.total.add_(more.values.total)
    total.counts.add_(more.counts)
    return total


def _write(out: Tensor, rows: slice, value: Tensor, bound: Bound) -> None:
    if bound.chosen.start:
        out[:, rows] += value
    else:
        out[:, rows] = value


def _pool(senders: Senders, bound: Bound) -> Sums:
    parts = []
    for b in _blocks(senders.log_k, bound):
        factor = _sending(senders, b, bound)
        v = senders.v[:, b]
        parts.append(_sums(factor, v, factor.samples, senders.v.size(1)))
    return reduce(_add, parts)


def _read(out: LogLinearRows, receivers: Receivers, sums: Sums, bound: Bound) -> None:
    for b in _blocks(receivers.log_q, bound):
        factor, log_sum = _receiving(receivers, sums, b, bound)
        _write(out.values, b, sums.values.rows(factor), bound)
        if log_sum is not None:
            out.log_sum[:, b, bound.chosen] = log_sum


def _read_backward(
    by_receivers: tuple[Tensor, Tensor],
    grad: LogLinearRows,
    receivers: Receivers,
    sums: Sums,
    bound: Bound,
) -> Sums:
    """Write the gradients of the receivers, and return those of the sums: W and Σ_i A_isr t_is."""
    by_log_q, by_row_shift = by_receivers
    parts = []
    for b in _blocks(receivers.log_q, bound):
        factor, log_sum = _receiving(receivers, sums, b, bound)
        g = grad.values[:, b]
        by_samples, by_features = sums.values.exponents(factor, g)
        if log_sum is None:
            by_row_shift[:, b, bound.chosen] = by_samples
            through = torch.zeros_like(by_samples)
        else:
            through = (
                (grad.log_sum[:, b, bound.chosen] - by_samples)
                .mul_(bound.total)
                .mul_(factor.samples)
            )  # x t
            by_features.addcmul_(torch.bmm(through, sums.counts), factor.features)
        parts.append(_sums(factor, g, through, receivers.log_q.size(1)))
        _write(by_log_q, b, by_features, bound)
    return reduce(_add, parts)


def _pool_backward(by_senders: Senders, by_sums: Sums, senders: Senders, bound: Bound) -> None:
    for b in _blocks(senders.log_k, bound):
        factor = _sending(senders, b, bound)
        _write(by_senders.v, b, by_sums.values.rows(factor), bound)
        by_samples, by_features = by_sums.values.exponents(factor, senders.v[:, b])
        by_samples.addcmul_(
            torch.bmm(factor.features, by_sums.counts.transpose(1, 2)), factor.samples
        )
        by_features.addcmul_(torch.bmm(factor.samples, by_sums.counts), factor.features)
        by_senders.col_shift[:, b, bound.chosen] = by_samples
        _write(by_senders.log_k, b, by_features, bound)


def _sending(senders: Senders, rows: slice, bound: Bound) -> Factor:
    """Return B of a block, as w and e ≤ 1."""
    keys = senders.log_k[:, rows] - bound.features
    if bound.rest is not None:
        keys -= bound.rest
    top = keys.amax(2, keepdim=True)
    shift = senders.col_shift[:, rows, bound.chosen] - bound.samples
    return Factor(shift.add_(top).clamp_max_(0.0).exp_(), keys.sub_(top).exp_())


def _receiving(
    receivers: Receivers, sums: Sums, rows: slice, bound: Bound
) -> tuple[Factor, Tensor | None]:
    """Return A of a block, as x and f ≤ 1, and L [B, n, K] where no shifts are given."""
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
