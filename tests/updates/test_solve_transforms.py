"""Solves and limits under forward mode, ``torch.func``, and batches of both.

``test_transform_matrix.py`` has all layers under all transforms. Here are the updates by themselves, derivatives of the
coupling, central differences, and systems that are too large for a formula.
"""

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize

from diffusion_mp import (
    AdjacencyDiffusivity,
    GaussianDiffusivity,
    NeumannDiffusivity,
    SimpleDiffusivity,
)
from diffusion_mp.couplings import DenseCoupling
from diffusion_mp.graph import Graph
from diffusion_mp.layers import CertifiedBlock, CertifiedConv, WeightedGraph
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    HeatKernel,
    ImplicitEuler,
    derivatives,
    fixed_point,
    teleport_limit,
)
from helpers import built, randn

NODE = torch.arange(6)
ONE_WAY = torch.stack([NODE, (NODE + 1) % 6])
EDGES = torch.cat([ONE_WAY, ONE_WAY.flip(0)], 1)
X, V, G = randn(3, 6, 4)
SYM = AdjacencyDiffusivity("sym", direction="undirected")
ROW = AdjacencyDiffusivity("row")


def ring():
    """A new graph, since what a graph keeps would be that of the first transform."""
    return Graph(6, EDGES, validate=False)


def layer(build):
    module = built(build).double().eval().requires_grad_(False)
    return lambda x: module(x, ring())


def of_states(x):
    """A coupling of the states themselves, so that the matrix has derivatives too."""
    weight = (-(x.unsqueeze(0) - x.unsqueeze(1)).square().sum(2)).exp()
    return DenseCoupling(weight, symmetric=True, nonnegative=True, row_stochastic=False)


def hidden(z, x):
    return (x + 0.3 * z.roll(1, 0) * z.roll(1, 1)).tanh()


BATCH = Graph(6, ptr=torch.tensor([0, 4, 6]))
SEQUENCE = NeumannDiffusivity(budget=None)
#: Solves of one linear system, or a matrix function.
LINEAR = {
    "crank": lambda x: CrankNicolson(0.7)(x, ROW(x, ring())),
    "no-leak": lambda x: Equilibrium("residual")(x, 0.9 * SYM(x, ring())),
    "teleport": lambda x: teleport_limit(0.1)(x, ROW(x, ring()), source=x),
    "heat-rows": lambda x: HeatKernel(0.7, "residual")(x, ROW(x, ring())),
    "own-weights": lambda x: ImplicitEuler(0.7)(x, of_states(x)),
    "heat-own-weights": lambda x: HeatKernel(0.7)(x, of_states(x)),
    "block": layer(
        lambda: CertifiedBlock(4, [WeightedGraph(4)], None, constraint=None)
    ),
}
#: Fixed points of steps that are not linear.
NONLINEAR = {
    "fixed-point": lambda x: fixed_point(lambda z: hidden(z, x), torch.zeros_like(x)),
    "sphere": layer(
        lambda: CertifiedConv(
            4, penalty=None, num_layers=None, constraint="sphere", beta=3.0
        )
    ),
}
#: Attention and sequences have the same formulas, and operations between them that have their own tests.
FIRST_ORDER = {
    "attention": lambda x: ImplicitEuler(0.7)(x, SimpleDiffusivity()(x)),
    "heat-attention": lambda x: HeatKernel(0.7)(x, SimpleDiffusivity()(x)),
    "sequence": lambda x: ImplicitEuler(0.7)(x, SEQUENCE(x)),
    "heat-sequence": lambda x: HeatKernel(0.7)(x, SEQUENCE(x)),
    "batch": lambda x: ImplicitEuler(0.7)(x, GaussianDiffusivity()(x, BATCH)),
}
ALL = LINEAR | NONLINEAR | FIRST_ORDER


def loss(solve):
    weights = torch.linspace(-1, 1, X.numel(), dtype=X.dtype).view_as(X)
    return lambda x: (solve(x) * weights).sum()


def slope(solve, x, direction, step=1e-5):
    return (solve(x + step * direction) - solve(x - step * direction)) / (2 * step)


def assert_near(got, expected, error=1e-6):
    assert (got - expected).norm() <= error * expected.norm()


def check_first_derivatives(solve):
    """Tangents are central differences, and gradients those of autograd."""
    expected = slope(solve, X, V)
    value, tangent = jvp(solve, (X,), (V,))
    assert_near(value, solve(X), 1e-10)
    assert_near(tangent, expected)
    with dual_level():
        assert_near(unpack_dual(solve(make_dual(X, V))).tangent, expected)
    x = X.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(loss(solve)(x), x)
    assert_near(grad(loss(solve))(X), by_autograd, 1e-9)


@pytest.mark.parametrize("name", ALL)
def test_first_derivatives(name):
    check_first_derivatives(ALL[name])


@pytest.mark.parametrize("name", ["own-weights", "heat-own-weights", *NONLINEAR])
def test_second_derivatives(name):
    solve = ALL[name]
    expected = slope(grad(loss(solve)), X, V)
    by_columns = torch.einsum("nchd,hd->nc", hessian(loss(solve))(X), V)
    assert_near(by_columns, expected)
    # ``torch.linalg.solve`` alone is wrong here.
    forward_first = grad(lambda x: jvp(loss(solve), (x,), (V,))[1])(X)
    assert_near(forward_first, expected)


@pytest.fixture
def large(monkeypatch):
    """Six nodes count as more than a formula has a matrix for."""
    monkeypatch.setattr(derivatives, "DENSE", 3)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "name", ["crank", "teleport", "own-weights", "block", *NONLINEAR]
)
def test_large_systems_are_differentiated_once_without_a_matrix(name):
    check_first_derivatives(ALL[name])


@pytest.mark.usefixtures("large", "no_typecheck")
@pytest.mark.parametrize("name", ["own-weights", "fixed-point", "block"])
def test_large_systems_say_what_they_cannot_do(name):
    solve = ALL[name]
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad(lambda x: grad(loss(solve))(x).square().sum())(X)
    for transform in (
        jacrev(solve),
        jacfwd(solve),
        lambda x: linearize(solve, x)[1](V),
    ):
        with pytest.raises(NotImplementedError, match="more than 4096 unknowns"):
            transform(X)
