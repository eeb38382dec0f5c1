"""Torch's own fused kernel on the CPU, where it fits: softmax attention of one graph, features as wide as values."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.pairwise.scores import Attended

# Columns of zeros that features or values may get, until they are as wide as the others: with more, tiles are faster.
PADDING = 8

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def takes(q: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> bool:
    """Whether the kernel can compute this, and is the fastest."""
    if score != "exp" or ptr is not None or not q.is_cpu:
        return False
    return q.numel() > 0 and abs(q.size(2) - v.size(2)) <= PADDING


def attention(q: Tensor, k: Tensor, v: Tensor) -> Attended:
    """Σ_j p_ij v_j, [N, H, D], and log Σ_j exp(q_i·k_j), [N, H]; q, k and v have one dtype."""
    width = max(q.size(2), v.size(2))
    out, lse = _attention(_by_head(q, width), _by_head(k, width), _by_head(v, width), scale=1.0)
    return Attended(_by_node(out, v.size(2)), lse[0].t())


def backward(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for that of the result ``out``."""
    features, channels = q.size(2), v.size(2)
    width = max(features, channels)
    grad, q, k, v, out = [_by_head(x, width) for x in (grad, q, k, v, out)]
    dq, dk, dv = _backward(grad, q, k, v, out, lse.t()[None], 0.0, False, scale=1.0)
    return _by_node(dq, features), _by_node(dk, features), _by_node(dv, channels)


def _by_head(x: Tensor, width: int) -> Tensor:
    """[N, H, F] → [1, H, N, width], zero beyond F; the kernel reads a row as numbers that lie side by side."""
    x = x if x.size(2) == width else pad(x, (0, width - x.size(2)))
    x = x if x.stride(2) == 1 else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _by_node(x: Tensor, width: int) -> Tensor:
    """And back."""
    x = x.squeeze(0).transpose(0, 1)
    return x if x.size(2) == width else x[:, :, :width].contiguous()
