"""``ExplicitEuler``: the explicit step behind GCN, GIN, APPNP and DIFFormer."""

import sys

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_positive, check_tensor, describe
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
        tau: step size τ > 0: a number, or one that is learned. A parameter may get anywhere in training; a `Positive`
            stays above zero. ``reset_parameters`` takes it back to what it was.
        form: which Laplacian, see above.
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
        """τ as it is now."""
        return self.tau() if isinstance(self.tau, Positive) else self.tau

    def reset_parameters(self) -> None:
        """A learned τ goes back to what it was at first."""
        super().reset_parameters()
        if self._initial is not None and isinstance(self.tau, Tensor):
            with torch.no_grad():
                self.tau.copy_(self._initial)

    def step(self, x: State, coupling: Coupling, values: State | None = None, source: State | None = None) -> State:
        """(1 − τ(d + κ))·x + τ S v + τβh, with as few passes over memory as that takes."""
        values = self.validate(x, coupling, values, source)
        moved = coupling.product(values)
        if not isinstance(self.tau, float):
            return self._by_tensor(x, coupling, moved, source)
        keep = 1.0 - self.tau * (self.diagonal(coupling) + self.leak)
        if isinstance(keep, Tensor):
            moved = torch.add(keep.to(x.dtype) * x, moved, alpha=self.tau)
        elif abs(keep) > 4 * sys.float_info.epsilon:  # zero for τ = 1, and up to rounding for APPNP's weights
            moved = torch.add(keep * x, moved, alpha=self.tau)
        elif self.tau != 1.0:
            moved = self.tau * moved
        if self.beta != 0.0 and source is not None:
            moved = torch.add(moved, source, alpha=self.tau * self.beta)
        return moved

    def _by_tensor(self, x: Tensor, coupling: Coupling, moved: Tensor, source: Tensor | None) -> Tensor:
        """x + τ (S v − (d + κ) x + βh), whatever τ is."""
        rate = self.diagonal(coupling) + self.leak
        change = moved - (rate.to(x.dtype) if isinstance(rate, Tensor) else rate) * x
        if self.beta != 0.0 and source is not None:
            change = torch.add(change, source, alpha=self.beta)
        return x + self.step_size * change

    def extra_repr(self) -> str:
        tau = f"tau={self.tau:g}, " if isinstance(self.tau, float) else "tau=learned, "
        return ("" if isinstance(self.tau, Positive) else tau) + super().extra_repr()


def _check_scalar(tau: Tensor) -> None:
    """Raise unless ``tau`` is a positive number in a tensor without dimensions."""
    check_tensor(tau, "tau", "of no dimensions")
    if tau.dim():
        raise ValueError(f"tau must be one number, nn.Parameter(torch.tensor(0.5)) for instance; got {describe(tau)}.")
    if not tau.is_meta and not torch.compiler.is_compiling():
        check_positive(float(tau.detach()), "tau")
