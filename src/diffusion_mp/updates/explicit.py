"""Explicit steps: ``ExplicitEuler`` (GCN, GIN, APPNP, DIFFormer), ``teleport`` and ``MomentumStep``."""

import sys

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_counts, check_positive, check_tensor, describe
from diffusion_mp.updates.base import Form, LaplacianUpdate, Positive, State


class ExplicitEuler(LaplacianUpdate):
    r"""One explicit Euler step with source and leak (Eqs. 6, 10, 22, 24, 63 of TfD, Wu, Wipf & Yan, 2025).

        x′ = x − τ(d + κ)x + τSv + τβh

    Node by node, with values v (the state itself unless given):

    * ``form="conservative"`` (Eqs. 6, 22, 24): d_i = Σ_j s_ij, x′_i = (1 − τ Σ_j s_ij) x_i + τ Σ_j s_ij v_j.
      Constants stay as they are. With symmetric S and τ < 2/λ₁ it descends the energy of Δ = D̄ − S, which is
      tr ZᵀΔZ = ½ Σ_ij s_ij‖z_i − z_j‖².
    * ``form="residual"`` (Eq. 63, GCN, GIN): d_i = 1, x′_i = (1 − τ) x_i + τ Σ_j s_ij v_j. With symmetric S and
      τ < 2/λ₁ it descends the energy of Δ = I − S, where I − S is positive semidefinite; for GCN's
      S = D^-½AD^-½ that is ½ Σ_ij a_ij‖z_i/√d_i − z_j/√d_j‖², and √d_i, not a constant, stays as it is.

    Both agree when the rows of S sum to one. Examples 1 and 2 print the residual form of a step that Eq. 6 defines
    as conservative; Eq. 24 is the coupling ½Ŝ + ½Ã in the conservative form, Eqs. 61–63 are Ŝ + Ã in the residual one.

    A source alone does not stop over-smoothing: Δ is singular and the state runs off along its kernel. A source and
    a leak κ do; the steady state is then (Δ + κ)⁻¹βh (see `Equilibrium`). APPNP is `teleport`.

    Args:
        tau: step size τ > 0: a number, or a learnable one. A parameter may leave this range in training; a `Positive`
            stays above zero. ``reset_parameters`` restores its initial value.
        form: the Laplacian, see above.
        beta: weight β of the source h; needs ``source`` in the call unless zero.
        leak: κ ≥ 0, the rate at which the state decays.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D].

    Raises:
        ValueError: τ not positive and finite, negative leak, missing source, shapes that do not fit.

    Examples:
        >>> S = UniformDiffusivity()(x)
        >>> torch.allclose(ExplicitEuler(tau=1.0)(x, S), x.mean(0).expand(6, 4))  # one whole step to the mean
        True
    """

    def __init__(
        self,
        tau: float | Tensor | Positive,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        self._initial: Tensor | None = None
        if isinstance(tau, Tensor):
            _check_scalar(tau)
            self._initial = tau.detach().clone() if isinstance(tau, nn.Parameter) else None
        elif not isinstance(tau, Positive):
            check_positive(tau, "tau")
            tau = float(tau)
        if isinstance(tau, Tensor) and not isinstance(tau, nn.Parameter):
            self.register_buffer("tau", tau)
        else:
            self.tau: float | Tensor | Positive = tau

    @property
    def step_size(self) -> float | Tensor:
        """The current value of τ."""
        return self.tau() if isinstance(self.tau, Positive) else self.tau

    def reset_parameters(self) -> None:
        """Reset the parameters, a learned τ to its initial value."""
        super().reset_parameters()
        if self._initial is not None and isinstance(self.tau, Tensor):
            with torch.no_grad():
                self.tau.copy_(self._initial)

    def step(self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None) -> State:
        """Return (1 − τ(d + κ))·x + τ S v + τβh, in as few passes over memory as possible."""
        values = self.validate(x, coupling, values, source)
        moved = coupling.matmul(values)
        if not isinstance(self.tau, float):
            return self._by_tensor(x, coupling, moved, source)
        keep = 1.0 - self.tau * (self.diagonal(coupling) + self.leak)
        if isinstance(keep, Tensor):
            moved = torch.add(keep.to(x.dtype) * x, moved, alpha=self.tau)
        elif abs(keep) > 4 * sys.float_info.epsilon:  # zero for τ = 1, and up to rounding for the weights of APPNP
            moved = torch.add(keep * x, moved, alpha=self.tau)
        elif self.tau != 1.0:
            moved = self.tau * moved
        if self.beta != 0.0 and source is not None:
            moved = torch.add(moved, source, alpha=self.tau * self.beta)
        return moved

    def _by_tensor(self, x: Tensor, coupling: Coupling, moved: Tensor, source: Tensor | None) -> Tensor:
        """Return x + τ (S v − (d + κ) x + βh) for a τ of any type."""
        change = moved - self.decay(x, coupling)
        if self.beta != 0.0 and source is not None:
            change = torch.add(change, source, alpha=self.beta)
        return x + self.step_size * change

    def extra_repr(self) -> str:
        tau = f"tau={self.tau:g}, " if isinstance(self.tau, float) else "tau=learned, "
        return ("" if isinstance(self.tau, Positive) else tau) + super().extra_repr()


def teleport(alpha: float) -> ExplicitEuler:
    """x′ = (1 − α) S x + α h, the step of APPNP: step size 1 − α, with source weight and leak α/(1 − α), 0 ≤ α < 1.

    The leak keeps the states of a deep stack apart, which a source alone does not (D22 in docs/errata.md). The limit of
    these steps is `teleport_limit`.

    Examples:
        >>> teleport(0.1)(x, AdjacencyDiffusivity("row")(x, graph), source=x).shape  # a step of APPNP
        torch.Size([6, 4])
    """
    check_positive(alpha, "alpha", allow_zero=True)
    if alpha >= 1:
        raise ValueError(f"alpha must lie in [0, 1), nothing would propagate at 1; got {alpha}.")
    rate = alpha / (1 - alpha)
    return ExplicitEuler(1 - alpha, "residual", beta=rate, leak=rate)


class MomentumStep(LaplacianUpdate):
    r"""K steps of the heavy-ball method (Polyak, 1964) for the diffusion with source and leak, from a state at rest.

        z⁺ = z − τ((Δ + κ)z − βh) + m(z − z₋)

    With m the momentum. The energy of TfD (Wu, Wipf & Yan, 2025, Eq. 8) is its Lyapunov function, ‖z⁺ − z‖² the kinetic
    part (Theorem T4 of docs/certified.md): for Δ = D̄ − Ω, P = Σ_ij δ(‖z_i − z_j‖²) and τ ≤ 2(1 − m)/λ_max, with
    λ_max ≤ n f(0), P(z⁺) + (2m/τ)‖z⁺ − z‖² ≤ P(z) + (2m/τ)‖z − z₋‖², which is E(Z_{k+1}, k) ≤ E(Z_k, k − 1) with
    λ = τ/(2m). Ω may be recomputed at every z.

    With one symmetric and positive semidefinite Δ for all steps, τ < 2(1 + m)/λ₁ suffices, λ₁ the largest eigenvalue
    of Δ + κ: with states measured from the steady state, ½(1 + m)‖z⁺ − z‖² + τ⟨z⁺, (Δ + κ)z⟩ is a squared norm of both
    states and does not increase. Convergence is fastest for τ = 4/(√λ₁ + √μ)² and m = ((√λ₁ − √μ)/(√λ₁ + √μ))², μ the
    smallest eigenvalue that has to decay: about √(λ₁/μ) steps where `ExplicitEuler` takes λ₁/μ. Both lie beyond the
    first bound.

    An update keeps no state between calls, so a call takes all K steps with one coupling. With ``steps=1`` the calling
    layer or model passes the previous state, and the coupling may change with the state; `advance` is that step.

    Args:
        tau: τ > 0.
        momentum: m in [0, 1).
        steps: K.
        form, beta, leak: see `LaplacianUpdate`.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D].

    Raises:
        ValueError: an argument out of range, a missing source, shapes that do not fit.

    Examples:
        >>> S = AdjacencyDiffusivity("row")(x, graph)
        >>> MomentumStep(tau=0.5, momentum=0.5, steps=10)(x, S).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        tau: float,
        momentum: float,
        steps: int = 10,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak)
        check_positive(tau, "tau")
        check_positive(momentum, "momentum", allow_zero=True)
        if momentum >= 1:
            raise ValueError(f"momentum must lie in [0, 1), or nothing would ever come to rest; got {momentum}.")
        check_counts(steps=steps)
        self.tau, self.momentum, self.steps = float(tau), float(momentum), steps
        self.takes_previous = steps == 1

    def step(
        self,
        x: State,
        coupling: Coupling,
        values: State | None = None,
        source: State | None = None,
        *,
        previous: State | None = None,
    ) -> State:
        """Return the state after K steps from ``values`` (default: the state itself), which starts at rest.

        With ``steps=1`` the step starts from ``previous``, the state one step earlier, where it is given.
        """
        state = self.validate(x, coupling, values, source)
        if previous is not None and not self.takes_previous:
            raise ValueError(f"previous is one step earlier, so it goes with steps=1; got it with steps={self.steps}.")
        previous = state if previous is None else previous
        for _ in range(self.steps):
            state, previous = self.advance(state, previous, coupling, source), state
        return state

    def advance(self, x: State, previous: State, coupling: Coupling, source: State | None = None) -> State:
        """Return z⁺ for z = ``x`` and z₋ = ``previous``; a state at rest has z₋ = z."""
        self.validate(x, coupling, previous, source)
        slope = self.decay(x, coupling) - coupling.matmul(x)
        if source is not None and self.beta != 0.0:
            slope = slope - self.beta * source
        return x - self.tau * slope + self.momentum * (x - previous)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, momentum={self.momentum:g}, steps={self.steps}, {super().extra_repr()}"


def _check_scalar(tau: Tensor) -> None:
    """Raise unless ``tau`` is a positive 0-dimensional tensor."""
    check_tensor(tau, "tau", "of no dimensions")
    if tau.dim():
        raise ValueError(f"tau must be one number, nn.Parameter(torch.tensor(0.5)) for instance; got {describe(tau)}.")
    if not tau.is_meta and not torch.compiler.is_compiling():
        check_positive(float(tau.detach()), "tau")
