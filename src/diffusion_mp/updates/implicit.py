"""Updates that solve a linear system with the Laplacian: implicit steps of any length, and the steady state."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.spectrum import laplacian_extremes, precision
from diffusion_mp.errors import SingularSystemError, check_counts, check_positive
from diffusion_mp.updates.base import Form, LaplacianUpdate, State, working_precision
from diffusion_mp.updates.closed_forms import LowRankInverse
from diffusion_mp.updates.linear_solve import solve
from diffusion_mp.updates.preconditioners import precondition


class SolvedUpdate(LaplacianUpdate):
    """Base of the updates that solve (Δ + shift) x = b, for reversible couplings and for linear attention of any kind.

    How it is solved, the first of these that fits:

    - in the eigenvectors of Δ, where the coupling knows them (`NeumannCoupling`);
    - in closed form, where S is low-rank: O(N F² + F³) (Theorem T3 of docs/certified.md), differentiable any number of
      times. A system that is symmetric but not promised to be definite is left to the iteration, which sees it;
    - by conjugate gradients in the metric of the coupling, preconditioned as `precondition` says. Derivatives come from
      the implicit function theorem, so memory does not grow with the iterations, and are once differentiable.

    All of it happens in double precision, whatever the precision of the state: a long step or a small leak makes
    systems whose condition number is the inverse of float32's resolution.

    Args:
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        beta: weight β of the source h.
        leak: κ ≥ 0, the rate at which the state decays.
        tol: relative residual of every (head, channel) column; by default 1e-12, for states in single and half
            precision 1e-6, times the shift where that is below one, so that six digits of the solution are right.
        max_iter: iterations of conjugate gradients at most.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D].

    Raises:
        CouplingMismatchError: the coupling is not reversible (`Coupling.metric`), nor low-rank.
        ConvergenceError: ``max_iter`` is not enough, or the system is not positive definite or singular.
        ValueError: an argument out of range, a missing source, shapes that do not fit.
    """

    needs_reversible = True

    def __init__(
        self,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
        tol: float | None = None,
        max_iter: int = 1000,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        if tol is not None:
            check_positive(tol, "tol")
        check_counts(max_iter=max_iter)
        self.tol, self.max_iter = tol, max_iter

    def solve(self, coupling: Coupling, shift: float, b: Tensor, dtype: torch.dtype) -> Tensor:
        """(Δ + shift)⁻¹ b, as exact as a state of ``dtype`` needs it."""
        # Without the promise S ≥ 0 the system may be indefinite, which conjugate gradients notice and say.
        if coupling.nonnegative and shift > 0.0:
            solution = self.exact(coupling, lambda rate: 1.0 / (rate + shift), b)
            if solution is not None:
                return solution
        self.warn_if_rounded(coupling, shift)
        form = coupling.low_rank_form(b.dtype)  # all of S, a part of it, or None
        diagonal = self.exact_diagonal(coupling, b.dtype) + shift
        dominant = self._is_dominant(coupling, shift)
        if form is not None and coupling.low_rank and (dominant or not coupling.reversible):
            return LowRankInverse(form, diagonal).solve(b)
        wanted = precision(dtype).residual * min(1.0, shift or 1.0)
        metric = None if coupling.symmetric else coupling.metric
        return solve(
            lambda u: diagonal * u - coupling @ u,
            b,
            metric=metric,
            preconditioner=precondition(coupling, diagonal, metric, form, dominant),
            tol=self.tol or max(precision(b.dtype).residual, wanted),
            max_iter=self.max_iter,
            what=f"the system of {self}",
        )

    def _is_dominant(self, coupling: Coupling, shift: float) -> bool:
        """Whether every row of Δ + shift, S ≥ 0, has more on its diagonal than off it: regular, and so is any part."""
        if not (coupling.nonnegative and shift > 0.0):
            return False
        if self.form == "conservative" or coupling.row_stochastic:
            return True
        return bool((coupling.degree() < 1.0 + shift).all())


class _ThetaStep(SolvedUpdate):
    r"""Base of the steps that solve for a state m after a part θ of the step, and go on from there along a line.

        (I + θτ(Δ + κ)) m = v + θτβh,   x′ = v + (m − v)/θ

    Where Δ is positive semidefinite none of them expands a state for θ ≥ ½, at any τ.
    """

    #: θ in (0, 1].
    theta: ClassVar[float]

    def __init__(self, tau: float, form: Form = "conservative", **options: Any) -> None:
        super().__init__(form, **options)
        check_positive(tau, "tau")
        self.tau = float(tau)

    def step(self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None) -> State:
        """Solve for the state after θτ whose slope is taken there, and go on with that slope."""
        values = self.validate(x, coupling, values, source)
        start = working_precision(values, max(x.size(1), coupling.heads))
        # Divided by θτ, the system keeps the scale of Δ however long the step: (Δ + κ + 1/θτ) m = v/θτ + βh.
        rate = 1.0 / (self.theta * self.tau)
        b = rate * start
        if source is not None and self.beta != 0.0:
            b = b + self.beta * source
        middle = self.solve(coupling, self.leak + rate, b, values.dtype)
        return torch.lerp(start, middle, 1.0 / self.theta).to(values.dtype)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"


class ImplicitEuler(_ThetaStep):
    r"""One implicit Euler step of Eq. 10 of TfD (Wu, Wipf & Yan, 2025) with leak, for reversible couplings.

        (I + τ(Δ + κ)) x′ = v + τβh

    The step starts at the values v (the state itself unless given). Where Δ is positive semidefinite (the conservative
    form of any non-negative S, the residual form of a symmetrically normalised one) it never expands, at any τ.

    Args:
        tau: step size τ > 0, as large as wanted.
        form, beta, leak, tol, max_iter: see `SolvedUpdate`, as for shapes and errors.

    Examples:
        >>> S = AdjacencyDiffusivity("row")(x, graph)
        >>> ImplicitEuler(tau=100.0)(x, S).shape  # any τ is stable
        torch.Size([6, 4])
    """

    theta = 1.0


class CrankNicolson(_ThetaStep):
    r"""One trapezoidal step of Eq. 10 of TfD (Wu, Wipf & Yan, 2025) with leak (Crank & Nicolson, 1947).

        (I + (τ/2)(Δ + κ)) x′ = (I − (τ/2)(Δ + κ)) v + τβh

    That is half a step of `ImplicitEuler`, from v to m, and as far again: x′ = 2m − v. The error of a step is of third
    order in τ. Where Δ is positive semidefinite it never expands, at any τ; but beyond τ = 2/λ the mode of eigenvalue λ
    changes sign, and for τλ → ∞ it hardly decays: for long steps from rough states take `ImplicitEuler`, `HeatKernel`.

    Args:
        tau: step size τ > 0, as large as wanted.
        form, beta, leak, tol, max_iter: see `SolvedUpdate`, as for shapes and errors.

    Examples:
        >>> S = AdjacencyDiffusivity("row")(x, graph)
        >>> CrankNicolson(tau=0.5)(x, S).shape
        torch.Size([6, 4])
    """

    theta = 0.5


class Equilibrium(SolvedUpdate):
    r"""The steady state of the diffusion with source and leak (Eq. 10 of TfD, Wu, Wipf & Yan, 2025, made well posed).

        (Δ + κ) x* = βh

    This is where `ExplicitEuler` of the same form, β and leak ends after infinitely many steps; APPNP's limit is
    ``form="residual"``, ``beta = leak = alpha / (1 - alpha)``. The state it is called with only matters as the default
    source.

    Without a leak, D̄ − S has the constants in its kernel: the printed (D̄ − S)⁻¹H does not exist unless H happens
    to be orthogonal to them, so the conservative form needs ``leak > 0``. The residual form I − S may be regular by
    itself; its smallest eigenvalue is then computed and must be above 1e-6 (1e-2 in single precision).

    Args:
        form, beta, leak, tol, max_iter: see `SolvedUpdate`.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D]. Without ``source`` the values (or the state) are the source.

    Raises:
        SingularSystemError: no leak, and the Laplacian has (nearly) a kernel.
        CouplingMismatchError, ConvergenceError, ValueError: see `SolvedUpdate`.

    Examples:
        >>> S = AdjacencyDiffusivity("row")(x, graph)
        >>> Equilibrium("residual", beta=0.1, leak=0.1)(x, S, source=x).shape  # the limit of infinitely many steps
        torch.Size([6, 4])
    """

    def __init__(self, form: Form = "conservative", *, beta: float = 1.0, **options: Any) -> None:
        super().__init__(form, beta=beta, **options)

    def check(self, coupling: Coupling) -> None:
        """Refuse asymmetric couplings, and a system without a unique solution."""
        super().check(coupling)
        if self.leak > 0.0:
            return
        if self.form == "conservative":
            raise SingularSystemError(
                "Equilibrium(form='conservative', leak=0) has no unique steady state: D̄ − S maps constants to zero. "
                "Pass leak > 0 (APPNP with teleport alpha: form='residual', beta = leak = alpha / (1 - alpha))."
            )
        if not coupling.reversible:
            raise SingularSystemError(
                f"Equilibrium(form='residual', leak=0) needs I − S regular, which only reversible couplings are asked; "
                f"got a {type(coupling).__name__} that is not reversible. Pass leak > 0."
            )
        smallest, _ = laplacian_extremes(coupling, self.form)
        regular = precision(coupling.dtype).regular
        if coupling.num_nodes and not smallest > regular:
            raise SingularSystemError(
                f"Equilibrium(form='residual', leak=0) needs I − S positive definite; its smallest eigenvalue is "
                f"{smallest:.3g}, expected above {regular:g}. Pass leak > 0, or scale the coupling below spectral "
                f"radius 1, for instance 0.9 * AdjacencyDiffusivity('sym')."
            )

    def step(self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None) -> State:
        """Solve for the state at which diffusion, leak and source are in balance."""
        if source is None:
            source = x if values is None else values
        self.validate(x, coupling, values, source)
        b = self.beta * working_precision(source, max(x.size(1), coupling.heads))
        return self.solve(coupling, self.leak, b, source.dtype).to(source.dtype)
