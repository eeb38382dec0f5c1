"""Registration of the attention with normalised rows: shape inference, autograd, and the second derivative."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.derivatives import empty_like
from diffusion_mp.kernels.dispatch import Backend, requested
from diffusion_mp.kernels.linear_attention import blocked, reference
from diffusion_mp.kernels.linear_attention.product import linear_product
from diffusion_mp.kernels.linear_attention.reference import Terms
from diffusion_mp.kernels.precision import accumulating, promoted

BACKENDS = Backends("linear_attention", blocked, "diffusion_mp.kernels.linear_attention.triton")


@torch.library.custom_op("diffusion_mp::linear_attention", mutates_args=())
def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045 (schema inference)
    constant: float,
    own: float,
    unit: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the denominators, and the sums over the nodes of a single graph, which the gradient needs again."""
    out, den, sums = BACKENDS.run("forward", backend, q, k, v, Terms(ptr, constant, own, unit))
    return out, den, sums


@_linear_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Optional[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: UP045
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    den = v.new_empty(v.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    features, channels = k.size(2), v.size(2)
    size = features * channels + features + channels
    return out, den, den.new_empty(v.size(1) if ptr is None else 0, size)


@torch.library.custom_op("diffusion_mp::linear_attention_backward", mutates_args=())
def _linear_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    den: Tensor,
    sums: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    constant: float,
    own: float,
    unit: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = BACKENDS.run("backward", backend, grad, q, k, v, out, den, sums, Terms(ptr, constant, own, unit))
    return dq, dk, dv


@_linear_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_like(q, k, v)
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ptr, *ctx.options = inputs
    out, den, sums = output
    ctx.mark_non_differentiable(den, sums)
    ctx.save_for_backward(q, k, v, out, den, sums, ptr)


def _differentiate(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    return (*_linear_attention_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


_linear_attention.register_autograd(_differentiate, setup_context=_setup)


def _composed(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """The same from operations that are differentiable any number of times."""
    (q, k, v), dtype = accumulating(q, k, v)
    return reference.attention(q, k, v, terms, linear_product).to(dtype)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, q, k, v, _, _, _, ptr, *options, _ = inputs
    ctx.options = options
    ctx.save_for_backward(grad, q, k, v, ptr)


def _differentiate_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Through the composed form, whose derivative is taken here: out and d are functions of q, k and v there."""
    *inputs, ptr = ctx.saved_tensors
    with torch.enable_grad():
        # Views tell equal tensors apart, as in self-attention.
        grad, q, k, v = (t.view_as(t).requires_grad_() for t in inputs)
        first = torch.autograd.grad(_composed(q, k, v, Terms(ptr, *ctx.options)), (q, k, v), grad, create_graph=True)
        by_grad, by_q, by_k, by_v = torch.autograd.grad(first, (grad, q, k, v), grads, create_graph=True)
    return by_grad, by_q, by_k, by_v, *[None] * 8


_linear_attention_backward.register_autograd(_differentiate_backward, setup_context=_setup_backward)


def linear_attention(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    *,
    constant: float = 0.0,
    own: float = 0.0,
    unit: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = (own n v_i + Σ_j s_ij v_j) / (own n + Σ_j s_ij), s_ij = c + q_i·k_j, over the n nodes j of i's graph.

    DIFFormer-s is c = 1 with unit vectors (Wu, Wipf & Yan 2025, Eqs. 55–57), SGFormer own = 1 with unit vectors
    (D⁻¹(I + Q̃K̃ᵀ/n), multiplied by n; Wu et al. 2023b). A row whose denominator is zero is zero, in the gradient too.

    Args:
        q, k: queries of the receivers and keys of the senders.
        v: values.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph.
        constant: c.
        own: what a node weighs in its own row beyond s_ii, as a multiple of n.
        unit: divide every q_i and k_j by its norm; a zero vector stays zero, in the gradient too.
        backend: who computes it; see :mod:`diffusion_mp.kernels.dispatch`.

    O(N F D) time and no memory beyond the result's, in the backward pass beyond the gradients'; differentiable any
    number of times. Half precision accumulates in float32; the result has the dtype of ``v``.
    """
    name = requested("linear_attention", backend)
    if name == "reference":
        (q, k, v), dtype = accumulating(q, k, v)
        return reference.attention(q, k, v, Terms(ptr, constant, own, unit)).to(dtype)
    (q, k, v), dtype = promoted(q, k, v)
    return _linear_attention(q, k, v, ptr, constant, own, unit, name)[0].to(dtype)
