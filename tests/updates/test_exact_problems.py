"""The problems themselves: their answers solve the equations they claim to, and they serve a user's own update."""

import math

import pytest
import torch

from diffusion_mp.couplings import Coupling
from diffusion_mp.testing.problems import (
    Problem,
    cosine_mode,
    exact_problems,
    order_of_convergence,
    path_adjacency,
    path_problem,
)
from diffusion_mp.updates import StateUpdate


@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
def test_answers_solve_their_equations(problem: Problem) -> None:
    assert torch.equal(problem.matrix, problem.matrix.T)
    torch.testing.assert_close(problem.coupling.to_dense()[0], problem.matrix)
    eigenvalues = torch.linalg.eigvalsh(problem.laplacian)
    assert abs(eigenvalues[0]) < 1e-12 < eigenvalues[1]  # connected
    half = Problem("half", problem.matrix, problem.heat(0.5), problem.form)
    torch.testing.assert_close(half.heat(0.5), problem.heat(1.0))
    before, after = problem.heat(1.0 - 1e-4), problem.heat(1.0 + 1e-4)
    slope = -torch.einsum("ij,jhd->ihd", problem.laplacian, problem.heat(1.0))
    torch.testing.assert_close((after - before) / 2e-4, slope, rtol=1e-5, atol=1e-5)


def test_cosine_modes_are_eigenvectors() -> None:
    laplacian = path_adjacency(9).sum(1).diag() - path_adjacency(9)
    for k in range(9):
        mode, eigenvalue = cosine_mode(9, k)
        torch.testing.assert_close(laplacian @ mode[:, 0, 0], eigenvalue * mode[:, 0, 0], rtol=0, atol=1e-12)


class Heun(StateUpdate):
    """A user's own update: the explicit trapezoidal rule, of second order."""

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.tau = tau

    def step(
        self,
        x: torch.Tensor,
        coupling: Coupling,
        values: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> torch.Tensor:
        values = self.validate(x, coupling, values, source)
        degree = coupling.degree().unsqueeze(-1)
        first = coupling @ values - degree * values
        ahead = values + self.tau * first
        return values + self.tau / 2 * (first + coupling @ ahead - degree * ahead)


def test_a_users_own_update_shows_its_order() -> None:
    assert order_of_convergence(Heun, path_problem(), counts=(32, 64, 128)) == pytest.approx(2.0, abs=0.05)
    mode, eigenvalue = cosine_mode(12, 4)
    factor = 1 - 0.1 * eigenvalue + (0.1 * eigenvalue) ** 2 / 2
    torch.testing.assert_close(Heun(0.1)(mode, path_problem(12).coupling), factor * mode)
    assert factor == pytest.approx(math.exp(-0.1 * eigenvalue), abs=1e-2)
