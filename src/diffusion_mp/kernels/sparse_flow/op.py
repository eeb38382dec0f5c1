"""Registration of the sparse-flow operations: shape inference, autograd, no second derivative."""

from typing import Any, NamedTuple, Optional

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.backends import Backends
from diffusion_mp.kernels.derivatives import empty_like, once_differentiable
from diffusion_mp.kernels.dispatch import Backend, requested
from diffusion_mp.kernels.precision import accumulating, promoted
from diffusion_mp.kernels.sparse_flow import reference, tiled

# The gradient's program holds tiles of all three kinds of features: wider ones do not fit into shared memory.
BACKENDS = Backends("sparse_flow", tiled, "diffusion_mp.kernels.sparse_flow.triton", widest=128)


@torch.library.custom_op("diffusion_mp::sparse_flow_potentials", mutates_args=())
def _potentials(
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    lam: Tensor,
    leak: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = BACKENDS.run("potentials", backend, q, k, fq, fk, lam, leak, ptr)
    a, w, log_mu, resistance, slope, work, support = rows
    return a, w, log_mu, resistance, slope, work, support


@_potentials.register_fake
def _(
    q: Tensor, k: Tensor, fq: Tensor, fk: Tensor, lam: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, w, log_mu, resistance, slope, work, support = empty_like(*7 * [lam])
    return a, w, log_mu, resistance, slope, work, support


@torch.library.custom_op("diffusion_mp::sparse_flow_potentials_backward", mutates_args=())
def _potentials_backward(
    grad_a: Tensor,
    grad_w: Tensor,
    grad_mu: Tensor,
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    lam: Tensor,
    leak: Tensor,
    a: Tensor,
    w: Tensor,
    log_mu: Tensor,
    resistance: Tensor,
    slope: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = (a, w, log_mu, resistance, slope)
    dq, dk, dfq, dfk, dlam, dleak = BACKENDS.run(
        "potentials_backward", backend, grad_a, grad_w, grad_mu, q, k, fq, fk, lam, leak, *rows, ptr
    )
    return dq, dk, dfq, dfk, dlam, dleak


@_potentials_backward.register_fake
def _(
    grad_a: Tensor,
    grad_w: Tensor,
    grad_mu: Tensor,
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    lam: Tensor,
    leak: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dfq, dfk, dlam, dleak = empty_like(q, k, fq, fk, lam, leak)
    return dq, dk, dfq, dfk, dlam, dleak


@torch.library.custom_op("diffusion_mp::sparse_flow_product", mutates_args=())
def _product(
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    lam: Tensor,
    a: Tensor,
    w: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    transpose: bool,
    backend: str,
) -> Tensor:
    out: Tensor = BACKENDS.run("product", backend, q, k, fq, fk, v, lam, a, w, ptr, transpose)
    return out


@_product.register_fake
def _(q: Tensor, k: Tensor, fq: Tensor, fk: Tensor, v: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("diffusion_mp::sparse_flow_product_backward", mutates_args=())
def _product_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    lam: Tensor,
    a: Tensor,
    w: Tensor,
    ptr: Optional[Tensor],  # noqa: UP045
    transpose: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = BACKENDS.run("product_backward", backend, grad, q, k, fq, fk, v, lam, a, w, ptr, transpose)
    dq, dk, dfq, dfk, dv, dlam, da, dw = grads
    return dq, dk, dfq, dfk, dv, dlam, da, dw


@_product_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    lam: Tensor,
    a: Tensor,
    w: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dfq, dfk, dv, dlam, da, dw = empty_like(q, k, fq, fk, v, lam, a, w)
    return dq, dk, dfq, dfk, dv, dlam, da, dw


once_differentiable(
    _potentials_backward,
    _product_backward,
    name="sparse-flow attention",
    instead="use kernels.sparse_flow.solve_rows on dense rows, or the edge form (EdgeSparseFlowDiffusivity)",
)


def _setup_potentials(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ptr, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[:5], ptr)
    ctx.mark_non_differentiable(*output[3:])


def _differentiate_potentials(ctx: Any, grad_a: Tensor, grad_w: Tensor, grad_mu: Tensor, *others: Any) -> Any:
    return (*_potentials_backward(grad_a, grad_w, grad_mu, *ctx.saved_tensors, ctx.backend), None, None)


_potentials.register_autograd(_differentiate_potentials, setup_context=_setup_potentials)


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.transpose, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_product_backward(grad, *ctx.saved_tensors, ctx.transpose, ctx.backend), None, None, None)


_product.register_autograd(_differentiate_product, setup_context=_setup_product)


class RowPotentials(NamedTuple):
    """What is to be known about every row, [N, H].

    ``a`` and ``w`` give every entry, z_ij = e^{s_ij + a_i} max(1 − λ_i e^{u_ij − w_i}, 0). Beside them log μ and,
    without gradients, the friction's work Σ_j θ_ij z_ij and the number of entries that are not zero.
    """

    a: Tensor
    w: Tensor
    log_mu: Tensor
    work: Tensor
    support: Tensor


def _prepared(name: str, features: tuple[Tensor, ...], of_rows: tuple[Tensor, ...]) -> list[Tensor]:
    """Features in one dtype, half precision too where a kernel gets them; numbers of rows in at least float32."""
    (_, *numbers), _ = accumulating(features[0][:0], *of_rows)
    together, _ = accumulating(*features, numbers[0]) if name == "reference" else promoted(*features)
    return [*together[: len(features)], *numbers]


def sparse_flow_potentials(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    friction_q: Float[Tensor, "N H G"],
    friction_k: Float[Tensor, "N H G"],
    lam: Float[Tensor, "N H"],
    leak: Float[Tensor, "N H"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> RowPotentials:
    r"""Solve min ½Σ_j r_ij z_j² + λ_i Σ_j f_ij|z_j| + (α/2)(Σ_j z_j − 1)² for every row i (SFi-Former, Eqs. 6, 8, 9).

    Resistances r = softmax_j(−q_i·k_j) and frictions f = softmax_j(q̃_i·k̃_j) over the nodes j of i's graph; with no
    friction features (G = 0) f = 1/n. Exact, by Newton's method on the potential (ERRATA S3).

    Args:
        q, k: features of receivers and senders. friction_q, friction_k: those of the frictions.
        lam: λ ≥ 0 of every row. leak: 1/α, 0 for exact conservation.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        backend: how it is computed; see `kernels.dispatch`.

    O(N²) time, O(N) memory, also in the backward pass; at least float32; once differentiable in all but ``ptr``.
    """
    name = requested("sparse_flow", backend)
    arguments: tuple[Any, ...] = (*_prepared(name, (q, k, friction_q, friction_k), (lam, leak)), ptr)
    if name == "reference":
        a, w, log_mu, work, support = reference.sparse_flow_potentials(*arguments)
    else:
        a, w, log_mu, _, _, work, support = _potentials(*arguments, name)
    return RowPotentials(a, w, log_mu, work.detach(), support.detach())


def sparse_flow_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    friction_q: Float[Tensor, "N H G"],
    friction_k: Float[Tensor, "N H G"],
    v: Float[Tensor, "N H D"],
    lam: Float[Tensor, "N H"],
    a: Float[Tensor, "N H"],
    w: Float[Tensor, "N H"],
    ptr: Tensor | None = None,
    *,
    transpose: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j z_ij v_j with z_ij = e^{q_i·k_j + a_i} max(1 − λ_i e^{q̃_i·k̃_j − w_i}, 0).

    ``transpose``: out_i = Σ_j z_ji v_j; λ, a and w still belong to the rows of z. O(N²) time, O(N) memory, also in the
    backward pass; once differentiable; the result has the dtype of ``v``.
    """
    name = requested("sparse_flow", backend)
    arguments: tuple[Any, ...] = (*_prepared(name, (q, k, friction_q, friction_k, v), (lam, a, w)), ptr, transpose)
    if name == "reference":
        return reference.sparse_flow_product(*arguments).to(v.dtype)
    return _product(*arguments, name).to(v.dtype)
