"""The fixed point of a step, found by accelerated iteration and differentiated implicitly."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import checks, errors
from diffusion_mp.energies.spectrum import precision
from diffusion_mp.graph.arguments import as_ptr, check_ptr
from diffusion_mp.runtime.precision import without_autocast
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
    """Return the sum over all rows where this process has all of them."""
    return x


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of steps depends on values
def fixed_point(
    step: Operator,
    x0: Float[Tensor, "*shape"],
    *,
    energy: Callable[[Tensor], Tensor] | None = None,
    tol: float | None = None,
    max_iter: int = 1000,
    memory: int = 10,
    ptr: Tensor | None = None,
    total: Operator = _all_rows,
    what: str = "the fixed point",
) -> Float[Tensor, "*shape"]:
    r"""Return z* = T(z*), the limit of z ← T(z), with the derivatives of the implicit function theorem.

        ∂L/∂θ = gᵀ ∂T(z*)/∂θ,   g = ∂L/∂z* + Jᵀg,   J = ∂T/∂z at z*

    for every tensor θ inside ``step``. Both passes use the accelerated `iterate`: g is itself a fixed point, of a step
    with one vector–Jacobian product. Backward needs the autograd graph of a single step (Bai, Kolter & Koltun, 2019,
    Theorem 1) and is once differentiable, as are dual numbers. The transforms of ``torch.func`` differentiate two steps
    of Newton's method at z*, with the matrix I − J of up to 4 096 numbers: derivatives up to the third are exact.
    With several fixed points the acceleration may find another one than the plain iteration.

    Args:
        step: T, differentiable, which maps tensors of the shape of x₀ to such tensors.
        x0: initial state. It has no gradient, since the limit does not depend on it.
        energy: a function of the state that T never raises: one number, or one for every graph of ``ptr``, [B]. Where
            the accelerated iteration ends above the energy of x₀, the plain iteration replaces it.
        tol: ‖T(z) − z‖ ≤ tol ‖T(z)‖ at the end; by default 1e-12 in double, 1e-6 in single precision. Where T contracts
            by ρ the error is up to 1/(1 − ρ) times as large.
        max_iter, memory: maximum number of steps of each pass, and the memory of `iterate`.
        ptr: row boundaries [B+1] of graphs between which T has no connection, on the CPU. Each of them is accelerated,
            stopped and compared in energy on its own, so that its limit does not depend on the others.
        total: turns a sum over the rows of this process into one over all rows (``Graph.total``).
        what: name of the fixed point in messages.

    Raises:
        ConvergenceError: ``max_iter`` steps were not enough; also from the backward pass.
        NotImplementedError: ``torch.export`` or ``vmap``, which do not know how many steps are needed.

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
    if tol is not None:
        checks.check_positive(tol, "tol")
    checks.check_counts(max_iter=max_iter)
    checks.check_counts(0, memory=memory)
    if ptr is not None:
        ptr = as_ptr(ptr)
        check_ptr(x0.size(0) if x0.dim() else 1, ptr)
    with values_needed(what):
        with on_values():
            checks.check_finite(x0, "x0")
        # Half precision cannot hold a fixed point to six digits, nor can a step under autocast.
        start = x0.detach().to(torch.promote_types(x0.dtype, torch.float32))
        limit = partial(
            iterate,
            tol=precision(start.dtype).residual if tol is None else tol,
            max_iter=max_iter,
            memory=memory,
            ptr=ptr,
            total=total,
        )
        # Only the accelerated iteration may end above the energy of x₀.
        compared = energy if memory else None
        return _limit(step, start, limit, compared, ptr, what).to(x0.dtype)


def _limit(
    step: Operator,
    start: Tensor,
    accelerated: Callable[..., Tensor],
    energy: Callable[[Tensor], Tensor] | None,
    ptr: Tensor | None,
    what: str,
) -> Tensor:
    def exact(z: Tensor) -> Tensor:
        with without_autocast(z):
            image = step(z)
        checks.check_tensor(image, "step(z)", "of the shape of z")
        if image.shape != z.shape or image.device != z.device:
            raise ValueError(
                f"step(z) must be like z, {checks.describe(z)}; got {checks.describe(image)}."
            )
        return image.to(z.dtype)

    def limit(step: Operator, begin: Tensor, what: str, **options: int) -> Tensor:
        # Without autocast for the products of the acceleration, and in backward().
        with without_autocast(begin), on_values():
            return accelerated(step, begin, what=what, **options)

    solution = limit(exact, start, what)
    if energy is not None:
        with on_values():
            higher = _rises(energy, start, solution, ptr)
        if (
            higher is not None
        ):  # the plain iteration, in which the other graphs stop at once
            solution = limit(
                exact, torch.where(higher, start, solution), what, memory=0
            )

    def residual(z: Tensor) -> Tensor:
        return exact(z) - z

    if formula_runs(start.numel() ** 2):
        # Each step doubles the order up to which derivatives are right.
        closer = newton_step(residual, solution)
        return with_derivatives_of(solution, newton_step(residual, closer))

    def inverse(tangent: Tensor) -> Tensor:
        """Return (I − J)⁻¹ tangent."""
        push = product(exact, solution)
        return limit(lambda u: tangent + push(u), tangent, f"the tangent of {what}")

    def inverse_transposed(grad: Tensor) -> Tensor:
        """Return (I − Jᵀ)⁻¹ grad."""
        pull = transposed_product(exact, solution)
        return limit(lambda g: grad + pull(g), grad, f"the gradient of {what}")

    return differentiated(solution, residual, inverse, inverse_transposed)


@torch.no_grad()
def _rises(
    energy: Callable[[Tensor], Tensor],
    start: Tensor,
    solution: Tensor,
    ptr: Tensor | None,
) -> Tensor | None:
    """Return which rows are of graphs whose energy is above that of the start, ``None`` if there are none."""
    columns = Columns(ptr, start.size(0) if start.dim() else 1, start.device)
    values = []
    for state in (start, solution):
        value = energy(state)
        if isinstance(value, float):
            value = torch.tensor(value)
        if not isinstance(value, Tensor) or value.numel() not in (1, columns.graphs):
            raise TypeError(
                f"energy(z) must be one number, or {columns.graphs}, one for every graph; "
                f"got {checks.describe(value)}."
            )
        values.append(value.flatten())
    higher = ~(values[1] <= values[0])
    if not bool(higher.any()):
        return None
    return columns.rows(higher.expand(columns.graphs)).view(
        -1, *[1] * (start.dim() - 1)
    )


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
    r"""Iterate x ← T(x), accelerated, until ‖T(x) − x‖ ≤ tol ‖T(x)‖ in every graph of ``ptr``, and return T(x).

    With r = T(x) − x and the last ``memory`` differences Δr of residuals and ΔT of images, the next x is T(x) − ΔT γ
    for the γ that minimises ‖r − Δr γ‖ (Anderson, 1965). Where this does not reduce the residual, T(x) is taken
    instead and the differences are discarded; so it converges where T alone does, at most at twice the cost.
    ``memory=0`` is T alone. Every graph has its own γ, decides for itself, and keeps its state once it has arrived.
    """
    shape = x.shape
    rows = shape[0] if shape else 1
    x = x.detach().reshape(rows, math.prod(shape[1:]))
    history = _History(x, memory, Columns(ptr, x.size(0), x.device), total)
    for closer in solving(what, max_iter):
        image = step(x.view(shape)).detach().reshape(x.shape)
        following = history.next(x, image, tol)
        if history.arrived:
            return history.result.view(shape)
        closer(history.size, history.aim)
        if history.lost:
            break
        x = following
    raise errors.ConvergenceError(
        f"{what} was not reached in max_iter={max_iter} steps: the last one moved the state by {history.moved():.3g}, "
        f"more than tol={tol:.3g} of its norm. Raise max_iter or tol, weigh the source more (a larger beta), or use "
        f"float64."
    )


class _History:
    """The last differences of images and residuals of every graph, and whether it has arrived.

    Rows are the first axis of states [N, C], and graphs that of the numbers [B, 1] and flags that are kept for them.
    """

    def __init__(
        self, x: Tensor, memory: int, columns: Columns, total: Operator
    ) -> None:
        self.columns = columns
        self.total = total
        self.memory = memory
        graphs = columns.graphs
        # Ring buffers of differences: no iteration copies all of them.
        self.images = x.new_zeros(memory, *x.shape)
        self.residuals = x.new_zeros(memory, *x.shape)
        #: ⟨Δr, Δr⟩ of every graph, of which an iteration replaces a row and a column.
        self.gram = x.new_zeros(graphs, memory, memory)
        #: Which differences a graph may use.
        self.valid = x.new_zeros(graphs, memory, dtype=torch.bool)
        self.last_image = x
        self.last_residual = x
        # Flags, not branches: graphs of a batch are at different points of the iteration, and nothing waits for values.
        no = x.new_zeros(graphs, 1, dtype=torch.bool)
        self.has_last = no
        self.mixed = no
        self.done = no
        self.best = x.new_full((graphs, 1), math.inf, dtype=torch.float64)
        self.size = self.best
        self.aim = self.best
        self.result = x
        self.count = 0
        self.arrived = False
        self.lost = False

    def next(self, x: Tensor, image: Tensor, tol: float) -> Tensor:
        """Return the next state of every graph, from a state and its image."""
        residual = image - x
        self._measure(residual, image, tol)
        # An aim that overflowed would let everything arrive.
        arrives = (self.size <= self.aim) & (self.aim < math.inf) & ~self.done
        self.result = self._where(arrives, image, self.result)
        self.done = self.done | arrives
        # Only a mixed state can be rejected: T alone may well move further before it contracts.
        rejected = self.mixed & ~(self.size < self.best) & ~self.done
        accepted = ~(rejected | self.done)
        lost = accepted & ~self.size.isfinite()
        # One number, for which a GPU is waited for once; and `tolist` looks into memory, which transforms have not.
        verdict = int(self.done.all().long() + 2 * lost.any())
        self.arrived = verdict % 2 == 1
        self.lost = verdict >= 2
        if self.arrived or self.lost:
            return x
        following = image
        self.valid = self.valid & ~rejected
        if self.memory:
            products = self._record(image, residual, accepted & self.has_last)
            following = self._mix(image, products)
        self.mixed = accepted & self.valid.any(1, keepdim=True)
        self.has_last = accepted
        self.last_image = self._where(accepted, image, self.last_image)
        self.last_residual = self._where(accepted, residual, self.last_residual)
        self.best = torch.where(accepted, self.size, self.best)
        following = self._where(rejected, self.last_image, following)
        return self._where(self.done, self.result, following)

    def moved(self) -> float:
        """Return how far the last step moved the graph that is farthest from its limit."""
        return self.size.masked_fill(self.done, 0.0).max().item()

    def _where(self, of_graph: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the rows of x for graphs with this flag, and those of y for others."""
        return torch.where(self.columns.rows(of_graph), x, y)

    def _measure(self, residual: Tensor, image: Tensor, tol: float) -> None:
        # In double, where no square overflows.
        norms = [
            torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
            for part in (residual, image)
        ]
        squares = self.total(self.columns.sum(torch.stack(norms, 1).square()))
        self.size, scale = squares.sqrt().split(1, 1)
        self.aim = tol * scale

    def _record(self, image: Tensor, residual: Tensor, recorded: Tensor) -> Tensor:
        """Keep the differences to the last image and residual of some graphs, and return ⟨Δr, r⟩, [B, m]."""
        slot = self.count % self.memory
        difference = self._where(
            recorded, residual - self.last_residual, torch.zeros_like(residual)
        )
        self.residuals[slot] = difference
        self.images[slot] = self._where(
            recorded, image - self.last_image, torch.zeros_like(image)
        )
        self.valid[:, slot] = recorded.squeeze(1)
        self.count += 1
        # One sum over all rows, since they may be spread over processes.
        if self.columns.graphs == 1:
            pair = torch.stack([difference.flatten(), residual.flatten()], 1)
            products = (self.residuals.flatten(1) @ pair).unsqueeze(0)
        else:
            by_row = torch.einsum(
                "mnc,knc->nmk", self.residuals, torch.stack([difference, residual])
            )
            products = self.columns.sum(by_row)
        with_difference, with_residual = self.total(products).unbind(2)
        self.gram[:, slot] = with_difference
        self.gram[:, :, slot] = with_difference
        return with_residual

    def _mix(self, image: Tensor, products: Tensor) -> Tensor:
        """Return T(x) − ΔT γ; where a graph has no differences, T(x)."""
        both = self.valid.unsqueeze(1) & self.valid.unsqueeze(2)
        gram = torch.where(both, self.gram, 0.0)
        # Differences may be linearly dependent: scale them to norm one, and add to the diagonal what rounding is.
        limits = torch.finfo(gram.dtype)
        scale = gram.diagonal(dim1=1, dim2=2).clamp(min=limits.tiny).rsqrt()
        scale = torch.where(self.valid, scale, 0.0)
        gram = scale.unsqueeze(2) * gram * scale.unsqueeze(1)
        extra = torch.where(self.valid, 10 * limits.eps, 1.0).to(gram)
        right = scale * torch.where(self.valid, products, 0.0)
        gamma = scale * torch.linalg.solve(gram + torch.diag_embed(extra), right)
        if self.columns.graphs == 1:
            return image - (gamma @ self.images.flatten(1)).view_as(image)
        return image - torch.einsum("nm,mnc->nc", self.columns.rows(gamma), self.images)
