"""Registration: the product and the sampled product are each other's derivatives."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph import Pattern
from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.dispatch import Backend, requested
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.kernels.spmm import compressed, reference

BACKENDS = Backends("spmm", compressed)


@torch.library.custom_op("diffusion_mp::spmm", mutates_args=())
def _spmm(pattern: list[Tensor], weight: Tensor, v: Tensor, backend: str) -> Tensor:
    out: Tensor = BACKENDS.run("spmm", backend, Pattern(*pattern), weight, v)
    return out


@_spmm.register_fake
def _(pattern: list[Tensor], weight: Tensor, v: Tensor, backend: str) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::sddmm", mutates_args=())
def _sddmm(pattern: list[Tensor], a: Tensor, b: Tensor, backend: str) -> Tensor:
    p = Pattern(*pattern)
    out: Tensor = BACKENDS.run("sddmm", backend, p.row, p.col, a, b)
    return out


@_sddmm.register_fake
def _(pattern: list[Tensor], a: Tensor, b: Tensor, backend: str) -> Tensor:
    return a.new_empty(pattern[0].size(0), a.size(1))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pattern, first, second, ctx.backend = inputs
    ctx.save_for_backward(*pattern, first, second)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *indices, weight, v = ctx.saved_tensors
    pattern = Pattern(*indices)
    d_weight = d_v = None
    if ctx.needs_input_grad[1]:
        d_weight = _sddmm(list(pattern), grad, v, ctx.backend)
        d_weight = d_weight.sum(1, keepdim=True) if weight.size(1) == 1 else d_weight
    if ctx.needs_input_grad[2]:
        d_v = _spmm(list(pattern.T), weight, grad, ctx.backend)
    return [None] * 6, d_weight, d_v, None


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *indices, a, b = ctx.saved_tensors
    pattern = Pattern(*indices)
    d_a = _spmm(list(pattern), grad, b, ctx.backend) if ctx.needs_input_grad[1] else None
    d_b = _spmm(list(pattern.T), grad, a, ctx.backend) if ctx.needs_input_grad[2] else None
    return [None] * 6, d_a, d_b, None


_spmm.register_autograd(_spmm_backward, setup_context=_setup)
_sddmm.register_autograd(_sddmm_backward, setup_context=_setup)


def spmm(
    pattern: Pattern, weight: Float[Tensor, "E heads"], v: Float[Tensor, "N H D"], *, backend: Backend = "auto"
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_e w_e v_col(e) over the entries e of row i; ``weight`` has H heads or one for all. O(E H D)."""
    name = requested("spmm", backend)
    (weight, v), dtype = accumulating(weight, v)
    if name == "reference":
        return reference.spmm(pattern.row, pattern.col, weight, v).to(dtype)
    return _spmm(list(pattern), weight, v, name).to(dtype)


def sddmm(
    pattern: Pattern, a: Float[Tensor, "N H D"], b: Float[Tensor, "N H D"], *, backend: Backend = "auto"
) -> Float[Tensor, "E H"]:
    """s_e = a_row(e)·b_col(e), the inner product of the two ends of every entry. O(E H D)."""
    name = requested("spmm", backend)
    (a, b), dtype = accumulating(a, b)
    if name == "reference":
        return reference.sddmm(pattern.row, pattern.col, a, b).to(dtype)
    return _sddmm(list(pattern), a, b, name).to(dtype)
