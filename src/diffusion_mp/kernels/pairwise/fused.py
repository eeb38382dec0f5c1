"""Attention by kernels of torch: the fused softmax attention on the CPU, and FlexAttention.

FlexAttention takes every score: normalised rows are a softmax of log f for any f > 0 (D11 of docs/errata.md).
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from diffusion_mp.graph.cache import values_only
from diffusion_mp.kernels.operation import PLAIN, Implementation
from diffusion_mp.kernels.pairwise.scores import PairwiseRows, log_score
from diffusion_mp.kernels.precision import accumulating

# Columns of zeros that may be added to features or values to make them equally wide: with more, tiles are faster.
PADDING = 8


def fits(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> bool:
    """Whether the fused kernel supports these arguments and is the fastest; torch then differentiates it."""
    if score != "exp" or ptr is not None or not q.is_cpu or not values_only():
        return False
    alike = PLAIN.issuperset(map(type, (q, k, v))) and q.shape == k.shape and q.device == k.device == v.device
    (nodes, heads, features), (rows, columns, channels) = q.shape, v.shape
    return alike and nodes == rows and heads == columns and q.numel() > 0 and abs(features - channels) <= PADDING


def attention(q: Tensor, k: Tensor, v: Tensor, once: Callable[[Tensor], Tensor]) -> Tensor:
    """Return Σ_j p_ij v_j, [N, H, D], in the dtype of v; gradients that require a gradient go through ``once``."""
    (q, k, wide), dtype = accumulating(q, k, v)
    width = max(q.size(2), v.size(2))
    inputs = _by_head(q, width), _by_head(k, width), _by_head(wide, width)
    out: Tensor = torch._scaled_dot_product_flash_attention_for_cpu(*inputs, scale=1.0)[0]

    def derived(gradients: Sequence[Tensor | None], _: Sequence[Tensor]) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            return None
        return tuple(None if gradient is None else once(gradient) for gradient in gradients)

    if out.grad_fn is not None:
        out.grad_fn.register_hook(derived)
    out = out.squeeze(0).transpose(0, 1)
    out = out if width == v.size(2) else out[:, :, : v.size(2)]
    return out if out.dtype is dtype else out.to(dtype)


def _by_head(x: Tensor, width: int) -> Tensor:
    """[N, H, F] → [1, H, N, width], zero beyond F, with contiguous rows as the kernel needs them."""
    x = x if x.size(2) == width else pad(x, (0, width - x.size(2)))
    x = x if x.stride(2) == 1 else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)


def flex_declines(named: bool, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> str | None:
    """Return why FlexAttention cannot take these arguments, as the end of a sentence, or ``None`` if it can."""
    if q.dtype == torch.float64:
        return "FlexAttention has no float64"
    if not q.numel():
        return "FlexAttention wants at least one node"
    if not q.is_cuda:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return "FlexAttention has no backward pass on the CPU (see torch.no_grad)"
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            return "FlexAttention compiles its code, and there is no C++ compiler (see the variable CXX)"
    return None


def flex(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> PairwiseRows:
    """Return Σ_j p_ij v_j, [N, H, D], differentiable by torch. Graphs of a batch are masked, not skipped."""
    graph = None if ptr is None else torch.repeat_interleave(ptr.diff()).to(q.device)

    def log_weight(s: Tensor, batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        log_f = log_score(s, score)
        return log_f if graph is None else torch.where(graph[row] == graph[col], log_f, -torch.inf)

    queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = _compiled()(queries, keys, values, score_mod=log_weight, scale=1.0)
    return PairwiseRows(out.squeeze(0).transpose(0, 1), out.new_empty(0))


FLEX = Implementation(flex, flex_declines)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)
