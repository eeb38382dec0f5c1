"""The trapezoidal step: against dense solves, of second order, at any τ, with implicit gradients."""

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.testing import tolerance
from diffusion_mp.testing.problems import Problem, cosine_mode, exact_problems, order_of_convergence, path_problem
from diffusion_mp.updates import CrankNicolson, ImplicitEuler


def dense_step(problem: Problem, tau: float, source: Tensor, beta: float, leak: float) -> Tensor:
    """(I + τ/2(Δ + κ))⁻¹ ((I − τ/2(Δ + κ)) x + τβh)."""
    identity = torch.eye(len(problem.matrix), dtype=torch.float64)
    half = tau / 2 * (problem.laplacian + leak * identity)
    right = torch.einsum("ij,jhd->ihd", identity - half, problem.state) + tau * beta * source
    return torch.linalg.solve(identity + half, right.flatten(1)).view_as(right)


@pytest.mark.parametrize("tau", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
def test_equals_a_dense_solve(problem: Problem, tau: float) -> None:
    source = problem.state.flip(0)
    got = CrankNicolson(tau, problem.form)(problem.state, problem.coupling)
    assert (got - dense_step(problem, tau, source, 0.0, 0.0)).abs().max() <= 1e-8
    got = CrankNicolson(tau, problem.form, beta=0.4, leak=0.2)(problem.state, problem.coupling, source=source)
    assert (got - dense_step(problem, tau, source, 0.4, 0.2)).abs().max() <= 1e-8


@pytest.mark.parametrize("problem", [path_problem(6), path_problem(6, "residual")], ids=lambda p: p.name)
def test_order_two(problem: Problem) -> None:
    def step(tau: float) -> CrankNicolson:
        return CrankNicolson(tau, problem.form)

    assert order_of_convergence(step, problem, t=0.5, counts=(8, 16, 32)) == pytest.approx(2.0, abs=0.05)


def test_a_mode_is_scaled_by_its_own_factor_and_changes_sign_in_long_steps() -> None:
    mode, rate = cosine_mode(12, 11)
    coupling = path_problem(12).coupling
    for tau in (0.1, 1.0, 50.0):
        factor = (1 - tau * rate / 2) / (1 + tau * rate / 2)
        torch.testing.assert_close(CrankNicolson(tau)(mode, coupling), factor * mode, rtol=1e-9, atol=1e-9)
    assert factor < -0.9  # where an implicit Euler step of that size has left nothing:
    assert ImplicitEuler(50.0)(mode, coupling).norm() < 0.01 * mode.norm()


def test_gradients_of_state_source_and_coupling() -> None:
    problem = path_problem(5)
    coupling = problem.coupling
    receiver, sender = problem.matrix.nonzero(as_tuple=True)
    upper = problem.matrix.triu().nonzero(as_tuple=True)

    def step(x: Tensor, source: Tensor, weight: Tensor) -> Tensor:
        matrix = torch.zeros(5, 5, dtype=torch.float64).index_put(upper, weight)
        entries = (matrix + matrix.T)[receiver, sender]
        learned = SparseCoupling(coupling.graph, entries, symmetric=True, nonnegative=True)
        return CrankNicolson(0.7, beta=0.3, leak=0.2)(x, learned, source=source)

    x = problem.state.clone().requires_grad_()
    source = problem.state.flip(0).clone().requires_grad_()
    weight = torch.linspace(0.5, 1.5, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(step, (x, source, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    problem = path_problem(20)
    coupling = SparseCoupling(
        problem.coupling.graph, problem.coupling.weight.to(dtype), symmetric=True, nonnegative=True
    )
    got = CrankNicolson(2.0)(problem.state.to(dtype), coupling)
    assert got.dtype == dtype
    expected = CrankNicolson(2.0)(problem.state.to(dtype).double(), problem.coupling)
    torch.testing.assert_close(got.double(), expected, **tolerance("solve", dtype)._asdict())
