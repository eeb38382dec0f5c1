"""Registration of the operations on log features: shape inference, autograd, no second derivative."""

from typing import Any, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.derivatives import empty_like, once_differentiable
from diffusion_mp.kernels.dispatch import Backend, requested
from diffusion_mp.kernels.log_linear_attention import blocked, reference
from diffusion_mp.kernels.log_linear_attention import entries as chunked
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.pattern import Pattern

BLOCKS = Backends("log_linear_attention", blocked)
ENTRIES = Backends("log_linear_attention", chunked)


@torch.library.custom_op("diffusion_mp::log_linear_logsumexp", mutates_args=())
def _logsumexp(
    log_q: Tensor,
    log_k: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    backend: str,
) -> Tensor:
    lse: Tensor = BLOCKS.run("logsumexp", backend, log_q, log_k, col_shift, ptr)
    return lse


@_logsumexp.register_fake
def _(log_q: Tensor, log_k: Tensor, col_shift: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(col_shift, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::log_linear_logsumexp_backward", mutates_args=())
def _logsumexp_backward(
    grad: Tensor,
    lse: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    col_shift: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, db = BLOCKS.run("logsumexp_backward", backend, grad, lse, log_q, log_k, col_shift, ptr)
    return dq, dk, db


@_logsumexp_backward.register_fake
def _(
    grad: Tensor, lse: Tensor, log_q: Tensor, log_k: Tensor, col_shift: Tensor, *others: Any
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
    backend: str,
) -> Tensor:
    out: Tensor = BLOCKS.run("product", backend, log_q, log_k, v, row_shift, col_shift, ptr)
    return out


@_product.register_fake
def _(log_q: Tensor, log_k: Tensor, v: Tensor, *others: Any) -> Tensor:
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = BLOCKS.run("product_backward", backend, grad, log_q, log_k, v, row_shift, col_shift, ptr)
    dq, dk, dv, da, db = grads
    return dq, dk, dv, da, db


@_product_backward.register_fake
def _(
    grad: Tensor, log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, da, db = empty_like(log_q, log_k, v, row_shift, col_shift)
    return dq, dk, dv, da, db


@torch.library.custom_op("diffusion_mp::log_linear_entries", mutates_args=())
def _entries(target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor, backend: str) -> Tensor:
    out: Tensor = ENTRIES.run("entries", backend, target, source, log_q, log_k)
    return out


@_entries.register_fake
def _(target: Tensor, source: Tensor, log_q: Tensor, *others: Any) -> Tensor:
    return log_q.new_empty(target.size(0), log_q.size(1))


@torch.library.custom_op("diffusion_mp::log_linear_entries_backward", mutates_args=())
def _entries_backward(
    grad: Tensor, out: Tensor, target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    dq, dk = ENTRIES.run("entries_backward", backend, grad, out, target, source, log_q, log_k)
    return dq, dk


@_entries_backward.register_fake
def _(
    grad: Tensor, out: Tensor, target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
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
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(output, *tensors)


def _differentiate_logsumexp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_logsumexp_backward(grad, *ctx.saved_tensors, ctx.backend), None, None)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_product_backward(grad, *ctx.saved_tensors, ctx.backend), None, None)


def _differentiate_entries(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (None, None, *_entries_backward(grad, *ctx.saved_tensors, ctx.backend), None)


_logsumexp.register_autograd(_differentiate_logsumexp, setup_context=_save_all)
_product.register_autograd(_differentiate_product, setup_context=_save_inputs)
_entries.register_autograd(_differentiate_entries, setup_context=_save_all)


def log_linear_logsumexp(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H K"]:
    """L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js) over the nodes j of i's graph, for every sample s.

    The log-normaliser of a row, always in at least float32. O(N K F) time, O(N (K + F)) memory, also in the backward
    pass; once differentiable.
    """
    name = requested("log_linear_attention", backend)
    (log_q, log_k, col_shift), _ = accumulating(log_q, log_k, col_shift)
    if name == "reference":
        return reference.log_linear_logsumexp(log_q, log_k, col_shift, ptr)
    return _logsumexp(log_q, log_k, col_shift, ptr, name)


def log_linear_product(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H K"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j over the nodes j of i's graph.

    With a = −logsumexp − log K and b the samples' log weights it is the mean over K samples of row-normalised kernel
    attention (Algorithm 1 of the slides, with Gumbel noise b = g/τ); with q and k exchanged, and a and b, its
    transpose. Nothing leaves log space before the largest exponent of every feature and sample is subtracted.

    Args:
        log_q, log_k: logarithms of the positive features of receivers and senders. v: values.
        row_shift, col_shift: a and b, one number per node, head and sample.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        backend: how it is computed; see `kernels.dispatch`.

    O(N K F D) time and O(N (K + F + D)) memory, also in the backward pass: the [N, H, K F] factors exist for a block of
    nodes at a time. Once differentiable; the result has the dtype of ``v``.
    """
    name = requested("log_linear_attention", backend)
    (log_q, log_k, row_shift, col_shift, v), dtype = accumulating(log_q, log_k, row_shift, col_shift, v)
    if name == "reference":
        return reference.log_linear_product(log_q, log_k, v, row_shift, col_shift, ptr).to(dtype)
    return _product(log_q, log_k, v, row_shift, col_shift, ptr, name).to(dtype)


def log_linear_entries(
    pattern: Pattern, log_q: Float[Tensor, "N H F"], log_k: Float[Tensor, "N H F"], *, backend: Backend = "auto"
) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_row(e),r + log_k_col(e),r), the logarithm of every entry e of a pattern. O(E H F) time.

    In at least float32; once differentiable.
    """
    name = requested("log_linear_attention", backend)
    (log_q, log_k), _ = accumulating(log_q, log_k)
    if name == "reference":
        return reference.log_linear_entries(pattern.row, pattern.col, log_q, log_k)
    return _entries(pattern.row, pattern.col, log_q, log_k, name)
