"""The fixed point of a step, found by accelerated iteration and differentiated implicitly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import errors
from diffusion_mp.energies.spectrum import precision
from diffusion_mp.kernels.precision import without_autocast
from diffusion_mp.progress import solving
from diffusion_mp.updates.derivatives import Operator, differentiated


def _all_rows(x: Tensor) -> Tensor:
    """Return the sum over all rows where this process has all of them."""
    return x


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of steps depends on values
def fixed_point(
    step: Operator, x0: Float[Tensor, "*shape"],
    *, energy: Callable[[Tensor], Tensor] | None = None, tol: float | None = None, max_iter: int = 1000,
    memory: int = 10, total: Operator = _all_rows, what: str = "the fixed point",
) -> Float[Tensor, "*shape"]:  # fmt: skip
    r"""Return z* = T(z*), the limit of z ← T(z), with the gradient of the implicit function theorem.

        ∂L/∂θ = gᵀ ∂T(z*)/∂θ,   g = ∂L/∂z* + Jᵀg,   J = ∂T/∂z at z*

    for every tensor θ inside ``step``. Both passes use the accelerated `iterate`: g is itself a fixed point, of a step
    with one vector–Jacobian product. Backward needs the autograd graph of a single step (Bai, Kolter & Koltun, 2019,
    Theorem 1) and is once differentiable. With several fixed points the acceleration may find another one than the
    plain iteration.

    Args:
        step: T, differentiable, which maps tensors of the shape of x₀ to such tensors.
        x0: initial state. It has no gradient, since the limit does not depend on it.
        energy: a function of the state that T never raises. If the accelerated iteration ends above the energy of x₀,
            the plain iteration replaces it.
        tol: ‖T(z) − z‖ ≤ tol ‖T(z)‖ at the end; by default 1e-12 in double, 1e-6 in single precision. Where T contracts
            by ρ the error is up to 1/(1 − ρ) times as large.
        max_iter, memory: maximum number of steps of each pass, and the memory of `iterate`.
        total: turns a sum over the rows of this process into one over all rows (``Graph.total``).
        what: name of the fixed point in messages.

    Raises:
        ConvergenceError: ``max_iter`` steps were not enough; also from the backward pass.

    Examples:
        >>> torch.allclose(fixed_point(torch.cos, torch.zeros(1)), torch.tensor([0.739085]), atol=1e-5)  # cos z = z
        True
    """
    errors.check_function(step, "step", "the map whose fixed point is sought")
    errors.check_function(total, "total", "a sum over all rows")
    if energy is not None:
        errors.check_function(energy, "energy", "of the state")
    errors.check_kind(what, "what", str, "a name")
    errors.check_tensor(x0, "x0", "to begin with")
    if tol is not None:
        errors.check_positive(tol, "tol")
    errors.check_counts(max_iter=max_iter)
    errors.check_counts(0, memory=memory)
    errors.check_finite(x0, "x0")
    # Half precision cannot hold a fixed point to six digits, nor can a step under autocast.
    start = x0.detach().to(torch.promote_types(x0.dtype, torch.float32))
    tol = precision(start.dtype).residual if tol is None else tol

    def exact(z: Tensor) -> Tensor:
        with without_autocast(z):
            image = step(z)
        errors.check_tensor(image, "step(z)", "of the shape of z")
        if image.shape != z.shape or image.device != z.device:
            raise ValueError(f"step(z) must be like z, {errors.describe(z)}; got {errors.describe(image)}.")
        return image.to(z.dtype)

    def limit(step: Operator, begin: Tensor, what: str, memory: int = memory) -> Tensor:
        with without_autocast(begin):  # for the products of the acceleration, and in backward()
            return iterate(step, begin, tol=tol, max_iter=max_iter, memory=memory, total=total, what=what)

    solution = limit(exact, start, what)
    if energy is not None and memory:
        with torch.no_grad():
            before, after = energy(start), energy(solution)
        for value in (before, after):
            if not isinstance(value, (Tensor, float)) or (isinstance(value, Tensor) and value.numel() != 1):
                raise TypeError(f"energy(z) must be one number; got {errors.describe(value)}.")
        if not bool(after <= before):
            solution = limit(exact, start, what, memory=0)

    def inverse_transposed(grad: Tensor) -> Tensor:
        """Return (I − Jᵀ)⁻¹ grad."""
        with torch.enable_grad():
            variable = solution.detach().requires_grad_()
            image = exact(variable)

        def pull(g: Tensor) -> Tensor:
            (moved,) = torch.autograd.grad(image, variable, g, retain_graph=True, materialize_grads=True)
            return grad + moved

        return limit(pull, grad, f"the gradient of {what}")

    return differentiated(solution, lambda z: exact(z) - z, inverse_transposed).to(x0.dtype)


@torch.no_grad()
def iterate(
    step: Operator, x: Float[Tensor, "*shape"],
    *, tol: float, max_iter: int, memory: int, total: Operator = _all_rows, what: str = "the fixed point",
) -> Float[Tensor, "*shape"]:  # fmt: skip
    r"""Iterate x ← T(x), accelerated, until ‖T(x) − x‖ ≤ tol ‖T(x)‖, and return T(x).

    With r = T(x) − x and the last ``memory`` differences Δr of residuals and ΔT of images, the next x is T(x) − ΔT γ
    for the γ that minimises ‖r − Δr γ‖ (Anderson, 1965). Where this does not reduce the residual, T(x) is taken
    instead and the differences are discarded; so it converges where T alone does, at most at twice the cost.
    ``memory=0`` is T alone.
    """
    # A ring buffer of differences: no iteration copies all of them.
    images, residuals = x.new_zeros(2, memory, x.numel()).unbind()
    count, mixed = 0, False
    last_image = last_residual = x.flatten()
    best = size = math.inf
    for closer in solving(what, max_iter):
        image = step(x).flatten()
        residual = image - x.flatten()
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in (residual, image)]
        size, scale = total(torch.stack(norms).square()).sqrt().tolist()  # in double, where no square overflows
        if size <= tol * scale < math.inf:
            return image.view_as(x)
        closer(size, tol * scale)
        if mixed and not size < best:
            x, count, mixed = last_image.view_as(x), 0, False
            continue
        if not math.isfinite(size):
            break
        if count:
            place = (count - 1) % memory
            images[place], residuals[place] = image - last_image, residual - last_residual
        last_image, last_residual, best = image, residual, size
        used = min(count, memory)
        mixed = used > 0
        x = (image - _least(residuals[:used], residual, total) @ images[:used] if mixed else image).view_as(x)
        count += memory > 0
    raise errors.ConvergenceError(
        f"{what} was not reached in max_iter={max_iter} steps: the last one moved the state by {size:.3g}, more than "
        f"tol={tol:.3g} of its norm. Raise max_iter or tol, weigh the source more (a larger beta), or use float64."
    )


def _least(differences: Float[Tensor, "m n"], residual: Float[Tensor, " n"], total: Operator) -> Float[Tensor, " m"]:
    """Return the γ that minimises ‖residual − γ · differences‖."""
    products = total(differences @ torch.cat([differences, residual.unsqueeze(0)]).t())
    gram, right = products[:, :-1], products[:, -1]
    # Differences may be linearly dependent: scale them to norm one and add a multiple of the identity near rounding.
    scale = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).rsqrt()
    gram = scale.unsqueeze(1) * gram * scale
    gram.diagonal().add_(10 * torch.finfo(gram.dtype).eps)
    return scale * torch.linalg.solve(gram, scale * right)
