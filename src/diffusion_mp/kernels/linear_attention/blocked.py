"""The fast path on the CPU: a block of nodes at a time, small enough to stay in cache from its norms to its products.

No unit vector is ever written: with ρ = 1/max(‖k_j‖, ε) and σ = 1/max(‖q_i‖, ε), or 1, the norms weigh the other factor
of every product. One more channel of ones carries the denominator: with v′_j = ρ_j [v_j, 1], K = Σ_j k_j v′_jᵀ of a
graph, b = c Σ_j [v_j, 1] and a = own n,

    t_i = σ_i Kᵀq_i + b + a [v_i, 1],  out_i = t_i[:D] / d_i,  d_i = t_i[D].

Backward, g_i = ∂out_i / d_i, g′_i = σ_i [g_i, −g_i·out_i] and G = Σ_i q_i g′_iᵀ take the places of v, v′ and K:

    ∂q_i = (1 − q̃_i q̃_iᵀ) K g′_i,  ∂k_j = (1 − k̃_j k̃_jᵀ) G v′_j,  ∂v_j = ρ_j (Gᵀk_j)[:D] + c Σ_i g_i + a g_j.
"""

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.segments import Rows, gather, row_blocks, scatter

# Entries of one block over all heads, 2 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 19

# Entries of a block that are worth two threads, also where there are few nodes.
SMALL = 1 << 15

# The smallest norm that a vector is divided by, as torch.nn.functional.normalize has it.
EPS = 1e-12


def forward(
    q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, constant: float, own: float, unit: bool
) -> tuple[Tensor, Tensor]:
    """The result [N, H, D] and the denominators [N, H]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    den = v.new_empty(v.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    for size, _, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        pooled, bias = _pool(k, v, size, blocks, unit)
        bias.mul_(constant)
        for b in blocks:
            queries = _load(q, b)
            total = _affine(bias, queries @ pooled, _norm(queries) if unit else None)
            if own:
                total[..., :-1].add_(_load(v, b), alpha=own * size)
                total[..., -1:] += own * size
            row = total[..., -1:]
            scatter(den.unsqueeze(2), b, row)
            scatter(out, b, total[..., :-1].mul_(_reciprocal(row)))
    return out, den


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    den: Tensor,
    ptr: Tensor | None,
    constant: float,
    own: float,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for size, _, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        pooled, bias = _pool(k, v, size, blocks, unit)
        pooled_grad, bias_grad = torch.zeros_like(pooled), torch.zeros_like(bias[..., :-1])
        for b in blocks:
            queries = _load(q, b)
            norm = _norm(queries) if unit else None
            grads = _extended_gradient(grad, out, den, b)
            bias_grad += grads[..., :-1].sum(2, keepdim=True)
            if norm is not None:
                grads.mul_(_scale(norm))
            pooled_grad += queries.transpose(2, 3) @ grads
            scatter(dq, b, _tangential(grads @ pooled.transpose(2, 3), queries, norm))
        bias_grad.mul_(constant)
        for b in blocks:
            keys = _load(k, b)
            norm = _norm(keys) if unit else None
            scatter(dk, b, _tangential(_extended(v, b, norm) @ pooled_grad.transpose(2, 3), keys, norm))
            values = _affine(bias_grad, keys @ pooled_grad[..., :-1], norm)
            if own:
                values.add_(_extended_gradient(grad, out, den, b)[..., :-1], alpha=own * size)
            scatter(dv, b, values)
    return dq, dk, dv


def _height(k: Tensor, v: Tensor) -> int:
    """Nodes of a block: an eighth of all, so that blocks are small beside the result, within the limits above."""
    width = max(1, k.size(1) * max(k.size(2), v.size(2)))
    return min(BLOCK, max(SMALL, k.size(0) * width // 8)) // width


def _load(x: Tensor, rows: Rows) -> Tensor:
    """A block [b, H, n, F] in the precision of sums."""
    return gather(x, rows).to(torch.promote_types(x.dtype, torch.float32))


def _norm(x: Tensor) -> Tensor:
    """‖x‖ of a block, [b, H, n, 1]."""
    return torch.linalg.vector_norm(x.transpose(1, 2), dim=3, keepdim=True).transpose(1, 2)


def _scale(norm: Tensor) -> Tensor:
    """What a vector of that norm is multiplied by."""
    return norm.clamp_min(EPS).reciprocal_()


def _reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 for 0."""
    return x.reciprocal().masked_fill_(x == 0, 0.0)


def _affine(bias: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
    """bias + x, x in place and over the norm if there is one."""
    return x.add_(bias) if norm is None else torch.addcmul(bias, x, _scale(norm), out=x)


def _extended(v: Tensor, rows: Rows, norm: Tensor | None) -> Tensor:
    """v′ of a block, [b, H, n, D + 1]."""
    values = _load(v, rows)
    extended = values.new_empty(*values.shape[:3], values.size(3) + 1)
    if norm is None:
        extended[..., :-1], extended[..., -1] = values, 1.0
    else:
        scale = _scale(norm)
        torch.mul(values, scale, out=extended[..., :-1])
        extended[..., -1:] = scale
    return extended


def _extended_gradient(grad: Tensor, out: Tensor, den: Tensor, rows: Rows) -> Tensor:
    """[g, −g·out] of a block, [b, H, n, D + 1]."""
    grads = _load(grad, rows)
    extended = grads.new_empty(*grads.shape[:3], grads.size(3) + 1)
    inner = torch.mul(grads, _reciprocal(_load(den.unsqueeze(2), rows)), out=extended[..., :-1])
    torch.sum(inner * gather(out, rows), 3, out=extended[..., -1]).neg_()
    return extended


def _pool(k: Tensor, v: Tensor, size: int, blocks: list[Rows], unit: bool) -> tuple[Tensor, Tensor]:
    """K [b, H, F, D + 1] and Σ_j [v_j, 1] [b, H, 1, D + 1] of the graphs of that size that the blocks make up."""

    def part(b: Rows) -> tuple[Tensor, Tensor]:
        keys = _load(k, b)
        values = _extended(v, b, _norm(keys) if unit else None)
        return keys.transpose(2, 3) @ values, _load(v, b).sum(2, keepdim=True)

    pooled, total = reduce(lambda x, y: (x[0].add_(y[0]), x[1].add_(y[1])), map(part, blocks))
    return pooled, pad(total, (0, 1), value=size)


def _tangential(gradient: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
    """(1 − x̃x̃ᵀ) of the gradient, in place: what is left of it behind a division by the norm."""
    if norm is None:
        return gradient
    along = (gradient * x).sum(3, keepdim=True).div_(norm.square()).masked_fill_(norm < EPS, 0.0)
    return gradient.addcmul_(along, x, value=-1)
