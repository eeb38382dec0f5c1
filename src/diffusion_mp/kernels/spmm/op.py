"""Registration: the product and the sampled product are each other's derivatives."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph import Pattern
from diffusion_mp.kernels.precision import accumulating, without_autocast
from diffusion_mp.kernels.spmm import compressed


@torch.library.custom_op("diffusion_mp::spmm", mutates_args=())
def _spmm(pattern: list[Tensor], weight: Tensor, v: Tensor) -> Tensor:
    p = Pattern(*pattern)
    with without_autocast(v):
        return compressed.spmm(p, weight, v)


@_spmm.register_fake
def _(pattern: list[Tensor], weight: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::sddmm", mutates_args=())
def _sddmm(pattern: list[Tensor], a: Tensor, b: Tensor) -> Tensor:
    p = Pattern(*pattern)
    with without_autocast(a):
        return compressed.sddmm(p.row, p.col, a, b)


@_sddmm.register_fake
def _(pattern: list[Tensor], a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(pattern[0].size(0), a.size(1))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pattern, first, second = inputs
    ctx.save_for_backward(*pattern, first, second)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *indices, weight, v = ctx.saved_tensors
    pattern = Pattern(*indices)
    d_weight = d_v = None
    if ctx.needs_input_grad[1]:
        d_weight = _sddmm(list(pattern), grad, v)
        d_weight = d_weight.sum(1, keepdim=True) if weight.size(1) == 1 else d_weight
    if ctx.needs_input_grad[2]:
        d_v = _spmm(list(pattern.T), weight, grad)
    return [None] * 6, d_weight, d_v


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *indices, a, b = ctx.saved_tensors
    pattern = Pattern(*indices)
    d_a = _spmm(list(pattern), grad, b) if ctx.needs_input_grad[1] else None
    d_b = _spmm(list(pattern.T), grad, a) if ctx.needs_input_grad[2] else None
    return [None] * 6, d_a, d_b


_spmm.register_autograd(_spmm_backward, setup_context=_setup)
_sddmm.register_autograd(_sddmm_backward, setup_context=_setup)


def spmm(pattern: Pattern, weight: Float[Tensor, "E heads"], v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
    """out_i = Σ_e w_e v_col(e) over the entries e of row i; ``weight`` has H heads or one for all. O(E H D)."""
    (weight, v), dtype = accumulating(weight, v)
    return _spmm(list(pattern), weight, v).to(dtype)


def sddmm(pattern: Pattern, a: Float[Tensor, "N H D"], b: Float[Tensor, "N H D"]) -> Float[Tensor, "E H"]:
    """s_e = a_row(e)·b_col(e), the inner product of the two ends of every entry. O(E H D)."""
    (a, b), dtype = accumulating(a, b)
    return _sddmm(list(pattern), a, b).to(dtype)
