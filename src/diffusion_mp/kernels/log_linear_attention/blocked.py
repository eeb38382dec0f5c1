"""The fast path: samples and features are one axis of a low-rank product; its factors exist for a block of nodes only.

With M_sr = max_j (log_k_jr + b_js) the weight of i and j is Σ_sr A_isr B_jsr, A_isr = exp(log_q_ir + a_is + M_sr) and
B_jsr = exp(log_k_jr + b_js − M_sr) ≤ 1. Some j attains every maximum, so no row of weights underflows as a whole.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import Rows, buckets, gather, rows_of, scatter

# Entries of one block of factors over all heads: 1 MiB in float32, so that it stays in cache from exp to product.
BLOCK = 1 << 18


def blocks(log_q: Tensor, shift: Tensor, ptr: Tensor | None, channels: int) -> Iterator[list[Rows]]:
    """Yield the blocks of rows of one large graph, or one block of small graphs of equal size.

    A node has H K F factors, and a graph as many sums over its nodes in each of ``channels``.
    """
    num_nodes, heads, features = log_q.shape
    width = heads * shift.size(2) * features
    height = max(1, BLOCK // width)
    for size, starts in buckets(ptr, num_nodes):
        for some in starts.split(max(1, height // max(size, channels))):
            rows = rows_of(some, size, log_q.device)
            if isinstance(rows, Tensor):
                yield [rows]
                continue
            yield [slice(first, min(first + height, rows.stop)) for first in range(rows.start, rows.stop, height)]


def _exponents(log_features: Tensor, shift: Tensor, rows: Rows) -> Tensor:
    """log_features_ir + shift_is of some rows, [b, H, n, K, F]."""
    return gather(shift, rows).unsqueeze(4) + gather(log_features, rows).unsqueeze(3)


def _factor(log_features: Tensor, shift: Tensor, offset: Tensor, rows: Rows) -> Tensor:
    """exp(log_features_ir + shift_is + offset_sr), [b, H, n, K, F]."""
    return _exponents(log_features, shift, rows).add_(offset).exp_()


def _maximum(log_k: Tensor, col_shift: Tensor, some: list[Rows]) -> Tensor:
    """M_sr = max_j (log_k_jr + b_js), [b, H, 1, K, F]."""
    maximum = _exponents(log_k, col_shift, some[0]).amax(2, keepdim=True)
    for rows in some[1:]:
        maximum = torch.maximum(maximum, _exponents(log_k, col_shift, rows).amax(2, keepdim=True))
    return maximum


def _pool(log_k: Tensor, col_shift: Tensor, maximum: Tensor, v: Tensor, some: list[Rows]) -> Tensor:
    """U_sr = Σ_j B_jsr v_j, [b, H, K F, D]."""
    return sum_of(
        _factor(log_k, col_shift, -maximum, rows).flatten(3).transpose(2, 3) @ gather(v, rows) for rows in some
    )


def sum_of(terms: Iterator[Tensor]) -> Tensor:
    """The sum of at least one tensor, in the first one's memory."""
    total = next(terms)
    for term in terms:
        total += term
    return total


def logsumexp(log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Tensor | None) -> Tensor:
    """log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js), [N, H, K]."""
    out = torch.empty_like(col_shift, memory_format=torch.contiguous_format)
    for some in blocks(log_q, col_shift, ptr, 1):
        maximum = _maximum(log_k, col_shift, some)
        total = sum_of(_factor(log_k, col_shift, -maximum, rows).sum(2, keepdim=True) for rows in some)
        offset = maximum + total.log_()
        for rows in some:
            scatter(out, rows, (gather(log_q, rows).unsqueeze(3) + offset).logsumexp(4))
    return out


def product(
    log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None
) -> Tensor:
    """Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j, [N, H, D]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for some in blocks(log_q, col_shift, ptr, v.size(2)):
        maximum = _maximum(log_k, col_shift, some)
        pooled = _pool(log_k, col_shift, maximum, v, some)
        for rows in some:
            scatter(out, rows, _factor(log_q, row_shift, maximum, rows).flatten(3) @ pooled)
    return out


def product_backward(
    grad: Tensor,
    scale: Tensor | None,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of log_q, log_k, v, a and b; the factors are computed anew, block by block.

    Every term of sample s in row i is multiplied by ``scale`` [N, H, K] (``None``: by one). With A (scaled) and B,
    U = Bᵀv and W = Aᵀ grad: P_isr = A_isr (grad_i·U_sr) and Q_jsr = B_jsr (v_j·W_sr) are the derivatives by the
    exponents, whose sums over s and over r are those by the log features and by the shifts; dv = B W.
    """
    dq, dk, dv, da, db = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k, v, row_shift, col_shift)
    )

    def by_exponents(factor: Tensor, x: Tensor, pooled: Tensor, d_log: Tensor, d_shift: Tensor, rows: Rows) -> None:
        derivative = factor.mul_((x @ pooled.transpose(2, 3)).view_as(factor))
        scatter(d_log, rows, derivative.sum(3))
        scatter(d_shift, rows, derivative.sum(4))

    for some in blocks(log_q, col_shift, ptr, v.size(2)):
        maximum = _maximum(log_k, col_shift, some)
        pooled = _pool(log_k, col_shift, maximum, v, some)
        pooled_grad = torch.zeros_like(pooled)
        for rows in some:
            factor, g = _factor(log_q, row_shift, maximum, rows), gather(grad, rows)
            if scale is not None:
                factor *= gather(scale, rows).unsqueeze(4)
            pooled_grad += factor.flatten(3).transpose(2, 3) @ g
            by_exponents(factor, g, pooled, dq, da, rows)
        for rows in some:
            factor = _factor(log_k, col_shift, -maximum, rows)
            scatter(dv, rows, factor.flatten(3) @ pooled_grad)
            by_exponents(factor, gather(v, rows), pooled_grad, dk, db, rows)
    return dq, dk, dv, da, db
