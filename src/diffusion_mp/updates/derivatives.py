"""Derivatives of what an iteration finds: by torch through a formula, or by the implicit function theorem.

A solve has two ways to run. The fast one iterates on values and is differentiated once, by one more solve. The formula
is plain torch, with a dense matrix, and runs whenever a transform of ``torch.func``, forward mode or an export looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from diffusion_mp.kernels.operation import exporting
from diffusion_mp.runtime.torch_private import (
    dispatch_mode_active,
    forward_mode_active,
    transforms_active,
)

Operator = Callable[[Tensor], Tensor]

#: Entries of a matrix up to which a formula stores it: 128 MiB in double, or 4 096
#: unknowns.
DENSE = 1 << 24

#: Columns of a matrix that are found at once.
CHUNK = 256


def formula_runs(entries: int) -> bool:
    """Return whether a formula with a matrix of so many entries runs instead of an iteration.

    An export always runs the formula, and does not compare sizes that may be symbols.
    """
    # Under torch.compile solves are calls outside of the graph, where none of the
    # questions below is open.
    if torch.compiler.is_compiling():
        return exporting()
    return (transforms_active() or forward_mode_active()) and entries <= DENSE


def jacobian(function: Operator, z: Tensor) -> Tensor:
    """Return the matrix [n, n] of derivatives at z, differentiable any number of times."""
    numbers = z.numel()
    units = torch.eye(numbers, dtype=z.dtype, device=z.device).view(numbers, *z.shape)
    if forward_mode_active() and not transforms_active():
        # Levels of dual numbers do not nest, so the matrix is found row by row.
        pull = vjp(function, z)[1]
        return vmap(lambda unit: pull(unit)[0], chunk_size=CHUNK)(units).flatten(1)
    # In forward mode, operations of this library are formulas, which `vmap` takes.
    columns = vmap(lambda unit: jvp(function, (z,), (unit,))[1], chunk_size=CHUNK)(
        units
    )
    return columns.flatten(1).t()


def on_values() -> AbstractContextManager[Any]:
    """Run an iteration outside of what is recorded, for instance by ``torch.func.linearize``, which has no values."""
    if not dispatch_mode_active():
        return nullcontext()
    from torch.fx.experimental.proxy_tensor import (
        disable_proxy_modes_tracing,
    )  # it imports SymPy

    return disable_proxy_modes_tracing()


def refuse_export(what: str) -> None:
    """Raise in an export."""
    if exporting():
        raise NotImplementedError(
            f"{what} takes as many steps as its values need, and torch.export has no values. Export a fixed number of "
            f"steps, for instance num_layers=20."
        )


@contextmanager
def values_needed(what: str) -> Iterator[None]:
    """Refuse an export, and a ``vmap`` whose values are read, where the number of steps depends on values."""
    refuse_export(what)
    try:
        yield
    except RuntimeError as error:
        if not _asks_a_batch(error):
            raise
        raise NotImplementedError(
            f"{what} takes another number of steps for every entry of a vmap. Take a fixed number of steps, for "
            f"instance num_layers=20, or pass all entries as the graphs of a batch."
        ) from error


def transposed_product(function: Operator, z: Tensor) -> Operator:
    """Return u ↦ Jᵀu for the matrix J of derivatives at z."""
    if transforms_active():  # which know no ``requires_grad_``
        pull = vjp(function, z)[1]
        return lambda u: pull(u)[0].detach()
    with torch.enable_grad():
        variable = z.detach().requires_grad_()
        image = function(variable)
    return lambda u: torch.autograd.grad(
        image, variable, u, retain_graph=True, materialize_grads=True
    )[0]


def product(function: Operator, z: Tensor) -> Operator:
    """Return u ↦ J u for the matrix J of derivatives at z."""
    if transforms_active():
        return lambda u: jvp(function, (z,), (u,))[1].detach()
    # Levels of dual numbers do not nest, so this is the derivative of u ↦ Jᵀu, which is
    # linear.
    with torch.enable_grad():
        variable = z.detach().requires_grad_()
        image = function(variable)
        direction = torch.zeros_like(image).requires_grad_()
        pulled = torch.autograd.grad(
            image, variable, direction, create_graph=True, materialize_grads=True
        )[0]
    if not pulled.requires_grad:
        return torch.zeros_like
    return lambda u: torch.autograd.grad(pulled, direction, u, retain_graph=True)[
        0
    ].detach()


def dense_solution(matrix: Tensor, b: Tensor) -> Tensor:
    """Return A⁻¹ b for matrices [..., n, n] and [..., n, k], differentiable any number of times.

    It uses neither ``torch.linalg.solve`` nor its factors (both in torch 2.13). The forward mode of
    ``torch.linalg.solve`` holds the factors of A constant, so a tangent of it has wrong derivatives. ``vmap`` of its
    factors is wrong. An export, which has no derivatives, does use ``torch.linalg.solve``.
    """
    if exporting():
        return torch.linalg.solve(matrix, b)
    return torch.linalg.inv(matrix) @ b


def newton_step(equation: Operator, z: Tensor) -> Tensor:
    """Return z − G′(z)⁻¹ G(z), which is closer to G(z) = 0, and solves the equation if G is affine."""
    move = dense_solution(jacobian(equation, z), equation(z).reshape(-1, 1))
    return z - move.view_as(z)


def with_derivatives_of(solution: Tensor, formula: Tensor) -> Tensor:
    """Return the value of a solution with the derivatives of a formula for it."""
    # The formula's own value differs in rounding, and calls in and outside of a
    # transform should not.
    return solution + (formula - formula.detach())


def _asks_a_batch(error: BaseException | None) -> bool:
    """Return whether torch refused to read a value in a ``vmap``."""
    return error is not None and "vmap: It looks like" in str(error)


def _refuse_batches(*_: Any, cause: BaseException | None = None) -> NoReturn:
    raise NotImplementedError(
        "the derivatives of a system of more than 4096 unknowns are solved one at a time, and vmap, jacrev, jacfwd, "
        "hessian and linearize ask for a formula, which needs its matrix. Take torch.func.vjp or jvp of one vector, a "
        "fixed num_layers, or fewer nodes."
    ) from cause


class _OnceDifferentiable(torch.autograd.Function):
    """Pass a derivative on, and raise when it is differentiated again."""

    @staticmethod
    def forward(derivative: Tensor, *dependencies: Tensor) -> Tensor:
        return derivative.view_as(derivative)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "implicit differentiation is once differentiable: the derivative of a solved system has no derivative of "
            "its own here. For second derivatives use torch.func on a system of at most 4096 unknowns, ExplicitEuler "
            "or a fixed num_layers, or solve with the coupling's to_dense()."
        )

    jvp = backward
    vmap = staticmethod(_refuse_batches)


class _Correction(torch.autograd.Function):
    """The map r ↦ A⁻¹r at r = 0, whose value is zero; a gradient is solved with Aᵀ, and a tangent with A."""

    @staticmethod
    def forward(residual: Tensor, inverse: Operator, adjoint: Operator) -> Tensor:
        return torch.zeros_like(residual)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Operator, Operator], output: Tensor
    ) -> None:
        residual, ctx.inverse, ctx.adjoint = inputs
        ctx.save_for_backward(residual)
        ctx.save_for_forward(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _solved(ctx.adjoint, grad, ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _solved(ctx.inverse, tangent, ctx.saved_tensors)

    vmap = staticmethod(_refuse_batches)


def _solved(solve: Operator, right: Tensor, residual: tuple[Tensor, ...]) -> Tensor:
    """Return a solution that cannot be differentiated again, in the right side or, if that is constant, in r."""
    try:
        solution = solve(right.detach())
    except (RuntimeError, NotImplementedError) as error:
        if _asks_a_batch(error) or _asks_a_batch(error.__cause__):
            _refuse_batches(cause=error)
        raise
    guard: Callable[..., Tensor] = _OnceDifferentiable.apply
    return guard(solution, right, *residual)


def refuse_recorded_tangents() -> None:
    """Raise where ``linearize`` records tangents, since the record would leave out an iteration."""
    if forward_mode_active() and dispatch_mode_active():
        _refuse_batches()


def differentiated(
    solution: Tensor, equation: Operator, inverse: Operator, adjoint: Operator
) -> Tensor:
    """Return x̂ with the derivatives of x̂ + A⁻¹ ``equation(x̂)``, where A⁻¹ and x̂ are constants.

    These are the derivatives of the implicit function theorem, to first order: one solution with Aᵀ in the backward
    pass, or one with A in forward mode.
    """
    if not (torch.is_grad_enabled() or forward_mode_active()):
        return solution
    refuse_recorded_tangents()
    residual = equation(solution)
    if not (residual.requires_grad or forward_mode_active()):
        return solution
    correction: Callable[..., Tensor] = _Correction.apply
    return solution + correction(residual, inverse, adjoint)
