"""The fast path on the CPU: a block of nodes at a time, small enough to stay in cache from its norms to its products.

With unit vectors q̃ and k̃ (or q and k as they are) and per graph K = Σ_j k̃_j v_jᵀ, κ = Σ_j k̃_j, V = Σ_j v_j and n nodes:
d_i = q̃_i·κ + (c + own) n and out_i = (Kᵀq̃_i + c V + own n v_i) / d_i.
"""

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import Rows, gather, row_blocks, scatter

# Entries of one block over all heads: 1 MiB in float32.
BLOCK = 1 << 18

# The smallest norm that a vector is divided by, as torch.nn.functional.normalize has it.
EPS = 1e-12


def _height(k: Tensor, v: Tensor) -> int:
    """Nodes of a block."""
    return max(1, BLOCK // max(1, k.size(1) * max(k.size(2), v.size(2))))


def _load(x: Tensor, rows: Rows) -> Tensor:
    """A block in the precision of sums."""
    return gather(x, rows).to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor, unit: bool) -> tuple[Tensor, Tensor | None]:
    """x / max(‖x‖, ε) and ‖x‖ [..., 1]."""
    if not unit:
        return x, None
    norm = x.square().sum(3, keepdim=True).sqrt_()
    return x / norm.clamp_min(EPS), norm


def _through_unit(gradient: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
    """The gradient of a vector from that of its unit vector x, in place."""
    if norm is None:
        return gradient
    radial = (gradient * x).sum(3, keepdim=True).masked_fill_(norm <= EPS, 0.0)
    return gradient.addcmul_(radial, x, value=-1).div_(norm.clamp_min(EPS))


def forward(
    q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, constant: float, own: float, unit: bool
) -> tuple[Tensor, Tensor]:
    """The result [N, H, D] and the denominators [N, H]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    den = v.new_empty(v.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    for size, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        kv, ksum, vsum = _pool(k, v, blocks, unit)
        for b in blocks:
            qs, _ = _unit(_load(q, b), unit)
            total = qs @ ksum + (constant + own) * size
            result = (qs @ kv).add_(vsum, alpha=constant).add_(_load(v, b), alpha=own * size)
            scatter(den.unsqueeze(2), b, total)
            scatter(out, b, result.mul_(_reciprocal(total)))
    return out, den


def _pool(k: Tensor, v: Tensor, blocks: list[Rows], unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    """K [b, H, F, D], κ [b, H, F, 1] and V [b, H, 1, D]."""
    kv = ksum = vsum = 0.0
    for b in blocks:
        ks, _ = _unit(_load(k, b), unit)
        vs = _load(v, b)
        kv, ksum, vsum = kv + ks.transpose(2, 3) @ vs, ksum + ks.sum(2).unsqueeze(3), vsum + vs.sum(2, keepdim=True)
    return kv, ksum, vsum


def _reciprocal(x: Tensor) -> Tensor:
    return x.reciprocal().masked_fill_(x == 0, 0.0)


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
        kv, ksum, _ = _pool(k, v, blocks, unit)
        gq = hq = gsum = 0.0
        for b in blocks:
            qs, norm = _unit(_load(q, b), unit)
            gs = _load(grad, b) * _reciprocal(_load(den.unsqueeze(2), b))
            hs = -(gs * _load(out, b)).sum(3, keepdim=True)
            gq, hq, gsum = gq + gs.transpose(2, 3) @ qs, hq + hs.transpose(2, 3) @ qs, gsum + gs.sum(2, keepdim=True)
            scatter(dq, b, _through_unit(gs @ kv.transpose(2, 3) + hs * ksum.transpose(2, 3), qs, norm))
        for b in blocks:
            ks, norm = _unit(_load(k, b), unit)
            gs = _load(grad, b) * _reciprocal(_load(den.unsqueeze(2), b))
            scatter(dv, b, (ks @ gq.transpose(2, 3)).add_(gsum, alpha=constant).add_(gs, alpha=own * size))
            scatter(dk, b, _through_unit(_load(v, b) @ gq + hq, ks, norm))
    return dq, dk, dv
