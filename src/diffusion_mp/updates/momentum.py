"""``MomentumStep``: steps that keep some of the last move, and go down the energy with it."""

from __future__ import annotations

from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_counts, check_positive
from diffusion_mp.updates.base import Form, LaplacianUpdate, State


class MomentumStep(LaplacianUpdate):
    r"""K steps of the heavy-ball method (Polyak, 1964) for the diffusion with source and leak, from a state at rest.

        z⁺ = z − τ((Δ + κ)z − βh) + m(z − z₋)

    With m the momentum. The energy of TfD (Wu, Wipf & Yan, 2025, Eq. 8) is its Lyapunov function, ‖z⁺ − z‖² the kinetic
    part (Theorem T4 of docs/certified.md): for Δ = D̄ − Ω, P = Σ_ij δ(‖z_i − z_j‖²) and τ ≤ 2(1 − m)/λ_max, with
    λ_max ≤ n f(0), P(z⁺) + (2m/τ)‖z⁺ − z‖² ≤ P(z) + (2m/τ)‖z − z₋‖², which is E(Z_{k+1}, k) ≤ E(Z_k, k − 1) with
    λ = τ/(2m); Ω may be made anew at every z.

    With one Δ for all steps, symmetric and positive semi-definite, τ < 2(1 + m)/λ₁ is enough, λ₁ the largest eigenvalue
    of Δ + κ: counted from the steady state, ½(1 + m)‖z⁺ − z‖² + τ⟨z⁺, (Δ + κ)z⟩ then is the square of a norm of both
    states, and does not rise. The fastest are τ = 4/(√λ₁ + √μ)² and m = ((√λ₁ − √μ)/(√λ₁ + √μ))², μ the smallest
    eigenvalue that has to decay: about √(λ₁/μ) steps where `ExplicitEuler` takes λ₁/μ. They are beyond the first bound.

    An update keeps nothing between calls, so a call takes all K steps, with one coupling. With ``steps=1`` it is told
    the state before by the layer or model that calls it again and again, and couplings may follow the state;
    `advance` is that step.

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
        """The state after K steps from ``values`` (the state itself unless given), at rest before; with ``steps=1``
        from ``previous`` one step earlier, where it is given."""
        state = self.validate(x, coupling, values, source)
        if previous is not None and not self.takes_previous:
            raise ValueError(f"previous is one step earlier, so it goes with steps=1; got it with steps={self.steps}.")
        previous = state if previous is None else previous
        for _ in range(self.steps):
            state, previous = self.advance(state, previous, coupling, source), state
        return state

    def advance(self, x: State, previous: State, coupling: Coupling, source: State | None = None) -> State:
        """z⁺ of z = ``x`` and z₋ = ``previous``, which is z itself where the state is at rest."""
        self.validate(x, coupling, previous, source)
        rate: Tensor | float = self.diagonal(coupling) + self.leak
        slope = (rate.to(x.dtype) if isinstance(rate, Tensor) else rate) * x - coupling.product(x)
        if source is not None and self.beta != 0.0:
            slope = slope - self.beta * source
        return x - self.tau * slope + self.momentum * (x - previous)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, momentum={self.momentum:g}, steps={self.steps}, {super().extra_repr()}"
