"""The implicit step: against a dense solve, at any τ, with implicit gradients."""

import pytest
import torch

from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.testing.problems import (
    Problem,
    cosine_mode,
    exact_problems,
    order_of_convergence,
    path_problem,
    random_problem,
)
from diffusion_mp.updates import ExplicitEuler, ImplicitEuler


@pytest.mark.parametrize("tau", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
def test_equals_a_dense_solve(problem: Problem, tau: float) -> None:
    got = ImplicitEuler(tau, problem.form)(problem.state, problem.coupling)
    assert (got - problem.implicit_step(tau)).abs().max() <= 1e-8
    source = problem.state.flip(0)
    got = ImplicitEuler(tau, problem.form, beta=0.4, leak=0.2)(problem.state, problem.coupling, source=source)
    assert (got - problem.implicit_step(tau, source, beta=0.4, leak=0.2)).abs().max() <= 1e-8


def test_an_explicit_step_of_that_size_would_explode() -> None:
    """The comparison that makes the law above a law about this update."""
    problem = random_problem()
    assert ExplicitEuler(100.0)(problem.state, problem.coupling).norm() > 100 * problem.state.norm()


def test_order_one() -> None:
    assert order_of_convergence(ImplicitEuler, path_problem(6), t=0.2, counts=(16, 32, 64)) == pytest.approx(
        1.0, abs=0.05
    )


def test_scales_a_cosine_mode() -> None:
    mode, eigenvalue = cosine_mode(10, 3)
    torch.testing.assert_close(ImplicitEuler(5.0)(mode, path_problem(10).coupling), mode / (1 + 5.0 * eigenvalue))


def test_starts_at_the_values() -> None:
    problem = path_problem()
    values = problem.state.flip(0)
    step = ImplicitEuler(0.5)
    assert torch.equal(step(problem.state, problem.coupling, values), step(values, problem.coupling))


def test_gradients_in_state_source_and_edge_weights() -> None:
    problem = path_problem(5)
    graph, weight = problem.coupling.graph, torch.tensor([0.5, 1.0, 1.5, 0.7], dtype=torch.float64)
    sender, receiver = graph.edges
    link = torch.minimum(sender, receiver)  # both directions of a link share a weight

    def apply(x, source, weight):  # type: ignore[no-untyped-def]
        coupling = SparseCoupling(graph, weight[link], symmetric=True, nonnegative=True)
        return ImplicitEuler(2.0, beta=0.5, leak=0.1)(x, coupling, source=source)

    state = problem.state[:, :1, :2]
    x, source = state.clone().requires_grad_(), state.flip(0).clone().requires_grad_()
    assert torch.autograd.gradcheck(apply, (x, source, weight.requires_grad_()))


def test_half_precision_state_is_solved_in_single() -> None:
    problem = path_problem()
    got = ImplicitEuler(2.0)(problem.state.half(), problem.coupling)
    assert got.dtype == torch.float16
    assert (got - problem.implicit_step(2.0)).abs().max() < 1e-2
