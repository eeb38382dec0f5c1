"""Registration of the operations on log features: shape inference, autograd, no second derivative."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph import Pattern
from diffusion_mp.kernels.derivatives import empty_like, once_differentiable
from diffusion_mp.kernels.log_linear_attention import blocked
from diffusion_mp.kernels.log_linear_attention import entries as chunked
from diffusion_mp.kernels.precision import accumulating, without_autocast


@torch.library.custom_op("diffusion_mp::log_linear_logsumexp", mutates_args=())
def _logsumexp(log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Optional[Tensor]) -> Tensor:  # noqa: UP045
    with without_autocast(log_q):
        return blocked.logsumexp(log_q, log_k, col_shift, ptr)


@_logsumexp.register_fake
def _(log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Tensor | None) -> Tensor:
    return torch.empty_like(col_shift, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::log_linear_logsumexp_backward", mutates_args=())
def _logsumexp_backward(
    grad: Tensor,
    lse: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor]:
    with without_autocast(log_q):
        return blocked.logsumexp_backward(grad, lse, log_q, log_k, col_shift, ptr)


@_logsumexp_backward.register_fake
def _(
    grad: Tensor, lse: Tensor, log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, db = empty_like(log_q, log_k, col_shift)
    return dq, dk, db


@torch.library.custom_op("diffusion_mp::log_linear_product", mutates_args=())
def _product(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
) -> Tensor:
    with without_autocast(log_q):
        return blocked.product(log_q, log_k, v, row_shift, col_shift, ptr)


@_product.register_fake
def _(log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::log_linear_product_backward", mutates_args=())
def _product_backward(
    grad: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with without_autocast(log_q):
        return blocked.product_backward(grad, log_q, log_k, v, row_shift, col_shift, ptr)


@_product_backward.register_fake
def _(
    grad: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, da, db = empty_like(log_q, log_k, v, row_shift, col_shift)
    return dq, dk, dv, da, db


@torch.library.custom_op("diffusion_mp::log_linear_entries", mutates_args=())
def _entries(target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
    with without_autocast(log_q):
        return chunked.entries(target, source, log_q, log_k)


@_entries.register_fake
def _(target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
    return log_q.new_empty(target.size(0), log_q.size(1))


@torch.library.custom_op("diffusion_mp::log_linear_entries_backward", mutates_args=())
def _entries_backward(
    grad: Tensor, out: Tensor, target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor
) -> tuple[Tensor, Tensor]:
    with without_autocast(log_q):
        return chunked.entries_backward(grad, out, target, source, log_q, log_k)


@_entries_backward.register_fake
def _(grad: Tensor, out: Tensor, target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor]:
    dq, dk = empty_like(log_q, log_k)
    return dq, dk


once_differentiable(
    _logsumexp_backward,
    _product_backward,
    _entries_backward,
    name="attention through log features",
    instead="use a low-rank diffusivity (SimpleDiffusivity)",
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


def _differentiate_logsumexp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_logsumexp_backward(grad, *ctx.saved_tensors), None)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_product_backward(grad, *ctx.saved_tensors), None)


def _differentiate_entries(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (None, None, *_entries_backward(grad, *ctx.saved_tensors))


_logsumexp.register_autograd(_differentiate_logsumexp, setup_context=_save_all)
_product.register_autograd(_differentiate_product, setup_context=_save_inputs)
_entries.register_autograd(_differentiate_entries, setup_context=_save_all)


def log_linear_logsumexp(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
) -> Float[Tensor, "N H K"]:
    """L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js) over the nodes j of i's graph, for every sample s.

    The log-normaliser of a row, always in at least float32. O(N K F) time, O(N (K + F)) memory, also in the backward
    pass; once differentiable.
    """
    (log_q, log_k, col_shift), _ = accumulating(log_q, log_k, col_shift)
    return _logsumexp(log_q, log_k, col_shift, ptr)


def log_linear_product(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H K"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j over the nodes j of i's graph.

    With a = −logsumexp − log K and b the samples' log weights it is the mean over K samples of row-normalised kernel
    attention (Algorithm 1 of the slides, with Gumbel noise b = g/τ); with q and k exchanged, and a and b, its
    transpose. Nothing leaves log space before the largest exponent of every feature and sample is subtracted.

    Args:
        log_q, log_k: logarithms of the positive features of receivers and senders. v: values.
        row_shift, col_shift: a and b, one number per node, head and sample.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.

    O(N K F D) time and O(N (K + F + D)) memory, also in the backward pass: the [N, H, K F] factors exist for a block of
    nodes at a time. Once differentiable; the result has the dtype of ``v``.
    """
    (log_q, log_k, row_shift, col_shift, v), dtype = accumulating(log_q, log_k, row_shift, col_shift, v)
    return _product(log_q, log_k, v, row_shift, col_shift, ptr).to(dtype)


def log_linear_entries(
    pattern: Pattern, log_q: Float[Tensor, "N H F"], log_k: Float[Tensor, "N H F"]
) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_row(e),r + log_k_col(e),r), the logarithm of every entry e of a pattern. O(E H F) time.

    In at least float32; once differentiable.
    """
    (log_q, log_k), _ = accumulating(log_q, log_k)
    return _entries(pattern.row, pattern.col, log_q, log_k)
