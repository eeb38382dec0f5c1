"""Linear systems with a Laplacian: conjugate gradients with implicit derivatives, and the inverse of low-rank forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings.algebra import LowRankForm
from diffusion_mp.energies.spectrum import precision
from diffusion_mp.errors import ConvergenceError
from diffusion_mp.kernels.segments import Rows, by_size, gather
from diffusion_mp.progress import solving

Operator = Callable[[Tensor], Tensor]

LEFT_OVER = 1e-6  # relative residual of a closed form above which rounding errors dominate the solution


@torch.no_grad()
def conjugate_gradients(
    operator: Operator, b: Float[Tensor, "N H D"],
    *, tol: float | None = None, max_iter: int = 1000, what: str = "the linear system",
    metric: Float[Tensor, "N heads"] | None = None, preconditioner: Operator | None = None,
) -> Float[Tensor, "N H D"]:  # fmt: skip
    """Solve A x = b for a symmetric positive definite A acting on [N, H, D], every (head, channel) column on its own.

    A column stops when its residual is ‖b − A x‖₂ ≤ ``tol``·‖b‖₂ (default 1e-12 in double, 1e-6 in single precision);
    a zero column has the zero solution. No gradients: see `solve` (Hestenes & Stiefel, 1952).

    ``metric`` is a d̄ > 0 such that A is self-adjoint and positive definite in ⟨u, v⟩ = Σ_i d̄_i u_i v_i, by default uᵀv;
    ``preconditioner`` approximates u ↦ A⁻¹u and is self-adjoint and positive definite in the same inner product.

    Raises:
        ConvergenceError: ``max_iter`` was not enough, A is not positive definite, or something is not finite.
    """
    tol = precision(b.dtype).residual if tol is None else tol
    if b.numel() == 0:
        return torch.zeros_like(b)
    scale = b.abs().amax(0)
    scale = torch.where(scale > 0, scale, 1.0)  # squares of tiny columns would underflow
    residual = b / scale
    weight = None if metric is None else (metric / metric.amax(0)).unsqueeze(2)

    def product(u: Tensor, v: Tensor) -> Tensor:
        if b.numel() == b.size(0):  # without a tensor of their size
            return torch.dot(u.flatten(), v.flatten()).view(b.shape[1:])
        return (u * v).sum(0)

    def inner(u: Tensor, v: Tensor) -> Tensor:
        return product(u if weight is None else weight * u, v)

    improved = residual if preconditioner is None else preconditioner(residual)
    direction = improved.clone()
    x = torch.zeros_like(residual)
    start = square = product(residual, residual)
    plain = weight is None and preconditioner is None
    slope = square if plain else inner(residual, improved)
    goal = tol * tol * start
    for closer in solving(what, max_iter):
        closer(square, goal)
        active = ~(square <= goal)  # NaN counts as active and is caught below
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
        square = product(residual, residual)
        improved = residual if preconditioner is None else preconditioner(residual)
        before, slope = slope, square if plain else inner(residual, improved)
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
    """Pass a gradient on, and raise when it is differentiated again."""

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
        # Depends on r as well as on the incoming gradient: only r depends on θ when the loss is linear in x.
        guard: Callable[..., Tensor] = _OnceDifferentiable.apply
        return guard(ctx.adjoint(grad.detach()), grad, *ctx.saved_tensors), None


def differentiated(solution: Tensor, equation: Operator, adjoint: Operator) -> Tensor:
    """Return x̂ with the gradient of x̂ + A⁻¹ ``equation(x̂)``, by one solution with Aᵀ in the backward pass."""
    residual = equation(solution) if torch.is_grad_enabled() else solution
    if not residual.requires_grad:
        return solution
    correction: Callable[..., Tensor] = InverseApply.apply
    return solution + correction(residual, adjoint)


def solve(
    operator: Operator, b: Float[Tensor, "N H D"],
    *, metric: Float[Tensor, "N heads"] | None = None, preconditioner: Operator | None = None, **options: Any,
) -> Float[Tensor, "N H D"]:  # fmt: skip
    """Solve A x = b by `conjugate_gradients` with these options and errors, differentiated implicitly.

    With x̂ the converged solution, x = x̂ + A⁻¹(b − A x̂) has the value x̂ and, with A⁻¹ and x̂ held constant, the
    gradient of the implicit function theorem: ∂L/∂b = g and ∂L/∂θ = −gᵀ(∂A/∂θ)x̂ with g = A⁻ᵀ ∂L/∂x, for every
    tensor θ inside ``operator``. Where A is self-adjoint in a metric d̄, Aᵀ = D̄ A D̄⁻¹ is self-adjoint in 1/d̄. Memory
    does not grow with the iterations. Once differentiable.
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

    return differentiated(inverse(b.detach()), lambda x: b - operator(x), adjoint)


class LowRankInverse:
    r"""(diag(d) − S)⁻¹ for S = diag(e) + U Kᵀ, factorised once (Woodbury, 1950; Theorem T3 of docs/certified.md).

        A⁻¹ + A⁻¹U(I − KᵀA⁻¹U)⁻¹KᵀA⁻¹,   A = diag(d − e)

    It costs O(N F² + F³) a graph and may be differentiated any number of times. A graph with no more nodes than
    features has its own, smaller, matrix factorised. d is [N, H, 1], of one head or of all of the form, or a number.
    """

    def __init__(self, form: LowRankForm, diagonal: Tensor | float) -> None:
        self.form = form
        own = 0.0 if form.diagonal is None else form.diagonal.unsqueeze(2)
        self.diagonal: Tensor = diagonal * form.left.new_ones(*form.left.shape[:2], 1) - own
        parts = self.diagonal, form.left, form.right
        self.blocks = [_Block.of(*(gather(part, rows) for part in parts)) for rows in _graphs(form)]

    def __call__(self, b: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        solved = iter(self.blocks)
        return by_graph(self.form, lambda part: next(solved).apply(part), b)

    def solve(self, b: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        """Return (diag(d) − S)⁻¹ b, or raise ``ConvergenceError`` where it misses b: singular or not finite."""
        x = self(b)
        with torch.no_grad():
            left, right = self.form.left, self.form.right
            moved = by_graph(self.form, lambda left, right, x: left @ (right.mT @ x), left, right, x)
            left_over, size = (self.diagonal * x - moved - b).norm(dim=0), b.norm(dim=0)
        if not bool((left_over <= LEFT_OVER * size).all()):  # NaN is not
            relative = torch.where(size > 0, left_over / size, left_over).max().item()
            raise ConvergenceError(
                f"a low-rank system is singular, nearly so, or holds NaN or infinity: the solution misses the "
                f"right-hand side by {relative:.3g} of it, expected up to {LEFT_OVER:g}. Raise the leak, or lower tau."
            )
        return x

    def inverse_diagonal(self) -> Float[Tensor, "N H"]:
        solved = iter(self.blocks)
        return by_graph(self.form, lambda _: next(solved).inverse_diagonal(), self.diagonal).squeeze(2)


class _Block(NamedTuple):
    """Graphs of one size: R (I − û k̂ᵀ)⁻¹ sR with R = |A|^-½, s the sign of a, û = sRU and k̂ = RK."""

    root: Tensor
    sign: Tensor
    left: Tensor
    right: Tensor
    factors: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, diagonal: Tensor, left: Tensor, right: Tensor) -> _Block:
        root, sign = diagonal.abs().rsqrt(), diagonal.detach().sign()
        left, right = sign * root * left, root * right
        nodes, features = right.shape[-2:]
        if nodes > features:
            left, right = rebased(left, right)
        core = right.mT @ left if nodes > features else left @ right.mT
        lu, pivots, _ = torch.linalg.lu_factor_ex(identity_like(core) - core)
        return cls(root, sign, left, right, (lu, pivots))

    @property
    def thin(self) -> bool:
        return self.right.size(-2) > self.right.size(-1)

    def core_solve(self, b: Tensor) -> Tensor:
        return torch.linalg.lu_solve(*(factor.expand(*b.shape[:2], *factor.shape[2:]) for factor in self.factors), b)

    def apply(self, b: Tensor) -> Tensor:
        b = self.sign * self.root * b
        solved = b + self.left @ self.core_solve(self.right.mT @ b) if self.thin else self.core_solve(b)
        return self.root * solved

    def inverse_diagonal(self) -> Tensor:
        if self.thin:
            kept = 1.0 + (self.left * self.core_solve(self.right.mT).mT).sum(-1, keepdim=True)
        else:
            kept = self.core_solve(identity_like(self.factors[0])).diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return self.sign * self.root.square() * kept


def rebased(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return U T and K T⁻ᵀ, with the same product, for a T that makes KᵀK the identity, or nearly so if singular.

    KᵀU is then scaled like the coupling itself. T needs no gradient, since the product does not depend on it.
    """
    if not right.size(-1):
        return left, right
    with torch.no_grad():
        size = right.abs().amax(-2, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        values, vectors = torch.linalg.eigh((right / size).mT @ (right / size))
        least = values.size(-1) * torch.finfo(values.dtype).eps
        root = values.clamp(min=least * values.amax(-1, keepdim=True)).sqrt().unsqueeze(-2)
        basis, inverse = size.mT * vectors * root, vectors / root
    return left @ basis, (right / size) @ inverse


def identity_like(like: Tensor) -> Tensor:
    return torch.eye(like.size(-1), dtype=like.dtype, device=like.device).expand_as(like)


def _graphs(form: LowRankForm) -> list[Rows]:
    """Return the rows of all graphs of one size, for every size."""
    return list(by_size(form.ptr, form.left.size(0), form.left.device))


def by_graph(form: LowRankForm, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function of stacked graphs of one size, [b, H, n, C] → [b, H, n, D], to all graphs."""
    every = _graphs(form)
    parts = [function(*(gather(tensor, rows) for tensor in tensors)).transpose(1, 2).flatten(0, 1) for rows in every]
    if not parts:
        return torch.zeros_like(tensors[-1])
    node = torch.arange(form.left.size(0), device=form.left.device)
    order = torch.cat([node[rows].flatten() for rows in every])
    return parts[0] if len(parts) == 1 and isinstance(every[0], slice) else torch.cat(parts)[order.argsort()]
