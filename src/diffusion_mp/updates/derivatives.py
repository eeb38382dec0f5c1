"""Derivatives of what an iteration finds: by torch through a formula, or by the implicit function theorem.

A solve has two ways to run. The fast one iterates on values and is differentiated once, by one more solve. The formula
is plain torch, with a dense matrix, and runs whenever a transform of ``torch.func``, forward mode or an export looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from diffusion_mp.runtime.torch_private import forward_mode_active, transforms_active

Operator = Callable[[Tensor], Tensor]

#: Entries of a matrix up to which a formula stores it: 128 MiB in double, or 4 096 unknowns.
DENSE = 1 << 24

#: Before torch 2.7 an export cannot be told from ``torch.compile``.
exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def formula_runs(entries: int) -> bool:
    """Return whether a formula with a matrix of so many entries runs, rather than an iteration.

    An export has no choice, and sizes that may be symbols are not compared there.
    """
    if exporting():
        return True
    return (transforms_active() or forward_mode_active()) and entries <= DENSE


def jacobian(function: Operator, z: Tensor) -> Tensor:
    """Return the matrix [n, n] of derivatives at z, by forward mode, differentiable any number of times."""

    def column(direction: Tensor) -> Tensor:
        return jvp(function, (z,), (direction,))[1]

    numbers = z.numel()
    units = torch.eye(numbers, dtype=z.dtype, device=z.device).view(numbers, *z.shape)
    return vmap(column, chunk_size=None if exporting() else 256)(units).flatten(1).t()


def newton_step(equation: Operator, z: Tensor) -> Tensor:
    """Return z − G′(z)⁻¹ G(z), which solves an affine equation G(z) = 0."""
    left_over = equation(z)
    move = torch.linalg.solve(jacobian(equation, z), left_over.flatten())
    return z - move.view_as(z)


def with_derivatives_of(solution: Tensor, formula: Tensor) -> Tensor:
    """Return the value of a solution with the derivatives of a formula for it."""
    return solution + (formula - formula.detach())


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


class _Correction(torch.autograd.Function):
    """r ↦ A⁻¹r at r = 0: the value is zero, a gradient is solved with Aᵀ, and a tangent with A."""

    @staticmethod
    def forward(residual: Tensor, inverse: Operator, adjoint: Operator) -> Tensor:
        return torch.zeros_like(residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Operator, Operator], output: Tensor) -> None:
        residual, ctx.inverse, ctx.adjoint = inputs
        ctx.save_for_backward(residual)
        ctx.save_for_forward(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The result depends on r too, which is not seen where the loss is linear in x.
        guard: Callable[..., Tensor] = _OnceDifferentiable.apply
        return guard(ctx.adjoint(grad.detach()), grad, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        guard: Callable[..., Tensor] = _OnceDifferentiable.apply
        return guard(ctx.inverse(tangent.detach()), tangent, *ctx.saved_tensors)


def differentiated(solution: Tensor, equation: Operator, inverse: Operator, adjoint: Operator) -> Tensor:
    """Return x̂ with the derivatives of x̂ + A⁻¹ ``equation(x̂)``, where A⁻¹ and x̂ are constants.

    They are those of the implicit function theorem, to first order: by one solution with Aᵀ in the backward pass, or
    one with A in forward mode.
    """
    if not (torch.is_grad_enabled() or forward_mode_active()):
        return solution
    residual = equation(solution)
    if not (residual.requires_grad or forward_mode_active()):
        return solution
    correction: Callable[..., Tensor] = _Correction.apply
    return solution + correction(residual, inverse, adjoint)
