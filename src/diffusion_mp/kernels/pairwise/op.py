"""Registration of the pairwise operations: shape inference, autograd, and a clear end at the second derivative."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.errors import check_choice
from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.derivatives import empty_like, once_differentiable
from diffusion_mp.kernels.dispatch import Backend, Implementation, choose, requested
from diffusion_mp.kernels.pairwise import reference, tiled
from diffusion_mp.kernels.pairwise.scores import SCORES
from diffusion_mp.kernels.precision import accumulating, promoted

BACKENDS = Backends("pairwise", tiled, "diffusion_mp.kernels.pairwise.triton")


@torch.library.custom_op("diffusion_mp::pairwise_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    score: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out, lse = BACKENDS.run("attention", backend, q, k, v, ptr, score)
    return out, lse


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str, backend: str) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("diffusion_mp::pairwise_product", mutates_args=())
def _product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    score: str,
    backend: str,
) -> Tensor:
    out: Tensor = BACKENDS.run("product", backend, q, k, v, row_shift, col_shift, ptr, score)
    return out


@_product.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::pairwise_backward", mutates_args=())
def _backward(
    grad: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Optional[Tensor],  # noqa: UP045
    ptr: Optional[Tensor],  # noqa: UP045
    score: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = BACKENDS.run("backward", backend, grad, delta, q, k, v, row_shift, col_shift, ptr, score)
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_like(q, k, v)
    return dq, dk, dv


once_differentiable(
    _backward,
    name="pairwise attention",
    instead="use a low-rank diffusivity (SimpleDiffusivity)",
)


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ptr, ctx.score, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output, ptr)


def _differentiate_attention(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    # Of p_ij = f_ij exp(−lse_i): Σ_j p_ij (grad_i·v_j) is grad_i·out_i, and p is the derivative of lse by log f.
    q, k, v, out, lse, ptr = ctx.saved_tensors
    delta = _inner(grad, out) - grad_lse
    return (*_backward(grad, delta, q, k, v, -lse, None, ptr, ctx.score, ctx.backend), None, None, None)


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.score, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Of g_ij = w_ij (grad_i·v_j): the row sums, da, are grad_i·out_i, and the column sums, db, are v_j·dv_j.
    q, k, v, row_shift, col_shift, ptr, out = ctx.saved_tensors
    nothing = torch.zeros_like(row_shift)
    dq, dk, dv = _backward(grad, nothing, q, k, v, row_shift, col_shift, ptr, ctx.score, ctx.backend)
    return dq, dk, dv, _inner(grad, out).to(row_shift), _inner(v, dv).to(col_shift), None, None, None


def _inner(a: Tensor, b: Tensor) -> Tensor:
    (a, b), _ = accumulating(a, b)
    return (a * b).sum(2)


_attention.register_autograd(_differentiate_attention, setup_context=_setup_attention)
_product.register_autograd(_differentiate_product, setup_context=_setup_product)


def pairwise_attention(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    *,
    score: str = "exp",
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j f(q_i·k_j) v_j / Σ_j f(q_i·k_j) over the nodes j of i's graph (Wu, Wipf & Yan 2025, Eq. 17).

    Args:
        q, k: features of receivers and senders. v: values.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        score: ``"exp"`` (f = exp) or ``"sigmoid"``.
        backend: how it is computed; see `kernels.dispatch`.

    No score can overflow, nor all of a row vanish. O(N²) time, O(N) memory, also in the backward pass, which
    recomputes the scores; once differentiable; the result has the dtype of ``v``.
    """
    check_choice(score, "score", SCORES)
    name = requested("pairwise", backend)
    if name == "reference":
        (q, k, v), dtype = accumulating(q, k, v)
        return reference.pairwise_attention(q, k, v, ptr, score).to(dtype)
    (q, k, v), dtype = promoted(q, k, v)
    if name == "flex":
        from diffusion_mp.kernels.pairwise import flex

        table = {"flex": Implementation(flex.attention, flex.declines)}
        return choose("pairwise_attention", name, table, q, k, v, ptr, score)(q, k, v, ptr, score).to(dtype)
    return _attention(q, k, v, ptr, score, name)[0].to(dtype)


def pairwise_logsumexp(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    ptr: Tensor | None = None,
    *,
    score: str = "exp",
    backend: Backend = "auto",
) -> Float[Tensor, "N H"]:
    """log Σ_j f(q_i·k_j) over the nodes j of i's graph, the log-normaliser of a row; always in at least float32."""
    check_choice(score, "score", SCORES)
    name = requested("pairwise", backend)
    (q, k), _ = accumulating(q, k)
    if name == "reference":
        return reference.pairwise_logsumexp(q, k, ptr, score)
    return _attention(q, k, q.new_empty(*q.shape[:2], 0), ptr, score, name)[1]


def pairwise_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H"],
    col_shift: Float[Tensor, "N H"],
    ptr: Tensor | None = None,
    *,
    score: str = "exp",
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j exp(log f(q_i·k_j) + a_i + b_j) v_j over the nodes j of i's graph.

    The shifts keep every exponent in log space: with a = 0 and b = −logsumexp, and q and k exchanged, it is the
    transpose of :func:`pairwise_attention`.

    Args:
        q, k: features of receivers and senders. v: values.
        row_shift, col_shift: a and b.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        score: ``"exp"`` (f = exp) or ``"sigmoid"``.
        backend: how it is computed; see `kernels.dispatch`.

    O(N²) time, O(N) memory, also in the backward pass; once differentiable.
    """
    check_choice(score, "score", SCORES)
    name = requested("pairwise", backend)
    if name == "reference":
        (q, k, row_shift, col_shift, v), dtype = accumulating(q, k, row_shift, col_shift, v)
        return reference.pairwise_product(q, k, v, row_shift, col_shift, ptr, score).to(dtype)
    (row_shift, col_shift), _ = accumulating(row_shift, col_shift)
    (q, k, v), dtype = promoted(q, k, v)
    return _product(q, k, v, row_shift, col_shift, ptr, score, name).to(dtype)
