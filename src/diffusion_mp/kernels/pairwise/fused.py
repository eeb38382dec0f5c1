"""Softmax attention of one graph by the fused kernels of torch: on the CPU, and on a GPU in half precision."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from diffusion_mp.kernels.operation import PLAIN
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import accumulating, without_autocast

# Columns of zeros that may be added to features or values to make them equally wide: with more, tiles are faster.
PADDING = 8
# The widest rows of the kernels for GPUs, which are multiples of eight.
WIDEST = 256


def fits(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> bool:
    """Whether a fused kernel supports these arguments and is the fastest; torch then differentiates it."""
    if score != "exp" or ptr is not None or not values_only(captured=True):
        return False
    alike = (
        PLAIN.issuperset(map(type, (q, k, v)))
        and q.shape == k.shape
        and q.device == k.device == v.device
    )
    (nodes, heads, features), (rows, columns, channels) = q.shape, v.shape
    if (
        not alike
        or nodes != rows
        or heads != columns
        or q.numel() == 0
        or abs(features - channels) > PADDING
    ):
        return False
    half = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cpu or (q.is_cuda and half and max(features, channels) <= WIDEST)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Float[Tensor, "N H D"]:
    """Return Σ_j p_ij v_j in the dtype of v.

    Where gradients may be differentiated again, ``gradients`` returns those of torch's kernel with a derivative.
    """
    channels = v.size(2)
    dtype = v.dtype
    width = max(q.size(2), channels)
    if q.is_cpu:
        (q, k, v), _ = accumulating(q, k, v)
    else:
        width = -(-width // 8) * 8
    query, key, value = inputs = [_by_head(x, width) for x in (q, k, v)]
    with without_autocast(q):
        out = scaled_dot_product_attention(query, key, value, scale=1.0)

    def derived(
        by_inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...] | None:
        (grad,) = grads
        if grad is None or not torch.is_grad_enabled():
            return None
        pairs = list(zip(by_inputs, inputs, strict=True))
        computed = [
            torch.zeros_like(x) if by_input is None else by_input.detach()
            for by_input, x in pairs
        ]
        again = gradients(*map(_rows, (*computed, grad, *inputs)))
        pairs = list(zip(by_inputs, again, strict=True))
        return tuple(
            None if by_input is None else _by_head(x, width) for by_input, x in pairs
        )

    if out.grad_fn is not None:
        out.grad_fn.register_hook(derived)
    out = _rows(out)
    out = out if out.size(2) == channels else out[:, :, :channels]
    return out if out.dtype is dtype else out.to(dtype)


def _by_head(x: Tensor, width: int) -> Tensor:
    """[N, H, F] → [1, H, N, width], zero beyond F, with contiguous rows as the kernel needs them."""
    x = x if x.size(2) == width else pad(x, (0, width - x.size(2)))
    x = x if x.stride(2) == 1 else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def _rows(x: Tensor) -> Tensor:
    """[1, H, N, width] → [N, H, width]."""
    return x.squeeze(0).transpose(0, 1)
