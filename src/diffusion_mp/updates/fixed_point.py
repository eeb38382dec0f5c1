"""The fixed point of a step, found by accelerated iteration and differentiated implicitly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import checks, errors
from diffusion_mp.energies.spectrum import precision
from diffusion_mp.graph.arguments import as_ptr, check_ptr
from diffusion_mp.runtime.precision import widened, without_autocast
from diffusion_mp.runtime.progress import solving
from diffusion_mp.updates.derivatives import (
    Operator,
    differentiated,
    formula_runs,
    newton_step,
    on_values,
    product,
    transposed_product,
    values_needed,
    with_derivatives_of,
)
from diffusion_mp.updates.linear_solve import Columns


def _all_rows(x: Tensor) -> Tensor:
    """Return the sum over all rows unchanged, if this process has all of them."""
    return x


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of steps depends on values
@checks.checked
def fixed_point(
    step: Operator,
    x0: Float[Tensor, "*shape"],
    *,
    energy: Callable[[Tensor], Tensor] | None = None,
    tol: checks.PositiveNumber | None = None,
    max_iter: checks.Count = 1000,
    memory: checks.CountOrZero = 10,
    ptr: Tensor | None = None,
    total: Operator = _all_rows,
    what: str = "the fixed point",
) -> Float[Tensor, "*shape"]:
    """Return the limit z* = T(z*) of the iteration z ← T(z), differentiated by the implicit function theorem.

    For every tensor θ inside ``step`` (Bai, Kolter & Koltun 2019, Theorem 1), with the Jacobian J of T at z*:

        ∂L/∂θ = gᵀ ∂T(z*)/∂θ,   g = ∂L/∂z* + Jᵀg

    Both passes use the accelerated `iterate`: g is itself a fixed point of a step with one vector–Jacobian product. The
    backward pass needs the autograd graph of a single step. It is once differentiable, and so are dual numbers. The
    transforms of ``torch.func`` differentiate two steps of Newton's method at z*, with the matrix I − J of up to 4 096
    numbers, and their derivatives up to the third are exact. If there are several fixed points, the acceleration may
    find another fixed point than the plain iteration.

    Args:
        step: T, a differentiable map from tensors of the shape of ``x0`` to tensors of the same shape.
        x0: initial state. It gets no gradient, since the limit does not depend on it.
        energy: a function of the state that T never raises. It returns one number, or one for every graph of ``ptr``,
            [B]. If the accelerated iteration ends above the energy of ``x0``, the plain iteration replaces it. ``None``
            compares nothing.
        tol: the iteration ends when ‖T(z) − z‖ ≤ tol ‖T(z)‖. ``None`` is 1e-12 in double and 1e-6 in single precision.
            If T contracts by ρ, the error is up to 1/(1 − ρ) times as large.
        max_iter: maximum number of steps of each pass.
        memory: number of earlier steps that the acceleration combines. 0 is the plain iteration.
        ptr: row boundaries [B+1] of graphs that T does not connect, on the CPU. Each graph is accelerated, stopped and
            compared in energy separately, so its limit does not depend on the other graphs. ``None`` is one graph.
        total: turns a sum over the rows of this process into a sum over all rows (``Graph.total``). By default this
            process has all rows.
        what: name of the fixed point in messages.

    Returns:
        The limit, of the shape and dtype of ``x0``.

    Raises:
        ConvergenceError: ``max_iter`` steps were not enough, in the forward or in the backward pass.
        NotImplementedError: under ``torch.export`` or ``vmap``, where the number of steps cannot depend on values.

    Examples:
        >>> torch.allclose(fixed_point(torch.cos, torch.zeros(1)), torch.tensor([0.739085]), atol=1e-5)  # cos z = z
        True
    """
    checks.check_function(step, "step", "the map whose fixed point is sought")
    checks.check_function(total, "total", "a sum over all rows")
    if energy is not None:
        checks.check_function(energy, "energy", "of the state")
    checks.check_kind(what, "what", str, "a name")
    checks.check_tensor(x0, "x0", "to begin with")
    if ptr is not None:
        ptr = as_ptr(ptr)
        check_ptr(x0.shape[:1].numel(), ptr)
    # Half precision cannot hold a fixed point to six digits, nor can a step under autocast.
    start = widened(x0.detach())
    options: dict[str, Any] = {
        "tol": precision(start.dtype).residual if tol is None else tol,
        "max_iter": max_iter,
        "ptr": ptr,
        "total": total,
    }

    def exact(z: Tensor) -> Tensor:
        with without_autocast(z):
            image = step(z)
        checks.check_tensor(image, "step(z)", "of the shape of z")
        if image.shape != z.shape or image.device != z.device:
            raise ValueError(
                f"step(z) must be like z, {checks.describe(z)}; got {checks.describe(image)}."
            )
        return image.to(z.dtype)

    def limit(step: Operator, begin: Tensor, what: str, memory: int = memory) -> Tensor:
        # Without autocast for the products of the acceleration, and in backward().
        with without_autocast(begin), on_values():
            return iterate(step, begin, memory=memory, what=what, **options)

    def residual(z: Tensor) -> Tensor:
        return exact(z) - z

    def inverse(tangent: Tensor) -> Tensor:
        """Return (I − J)⁻¹ tangent."""
        push = product(exact, solution)
        return limit(lambda u: tangent + push(u), tangent, f"the tangent of {what}")

    def adjoint(grad: Tensor) -> Tensor:
        """Return (I − Jᵀ)⁻¹ grad."""
        pull = transposed_product(exact, solution)
        return limit(lambda u: grad + pull(u), grad, f"the gradient of {what}")

    with values_needed(what):
        with on_values():
            checks.check_finite(x0, "x0")
        solution = limit(exact, start, what)
        # Only the accelerated iteration may end above the energy of x₀.
        if energy is not None and memory:
            with on_values():
                higher = _rises(energy, start, solution, ptr)
            if higher is not None:
                # The plain iteration, in which the other graphs stop at once.
                begin = torch.where(higher, start, solution)
                solution = limit(exact, begin, what, memory=0)
        if formula_runs(start.numel() ** 2):
            # Each step doubles the order up to which derivatives are right.
            closer = newton_step(residual, solution)
            result = with_derivatives_of(solution, newton_step(residual, closer))
        else:
            result = differentiated(solution, residual, inverse, adjoint)
        return result.to(x0.dtype)


@torch.no_grad()
def _rises(
    energy: Callable[[Tensor], Tensor],
    start: Tensor,
    solution: Tensor,
    ptr: Tensor | None,
) -> Tensor | None:
    """Return which rows belong to graphs whose energy is above the energy of the start, ``None`` if there are none."""
    columns = Columns(ptr, start.shape[:1].numel(), start.device)
    values = []
    for state in (start, solution):
        value = energy(state)
        number = torch.as_tensor(value) if isinstance(value, float) else value
        if not isinstance(number, Tensor) or number.numel() not in (1, columns.graphs):
            raise TypeError(
                f"energy(z) must be one number, or {columns.graphs}, one for every graph; "
                f"got {checks.describe(value)}."
            )
        values.append(number.flatten())
    higher = ~(values[1] <= values[0])
    if not bool(higher.any()):
        return None
    rows = columns.rows(higher.expand(columns.graphs))
    return rows.view(-1, *[1] * (start.dim() - 1))


@torch.no_grad()
def iterate(
    step: Operator,
    x: Float[Tensor, "*shape"],
    *,
    tol: float,
    max_iter: int,
    memory: int,
    ptr: Tensor | None = None,
    total: Operator = _all_rows,
    what: str = "the fixed point",
) -> Float[Tensor, "*shape"]:
    """Iterate x ← T(x), accelerated, until ‖T(x) − x‖ ≤ tol ‖T(x)‖ in every graph of ``ptr``, and return T(x).

    With r = T(x) − x and the last ``memory`` differences Δr of residuals and ΔT of images, the next x is T(x) − ΔT γ
    for the γ that minimises ‖r − Δr γ‖ (Anderson 1965). If this does not reduce the residual, T(x) is taken instead and
    the differences are discarded. The iteration therefore converges wherever T alone does, at most at twice the cost.
    ``memory=0`` is T alone. Every graph has its own γ, decides for itself, and keeps its state once it has arrived.
    """
    shape = x.shape
    # One row for a single number, whose shape is empty.
    rows = shape[:1].numel()
    x = x.detach().reshape(rows, shape[1:].numel())
    columns = Columns(ptr, rows, x.device)
    differences = _Differences(x, memory, columns, total)
    # Flags [B, 1], not branches: graphs of a batch are at different points of the
    # iteration, and nothing waits for values.
    mixed = done = followed = x.new_zeros(columns.graphs, 1, dtype=torch.bool)
    best = x.new_full((columns.graphs, 1), math.inf, dtype=torch.float64)
    result = last_image = last_residual = x
    for closer in solving(what, max_iter):
        image = step(x.view(shape)).detach().reshape(x.shape)
        residual = image - x
        # In double, where no square overflows.
        norms = [
            torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
            for part in (residual, image)
        ]
        squares = total(columns.sum(torch.stack(norms, 1).square()))
        size, scale = squares.sqrt().split(1, 1)
        aim = tol * scale
        # With an aim that overflowed, every graph would arrive.
        arrives = (size <= aim) & (aim < math.inf) & ~done
        result = columns.where(arrives, image, result)
        done = done | arrives
        # Only a mixed state can be rejected: T alone may move further before it
        # contracts.
        rejected = mixed & ~(size < best) & ~done
        accepted = ~(rejected | done)
        lost = accepted & ~size.isfinite()
        closer(size, aim)
        # One synchronisation with a GPU, unless the iteration ends.
        if bool(done.all() | lost.any()):
            break
        following = image
        if memory:
            differences.forget(rejected)
            following = differences.mix(
                image,
                residual,
                columns.where(accepted, image - last_image, 0.0),
                columns.where(accepted, residual - last_residual, 0.0),
                # Not after a rejected state: two steps of T alone lead away from the
                # point where mixing failed.
                accepted & followed,
            )
            mixed = accepted & differences.valid.any(1, keepdim=True)
        last_image = columns.where(accepted, image, last_image)
        last_residual = columns.where(accepted, residual, last_residual)
        best = torch.where(accepted, size, best)
        followed = accepted
        following = columns.where(rejected, last_image, following)
        x = columns.where(done, result, following)
    if bool(done.all()):
        return result.view(shape)
    moved = size.masked_fill(done, 0.0).max().item()
    raise errors.ConvergenceError(
        f"{what} was not reached in max_iter={max_iter} steps: the last one moved the state by {moved:.3g}, "
        f"more than tol={tol:.3g} of its norm. Raise max_iter or tol, weigh the source more (a larger beta), or use "
        f"float64."
    )


class _Differences:
    """The last differences of images and residuals of every graph, whose combinations are mixed into its state."""

    def __init__(
        self, x: Tensor, memory: int, columns: Columns, total: Operator
    ) -> None:
        self.columns = columns
        self.total = total
        # Ring buffers: no iteration copies all of them.
        self.images = x.new_zeros(memory, *x.shape)
        self.residuals = x.new_zeros(memory, *x.shape)
        #: ⟨Δr, Δr⟩ of every graph. An iteration replaces one row and one column.
        self.gram = x.new_zeros(columns.graphs, memory, memory)
        #: Which differences a graph may use.
        self.valid = x.new_zeros(columns.graphs, memory, dtype=torch.bool)
        self.count = 0

    def forget(self, rejected: Tensor) -> None:
        self.valid = self.valid & ~rejected

    def mix(
        self,
        image: Tensor,
        residual: Tensor,
        image_difference: Tensor,
        residual_difference: Tensor,
        recorded: Tensor,
    ) -> Tensor:
        """Keep the differences of some graphs, and return T(x) − ΔT γ of all graphs; without differences, T(x)."""
        slot = self.count % len(self.images)
        self.count += 1
        self.images[slot] = image_difference
        self.residuals[slot] = residual_difference
        self.valid[:, slot] = recorded.squeeze(1)
        pair = torch.stack([residual_difference, residual])
        by_row = torch.einsum("mnc,knc->nmk", self.residuals, pair)
        # One sum over all rows, since they may be spread over processes.
        products = self.total(self.columns.sum(by_row))
        with_difference, with_residual = products.unbind(2)
        self.gram[:, slot] = with_difference
        self.gram[:, :, slot] = with_difference
        # Differences may be linearly dependent: scale them to norm one, and add the size
        # of rounding to the diagonal. Differences that a graph may not use get scale zero.
        limits = torch.finfo(image.dtype)
        norms = self.gram.diagonal(dim1=1, dim2=2).clamp(min=limits.tiny)
        scale = torch.where(self.valid, norms.rsqrt(), 0.0)
        gram = torch.nan_to_num(scale.unsqueeze(2) * self.gram * scale.unsqueeze(1))
        extra = torch.where(self.valid, 10 * limits.eps, 1.0).to(gram)
        right = torch.nan_to_num(scale * with_residual)
        gamma = scale * torch.linalg.solve(gram + torch.diag_embed(extra), right)
        return image - torch.einsum("nm,mnc->nc", self.columns.rows(gamma), self.images)
