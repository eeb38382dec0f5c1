"""Steps and steady states against dense algebra, modes and orders known in closed form; gradients; refusals."""

import copy
import math

import numpy as np
import pytest
import torch
from dense_updates import both, dense_update
from torch.testing import assert_close

from diffusion_mp.couplings import IdentityCoupling, SparseCoupling
from diffusion_mp.energies.spectrum import spectral_interval
from diffusion_mp.graph import Graph
from diffusion_mp.testing import (
    cosine_mode,
    exact_problems,
    order_of_convergence,
    path_problem,
    random_problem,
)
from diffusion_mp.testing.problems import path_adjacency
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    ExplicitEuler,
    HeatKernel,
    ImplicitEuler,
)
from diffusion_mp.updates.heat_kernel import chebyshev_weights
from helpers import close, randn

every_problem = pytest.mark.parametrize(
    "problem", exact_problems(), ids=lambda problem: problem.name
)
UPDATES = [
    *(HeatKernel(t) for t in (1e-3, 1.0, 50.0)),
    *(
        step(tau, **kw)
        for step, times in (
            (ExplicitEuler, (0.1,)),
            (ImplicitEuler, (1e-3, 1.0, 100.0)),
            (CrankNicolson, (1e-3, 1.0, 100.0)),
        )
        for tau in times
        for kw in ({}, {"beta": 0.4, "leak": 0.2})
    ),
    *(Equilibrium(beta=0.7, leak=leak) for leak in (0.01, 1.0)),
]


@every_problem
def test_the_problems_solve_their_equations(problem):
    assert_close(problem.coupling.to_dense()[0], problem.matrix)
    eigenvalues = torch.linalg.eigvalsh(problem.laplacian)
    assert abs(eigenvalues[0]) < 1e-12 < eigenvalues[1]  # connected
    low, high = spectral_interval(problem.coupling, problem.form)
    assert low <= eigenvalues[0] + 1e-12
    assert high >= eigenvalues[-1] - 1e-12
    update = HeatKernel(0.3, problem.form)
    expected = dense_update(update, problem.coupling, problem.state, None)
    assert_close(problem.heat(0.3), expected)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@every_problem
def test_equals_dense_algebra(problem, update):
    update = copy.copy(update)
    update.form = problem.form
    assert_close(*both(update, problem.coupling, problem.state), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("step", "problem", "order", "t", "count"),
    [
        *((ExplicitEuler, problem, 1.0, 0.25, 64) for problem in exact_problems()[1:5]),
        (ImplicitEuler, path_problem(6), 1.0, 0.2, 32),
        (CrankNicolson, path_problem(6), 2.0, 0.5, 16),
        (CrankNicolson, path_problem(6, "residual"), 2.0, 0.5, 16),
    ],
)
def test_orders_of_convergence(step, problem, order, t, count):
    def update(tau):
        return step(tau, problem.form)

    got = order_of_convergence(update, problem, t=t, count=count)
    assert got == pytest.approx(order, abs=0.05)


@pytest.mark.parametrize("k", [0, 1, 5, 11])
def test_a_cosine_mode_is_scaled_by_its_own_factor(k):
    mode, rate = cosine_mode(12, k)
    laplacian = path_adjacency(12).sum(1).diag() - path_adjacency(12)
    assert_close(laplacian @ mode[:, 0, 0], rate * mode[:, 0, 0], rtol=0, atol=1e-12)
    for update, factor in [
        (ExplicitEuler(0.2), 1 - 0.2 * rate),
        (HeatKernel(2.0), math.exp(-2 * rate)),
        (ImplicitEuler(5.0), 1 / (1 + 5 * rate)),
        *(
            (CrankNicolson(tau), (1 - tau * rate / 2) / (1 + tau * rate / 2))
            for tau in (0.1, 1.0, 50.0)
        ),
    ]:
        close(update(mode, path_problem(12).coupling), factor * mode, "layer")


@pytest.mark.parametrize("tau", [0.1, 1.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("step", [ImplicitEuler, CrankNicolson])
def test_implicit_steps_never_expand(step, form, tau):
    problem = random_problem(form=form)
    # the condition number grows with τ
    x = problem.state
    rounding = 1e-11 + 1e-14 * tau
    for _ in range(3):
        after = step(tau, problem.form)(x, problem.coupling)
        assert (after.norm(dim=0) <= x.norm(dim=0) * (1 + rounding)).all()
        x = after
    if (form, tau) == ("conservative", 100.0):
        assert (
            ExplicitEuler(tau)(problem.state, problem.coupling).norm()
            > 100 * problem.state.norm()
        )


def test_a_signed_coupling_takes_its_interval_from_lanczos():
    problem = path_problem(260)
    weight = problem.coupling.weight.clone()
    graph = problem.coupling.graph
    weight[graph.edges.sum(0) == 1] = -0.5  # between the first two nodes
    coupling = SparseCoupling(graph, weight, symmetric=True)
    close(*both(HeatKernel(2.0), coupling, problem.state), "layer")


@pytest.mark.parametrize("z", [1e-6, 0.3, 10.0, 1e4])
@pytest.mark.parametrize("tol", [1e-3, 1e-15])
def test_the_chebyshev_series_is_as_long_as_needed(z, tol):
    weights = chebyshev_weights(z, tol)
    points = np.cos(np.linspace(0, np.pi, 101))
    series = np.polynomial.chebyshev.chebval(points, weights)
    assert np.abs(series - np.exp(-z * (points + 1))).max() <= tol + 5e-14
    digits = math.log(1 / tol) + 5
    assert len(weights) <= 2 + 2 * math.sqrt(z * digits) + 2 * digits


def test_heat_without_edges():
    x = randn(4, 2, 3).float()
    empty = SparseCoupling(Graph(4), symmetric=True, nonnegative=True)
    assert torch.equal(HeatKernel(2.0)(x, empty), x)
    assert_close(HeatKernel(2.0, "residual")(x, empty), math.exp(-2.0) * x)
    assert_close(HeatKernel(2.0)(x, IdentityCoupling(4)), x)


def test_gcn_step_keeps_roots_of_degrees_not_constants():
    """With S = D^-½AD^-½, √d is the kernel of I − S, whose energy the residual step descends (D4 in docs/errata.md)."""
    problem = random_problem(form="residual")
    step = ExplicitEuler(0.5, "residual")
    root = random_problem().matrix.sum(1).sqrt()[:, None, None]
    assert_close(step(root, problem.coupling), root)
    ones = torch.ones_like(root)
    assert (step(ones, problem.coupling) - ones).abs().max() > 1e-2


@every_problem
def test_an_explicit_step_stays_at_the_state_and_propagates_the_values(problem):
    x = problem.state
    values = x.flip(0)
    step = ExplicitEuler(0.1, problem.form, leak=0.3)
    expected = step(x, problem.coupling) + 0.1 * (problem.coupling @ (values - x))
    assert_close(step(x, problem.coupling, values), expected)


def test_a_step_starts_at_the_values_and_a_state_is_its_own_source_unless_one_is_given():
    problem = path_problem()
    update = Equilibrium(leak=0.5)
    step = ImplicitEuler(0.5)
    values = problem.state.flip(0)
    assert torch.equal(
        step(problem.state, problem.coupling, values), step(values, problem.coupling)
    )
    default = update(problem.state, problem.coupling)
    zero = torch.zeros_like(problem.state)
    assert torch.equal(default, update(zero, problem.coupling, source=problem.state))
    assert torch.equal(default, update(zero, problem.coupling, values=problem.state))


def test_gradients_do_not_unroll_the_iteration_and_have_no_derivative():
    def nodes(tensor):
        visited = set()
        stack = [tensor.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in visited:
                visited.add(node)
                stack.extend(parent for parent, _ in node.next_functions)
        return len(visited)

    problems = path_problem(4), path_problem(200)
    small, large = (
        Equilibrium(leak=1e-3)(p.state.requires_grad_(), p.coupling) for p in problems
    )
    assert nodes(small) == nodes(large) < 30
    x = path_problem().state.requires_grad_()
    out = Equilibrium(leak=0.5)(x, path_problem().coupling)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        gradient.square().sum().backward()
