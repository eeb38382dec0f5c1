"""The fast path: samples and features are one axis of a low-rank product; its factors exist for a block of nodes only.

With M_sr ≥ max_j (log_k_jr + b_js) the weight of i and j is Σ_sr A_isr B_jsr, A_isr = exp(log_q_ir + a_is + M_sr) and
B_jsr = exp(log_k_jr + b_js − M_sr) ≤ 1. Where M_sr is the maximum or a few nats above, Σ_j B_jsr does not underflow, so
no row of weights does.
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


class Separable(NamedTuple):
    """The bound M_sr = m_r + β_s, [b, H, 1, F] and [b, H, 1, K]: one exp per feature and one per sample."""

    features: Tensor
    samples: Tensor


# Or any M, [b, H, 1, K, F]: one exp per feature and sample.
Bound = Separable | Tensor


def groups(log_q: Tensor, shift: Tensor, ptr: Tensor | None, channels: int) -> Iterator[tuple[int, Rows, list[Rows]]]:
    """Yield the size and the rows of one graph, or of several of equal size, and the same rows in blocks.

    A node has H K F factors, and a graph as many sums over its nodes in each of ``channels``.
    """
    num_nodes, heads, features = log_q.shape
    return row_blocks(ptr, num_nodes, BLOCK // (heads * shift.size(2) * features), log_q.device, channels)


def _sum(terms: Iterator[Tensor]) -> Tensor:
    total = next(terms)
    for term in terms:
        total += term
    return total


def _exponents(log_features: Tensor, shift: Tensor) -> Tensor:
    """log_features_ir + shift_is, [b, H, n, K, F]."""
    return shift.unsqueeze(4) + log_features.unsqueeze(3)


def _bound(log_k: Tensor, col_shift: Tensor, rows: Rows, blocks: list[Rows]) -> Bound:
    """m_r = max_j log_k_jr and β_s = max_j b_js, if for each s the node that attains β_s is within SLACK of every m_r;
    else the maximum itself.
    """
    keys = gather(log_k, rows)
    features = keys.amax(2, keepdim=True)
    samples, at = gather(col_shift, rows).max(2, keepdim=True)
    attained = keys.gather(2, at.transpose(2, 3).expand(-1, -1, -1, keys.size(3)))
    if not (features - attained > SLACK).any():  # so put, a NaN of one graph does not decide for others
        return Separable(features, samples)
    maxima = (_exponents(gather(log_k, b), gather(col_shift, b)).amax(2, keepdim=True) for b in blocks)
    bound = next(maxima)
    for maximum in maxima:
        bound = torch.maximum(bound, maximum)
    return bound


def _factor(log_features: Tensor, shift: Tensor, bound: Bound, sign: int) -> Tensor:
    """exp(log_features_ir + shift_is ± M_sr), [b, H, n, K, F]: A with the upper sign, B with the lower."""
    if isinstance(bound, Tensor):
        exponents = _exponents(log_features, shift).add_(bound, alpha=sign)
        return torch.threshold_(
            exponents, math.log(torch.finfo(exponents.dtype).tiny), -math.inf
        ).exp_()  # subnormals are slow
    log_features = log_features.add(bound.features, alpha=sign)
    top = log_features.amax(3, keepdim=True)
    shift = shift.add(bound.samples, alpha=sign).add_(top)
    return shift.exp_().unsqueeze(4) * log_features.sub_(top).exp_().unsqueeze(3)


def _top(log_q: Tensor, bound: Bound) -> Tensor:
    """max_r (log_q_ir + M_sr), [b, H, n, K]."""
    if isinstance(bound, Tensor):
        return (log_q.unsqueeze(3) + bound).amax(4)
    return (log_q + bound.features).amax(3, keepdim=True) + bound.samples


def logsumexp(log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Tensor | None) -> Tensor:
    """log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js), [N, H, K]."""
    out = torch.empty_like(col_shift, memory_format=torch.contiguous_format)
    for _, rows, blocks in groups(log_q, col_shift, ptr, 1):
        bound = _bound(log_k, col_shift, rows, blocks)
        pooled = _sum(_factor(gather(log_k, b), gather(col_shift, b), bound, -1).sum(2, keepdim=True) for b in blocks)
        for b in blocks:
            queries = gather(log_q, b)
            top = _top(queries, bound)
            scatter(out, b, _factor(queries, -top, bound, 1).mul_(pooled).sum(4).log_().add_(top))
    return out


def logsumexp_backward(
    grad: Tensor, lse: Tensor, log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_q, log_k and b: the product's for v = 1 and a = −lse, each row's terms times its gradient."""
    dq, dk, db = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k, col_shift))
    for _, rows, blocks in groups(log_q, col_shift, ptr, 1):
        bound = _bound(log_k, col_shift, rows, blocks)
        pooled = _sum(_factor(gather(log_k, b), gather(col_shift, b), bound, -1).sum(2, keepdim=True) for b in blocks)
        pooled_grad = torch.zeros_like(pooled)
        for b in blocks:
            share = _factor(gather(log_q, b), -gather(lse, b), bound, 1).mul_(gather(grad, b).unsqueeze(4))
            pooled_grad += share.sum(2, keepdim=True)
            scatter(dq, b, share.mul_(pooled).sum(3))
        for b in blocks:
            share = _factor(gather(log_k, b), gather(col_shift, b), bound, -1).mul_(pooled_grad)
            scatter(dk, b, share.sum(3))
            scatter(db, b, share.sum(4))
    return dq, dk, db


def product(
    log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None
) -> Tensor:
    """Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j, [N, H, D]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for _, rows, blocks in groups(log_q, col_shift, ptr, v.size(2)):
        bound = _bound(log_k, col_shift, rows, blocks)
        pooled = _pool(log_k, col_shift, v, bound, blocks)
        for b in blocks:
            scatter(out, b, _factor(gather(log_q, b), gather(row_shift, b), bound, 1).flatten(3) @ pooled)
    return out


def _pool(log_k: Tensor, col_shift: Tensor, v: Tensor, bound: Bound, blocks: list[Rows]) -> Tensor:
    """U_sr = Σ_j B_jsr v_j, [b, H, K F, D]."""
    return _sum(
        _factor(gather(log_k, b), gather(col_shift, b), bound, -1).flatten(3).transpose(2, 3) @ gather(v, b)
        for b in blocks
    )


def product_backward(
    grad: Tensor, log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of log_q, log_k, v, a and b; the factors are computed anew, block by block.

    With U = Bᵀv and W = Aᵀ grad: A_isr (grad_i·U_sr) and B_jsr (v_j·W_sr) are the derivatives by the exponents, whose
    sums over s and over r are those by the log features and by the shifts; dv = B W.
    """
    dq, dk, dv, da, db = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k, v, row_shift, col_shift)
    )

    def by_exponents(factor: Tensor, x: Tensor, pooled: Tensor, d_log: Tensor, d_shift: Tensor, b: Rows) -> None:
        derivative = factor.mul_((x @ pooled.transpose(2, 3)).view_as(factor))
        scatter(d_log, b, derivative.sum(3))
        scatter(d_shift, b, derivative.sum(4))

    for _, rows, blocks in groups(log_q, col_shift, ptr, v.size(2)):
        bound = _bound(log_k, col_shift, rows, blocks)
        pooled = _pool(log_k, col_shift, v, bound, blocks)
        pooled_grad = torch.zeros_like(pooled)
        for b in blocks:
            factor, g = _factor(gather(log_q, b), gather(row_shift, b), bound, 1), gather(grad, b)
            pooled_grad += factor.flatten(3).transpose(2, 3) @ g
            by_exponents(factor, g, pooled, dq, da, b)
        for b in blocks:
            factor = _factor(gather(log_k, b), gather(col_shift, b), bound, -1)
            scatter(dv, b, factor.flatten(3) @ pooled_grad)
            by_exponents(factor, gather(v, b), pooled_grad, dk, db, b)
    return dq, dk, dv, da, db
