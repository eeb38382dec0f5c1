"""``Equilibrium``: infinite depth in one solve."""

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import SingularSystemError
from diffusion_mp.updates.base import Form, working_precision
from diffusion_mp.updates.solved import SolvedUpdate
from diffusion_mp.updates.spectrum import laplacian_extremes, resolution


class Equilibrium(SolvedUpdate):
    r"""The steady state of the diffusion with source and leak (Eq. 10 of TfD, Wu, Wipf & Yan, 2025, made well posed).

    .. math:: (\Delta + \kappa) x^* = \beta h

    This is where `ExplicitEuler` of the same form, β and leak ends after infinitely many steps; APPNP's limit is
    ``form="residual"``, ``beta = leak = alpha / (1 - alpha)``. Solved as `ImplicitEuler` is: in
    the eigenvectors where the coupling knows them, else by conjugate gradients, once differentiable. The state it is
    called with only matters as the default source.

    Without a leak, D̄ − S has the constants in its kernel: the printed (D̄ − S)⁻¹H does not exist unless H happens
    to be orthogonal to them, so the conservative form needs ``leak > 0``. The residual form I − S may be regular by
    itself; its smallest eigenvalue is then computed and must be above 1e-6 (1e-2 in single precision).

    Args:
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        beta: weight β of the source h.
        leak: κ ≥ 0.
        tol: relative residual of every (head, channel) column; see `SolvedUpdate` for the default.
        max_iter: iterations of conjugate gradients at most.

    Shapes:
        x, values, source [N, H, D]; result [N, H, D]. Without ``source`` the values (or the state) are the source.

    Raises:
        SingularSystemError: no leak, and the Laplacian has (nearly) a kernel.
        CouplingMismatchError: the coupling is not symmetric.
        ConvergenceError: ``max_iter`` is not enough or the operator is not positive definite.
        ValueError: an argument out of range, shapes that do not fit.
    """

    def __init__(
        self,
        form: Form = "conservative",
        *,
        beta: float = 1.0,
        leak: float = 0.0,
        tol: float | None = None,
        max_iter: int = 1000,
    ) -> None:
        super().__init__(form, beta=beta, leak=leak, tol=tol, max_iter=max_iter)

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
        smallest, _ = laplacian_extremes(coupling, self.form)
        regular = 1000 * resolution(coupling.dtype)
        if not smallest > regular:
            raise SingularSystemError(
                f"Equilibrium(form='residual', leak=0) needs I − S positive definite; its smallest eigenvalue is "
                f"{smallest:.3g}, expected above {regular:g}. Pass leak > 0, or scale the coupling below spectral "
                f"radius 1, for instance 0.9 * AdjacencyDiffusivity('sym')."
            )

    def step(
        self,
        x: Float[Tensor, "N #H D"],
        coupling: Coupling,
        values: Float[Tensor, "N #H D"] | None = None,
        source: Float[Tensor, "N #H D"] | None = None,
    ) -> Float[Tensor, "N #H D"]:
        """Solve for the state at which diffusion, leak and source are in balance."""
        if source is None:
            source = x if values is None else values
        self.validate(x, coupling, values, source)
        b = self.beta * working_precision(source, max(x.size(1), coupling.heads))
        solution = self.solve(coupling, self.leak, b, source.dtype)
        return solution.to(source.dtype)
