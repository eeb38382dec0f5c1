"""``SolvedUpdate``: what the updates share that solve a linear system with the Laplacian."""

from collections.abc import Callable

from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_counts, check_positive
from diffusion_mp.updates.base import Form, LaplacianUpdate
from diffusion_mp.updates.linear_solve import solve


class SolvedUpdate(LaplacianUpdate):
    """Base of the updates that solve (Δ + shift) x = b, for symmetric couplings.

    Args:
        form, beta, leak: as in `LaplacianUpdate`.
        tol: relative residual of every (head, channel) column; default 1e-12 in double, 1e-6 in single precision.
        max_iter: iterations of conjugate gradients at most.
    """

    needs_symmetric = True

    def __init__(self, form: Form, *, beta: float, leak: float, tol: float | None, max_iter: int) -> None:
        super().__init__(form, beta=beta, leak=leak)
        if tol is not None:
            check_positive(tol, "tol")
        check_counts(max_iter=max_iter)
        self.tol, self.max_iter = tol, max_iter

    def solve(self, coupling: Coupling, shift: float, b: Tensor) -> Tensor:
        """(Δ + shift)⁻¹ b.

        Exact where the coupling has the eigenvectors of Δ at hand, else by conjugate gradients, differentiated
        implicitly. Without the promise S ≥ 0 it is for the latter to find out whether the system is definite.
        """
        if coupling.nonnegative and shift > 0.0:
            solution = self.exact(coupling, lambda rate: 1.0 / (rate + shift), b)
            if solution is not None:
                return solution
        operator: Callable[[Tensor], Tensor] = self.laplacian(coupling, b.dtype, shift)
        return solve(operator, b, tol=self.tol, max_iter=self.max_iter, what=f"the system of {self}")
