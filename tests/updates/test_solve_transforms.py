"""Solves and limits under what torch wraps around them: forward mode, ``torch.func``, and batches of both."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import diffusion_mp as dm
from diffusion_mp.couplings import DenseCoupling
from diffusion_mp.graph import Graph
from diffusion_mp.layers import APPNPConv, CertifiedBlock, CertifiedConv, WeightedGraph
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    HeatKernel,
    ImplicitEuler,
    derivatives,
    fixed_point,
    teleport_limit,
)
from helpers import built

State = Callable[[Tensor], Tensor]

NODE = torch.arange(6)
ONE_WAY = torch.stack([NODE, (NODE + 1) % 6])
EDGES = torch.cat([ONE_WAY, ONE_WAY.flip(0)], 1)
X, V, G = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SYM = dm.AdjacencyDiffusivity("sym", direction="undirected")
ROW = dm.AdjacencyDiffusivity("row")


def ring() -> Graph:
    """A new graph, since what a graph keeps would be that of the first transform."""
    return Graph(6, EDGES, validate=False)


def frozen(build: Callable[[], nn.Module]) -> nn.Module:
    return built(build).double().eval().requires_grad_(False)


def layer(build: Callable[[], nn.Module]) -> State:
    module = frozen(build)
    return lambda x: module(x, ring())


def of_states(x: Tensor) -> DenseCoupling:
    """A coupling of the states themselves, so that the matrix has derivatives too."""
    weight = (-(x.unsqueeze(0) - x.unsqueeze(1)).square().sum(2)).exp()
    return DenseCoupling(weight, symmetric=True, nonnegative=True, row_stochastic=False)


def hidden(z: Tensor, x: Tensor) -> Tensor:
    return (x + 0.3 * z.roll(1, 0) * z.roll(1, 1)).tanh()


#: Solves of one linear system, or a matrix function.
LINEAR: dict[str, State] = {
    "implicit": lambda x: ImplicitEuler(0.7)(x, SYM(x, ring())),
    "crank": lambda x: CrankNicolson(0.7)(x, ROW(x, ring())),
    "equilibrium": lambda x: Equilibrium(leak=0.3)(x, SYM(x, ring())),
    "no-leak": lambda x: Equilibrium("residual")(x, 0.9 * SYM(x, ring())),
    "teleport": lambda x: teleport_limit(0.1)(x, ROW(x, ring()), source=x),
    "heat": lambda x: HeatKernel(0.7)(x, SYM(x, ring())),
    "heat-rows": lambda x: HeatKernel(0.7, "residual")(x, ROW(x, ring())),
    "own-weights": lambda x: ImplicitEuler(0.7)(x, of_states(x)),
    "heat-own-weights": lambda x: HeatKernel(0.7)(x, of_states(x)),
    "appnp": layer(lambda: APPNPConv(4, K=None)),
    "certified-conv": layer(
        lambda: CertifiedConv(4, penalty=None, constraint=None, num_layers=None)
    ),
    "certified-block": layer(lambda: CertifiedBlock(4, [WeightedGraph(4)], None, constraint=None)),
    "certified-difformer": layer(
        lambda: dm.CertifiedDIFFormer(
            4, 8, 3, num_layers=None, penalty=None, constraint=None, dropout=0.0
        )
    ),
}
#: Fixed points of steps that are not linear.
NONLINEAR: dict[str, State] = {
    "fixed-point": lambda x: fixed_point(lambda z: hidden(z, x), torch.zeros_like(x)),
    "ball": layer(lambda: CertifiedConv(4, penalty=None, num_layers=None)),
    "sphere": layer(
        lambda: CertifiedConv(4, penalty=None, num_layers=None, constraint="sphere", beta=3.0)
    ),
}
ALL = LINEAR | NONLINEAR
#: Attention and sequences have the same formulas, and operations between them that have their own tests.
FIRST_ORDER: dict[str, State] = {
    **ALL,
    "attention": lambda x: ImplicitEuler(0.7)(x, dm.SimpleDiffusivity()(x)),
    "heat-attention": lambda x: HeatKernel(0.7)(x, dm.SimpleDiffusivity()(x)),
    "gaussian": lambda x: ImplicitEuler(0.7)(x, dm.GaussianDiffusivity()(x)),
    "sequence": lambda x: ImplicitEuler(0.7)(x, dm.NeumannDiffusivity(budget=None)(x)),
    "heat-sequence": lambda x: HeatKernel(0.7)(x, dm.NeumannDiffusivity(budget=None)(x)),
    "attention-limit": layer(lambda: CertifiedConv(4, num_layers=None)),
    "batch": lambda x: ImplicitEuler(0.7)(
        x, dm.GaussianDiffusivity()(x, Graph(6, ptr=torch.tensor([0, 4, 6])))
    ),
    "labels": layer(lambda: dm.LabelPropagation(None)),
}


def loss(solve: State) -> Callable[[Tensor], Tensor]:
    return lambda x: (
        solve(x) * torch.linspace(-1, 1, solve_numel(solve), dtype=x.dtype).view(6, -1)
    ).sum()


def solve_numel(solve: State) -> int:
    return solve(X).numel()


def slope(solve: State, x: Tensor, direction: Tensor, step: float = 1e-5) -> Tensor:
    return (solve(x + step * direction) - solve(x - step * direction)) / (2 * step)


def assert_near(got: Tensor, expected: Tensor, error: float = 1e-6) -> None:
    assert (got - expected).norm() <= error * expected.norm()


def reverse(solve: State) -> Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(loss(solve)(x), x)[0]


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_tangents_are_central_differences(name: str) -> None:
    solve = FIRST_ORDER[name]
    expected = slope(solve, X, V)
    value, tangent = jvp(solve, (X,), (V,))
    assert_near(value, solve(X), 1e-10)
    assert_near(tangent, expected)
    with dual_level():
        assert_near(unpack_dual(solve(make_dual(X, V))).tangent, expected)


@pytest.mark.parametrize("name", [name for name in FIRST_ORDER if name != "labels"])
def test_functional_gradients_are_those_of_autograd(name: str) -> None:
    solve = FIRST_ORDER[name]
    expected = reverse(solve)
    assert_near(grad(loss(solve))(X), expected, 1e-9)
    _, pull = vjp(loss(solve), X)
    assert_near(pull(torch.ones((), dtype=X.dtype))[0], expected, 1e-9)


@pytest.mark.parametrize("name", ALL)
def test_jacobians_agree_and_so_does_the_linear_map(name: str) -> None:
    solve = ALL[name]
    assert_near(jacfwd(solve)(X), jacrev(solve)(X), 1e-9)
    assert_near(linearize(solve, X)[1](V), slope(solve, X, V))


@pytest.mark.parametrize("name", LINEAR)
def test_a_batch_of_gradients_is_that_of_every_state(name: str) -> None:
    solve = LINEAR[name]
    states = torch.stack([X, V, G])
    assert_near(vmap(solve)(states), torch.stack([solve(x) for x in states]), 1e-10)
    gradients = torch.stack([grad(loss(solve))(x) for x in states])
    assert_near(vmap(grad(loss(solve)))(states), gradients, 1e-9)


@pytest.mark.parametrize("name", ["own-weights", "heat-own-weights", *NONLINEAR])
def test_second_derivatives(name: str) -> None:
    solve = ALL[name]
    expected = slope(grad(loss(solve)), X, V)
    by_columns = torch.einsum("nchd,hd->nc", hessian(loss(solve))(X), V)
    assert_near(by_columns, expected)
    # ``torch.linalg.solve`` alone is wrong here.
    forward_first = grad(lambda x: jvp(loss(solve), (x,), (V,))[1])(X)
    assert_near(forward_first, expected)


def test_parameters_have_the_same_derivatives() -> None:
    for build in (
        lambda: CertifiedBlock(4, [WeightedGraph(4)], None, constraint=None),
        lambda: CertifiedConv(4, num_layers=None),
        lambda: CertifiedConv(4, penalty=None, constraint=None, num_layers=None),
    ):
        module = built(build).double()
        values = {name: parameter.detach() for name, parameter in module.named_parameters()}

        def out(values: dict[str, Tensor], module: nn.Module = module) -> Tensor:
            return (functional_call(module, values, (X, EDGES)) * G).sum()

        expected = torch.autograd.grad((module(X, EDGES) * G).sum(), list(module.parameters()))
        torch.testing.assert_close(
            list(grad(out)(values).values()), list(expected), rtol=1e-8, atol=1e-10
        )
        tangents = {name: torch.ones_like(value) for name, value in values.items()}
        pushed = jvp(out, (values,), (tangents,))[1]
        torch.testing.assert_close(
            pushed, sum(part.sum() for part in expected), rtol=1e-8, atol=1e-10
        )


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six nodes count as more than a formula has a matrix for."""
    monkeypatch.setattr(derivatives, "DENSE", 3)


LARGE = (
    "implicit",
    "crank",
    "equilibrium",
    "teleport",
    "own-weights",
    "certified-conv",
    "certified-block",
)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", [*LARGE, *NONLINEAR])
def test_large_systems_are_differentiated_once_without_a_matrix(name: str) -> None:
    solve = ALL[name]
    expected = slope(solve, X, V)
    assert_near(jvp(solve, (X,), (V,))[1], expected)
    with dual_level():
        assert_near(unpack_dual(solve(make_dual(X, V))).tangent, expected)
    assert_near(grad(loss(solve))(X), reverse(solve), 1e-9)


@pytest.mark.usefixtures("large", "no_typecheck")
@pytest.mark.parametrize("name", ["own-weights", "fixed-point", "certified-block"])
def test_large_systems_say_what_they_cannot_do(name: str) -> None:
    solve = ALL[name]
    with pytest.raises(
        RuntimeError, match="once differentiable: the derivative of a solved system"
    ):
        grad(lambda x: grad(loss(solve))(x).square().sum())(X)
    for call in (
        lambda: jacrev(solve)(X),
        lambda: jacfwd(solve)(X),
        lambda: linearize(solve, X)[1](V),
    ):
        with pytest.raises(
            NotImplementedError, match=r"more than 4096 unknowns .* Take torch.func.vjp or jvp"
        ):
            call()


@pytest.mark.parametrize("name", NONLINEAR)
def test_a_limit_that_iterates_refuses_vmap(name: str) -> None:
    for call in (NONLINEAR[name], grad(loss(NONLINEAR[name]))):
        with pytest.raises(
            NotImplementedError, match="another number of steps for every entry of a vmap"
        ):
            vmap(call)(torch.stack([X, V]))
