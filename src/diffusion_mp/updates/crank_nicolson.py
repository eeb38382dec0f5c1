"""``CrankNicolson``: the trapezoidal rule, of second order and stable at any τ."""

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_positive
from diffusion_mp.updates.base import Form, working_precision
from diffusion_mp.updates.solved import SolvedUpdate


class CrankNicolson(SolvedUpdate):
    r"""One trapezoidal step of Eq. 10 of TfD (Wu, Wipf & Yan, 2025) with leak (Crank & Nicolson, 1947).

    .. math:: (I + \tfrac{\tau}{2} (\Delta + \kappa)) x' = (I - \tfrac{\tau}{2} (\Delta + \kappa)) v + \tau \beta h

    That is half a step of `ImplicitEuler`, from v to m, and as far again: x′ = 2m − v. The error of a step is of third
    order in τ. Where Δ is positive semidefinite it never expands, at any τ; but beyond τ = 2/λ the mode of eigenvalue λ
    changes sign, and for τλ → ∞ it hardly decays: for long steps from rough states take `ImplicitEuler`, `HeatKernel`.

    Args:
        tau: step size τ > 0, as large as wanted.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        beta: weight β of the source h; needs ``source`` in the call unless zero.
        leak: κ ≥ 0.
        tol: relative residual of every (head, channel) column, where conjugate gradients are needed; default 1e-12 in
            double, 1e-6 in single precision.
        max_iter: iterations of conjugate gradients at most.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D].

    Raises:
        CouplingMismatchError: the coupling is not symmetric.
        ConvergenceError: ``max_iter`` is not enough or the operator is not positive definite.
        ValueError: an argument out of range, a missing source, shapes that do not fit.
    """

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
        """Solve for the state in the middle of the step, and go on from there as far again."""
        values = self.validate(x, coupling, values, source)
        start = working_precision(values, max(x.size(1), coupling.heads))
        rate = 2.0 / self.tau
        b = rate * start
        if source is not None and self.beta != 0.0:
            b = b + self.beta * source
        middle = self.solve(coupling, self.leak + rate, b)
        return (2.0 * middle - start).to(values.dtype)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"
