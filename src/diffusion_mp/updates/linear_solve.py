"""Preconditioned conjugate gradients on all columns at once, differentiated implicitly."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.energies.spectrum import precision
from diffusion_mp.errors import ConvergenceError

Operator = Callable[[Tensor], Tensor]


@torch.no_grad()
def conjugate_gradients(
    operator: Operator,
    b: Float[Tensor, "N H D"],
    *,
    tol: float | None = None,
    max_iter: int = 1000,
    what: str = "the linear system",
    metric: Float[Tensor, "N heads"] | None = None,
    preconditioner: Operator | None = None,
) -> Float[Tensor, "N H D"]:
    """Solve A x = b for a symmetric positive definite A acting on [N, H, D], every (head, channel) column on its own.

    A column stops when its residual is ‖b − A x‖₂ ≤ ``tol``·‖b‖₂ (default 1e-12 in double, 1e-6 in single precision);
    a zero column has the zero solution. No gradients: see `solve` (Hestenes & Stiefel, 1952).

    Args:
        operator: u ↦ A u.
        b: the right-hand sides.
        tol, max_iter: when a column stops, and when the iteration gives up.
        what: the name of the system in messages.
        metric: d̄ > 0, where A is self-adjoint and positive definite in ⟨u, v⟩ = Σ_i d̄_i u_i v_i; by default in uᵀv.
        preconditioner: an approximation of u ↦ A⁻¹u, self-adjoint and positive definite in the same inner product.

    Raises:
        ConvergenceError: ``max_iter`` was not enough, A is not positive definite, or something is not finite.
    """
    tol = precision(b.dtype).residual if tol is None else tol
    if b.numel() == 0:
        return torch.zeros_like(b)
    scale = b.abs().amax(0)
    scale = torch.where(scale > 0, scale, 1.0)  # so that the squares of tiny columns do not underflow
    residual = b / scale
    weight = None if metric is None else (metric / metric.amax(0)).unsqueeze(2)

    def inner(u: Tensor, v: Tensor) -> Tensor:
        return (u * v if weight is None else weight * u * v).sum(0)

    improved = residual if preconditioner is None else preconditioner(residual)
    direction = improved.clone()
    x = torch.zeros_like(residual)
    start = square = (residual * residual).sum(0)
    slope = inner(residual, improved)
    goal = tol * tol * start
    for _ in range(max_iter):
        active = ~(square <= goal)  # NaN counts as active, and is caught below
        if not bool(active.any()):
            return x * scale
        image = operator(direction)
        curvature = inner(direction, image)
        if not bool((curvature[active] > 0).all()):
            raise ConvergenceError(
                f"{what} is not positive definite, or holds NaN or infinity: a search direction has curvature "
                f"{curvature[active].min().item():.3g}, expected > 0. Negative couplings, or row sums above 1 in the "
                f"residual form, do this; raise the leak, lower tau, or use ExplicitEuler."
            )
        step = torch.where(active, slope / curvature, 0.0)
        x.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1.0)
        square = (residual * residual).sum(0)
        improved = residual if preconditioner is None else preconditioner(residual)
        before, slope = slope, inner(residual, improved)
        direction.mul_(torch.where(active, slope / before, 0.0)).add_(improved)
    if bool((square <= goal).all()):
        return x * scale
    reached = torch.where(start > 0, square / start, 0.0).max().sqrt().item()
    raise ConvergenceError(
        f"Conjugate gradients on {what} reached a relative residual of {reached:.3g} in max_iter={max_iter} "
        f"iterations; tol={tol:.3g} was asked. Raise max_iter or tol, raise the leak (a better conditioned system), "
        f"or use float64."
    )


class _OnceDifferentiable(torch.autograd.Function):
    """Hand a gradient on, and refuse to be differentiated through whatever it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *dependencies: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "implicit differentiation is once differentiable: the gradient of a solved system has no derivative of its "
            "own here. For second derivatives use ExplicitEuler, or solve with the coupling's to_dense()."
        )


class InverseApply(torch.autograd.Function):
    """r ↦ A⁻¹r at r = 0: forward is zero, backward solves with Aᵀ."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, adjoint: Operator) -> Tensor:
        ctx.adjoint = adjoint
        ctx.save_for_backward(residual)
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Tied to r as well as to the incoming gradient: r is what depends on θ when the loss is linear in x.
        guard: Callable[..., Tensor] = _OnceDifferentiable.apply
        return guard(ctx.adjoint(grad.detach()), grad, *ctx.saved_tensors), None


def solve(
    operator: Operator,
    b: Float[Tensor, "N H D"],
    *,
    metric: Float[Tensor, "N heads"] | None = None,
    preconditioner: Operator | None = None,
    **options: Any,
) -> Float[Tensor, "N H D"]:
    """Solve A x = b by `conjugate_gradients` with these options; differentiate through the solution, not the iteration.

    With x̂ the converged solution, x = x̂ + A⁻¹(b − A x̂) has the value x̂ and, with A⁻¹ and x̂ held constant, the
    gradient of the implicit function theorem: ∂L/∂b = g and ∂L/∂θ = −gᵀ(∂A/∂θ)x̂ with g = A⁻ᵀ ∂L/∂x, for every
    tensor θ inside ``operator``; where A is self-adjoint in a metric d̄, Aᵀ = D̄ A D̄⁻¹ is in its reciprocal. Memory does
    not grow with the iterations. Once differentiable.

    Raises:
        ConvergenceError: as `conjugate_gradients`; also from the backward pass.
    """

    def inverse(rhs: Tensor) -> Tensor:
        return conjugate_gradients(operator, rhs, metric=metric, preconditioner=preconditioner, **options)

    def adjoint(rhs: Tensor) -> Tensor:
        if metric is None:
            return inverse(rhs)
        weight = metric.unsqueeze(2)

        def turned(function: Operator) -> Operator:
            return lambda u: weight * function(u / weight)

        improve = None if preconditioner is None else turned(preconditioner)
        return conjugate_gradients(turned(operator), rhs, metric=1.0 / metric, preconditioner=improve, **options)

    solution = inverse(b.detach())
    if not torch.is_grad_enabled():
        return solution
    residual = b - operator(solution)
    if not residual.requires_grad:
        return solution
    correction: Callable[..., Tensor] = InverseApply.apply
    return solution + correction(residual, adjoint)
