"""The fast path on the CPU: a block of nodes at a time, small enough to stay in cache from its norms to its products.

One more feature carries the constant c, one more channel of ones the denominator: with q′ = [q̃, c], k′ = [k̃, 1] and
v′ = [v, 1] (q̃ the unit vector of q, or q itself), K = Σ_j k′_j v′_jᵀ of a graph and a = own n, row i of the result is

    t_i = Kᵀq′_i + a v′_i,  out_i = t_i[:D] / d_i,  d_i = t_i[D].

With g′_i = [g_i, −g_i·out_i], g_i = ∂out_i/d_i, and G = Σ_i q′_i g′_iᵀ, the gradients are K g′_i, G v′_j and
Gᵀk′_j + a g′_j, without the last entry of each.
"""

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import Rows, gather, row_blocks, scatter

# Entries of one block over all heads: 1 MiB in float32.
BLOCK = 1 << 18

# The smallest norm that a vector is divided by, as torch.nn.functional.normalize has it.
EPS = 1e-12


def forward(
    q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, constant: float, own: float, unit: bool
) -> tuple[Tensor, Tensor]:
    """The result [N, H, D] and the denominators [N, H]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    den = v.new_empty(v.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    for size, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        pooled = _pool(k, v, blocks, unit)
        for b in blocks:
            total = _extended(q, b, constant, unit)[0] @ pooled
            if own:
                total.add_(_extended(v, b, 1.0)[0], alpha=own * size)
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
    for size, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        pooled = _pool(k, v, blocks, unit)
        pooled_grad = torch.zeros_like(pooled)
        for b in blocks:
            queries, norm = _extended(q, b, constant, unit)
            grads = _extended_gradient(grad, out, den, b)
            pooled_grad += queries.transpose(2, 3) @ grads
            scatter(dq, b, _through_unit(grads @ pooled[:, :, :-1].transpose(2, 3), queries, norm))
        for b in blocks:
            keys, norm = _extended(k, b, 1.0, unit)
            d_values = keys @ pooled_grad[..., :-1]
            if own:
                d_values.add_(_extended_gradient(grad, out, den, b)[..., :-1], alpha=own * size)
            scatter(dv, b, d_values)
            d_keys = _extended(v, b, 1.0)[0] @ pooled_grad[:, :, :-1].transpose(2, 3)
            scatter(dk, b, _through_unit(d_keys, keys, norm))
    return dq, dk, dv


def _height(k: Tensor, v: Tensor) -> int:
    """Nodes of a block."""
    return BLOCK // max(1, k.size(1) * max(k.size(2), v.size(2)))


def _pool(k: Tensor, v: Tensor, blocks: list[Rows], unit: bool) -> Tensor:
    """K [b, H, F + 1, D + 1] of the graphs that the blocks make up."""
    pooled = None
    for b in blocks:
        part = _extended(k, b, 1.0, unit)[0].transpose(2, 3) @ _extended(v, b, 1.0)[0]
        pooled = part if pooled is None else pooled.add_(part)
    return pooled


def _extended(x: Tensor, rows: Rows, last: float, unit: bool = False) -> tuple[Tensor, Tensor | None]:
    """[x̃, last] of a block of nodes, [b, H, n, F + 1], in the precision of sums, and ‖x‖."""
    block = x[rows].to(torch.promote_types(x.dtype, torch.float32))
    block = block.unsqueeze(0) if block.dim() == 3 else block
    graphs, size, heads, features = block.shape
    extended = block.new_empty(graphs, heads, size, features + 1)
    extended[..., -1] = last
    inner = extended[..., :-1].transpose(1, 2)
    if not unit:
        inner.copy_(block)
        return extended, None
    norm = torch.linalg.vector_norm(block, dim=3, keepdim=True)
    torch.div(block, norm.clamp_min(EPS), out=inner)
    return extended, norm.transpose(1, 2)


def _extended_gradient(grad: Tensor, out: Tensor, den: Tensor, rows: Rows) -> Tensor:
    """[g, −g·out] with g the gradient of a block over its denominators, [b, H, n, D + 1]."""
    extended = _extended(grad, rows, 0.0)[0]
    inner = extended[..., :-1]
    inner.mul_(_reciprocal(gather(den.unsqueeze(2), rows)))
    torch.sum(inner * gather(out, rows), 3, out=extended[..., -1]).neg_()
    return extended


def _through_unit(gradient: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
    """The gradient of a vector from that of x̃ of x = [x̃, …], in place."""
    if norm is None:
        return gradient
    x = x[..., :-1]
    radial = (gradient * x).sum(3, keepdim=True).masked_fill_(norm < EPS, 0.0)
    return gradient.addcmul_(radial, x, value=-1).div_(norm.clamp_min(EPS))


def _reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 for 0."""
    return x.reciprocal().masked_fill_(x == 0, 0.0)
