"""Torch's own fused kernel on the CPU, where it fits: softmax attention of one graph, features as wide as values."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.pairwise.scores import Attended

# Columns of zeros that features or values may get, until they are as wide as the others: with more, tiles are faster.
PADDING = 8


def takes(q: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> bool:
    """Whether the kernel can compute this, and is the fastest."""
    fits = score == "exp" and ptr is None and q.is_cpu and q.numel() > 0
    return fits and abs(q.size(2) - v.size(2)) <= PADDING


def attention(q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Σ_j p_ij v_j, [N, H, D], and log Σ_j exp(q_i·k_j), [N, H]; q, k and v have one dtype."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_by_head(q, k, v), scale=1.0)
    return Attended(_by_node(out, v), lse.squeeze(0).t())


def backward(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for that of the result ``out``."""
    grad, q_, k_, v_, out = _by_head(grad, q, k, v, out)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q_, k_, v_, out, lse.t().unsqueeze(0), 0.0, False, scale=1.0
    )
    dq, dk, dv = map(_by_node, found, (q, k, v))
    return dq, dk, dv


def _by_head(*rows: Tensor) -> list[Tensor]:
    """[N, H, F] → [1, H, N, F], all of one width."""
    widths = [x.size(2) for x in rows]
    most = max(widths)
    filled = [x if width == most else pad(x, (0, most - width)) for x, width in zip(rows, widths, strict=True)]
    return [x.transpose(0, 1).unsqueeze(0) for x in filled]


def _by_node(x: Tensor, like: Tensor) -> Tensor:
    """And back; a view of the columns that ``like`` has."""
    x = x.squeeze(0).transpose(0, 1)
    return x if x.size(2) == like.size(2) else x[:, :, : like.size(2)].contiguous()
