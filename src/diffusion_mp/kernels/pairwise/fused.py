"""Softmax attention of one graph by the fused kernels of torch: on the CPU, and on a GPU in half precision."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from diffusion_mp.kernels.operation import PLAIN, pulled_back
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import accumulating, without_autocast

# Columns of zeros that may be added to features or values to make them equally wide: with more, tiles are faster.
PADDING = 8
# The widest rows of the kernels for GPUs, which are multiples of eight.
WIDEST = 256


def fits(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> bool:
    """Return whether a fused kernel supports these arguments and is the fastest."""
    # What is compiled or transformed needs the formula, and a subclass of tensors may mean something else.
    if score != "exp" or ptr is not None or not values_only(captured=True):
        return False
    if not PLAIN.issuperset(map(type, (q, k, v))) or q.numel() == 0:
        return False
    # torch's kernels read past the end of shorter tensors.
    if q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        return False
    if not q.device == k.device == v.device:
        return False
    features = q.size(2)
    channels = v.size(2)
    if abs(features - channels) > PADDING:
        return False
    if q.is_cpu:
        return True
    # On a GPU half precision alone: tiles by Triton take the rest.
    half = q.dtype in (torch.bfloat16, torch.float16)
    narrow = max(features, channels) <= WIDEST
    return q.is_cuda and half and narrow and q.dtype == k.dtype == v.dtype


class _Fused(torch.autograd.Function):
    """torch's kernel and its derivative, which torch cannot differentiate: the formula gives the second derivative."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        # A graph of torch's own kernel inside this function, whose backward pass walks it.
        ctx.leaves = [x.detach().requires_grad_() for x in inputs]
        query, key, value = ctx.leaves
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            ctx.out = scaled_dot_product_attention(query, key, value, scale=1.0)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # With create_graph, for which torch would raise that its kernel cannot be differentiated twice.
        if torch.is_grad_enabled():
            return pulled_back(_formula, ctx.saved_tensors, grad)
        return torch.autograd.grad(ctx.out, ctx.leaves, grad, retain_graph=True)


def _formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    (query, key, value), dtype = accumulating(query, key, value)
    weight = (query @ key.mT).softmax(-1)
    return (weight @ value).to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "N H D"]:
    """Return Σ_j p_ij v_j in the dtype of v."""
    channels = v.size(2)
    dtype = v.dtype
    width = max(q.size(2), channels)
    if q.is_cpu:
        # Sums take at least float32.
        (q, k, v), _ = accumulating(q, k, v)
    else:
        # The kernels for GPUs take multiples of eight only.
        width = 8 * math.ceil(width / 8)
    with without_autocast(q):
        out = _Fused.apply(*(_by_head(x, width) for x in (q, k, v)))
    return out.squeeze(0).transpose(0, 1)[:, :, :channels].to(dtype)


def _by_head(x: Tensor, width: int) -> Tensor:
    """[N, H, F] → [1, H, N, width], zero beyond F, with contiguous rows as the kernel needs them."""
    # By no column, it would be a copy.
    if x.size(2) < width:
        x = pad(x, (0, width - x.size(2)))
    if x.stride(2) != 1:
        x = x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)
