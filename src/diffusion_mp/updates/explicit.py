"""Explicit steps: ``ExplicitEuler`` (GCN, GIN, APPNP, DIFFormer), ``teleport``, and ``MomentumStep``."""

import sys

import torch
from torch import Tensor

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling
from diffusion_mp.modules import Positive
from diffusion_mp.updates.base import Form, LaplacianUpdate, State


class ExplicitEuler(LaplacianUpdate):
    """Take one explicit Euler step with source and leak (Wu, Wipf & Yan 2025, Eqs. 6, 10, 22, 24, 63).

    With values v, and with the diagonal d of the Laplacian:

        x′ = x − τ(d + κ)x + τSv + τβh

    * ``form="conservative"`` (Eqs. 6, 22, 24): d_i = Σ_j s_ij, and constant states stay as they are. With a symmetric S
    and τ < 2/λ₁, the step descends the energy of Δ = D̄ − S, tr ZᵀΔZ = ½ Σ_ij s_ij‖z_i − z_j‖². * ``form="residual"``
    (Eq. 63, GCN, GIN): d_i = 1. With a symmetric S and τ < 2/λ₁, the step descends the energy of a positive
    semidefinite Δ = I − S. For S = D^-½AD^-½ of GCN, this energy is ½ Σ_ij a_ij‖z_i/√d_i − z_j/√d_j‖². The state √d_i,
    instead of a constant state, stays as it is.

    λ₁ is the largest eigenvalue of Δ. Examples 1 and 2 print the residual form of a step that Eq. 6 defines as
    conservative. Eq. 24 is ½Ŝ + ½Ã in the conservative form, and Eqs. 61–63 are Ŝ + Ã in the residual form. With a
    source and no leak, the state runs off along the kernel of Δ. With a leak κ, the steady state is (Δ + κ)⁻¹βh (see
    `Equilibrium`). The step of APPNP is `teleport`.

    Args:
        tau: step size τ > 0: a number, a learnable 0-dimensional tensor, or a learnable `Positive`.
            ``reset_parameters`` restores the initial value. A parameter may turn negative in training; a `Positive`
            stays above zero.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S, which keeps constant states (Eq.
            6). ``"residual"``: Δ = I − S (Eq. 63).
        beta: weight β of the source h (Eq. 10). 0, the default, is a step without source; any other value requires one.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Examples:
        >>> torch.allclose(ExplicitEuler(tau=1.0)(x, UniformDiffusivity()(x)), x.mean(0).expand(6, 4))
        True
    """

    tau: float | Tensor | Positive

    def __init__(
        self,
        tau: float | Tensor | Positive,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        if isinstance(tau, Tensor):
            checks.check_tensor(tau, "tau", "of no dimensions")
            if tau.dim():
                raise ValueError(
                    f"tau must be one number, nn.Parameter(torch.tensor(0.5)) for instance; got {checks.describe(tau)}."
                )
            # A model is built on the meta device to be loaded, and may be built in
            # compiled code: there are no values.
            if not tau.is_meta and not torch.compiler.is_compiling():
                checks.check_positive(float(tau.detach()), "tau")
        elif not isinstance(tau, Positive):
            checks.check_positive(tau, "tau")
            tau = float(tau)
        self._keep("tau", tau)

    @property
    def step_size(self) -> float | Tensor:
        return self.tau() if isinstance(self.tau, Positive) else self.tau

    def step(
        self, x: State, coupling: Coupling, values: State, source: State | None = None
    ) -> State:
        # A learned τ needs the velocity for its gradient, at the cost of one more pass.
        if not isinstance(self.tau, float):
            return x + self.step_size * self.velocity(x, coupling, values, source)
        moved = coupling.received(values)
        keep = 1.0 - self.tau * self.rate(coupling)
        if isinstance(keep, Tensor):
            # Rounded after the difference, which half precision would lose.
            keep = keep.to(x.dtype)
        # GCN (τ = 1) and APPNP keep nothing of the state, up to rounding, which saves
        # two passes.
        if isinstance(keep, Tensor) or abs(keep) > 4 * sys.float_info.epsilon:
            moved = torch.add(keep * x, moved, alpha=self.tau)
        elif self.tau != 1.0:
            moved = self.tau * moved
        if source is not None and self.beta != 0.0:
            moved = torch.add(moved, source, alpha=self.tau * self.beta)
        return moved

    def extra_repr(self) -> str:
        if isinstance(self.tau, Positive):  # a child, which prints itself
            return super().extra_repr()
        tau = f"{self.tau:g}" if isinstance(self.tau, float) else "learned"
        return f"tau={tau}, {super().extra_repr()}"


def teleport(alpha: float) -> ExplicitEuler:
    """Return the step of APPNP, x′ = (1 − α) S x + α h (Klicpera et al. 2019).

    It is a residual `ExplicitEuler` of step size 1 − α, whose source weight and leak are α/(1 − α). The leak keeps the
    states of a deep stack apart, which a source without a leak does not (docs/errata.md, D22). The limit of these steps
    is `teleport_limit`.

    Args:
        alpha: the teleport probability α, 0 ≤ α < 1.

    Examples:
        >>> teleport(0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape  # a step of APPNP
        torch.Size([6, 4])
    """
    checks.check_number(
        alpha,
        "alpha",
        lambda share: 0 <= share < 1,
        "lie in [0, 1), nothing would propagate at 1",
    )
    # τ = 1 − α and (1 − α)(1 + κ) = 1 leave nothing of the state itself, and τβ = α is
    # the weight of the source.
    rate = alpha / (1 - alpha)
    return ExplicitEuler(1 - alpha, "residual", beta=rate, leak=rate)


class MomentumStep(LaplacianUpdate):
    """Take K steps of the heavy-ball method for the diffusion, from a state at rest (Polyak 1964).

    With z₋ the state before z:

        z⁺ = z − τ((Δ + κ)z − βh) + m(z − z₋)

    The energy of Wu, Wipf & Yan (2025), Eq. 8, is a Lyapunov function of these steps, and ‖z⁺ − z‖² is its kinetic part
    (Theorem T4 of docs/certified.md). Let Δ = D̄ − Ω, P = Σ_ij δ(‖z_i − z_j‖²) and τ ≤ 2(1 − m)/λ_max, with λ_max ≤ n
    f(0). Then

        P(z⁺) + (2m/τ)‖z⁺ − z‖² ≤ P(z) + (2m/τ)‖z − z₋‖²

    This is E(Z_{k+1}, k) ≤ E(Z_k, k − 1) with λ = τ/(2m). Ω may be recomputed at every z.

    If one symmetric and positive semidefinite Δ serves all steps, τ < 2(1 + m)/λ₁ suffices, where λ₁ is the largest
    eigenvalue of Δ + κ. For states measured from the steady state, ½(1 + m)‖z⁺ − z‖² + τ⟨z⁺, (Δ + κ)z⟩ is a squared
    norm of both states and does not increase. Convergence is fastest for τ = 4/(√λ₁ + √μ)² and m = ((√λ₁ − √μ)/(√λ₁ +
    √μ))², where μ is the smallest eigenvalue that has to decay. It takes about √(λ₁/μ) steps, and `ExplicitEuler` takes
    about λ₁/μ.

    With ``steps=1``, the calling layer or model passes the state one step earlier as ``previous``. The coupling may
    then change with the state.

    Args:
        tau: step size τ > 0.
        momentum: m in [0, 1), the part of the last move that is repeated.
        steps: number K of steps.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄ of S, which keeps constant states (Eq.
            6). ``"residual"``: Δ = I − S (Eq. 63).
        beta: weight β of the source h (Eq. 10). 0, the default, is a step without source; any other value requires one.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default: no decay.

    Shapes:
        - x, values, source: [N, H, D], where one head broadcasts against several; or [N, C], whose channels are split
          into the heads of the coupling.
        - output: [N, H, D], or [N, C].

    Examples:
        >>> MomentumStep(tau=0.5, momentum=0.5, steps=10)(x, AdjacencyDiffusivity("row")(x, graph)).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        tau: checks.PositiveNumber,
        momentum: float,
        steps: checks.Count = 10,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        checks.check_number(
            momentum,
            "momentum",
            lambda m: 0 <= m < 1,
            "lie in [0, 1), or nothing would ever come to rest",
        )
        self.tau = float(tau)
        self.momentum = float(momentum)
        self.steps = steps
        self.takes_previous = steps == 1

    def step(
        self,
        x: State,
        coupling: Coupling,
        values: State,
        source: State | None = None,
        *,
        previous: State | None = None,
    ) -> State:
        """Return the state after K steps from ``values``.

        Args:
            x: state [N, H, D], which the steps do not read.
            coupling: the coupling S of all steps.
            values: the state [N, H, D] from which the steps start.
            source: the source h [N, H, D], or ``None``.
            previous: the state [N, H, D] one step earlier, for ``steps=1``. ``None`` starts at rest.
        """
        if previous is not None and not self.takes_previous:
            raise ValueError(
                f"previous is one step earlier, so it goes with steps=1; got it with steps={self.steps}."
            )
        # A state at rest was at the same place before.
        state = values
        before = values if previous is None else previous
        for _ in range(self.steps):
            change = self.tau * self.velocity(state, coupling, state, source)
            change = change + self.momentum * (state - before)
            before = state
            state = state + change
        return state

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, momentum={self.momentum:g}, steps={self.steps}, {super().extra_repr()}"
