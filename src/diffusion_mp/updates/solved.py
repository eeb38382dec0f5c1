"""``SolvedUpdate``: what the updates share that solve a linear system with the Laplacian."""

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_counts, check_positive
from diffusion_mp.updates.base import Form, LaplacianUpdate
from diffusion_mp.updates.linear_solve import solve

# Relative residuals that conjugate gradients reach in double precision, and that six digits of a solution need.
DOUBLE, SINGLE = 1e-12, 1e-6


class SolvedUpdate(LaplacianUpdate):
    """Base of the updates that solve (Δ + shift) x = b, for symmetric couplings.

    In double precision, whatever the precision of the state: a long step or a small leak makes systems whose condition
    number is the inverse of float32's resolution.

    Args:
        form, beta, leak: as in `LaplacianUpdate`.
        tol: relative residual of every (head, channel) column; by default 1e-12, for states in single and half
            precision 1e-6, times the shift where that is below one, so that six digits of the solution are right.
        max_iter: iterations of conjugate gradients at most.
    """

    needs_symmetric = True

    def __init__(self, form: Form, *, beta: float, leak: float, tol: float | None, max_iter: int) -> None:
        super().__init__(form, beta=beta, leak=leak)
        if tol is not None:
            check_positive(tol, "tol")
        check_counts(max_iter=max_iter)
        self.tol, self.max_iter = tol, max_iter

    def solve(self, coupling: Coupling, shift: float, b: Tensor, dtype: torch.dtype) -> Tensor:
        """(Δ + shift)⁻¹ b, as exact as a state of ``dtype`` needs it.

        Exact where the coupling has the eigenvectors of Δ at hand, else by conjugate gradients, differentiated
        implicitly. Without the promise S ≥ 0 it is for the latter to find out whether the system is definite.
        """
        if coupling.nonnegative and shift > 0.0:
            solution = self.exact(coupling, lambda rate: 1.0 / (rate + shift), b)
            if solution is not None:
                return solution
        self.warn_if_rounded(coupling, shift)
        tol = self.tol or (DOUBLE if dtype == torch.float64 else max(DOUBLE, SINGLE * min(1.0, shift or 1.0)))
        operator: Callable[[Tensor], Tensor] = self.laplacian(coupling, b.dtype, shift)
        return solve(operator, b, tol=tol, max_iter=self.max_iter, what=f"the system of {self}")
