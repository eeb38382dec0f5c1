"""``ImplicitEuler``: a step that no τ makes unstable."""

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_positive
from diffusion_mp.updates.base import Form, working_precision
from diffusion_mp.updates.solved import SolvedUpdate


class ImplicitEuler(SolvedUpdate):
    r"""One implicit Euler step of Eq. 10 of TfD (Wu, Wipf & Yan, 2025) with leak, for symmetric couplings.

    .. math:: (I + \tau (\Delta + \kappa)) x' = v + \tau \beta h

    The step starts at the values v (the state itself unless given). Where Δ is positive semidefinite (the conservative
    form of any non-negative S, the residual form of a symmetrically normalised one) it never expands, at any τ.
    Where the coupling knows its eigenvectors (`NeumannCoupling`), it is solved in them. For others it is matrix-free
    conjugate gradients; derivatives come from the implicit function theorem, so memory does not grow with the
    iterations; once differentiable.

    Args:
        tau: step size τ > 0, as large as wanted.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        beta: weight β of the source h; needs ``source`` in the call unless zero.
        leak: κ ≥ 0.
        tol: relative residual of every (head, channel) column; default 1e-12 in double, 1e-6 in single precision.
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
        """Solve for the state after a time τ whose slope is taken at its end."""
        values = self.validate(x, coupling, values, source)
        b = working_precision(values, max(x.size(1), coupling.heads)) / self.tau
        if source is not None and self.beta != 0.0:
            b = b + self.beta * source
        # Divided by τ, the system keeps the scale of Δ however long the step: (Δ + κ + 1/τ) x′ = v/τ + βh.
        solution = self.solve(coupling, self.leak + 1.0 / self.tau, b)
        return solution.to(values.dtype)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, {super().extra_repr()}"
