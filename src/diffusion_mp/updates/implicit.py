"""Updates that solve a linear system with the Laplacian: implicit steps of any length, and the steady state."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion_mp.checks import Count, PositiveNumber, checked
from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.spectrum import laplacian_extremes, precision
from diffusion_mp.errors import SingularSystemError
from diffusion_mp.updates.base import (
    Form,
    Laplacian,
    LaplacianUpdate,
    State,
    dense_formula_runs,
    working_precision,
)
from diffusion_mp.updates.derivatives import (
    DENSE,
    Operator,
    dense_solution,
    refuse_recorded_tangents,
)
from diffusion_mp.updates.explicit import teleport
from diffusion_mp.updates.linear_solve import LowRankInverse, identity_like, solve


class SolvedUpdate(LaplacianUpdate):
    """Base of the updates that solve (Δ + shift) x = b, for reversible couplings and for linear attention of any kind.

    The first of these methods that applies is used, always in double precision, since condition numbers may be large:

    - a dense matrix of up to 4 096 nodes, under a transform of ``torch.func``, in forward mode and in an export (there
      of any size), with derivatives of all orders;
    - the eigenvectors of Δ, if the coupling knows them (`NeumannCoupling`);
    - a closed form in O(N F² + F³), if S is low-rank (Theorem T3 of docs/certified.md). It is differentiable any number
      of times. It is not used if a symmetric system may be indefinite, which only conjugate gradients detect;
    - conjugate gradients in the metric of the coupling, preconditioned (`precondition`), separately for every graph of
      a batch. The implicit function theorem gives first derivatives, and memory does not grow with the iterations. If Δ
      is positive semidefinite, the relative error of every column (a head and channel of a graph) in the norm of the
      metric is 1e-6 for states in single and half precision. For states in double precision it is 1e-12, or up to 1e-6
      where the condition number allows no more.

    Args:
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S, which keeps constant states (Eq.
            6). ``"residual"``: Δ = I − S (Eq. 63).
        beta: weight β of the source h (Eq. 10). 0, the default, is a step without source; any other value requires one.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.
        max_iter: maximum number of iterations of conjugate gradients, where they run.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Raises:
        CouplingMismatchError: the coupling is neither reversible (`Coupling.metric`) nor low-rank.
        ConvergenceError: ``max_iter`` or double precision is not enough, or the system is singular or not positive
            definite.
    """

    needs_reversible = True

    def __init__(
        self,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
        max_iter: Count = 1000,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        self.max_iter = max_iter

    def solve(
        self, coupling: Coupling, shift: float, b: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return (Δ + shift)⁻¹ b, as exact as a state of ``dtype`` needs it.

        Args:
            coupling: the coupling S of Δ.
            shift: the number added to Δ.
            b: the right-hand side [N, H, D] in double precision.
            dtype: dtype of the state, which sets the tolerance.
        """
        # The warning names the update, and an export traces no repr.
        if not dense_formula_runs(coupling):
            self.warn_if_rounded(coupling, shift)
        return shifted_inverse(
            coupling,
            self.form,
            shift,
            b,
            dtype,
            max_iter=self.max_iter,
            what=self,
        )


def shifted_inverse(
    coupling: Coupling,
    form: Form,
    shift: float,
    b: HeadState,
    dtype: torch.dtype,
    *,
    max_iter: int = 1000,
    what: str | nn.Module = "the linear system",
) -> HeadState:
    """Return (Δ + shift)⁻¹ b for a b in double, as exact as a state of ``dtype`` needs it; see `SolvedUpdate`.

    ``what`` names the system in messages, or is the module to which the system belongs.
    """
    system = Laplacian(coupling, form, b.dtype, shift)
    # An indefinite system is left to conjugate gradients, which detect it.
    if coupling.nonnegative and shift > 0.0:
        # The eigenvectors are known for some stencils only, and then any function of Δ is exact.
        solution = system.function(torch.reciprocal, b)
        if solution is not None:
            return solution
    if dense_formula_runs(coupling):
        return dense_solution(system.dense(), b.transpose(0, 1)).transpose(0, 1)
    return _iterated(system, b, dtype=dtype, max_iter=max_iter, what=what)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # which way is taken depends on values
def _iterated(
    system: Laplacian,
    b: HeadState,
    *,
    what: str | nn.Module,
    **options: Any,
) -> HeadState:
    """Return (Δ + shift)⁻¹ b without the matrix of S."""
    refuse_recorded_tangents()
    coupling = system.coupling
    low_rank = coupling.low_rank_form(b.dtype)  # of S or of a part of it
    dominant = _is_dominant(system)
    # A closed form solves an indefinite symmetric system without notice, so such a
    # system goes to conjugate gradients.
    if (
        low_rank is not None
        and coupling.low_rank
        and (dominant or not coupling.reversible)
    ):
        return LowRankInverse(low_rank, system.diagonal).solve(b)
    metric = None if coupling.symmetric else coupling.metric
    preconditioner = precondition(coupling, system.diagonal, metric, low_rank, dominant)
    if not isinstance(what, str):  # named here, since torch.compile traces no repr
        what = f"the system of {what}"
    return solve(
        system,
        b,
        metric=metric,
        preconditioner=preconditioner,
        ptr=coupling.ptr,
        # Without a shift, `Equilibrium.check` has made sure of this smallest
        # eigenvalue. If Δ has negative eigenvalues, the smallest one lies below the
        # shift, and no bound is known.
        least=system.shift or precision(coupling.dtype).regular,
        what=what,
        **options,
    )


def _is_dominant(system: Laplacian) -> bool:
    """Return whether S ≥ 0 and Δ + shift is strictly diagonally dominant; every part of it is then regular."""
    coupling = system.coupling
    if not (coupling.nonnegative and system.shift > 0.0):
        return False
    if system.form == "conservative" or coupling.row_stochastic:
        return True
    return bool((coupling.degree() < 1.0 + system.shift).all())


class _ThetaStep(SolvedUpdate):
    """Base of the steps that solve for the state m at a fraction θ of the step and extrapolate to its end.

    With values v, x′ = v + (m − v)/θ, where m solves

        (I + θτ(Δ + κ)) m = v + θτβh

    Args:
        tau: step size τ > 0.
        form: ``"conservative"``, the default: Δ = D̄ − S. ``"residual"``: Δ = I − S.
        options: ``beta``, ``leak`` and ``max_iter`` of `SolvedUpdate`.
    """

    theta: ClassVar[float]  #: θ in (0, 1].

    def __init__(
        self, tau: PositiveNumber, form: Form = "conservative", **options: Any
    ) -> None:
        super().__init__(form, **options)
        self.tau = float(tau)

    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        start = working_precision(values, x, coupling)
        # Divided by θτ, the system keeps the scale of Δ for any step size: (Δ + κ +
        # 1/θτ) m = v/θτ + βh.
        rate = 1.0 / (self.theta * self.tau)
        b = rate * start
        if source is not None and self.beta != 0.0:
            b = b + self.beta * source
        middle = self.solve(coupling, self.leak + rate, b, values.dtype)
        # Extrapolated in double, since the difference of the two may be small beside both.
        return torch.lerp(start, middle, 1.0 / self.theta).to(values.dtype)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"


class ImplicitEuler(_ThetaStep):
    """Take one implicit Euler step, stable for any size, with source and leak (Wu, Wipf & Yan 2025, Eq. 10).

    The step starts at the values v:

        (I + τ(Δ + κ)) x′ = v + τβh

    If Δ is positive semidefinite, the step never expands, for any τ > 0. The conservative form of any nonnegative S and
    the residual form of a symmetrically normalised S have such a Δ. The coupling must be reversible or low-rank.

    The system is solved in double precision: in the eigenvectors of Δ if the coupling knows them (`NeumannCoupling`),
    in closed form in O(N F² + F³) if S is low-rank (Theorem T3 of docs/certified.md), and otherwise by preconditioned
    conjugate gradients. If Δ is positive semidefinite, the relative error of conjugate gradients is 1e-6. For states in
    double precision it is 1e-12, or up to 1e-6 where the condition number allows no more. Their derivatives, by the
    implicit function theorem, are first derivatives only.

    Args:
        tau: step size τ > 0.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S, which keeps constant states (Eq.
            6). ``"residual"``: Δ = I − S (Eq. 63).

    Options:
        beta: weight β of the source h (Eq. 10). 0, the default, is a step without source; any other value requires one.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.
        max_iter: maximum number of iterations of conjugate gradients, where they run. 1000 by default.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Raises:
        CouplingMismatchError: the coupling is neither reversible (`Coupling.metric`) nor low-rank.
        ConvergenceError: ``max_iter`` or double precision is not enough, or the system is singular or not positive
            definite.

    Examples:
        >>> ImplicitEuler(tau=100.0)(x, AdjacencyDiffusivity("row")(x, graph)).shape  # any τ is stable
        torch.Size([6, 4])
    """

    theta = 1.0


class CrankNicolson(_ThetaStep):
    """Take one trapezoidal step with source and leak (Crank & Nicolson 1947; Wu, Wipf & Yan 2025, Eq. 10).

    The step starts at the values v:

        (I + (τ/2)(Δ + κ)) x′ = (I − (τ/2)(Δ + κ)) v + τβh

    x′ is 2m − v, where m is half a step of `ImplicitEuler` from v. The error is of third order in τ. If Δ is positive
    semidefinite, the step never expands, for any τ > 0. Beyond τ = 2/λ the mode of eigenvalue λ changes sign, and for
    τλ → ∞ it hardly decays. Use `ImplicitEuler` or `HeatKernel` for long steps from rough states. The coupling must be
    reversible or low-rank.

    The system is solved in double precision: in the eigenvectors of Δ if the coupling knows them (`NeumannCoupling`),
    in closed form in O(N F² + F³) if S is low-rank (Theorem T3 of docs/certified.md), and otherwise by preconditioned
    conjugate gradients. If Δ is positive semidefinite, the relative error of conjugate gradients is 1e-6. For states in
    double precision it is 1e-12, or up to 1e-6 where the condition number allows no more. Their derivatives, by the
    implicit function theorem, are first derivatives only.

    Args:
        tau: step size τ > 0.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S, which keeps constant states (Eq.
            6). ``"residual"``: Δ = I − S (Eq. 63).

    Options:
        beta: weight β of the source h (Eq. 10). 0, the default, is a step without source; any other value requires one.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.
        max_iter: maximum number of iterations of conjugate gradients, where they run. 1000 by default.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Raises:
        CouplingMismatchError: the coupling is neither reversible (`Coupling.metric`) nor low-rank.
        ConvergenceError: ``max_iter`` or double precision is not enough, or the system is singular or not positive
            definite.

    Examples:
        >>> CrankNicolson(tau=0.5)(x, AdjacencyDiffusivity("row")(x, graph)).shape
        torch.Size([6, 4])
    """

    theta = 0.5


class Equilibrium(SolvedUpdate):
    """Solve for the steady state of the diffusion with source and leak (Wu, Wipf & Yan 2025, Eq. 10).

    A leak κ makes Eq. 10 well posed. The steady state x* solves

        (Δ + κ) x* = βh

    It is the limit of `ExplicitEuler` with the same form, β and leak. `teleport_limit` is the limit of APPNP. Without
    ``source``, h are the values, or the state. The coupling must be reversible or low-rank.

    The system is solved in double precision: in the eigenvectors of Δ if the coupling knows them (`NeumannCoupling`),
    in closed form in O(N F² + F³) if S is low-rank (Theorem T3 of docs/certified.md), and otherwise by preconditioned
    conjugate gradients. If Δ is positive semidefinite, the relative error of conjugate gradients is 1e-6. For states in
    double precision it is 1e-12, or up to 1e-6 where the condition number allows no more. Their derivatives, by the
    implicit function theorem, are first derivatives only.

    D̄ − S maps constants to zero, so the printed (D̄ − S)⁻¹H exists only for an H orthogonal to constants. The
    conservative form therefore needs ``leak > 0``. I − S may be regular without a leak. In that case its smallest
    eigenvalue is computed and must exceed 1e-6, or 1e-2 in single precision.

    Args:
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S (Eq. 6), which needs ``leak > 0``.
            ``"residual"``: Δ = I − S (Eq. 63).
        beta: weight β of the source h. 1 by default.

    Options:
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.
        max_iter: maximum number of iterations of conjugate gradients, where they run. 1000 by default.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Raises:
        SingularSystemError: there is no leak, and the Laplacian has a kernel or nearly has one.
        CouplingMismatchError: the coupling is neither reversible (`Coupling.metric`) nor low-rank.
        ConvergenceError: ``max_iter`` or double precision is not enough, or the system is not positive definite.

    Examples:
        >>> Equilibrium("residual", beta=0.1, leak=0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape
        torch.Size([6, 4])
    """

    def __init__(
        self, form: Form = "conservative", *, beta: float = 1.0, **options: Any
    ) -> None:
        super().__init__(form, beta=beta, **options)

    def forward(
        self,
        x: Tensor,
        coupling: Coupling,
        values: Tensor | None = None,
        source: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the steady state.

        Args:
            x: state, [N, H, D] or [N, C].
            coupling: the coupling S.
            values: values of the shape of x, which replace x as the default of ``source``.
            source: the source h, of the shape of x. ``None`` takes the values, or the state if there are none.
            options: keyword arguments of `step`; there are none.
        """
        if source is None:
            source = x if values is None else values
        return super().forward(x, coupling, values, source, **options)

    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        h = values if source is None else source
        b = self.beta * working_precision(h, x, coupling)
        return self.solve(coupling, self.leak, b, h.dtype).to(h.dtype)

    def check(self, coupling: Coupling) -> None:
        super().check(coupling)
        if self.leak > 0.0:
            return
        if self.form == "conservative":
            raise SingularSystemError(
                "Equilibrium(form='conservative', leak=0) has no unique steady state: D̄ − S maps constants to zero. "
                "Pass leak > 0 (APPNP with teleport alpha: form='residual', beta = leak = alpha / (1 - alpha))."
            )
        if dense_formula_runs(
            coupling
        ):  # which solves the system if it is not singular
            return
        if not coupling.reversible:
            raise SingularSystemError(
                f"Equilibrium(form='residual', leak=0) needs I − S regular, which only reversible couplings are asked; "
                f"got a {type(coupling).__name__} that is not reversible. Pass leak > 0."
            )
        smallest, _ = laplacian_extremes(coupling, self.form)
        # Entries that are rounded to this dtype cannot tell a smaller eigenvalue from zero.
        regular = precision(coupling.dtype).regular
        if coupling.num_nodes and not smallest > regular:
            raise SingularSystemError(
                f"Equilibrium(form='residual', leak=0) needs I − S positive definite; its smallest eigenvalue is "
                f"{smallest:.3g}, expected above {regular:g}. Pass leak > 0, or scale the coupling below spectral "
                f"radius 1, for instance 0.9 * AdjacencyDiffusivity('sym')."
            )


@checked
def teleport_limit(alpha: PositiveNumber) -> Equilibrium:
    """Return the limit of APPNP's steps, x* = α (I − (1 − α) S)⁻¹ h (PPNP; Klicpera et al. 2019, Eq. 3).

    Args:
        alpha: the teleport probability α, 0 < α < 1.

    Examples:
        >>> teleport_limit(0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape
        torch.Size([6, 4])
    """
    step = teleport(alpha)
    return Equilibrium("residual", beta=step.beta, leak=step.leak)


@torch.no_grad()
def precondition(
    coupling: Coupling,
    diagonal: Tensor | float,
    metric: Tensor | None,
    form: LowRankForm | None,
    dominant: bool,
) -> Operator | None:
    """Return an approximate inverse of diag(d) − S, self-adjoint and positive definite in the metric; ``None`` for I.

    - A product with a ``quadratic`` coupling costs as much as its matrix. Up to 4 096 nodes the matrix is factorised,
      N³/3, which pays off from some hundred products on. One or two iterations remain.
    - If the system is ``dominant`` (S ≥ 0, every row sum below d), the low-rank part ``form`` of S and the diagonal are
      inverted exactly, in O(N F² + F³). The iteration deals with the rest of S, usually a sparse graph. Without a
      low-rank part, a varying diagonal d [N, H, 1] is inverted.
    """
    if coupling.quadratic and coupling.heads * coupling.num_nodes**2 <= DENSE:
        factor = dense_factor(coupling, diagonal, metric)
        if factor is not None:
            root = 1.0 if metric is None else metric.sqrt().unsqueeze(2)

            def inverse(r: Tensor) -> Tensor:
                # The factor is that of the symmetric matrix, similar to this system by the roots of the metric.
                turned = (root * r).transpose(0, 1)
                return torch.cholesky_solve(turned, factor).transpose(0, 1) / root

            return inverse
    if not dominant:
        return None
    if form is not None and form.left.size(2):
        return LowRankInverse(form, diagonal)
    if isinstance(diagonal, Tensor):
        return lambda r: r / diagonal
    return None


def dense_factor(
    coupling: Coupling, diagonal: Tensor | float, metric: Tensor | None = None
) -> Tensor | None:
    """Return the Cholesky factor [H, N, N] of D̄^½(diag(d) − S)D̄^-½ in double, ``None`` if not positive definite."""
    matrix = coupling.to_dense().double()
    if metric is not None:
        root = metric.sqrt().t()
        matrix = root.unsqueeze(2) * matrix / root.unsqueeze(1)
    if isinstance(diagonal, Tensor):
        diagonal = diagonal.transpose(0, 1)
    factor, info = torch.linalg.cholesky_ex(diagonal * identity_like(matrix) - matrix)
    return None if bool(info.any()) else factor
