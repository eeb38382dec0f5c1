"""Registration: the product is bilinear, so its derivatives are itself and the inner product that goes with it."""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.dispatch import Backend, requested
from diffusion_mp.kernels.neumann import reference, stencil
from diffusion_mp.kernels.precision import accumulating

BACKENDS = Backends("neumann", stencil, "diffusion_mp.kernels.neumann.triton", math.inf)


@torch.library.custom_op("diffusion_mp::neumann_product", mutates_args=())
def _product(
    v: Tensor,
    alpha: Tensor,
    strides: list[int],
    boundary: str,
    ptr: Optional[Tensor],  # noqa: UP045 (schema inference)
    transpose: bool,
    backend: str,
) -> Tensor:
    out: Tensor = BACKENDS.run("product", backend, v, alpha, strides, boundary, ptr, transpose)
    return out


@_product.register_fake
def _(v: Tensor, alpha: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::neumann_inner", mutates_args=())
def _inner(
    g: Tensor,
    v: Tensor,
    strides: list[int],
    boundary: str,
    ptr: Optional[Tensor],  # noqa: UP045 (schema inference)
    backend: str,
) -> Tensor:
    out: Tensor = BACKENDS.run("inner", backend, g, v, strides, boundary, ptr)
    return out


@_inner.register_fake
def _(g: Tensor, v: Tensor, strides: list[int], *others: Any) -> Tensor:
    return v.new_empty(len(strides), v.size(1))


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v, alpha, ctx.strides, ctx.boundary, ptr, ctx.transpose, ctx.backend = inputs
    ctx.save_for_backward(v, alpha, ptr)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    v, alpha, ptr = ctx.saved_tensors
    kind = (ctx.strides, ctx.boundary, ptr)
    d_v = d_alpha = None
    if ctx.needs_input_grad[0]:
        d_v = _product(grad, alpha, *kind, not ctx.transpose, ctx.backend)
    if ctx.needs_input_grad[1]:  # ⟨g, Aᵀv⟩ = ⟨v, A g⟩
        left, right = (v, grad) if ctx.transpose else (grad, v)
        d_alpha = _inner(left, right, *kind, ctx.backend)
    return d_v, d_alpha, None, None, None, None, None


def _setup_inner(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, v, ctx.strides, ctx.boundary, ptr, ctx.backend = inputs
    ctx.save_for_backward(g, v, ptr)


def _differentiate_inner(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    g, v, ptr = ctx.saved_tensors
    kind = (ctx.strides, ctx.boundary, ptr)
    d_g = _product(v, grad, *kind, False, ctx.backend) if ctx.needs_input_grad[0] else None
    d_v = _product(g, grad, *kind, True, ctx.backend) if ctx.needs_input_grad[1] else None
    return d_g, d_v, None, None, None, None


_product.register_autograd(_differentiate_product, setup_context=_setup_product)
_inner.register_autograd(_differentiate_inner, setup_context=_setup_inner)


def neumann_product(
    v: Float[Tensor, "N H D"],
    alpha: Float[Tensor, "K H"],
    strides: Sequence[int],
    boundary: str = "symmetric",
    ptr: Tensor | None = None,
    *,
    transpose: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_k α_k (v_left + v_right), the neighbours of i at stride h_k in its sequence, in O(K N D).

    Args:
        v: values, the rows of a sequence in order.
        alpha: weight of every stride and head.
        strides: h_k ≥ 1.
        boundary: what a neighbour is where the sequence ends; see `neighbours`.
        ptr: row boundaries [B+1] of several sequences, on the CPU; ``None`` is one sequence.
        transpose: multiply with the transposed matrix.
        backend: how it is computed; see `kernels.dispatch`.

    Differentiable any number of times. Half precision accumulates in float32; the result has the dtype of ``v``.
    """
    name = requested("neumann", backend)
    (alpha, v), dtype = accumulating(alpha, v)
    if name == "reference":
        return reference.neumann_product(v, alpha, strides, boundary, ptr, transpose).to(dtype)
    return _product(v, alpha, list(strides), boundary, ptr, transpose, name).to(dtype)


def neumann_inner(
    g: Float[Tensor, "N H D"],
    v: Float[Tensor, "N H D"],
    strides: Sequence[int],
    boundary: str = "symmetric",
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "K H"]:
    """Σ_i g_i·(v_left + v_right) of every stride and head: the derivative of `neumann_product` in ``alpha``."""
    name = requested("neumann", backend)
    (g, v), dtype = accumulating(g, v)
    if name == "reference":
        return reference.neumann_inner(g, v, strides, boundary, ptr).to(dtype)
    return _inner(g, v, list(strides), boundary, ptr, name).to(dtype)
