"""The steady state: against a dense solve, as the limit of explicit steps, its gradients, its refusals."""

import pytest
import torch

from diffusion_mp.couplings import LowRankCoupling, SparseCoupling
from diffusion_mp.errors import ConvergenceError, SingularSystemError
from diffusion_mp.testing.problems import Problem, exact_problems, path_problem, random_problem
from diffusion_mp.updates import Equilibrium, ExplicitEuler


@pytest.mark.parametrize("leak", [0.01, 1.0])
@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
def test_equals_a_dense_solve(problem: Problem, leak: float) -> None:
    source = problem.state.flip(0)
    got = Equilibrium(problem.form, beta=0.7, leak=leak)(problem.state, problem.coupling, source=source)
    assert (got - problem.steady_state(source, beta=0.7, leak=leak)).abs().max() <= 1e-8


def test_state_is_its_own_source_unless_one_is_given() -> None:
    problem = path_problem()
    update = Equilibrium(leak=0.5)
    own = update(problem.state, problem.coupling)
    assert torch.equal(own, update(torch.zeros_like(problem.state), problem.coupling, source=problem.state))
    assert torch.equal(own, update(torch.zeros_like(problem.state), problem.coupling, values=problem.state))


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_appnp_runs_into_it(alpha: float) -> None:
    """K → ∞ steps of (1 − α) S z + α h."""
    problem = random_problem(form="residual")
    weight = alpha / (1 - alpha)
    step = ExplicitEuler(1 - alpha, "residual", beta=weight, leak=weight)
    limit = Equilibrium("residual", beta=weight, leak=weight)(problem.state, problem.coupling)
    x, distances = problem.state, []
    for _ in range(300):
        x = step(x, problem.coupling, source=problem.state)
        distances.append(float((x - limit).norm()))
    start = float((problem.state - limit).norm())
    assert all(distance <= (1 - alpha) ** (k + 1) * start + 1e-10 for k, distance in enumerate(distances))
    assert distances[4] > 1e-3 * start  # the limit is not simply where it began
    assert distances[-1] < 1e-10


def test_is_a_fixed_point_of_the_explicit_step() -> None:
    problem = random_problem()
    limit = Equilibrium(beta=0.3, leak=0.2)(problem.state, problem.coupling)
    step = ExplicitEuler(0.1, beta=0.3, leak=0.2)
    torch.testing.assert_close(step(limit, problem.coupling, source=problem.state), limit, rtol=1e-10, atol=1e-10)


def test_gradients_in_source_and_edge_weights() -> None:
    problem = path_problem(5)
    graph, weight = problem.coupling.graph, torch.tensor([0.5, 1.0, 1.5, 0.7], dtype=torch.float64)
    link = graph.edges.min(0).values  # both directions of a link share a weight

    def apply(source, weight):  # type: ignore[no-untyped-def]
        coupling = SparseCoupling(graph, weight[link], symmetric=True, nonnegative=True)
        return Equilibrium(beta=0.5, leak=0.3)(source, coupling)

    source = problem.state[:, :1, :2].flip(0).requires_grad_()
    assert torch.autograd.gradcheck(apply, (source, weight.requires_grad_()))


def test_gradients_in_the_features_of_an_all_pair_coupling() -> None:
    generator = torch.Generator().manual_seed(0)
    feature = torch.rand(4, 2, 2, dtype=torch.float64, generator=generator).requires_grad_()
    x = torch.randn(4, 2, 2, dtype=torch.float64, generator=generator).requires_grad_()

    def apply(x, feature):  # type: ignore[no-untyped-def]
        return Equilibrium(leak=0.5)(x, LowRankCoupling(feature, feature, symmetric=True, nonnegative=True))

    assert torch.autograd.gradcheck(apply, (x, feature))


def test_gradients_do_not_unroll_the_iteration() -> None:
    """The graph behind the result has the same size however many iterations it took."""

    def nodes(tensor: torch.Tensor) -> int:
        seen, stack = set(), [tensor.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack.extend(parent for parent, _ in node.next_functions)
        return len(seen)

    small, large = (
        Equilibrium(leak=1e-3)(problem.state.requires_grad_(), problem.coupling)
        for problem in (path_problem(4), path_problem(200))
    )
    assert nodes(small) == nodes(large) < 30


def test_second_derivatives_are_refused_by_name() -> None:
    problem = path_problem()
    x = problem.state.requires_grad_()
    (gradient,) = torch.autograd.grad(Equilibrium(leak=0.5)(x, problem.coupling).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        gradient.square().sum().backward()


def test_singular_systems_are_refused() -> None:
    conservative, residual = random_problem(), random_problem(form="residual")
    with pytest.raises(SingularSystemError, match=r"no unique steady state.*Pass leak > 0"):
        Equilibrium()(conservative.state, conservative.coupling)
    with pytest.raises(SingularSystemError, match=r"smallest eigenvalue is .*Pass leak > 0"):
        Equilibrium("residual")(residual.state, residual.coupling)


@pytest.mark.parametrize("num_nodes", [40, 400])
def test_a_contracting_coupling_needs_no_leak_in_the_residual_form(num_nodes: int) -> None:
    problem = random_problem(num_nodes, "residual")
    damped = Problem("damped", 0.9 * problem.matrix, problem.state, "residual")
    got = Equilibrium("residual")(problem.state, 0.9 * problem.coupling)
    assert (got - damped.steady_state(problem.state)).abs().max() <= 1e-8


def test_indefinite_system_is_refused() -> None:
    """Row sums far above one in the residual form: there is no stable steady state."""
    problem = random_problem()
    with pytest.raises(ConvergenceError, match="not positive definite"):
        Equilibrium("residual", leak=0.1)(problem.state, problem.coupling)
