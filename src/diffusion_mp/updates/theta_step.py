"""``ThetaStep``: what the implicit steps share."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_positive
from diffusion_mp.updates.base import Form, working_precision
from diffusion_mp.updates.solved import SolvedUpdate


class ThetaStep(SolvedUpdate):
    r"""Base of the steps that solve for a state m after a part θ of the step, and go on from there along a line.

    .. math:: (I + \theta\tau (\Delta + \kappa)) m = v + \theta\tau \beta h, \qquad x' = v + (m - v) / \theta

    Args:
        tau: step size τ > 0.
        form, beta, leak, tol, max_iter: as in `SolvedUpdate`.
    """

    #: θ in (0, 1]; without expansion for θ ≥ ½.
    theta: ClassVar[float]

    def __init__(
        self,
        tau: float,
        form: Form = "conservative",
        *,
        beta: float = 0.0,
        leak: float = 0.0,
        tol: float | None = None,
        max_iter: int = 1000,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak, tol=tol, max_iter=max_iter)
        check_positive(tau, "tau")
        self.tau = float(tau)

    def step(
        self,
        x: Float[Tensor, "N #H D"],
        coupling: Coupling,
        values: Float[Tensor, "N #H D"] | None = None,
        source: Float[Tensor, "N #H D"] | None = None,
    ) -> Float[Tensor, "N #H D"]:
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
