"""Linear systems with a Laplacian: conjugate gradients with implicit derivatives, and the inverse of low-rank forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import LowRankCoupling
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.spectrum import precision
from diffusion_mp.errors import ConvergenceError
from diffusion_mp.graph.ops import members
from diffusion_mp.kernels.segments import Rows, by_size, gather, scatter
from diffusion_mp.runtime.progress import solving
from diffusion_mp.updates.derivatives import Operator, differentiated

#: Relative residual of a closed form above which rounding errors dominate the solution.
LEFT_OVER = 1e-6
#: Relative error of a solution up to which rounding is accepted.
SIX_DIGITS = 1e-6


class Columns:
    """Sums over the rows of every graph of a batch, where every (graph, head, channel) is a separate column.

    No graph therefore affects when another graph stops, and the solution of a graph is the same as without the others.
    """

    def __init__(self, ptr: Tensor | None, num_rows: int, device: torch.device) -> None:
        self.graphs = 1
        # One graph, the usual case, needs plain sums and no index.
        self.graph: Tensor | None = None
        if ptr is not None and len(ptr) != 2:
            self.graphs = len(ptr) - 1
            self.graph, _ = members(ptr, num_rows, device)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums [B, …] over the rows [N, …] of every graph."""
        if self.graph is None:
            return x.sum(0, keepdim=True)
        return x.new_zeros(self.graphs, *x.shape[1:]).index_add(0, self.graph, x)

    def inner(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the inner products [B, …] of the columns of every graph."""
        if self.graph is None and u.numel() == u.size(0):
            # A single long column: without a tensor of its length for the products.
            return torch.dot(u.flatten(), v.flatten()).view(1, *u.shape[1:])
        return self.sum(u * v)

    def rows(self, by_graph: Tensor) -> Tensor:
        """Return the number of its graph for every row; one row if there is one graph."""
        if self.graph is None:
            return by_graph
        return by_graph.index_select(0, self.graph)

    def where(self, flag: Tensor, x: Tensor, y: Tensor | float) -> Tensor:
        """Return the rows of x for graphs with this flag, and the rows of y for the others."""
        return torch.where(self.rows(flag), x, y)


@torch.no_grad()
def conjugate_gradients(
    operator: Operator,
    b: HeadState,
    *,
    least: float,
    dtype: torch.dtype | None = None,
    max_iter: int = 1000,
    what: str = "the linear system",
    metric: Float[Tensor, "N heads"] | None = None,
    preconditioner: Operator | None = None,
    ptr: Tensor | None = None,
) -> HeadState:
    """Solve A x = b for a symmetric positive definite A acting on [N, H, D], separately for every column.

    A column is a head and channel of a graph (Hestenes & Stiefel 1952). A zero column has the zero solution. The result
    has no derivatives; see `solve`.

    Args:
        operator: u ↦ A u, within every graph of ``ptr``.
        b: the right-hand side [N, H, D].
        least: a lower bound on the eigenvalues of A. It bounds the relative error of the solution by ‖b − A x‖ /
            (``least`` ‖x‖), in the norm of the inner product.
        dtype: dtype of the state, which sets the relative error of the solution: 1e-6, or 1e-12 in double. In double
            the error may be larger where rounding does not allow less: ε times the condition number, up to 1e-6.
            ``None`` is the dtype of b.
        max_iter: maximum number of iterations.
        what: name of the system in messages.
        metric: a d̄ > 0 such that A is self-adjoint and positive definite in ⟨u, v⟩ = Σ_i d̄_i u_i v_i. ``None`` is
            uᵀv.
        preconditioner: approximates u ↦ A⁻¹u, self-adjoint and positive definite in the same inner product. ``None`` is
            the identity.
        ptr: row boundaries [B+1] of the graphs. ``None`` is one graph.

    Raises:
        ConvergenceError: ``max_iter`` or the precision was not enough, A is not positive definite, or something is not
            finite.
    """
    if b.numel() == 0:
        return torch.zeros_like(b)
    tol = precision(dtype or b.dtype).residual
    columns = Columns(ptr, b.size(0), b.device)
    # Squares of tiny columns would underflow.
    scale = columns.sum(b.detach().abs())
    scale = columns.rows(torch.where(scale > 0, scale, 1.0))
    right = b.detach() / scale
    weight = None if metric is None else metric.detach().to(b).unsqueeze(2)

    def inner(u: Tensor, v: Tensor) -> Tensor:
        return columns.inner(u if weight is None else weight * u, v)

    def improve(r: Tensor) -> Tensor:
        return r if preconditioner is None else preconditioner(r).detach()

    def goal(x: Tensor, error: float) -> Tensor:
        """Return the largest squared residual of a solution with this relative error."""
        return (error * least) ** 2 * inner(x, x)

    # Everything is detached: an operator may hold the tangents of forward mode, which
    # `no_grad` lets through.
    x = torch.zeros_like(right)
    residual = right.clone()
    improved = improve(residual)
    direction = improved.clone()
    square = inner(residual, residual)
    slope = inner(residual, improved)
    converged = False
    for closer in solving(what, max_iter):
        # Half of the tolerance is reserved for the difference between this updated
        # residual and the true residual.
        aim = goal(x, tol / 2)
        closer(square, aim)
        active = ~(square <= aim)  # NaN counts as active and is caught below
        converged = not bool(active.any())
        if converged:
            break
        image = operator(direction).detach()
        curvature = inner(direction, image)
        if not bool((curvature[active] > 0).all()):
            worst = curvature[active].min().item()
            raise ConvergenceError(
                f"{what} is not positive definite, or holds NaN or infinity: a search direction has curvature "
                f"{worst:.3g}, expected > 0. Negative couplings, or row sums above 1 in the "
                f"residual form, do this; raise the leak, lower tau, or use ExplicitEuler."
            )
        step = columns.rows(torch.where(active, slope / curvature, 0.0))
        x.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1.0)
        square = inner(residual, residual)
        improved = improve(residual)
        before = slope
        # Without a preconditioner the two are the same sum, which takes as long as an
        # update.
        slope = square if improved is residual else inner(residual, improved)
        keep = columns.rows(torch.where(active, slope / before, 0.0))
        direction.mul_(keep).add_(improved)
    # The residual above is updated from step to step, and rounding makes it drift from
    # the true residual.
    residual = right - operator(x).detach()
    square = inner(residual, residual)
    if bool((square <= goal(x, SIX_DIGITS)).all()):
        return x * scale
    size = goal(x, 1.0)
    reached = torch.where(size > 0, square / size, square).max().sqrt().item()
    budget = f"max_iter={max_iter} iterations"
    if converged:
        budget = f"the precision of {b.dtype}"
    raise ConvergenceError(
        f"Conjugate gradients on {what} reached a relative error of {reached:.3g} in {budget}; tol={tol:.3g} was "
        f"asked. Raise max_iter, raise the leak (a better conditioned system), or use float64."
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of iterations depends on values
def solve(
    operator: Operator,
    b: HeadState,
    *,
    metric: Float[Tensor, "N heads"] | None = None,
    preconditioner: Operator | None = None,
    **options: Any,
) -> HeadState:
    """Solve A x = b by `conjugate_gradients` with these options and errors, differentiated implicitly.

    With x̂ the converged solution, x = x̂ + A⁻¹(b − A x̂) has the value x̂. With A⁻¹ and x̂ held constant, it has the
    derivatives of the implicit function theorem: the tangent A⁻¹(b′ − A′x̂), and the gradients ∂L/∂b = g and ∂L/∂θ =
    −gᵀ(∂A/∂θ)x̂ with g = A⁻ᵀ ∂L/∂x, for every tensor θ inside ``operator``. Memory does not grow with the iterations.
    The result is once differentiable.
    """

    def inverse(rhs: Tensor) -> Tensor:
        return conjugate_gradients(
            operator,
            rhs,
            metric=metric,
            preconditioner=preconditioner,
            **options,
        )

    def adjoint(rhs: Tensor) -> Tensor:
        if metric is None:
            return inverse(rhs)
        # Aᵀ = D̄ A D̄⁻¹, so that A⁻ᵀ r = D̄ A⁻¹ (D̄⁻¹ r).
        weight = metric.unsqueeze(2)
        return weight * inverse(rhs / weight)

    return differentiated(inverse(b), lambda x: b - operator(x), inverse, adjoint)


class LowRankInverse:
    """(diag(d) − S)⁻¹ for S = diag(e) + U Kᵀ, factorised once (Woodbury 1950; Theorem T3 of docs/certified.md).

    With A = diag(d − e):

        A⁻¹ + A⁻¹U(I − KᵀA⁻¹U)⁻¹KᵀA⁻¹

    It costs O(N F² + F³) per graph and may be differentiated any number of times. For a graph with no more nodes than
    features, its own smaller matrix is factorised. d is [N, H, 1], with one head or all heads of the form, or a number.
    """

    def __init__(self, form: LowRankForm, diagonal: Tensor | float) -> None:
        self.form = form
        nodes, heads, _ = form.left.shape
        self.diagonal: Tensor = diagonal * form.left.new_ones(nodes, heads, 1)
        if form.diagonal is not None:
            self.diagonal = self.diagonal - form.diagonal.unsqueeze(2)
        parts = (self.diagonal, form.left, form.right)
        self.blocks = [
            _Block(*(gather(part, rows) for part in parts)) for rows in _graphs(form)
        ]

    def __call__(self, b: HeadState) -> HeadState:
        return by_graph(self.form, [block.solve for block in self.blocks], b)

    def solve(self, b: HeadState) -> HeadState:
        """Return (diag(d) − S)⁻¹ b, or raise ``ConvergenceError`` if the solution misses b: singular or not finite."""
        x = self(b)
        with torch.no_grad():
            form = self.form
            moved = LowRankCoupling(form.left, form.right, form.ptr).received(x)
            left_over = (self.diagonal * x - moved - b).norm(dim=0)
            size = b.norm(dim=0)
        if not bool((left_over <= LEFT_OVER * size).all()):  # NaN is not
            relative = torch.where(size > 0, left_over / size, left_over).max().item()
            raise ConvergenceError(
                f"a low-rank system is singular, nearly so, or holds NaN or infinity: the solution misses the "
                f"right-hand side by {relative:.3g} of it, expected up to {LEFT_OVER:g}. Raise the leak, or lower tau."
            )
        return x

    def inverse_diagonal(self) -> Float[Tensor, "N H"]:
        diagonals = [block.inverse_diagonal for block in self.blocks]
        return by_graph(self.form, diagonals, self.diagonal).squeeze(2)


class _Block:
    """Graphs of one size: R (I + ÛCK̂ᵀ) sR, R = |A|^-½, s the sign of A, ÛK̂ᵀ = sRUKᵀR, C = (I − K̂ᵀÛ)⁻¹, [b, H, n, …]."""

    def __init__(self, diagonal: Tensor, left: Tensor, right: Tensor) -> None:
        # Divided symmetrically: degrees may be decades apart, and the core would be
        # equally badly scaled.
        self.root = diagonal.abs().rsqrt()
        self.signed_root = self.root * diagonal.detach().sign()
        self.left, self.right = reduced(self.signed_root * left, self.root * right)
        core = self.right.mT @ self.left
        # It raises no error for a singular matrix, whose solutions miss b.
        self.core = torch.linalg.inv_ex(identity_like(core) - core).inverse

    def solve(self, b: Tensor) -> Tensor:
        b = self.signed_root * b
        return self.root * (b + self.left @ (self.core @ (self.right.mT @ b)))

    def inverse_diagonal(self, diagonal: Tensor) -> Tensor:
        moved = (self.left @ self.core * self.right).sum(-1, keepdim=True)
        return self.root * self.signed_root * (1.0 + moved)


def reduced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return U T and K T⁻ᵀ, with the same product, for a T that makes KᵀK the identity, or nearly so if singular.

    KᵀU is then scaled like the coupling itself. T needs no gradient, since the product does not depend on it. If there
    are no more nodes than features, U Kᵀ and the identity are returned, with fewer columns.
    """
    nodes, features = right.shape[-2:]
    if nodes <= features:
        product = left @ right.mT
        return product, identity_like(product)
    if not features:
        return left, right
    with torch.no_grad():
        # Columns may be decades apart, and the eigenvalues of their Gram matrix would
        # have no digit of the small columns.
        size = right.abs().amax(-2, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        scaled = right / size
        values, vectors = torch.linalg.eigh(scaled.mT @ scaled)
        least = features * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True)
        root = torch.maximum(values, least).sqrt().unsqueeze(-2)
        basis = size.mT * vectors * root
        inverse = vectors / root
    return left @ basis, (right / size) @ inverse


def identity_like(like: Tensor) -> Tensor:
    eye = torch.eye(like.size(-1), dtype=like.dtype, device=like.device)
    return eye.expand_as(like)


def _graphs(form: LowRankForm) -> list[Rows]:
    """Return the rows of all graphs of one size, for every size."""
    return list(by_size(form.ptr, form.left.size(0), form.left.device))


def by_graph(
    form: LowRankForm, functions: Iterable[Callable[..., Tensor]], *tensors: Tensor
) -> Tensor:
    """Apply functions of stacked graphs of one size, [b, H, n, C] → [b, H, n, D], one for every size."""
    runs = _graphs(form)
    parts = [
        function(*(gather(tensor, rows) for tensor in tensors))
        for rows, function in zip(runs, functions, strict=False)
    ]
    if not parts:
        return torch.zeros_like(tensors[-1])
    return scatter(parts, runs)
