"""Registration of the pairwise operations: shape inference, autograd, and a clear end at the second derivative."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.errors import check_choice
from diffusion_mp.kernels.derivatives import empty_like, once_differentiable
from diffusion_mp.kernels.dispatch import Backend, Implementation, always, choose, requested
from diffusion_mp.kernels.pairwise import reference, tiled
from diffusion_mp.kernels.pairwise.scores import SCORES
from diffusion_mp.kernels.precision import accumulating, promoted, without_autocast


def _run(function: str, backend: str, *args: Any) -> Any:
    """``function`` of the backend that was named, or of the first that does not decline: ``tiled.py`` has them all."""
    table = {"cpu": Implementation(getattr(tiled, function), always)}
    with without_autocast(args[0]):
        return choose("pairwise", backend, table, *args)(*args)


@torch.library.custom_op("diffusion_mp::pairwise_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    score: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out, lse = _run("attention", backend, q, k, v, ptr, score)
    return out, lse


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str, backend: str) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("diffusion_mp::pairwise_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    score: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _run("attention_backward", backend, grad, q, k, v, out, lse, ptr, score)
    return dq, dk, dv


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_like(q, k, v)
    return dq, dk, dv


@torch.library.custom_op("diffusion_mp::pairwise_logsumexp", mutates_args=())
def _logsumexp(q: Tensor, k: Tensor, ptr: Optional[Tensor], score: str, backend: str) -> Tensor:  # noqa: UP045
    lse: Tensor = _run("logsumexp", backend, q, k, ptr, score)
    return lse


@_logsumexp.register_fake
def _(q: Tensor, k: Tensor, ptr: Tensor | None, score: str, backend: str) -> Tensor:
    return q.new_empty(q.shape[:2])


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
    out: Tensor = _run("product", backend, q, k, v, row_shift, col_shift, ptr, score)
    return out


@_product.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::pairwise_product_backward", mutates_args=())
def _product_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    score: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = _run("product_backward", backend, grad, q, k, v, row_shift, col_shift, ptr, score)
    dq, dk, dv, da, db = grads
    return dq, dk, dv, da, db


@_product_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, da, db = empty_like(q, k, v, row_shift, col_shift)
    return dq, dk, dv, da, db


once_differentiable(
    _attention_backward,
    _product_backward,
    name="pairwise attention",
    instead="use a low-rank diffusivity (SimpleDiffusivity)",
)


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ptr, ctx.score, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output, ptr)
    ctx.mark_non_differentiable(output[1])


def _differentiate_attention(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    return (*_attention_backward(grad, *ctx.saved_tensors, ctx.score, ctx.backend), None, None, None)


def _setup_logsumexp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, ptr, ctx.score, ctx.backend = inputs
    ctx.save_for_backward(q, k, ptr, output)


def _differentiate_logsumexp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # d log Σ_j f_ij = Σ_j p_ij d log f_ij with p_ij = f_ij exp(−lse_i): a product with one value per node.
    q, k, ptr, lse = ctx.saved_tensors
    one, zero = torch.ones_like(lse).unsqueeze(2), torch.zeros_like(lse)
    dq, dk, *_ = _product_backward(grad.unsqueeze(2), q, k, one, -lse, zero, ptr, ctx.score, ctx.backend)
    return dq, dk, None, None, None


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.score, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_product_backward(grad, *ctx.saved_tensors, ctx.score, ctx.backend), None, None, None)


_attention.register_autograd(_differentiate_attention, setup_context=_setup_attention)
_logsumexp.register_autograd(_differentiate_logsumexp, setup_context=_setup_logsumexp)
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
    (q, k, v), dtype = promoted(q, k, v)
    if name == "reference":
        return reference.pairwise_attention(q, k, v, ptr, score).to(dtype)
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
    return _logsumexp(q, k, ptr, score, name)


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
    (q, k, row_shift, col_shift, v), dtype = accumulating(q, k, row_shift, col_shift, v)
    arguments = (q, k, v, row_shift, col_shift, ptr, score)
    if name == "reference":
        return reference.pairwise_product(*arguments).to(dtype)
    return _product(*arguments, name).to(dtype)
