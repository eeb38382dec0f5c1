"""Registration of the pairwise operations: shape inference, autograd, and a clear end at the second derivative."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.errors import check_choice
from diffusion_mp.kernels.derivatives import empty_like, once_differentiable
from diffusion_mp.kernels.pairwise import tiled
from diffusion_mp.kernels.pairwise.scores import SCORES
from diffusion_mp.kernels.precision import accumulating, without_autocast


@torch.library.custom_op("diffusion_mp::pairwise_logsumexp", mutates_args=())
def _logsumexp(q: Tensor, k: Tensor, ptr: Optional[Tensor], score: str) -> Tensor:  # noqa: UP045
    with without_autocast(q):
        return tiled.logsumexp(q, k, ptr, score)


@_logsumexp.register_fake
def _(q: Tensor, k: Tensor, ptr: Tensor | None, score: str) -> Tensor:
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
) -> Tensor:
    with without_autocast(q):
        return tiled.product(q, k, v, row_shift, col_shift, ptr, score)


@_product.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None, score: str) -> Tensor:
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with without_autocast(q):
        return tiled.product_backward(grad, q, k, v, row_shift, col_shift, ptr, score)


@_product_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Tensor | None,
    score: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, da, db = empty_like(q, k, v, row_shift, col_shift)
    return dq, dk, dv, da, db


once_differentiable(
    _product_backward,
    name="pairwise attention",
    instead="use a low-rank diffusivity (SimpleDiffusivity)",
)


def _setup_logsumexp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, ptr, ctx.score = inputs
    ctx.save_for_backward(q, k, ptr, output)


def _logsumexp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # d log Σ_j f_ij = Σ_j p_ij d log f_ij with p_ij = f_ij exp(−lse_i): a product with one value per node.
    q, k, ptr, lse = ctx.saved_tensors
    one = torch.ones_like(lse).unsqueeze(2)
    dq, dk, *_ = _product_backward(grad.unsqueeze(2), q, k, one, -lse, torch.zeros_like(lse), ptr, ctx.score)
    return dq, dk, None, None


_logsumexp.register_autograd(_logsumexp_backward, setup_context=_setup_logsumexp)


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.score = inputs
    ctx.save_for_backward(*tensors)


def _backward_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_product_backward(grad, *ctx.saved_tensors, ctx.score), None, None)


_product.register_autograd(_backward_product, setup_context=_setup_product)


def pairwise_logsumexp(
    q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"], ptr: Tensor | None = None, *, score: str = "exp"
) -> Float[Tensor, "N H"]:
    """log Σ_j f(q_i·k_j) over the nodes j of i's graph, the log-normaliser of a row; always in at least float32."""
    check_choice(score, "score", SCORES)
    (q, k), _ = accumulating(q, k)
    return _logsumexp(q, k, ptr, score)


def pairwise_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H"],
    col_shift: Float[Tensor, "N H"],
    ptr: Tensor | None = None,
    *,
    score: str = "exp",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j exp(log f(q_i·k_j) + a_i + b_j) v_j over the nodes j of i's graph.

    With a = −logsumexp and b = 0 it is the row-normalised attention of Wu, Wipf & Yan (2025), Eq. 17; with q and k
    exchanged, and a and b, its transpose. The shifts keep every exponent in log space.

    Args:
        q, k: features of receivers and senders. v: values.
        row_shift, col_shift: a and b.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        score: ``"exp"`` (f = exp) or ``"sigmoid"``.

    O(N²) time, O(N) memory, also in the backward pass; once differentiable.
    """
    check_choice(score, "score", SCORES)
    (q, k, row_shift, col_shift, v), dtype = accumulating(q, k, row_shift, col_shift, v)
    return _product(q, k, v, row_shift, col_shift, ptr, score).to(dtype)
