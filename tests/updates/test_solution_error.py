"""What a linear limit promises: the relative error of the solution, at any condition number, or an error."""

import pytest
import torch
from dense_updates import DOUBLE
from torch.testing import assert_close

from diffusion_mp import AdjacencyDiffusivity, Graph
from diffusion_mp.energies import CouplingTerm, EnergyTerm
from diffusion_mp.errors import ConvergenceError
from diffusion_mp.layers import CertifiedBlock, CertifiedConv, WeightedGraph
from diffusion_mp.updates import Equilibrium, ImplicitEuler
from diffusion_mp.updates.linear_solve import conjugate_gradients
from helpers import built, randn

NODES = 60
DTYPES = [torch.float32, DOUBLE, torch.bfloat16]


def path(num_nodes):
    node = torch.arange(num_nodes - 1)
    return torch.stack([node, node + 1])


def star(num_nodes):
    node = torch.arange(1, num_nodes)
    return torch.stack([torch.zeros_like(node), node])


GRAPHS = {
    "path": path(NODES),
    "star": star(NODES),
    "apart": torch.cat([path(NODES // 2), NODES // 2 + star(NODES // 2)], 1),
}


def edges(kind):
    one_way = GRAPHS[kind]
    return torch.cat([one_way, one_way.flip(0)], 1)


def limit(layer, ratio, normalization):
    """A block or convolution at rest with μ/β = ``ratio``."""
    mu = ratio**0.5
    beta = ratio**-0.5
    if layer == "conv":
        graph = AdjacencyDiffusivity(normalization, direction="undirected")  # type: ignore[arg-type]
        return CertifiedConv(
            3,
            penalty=None,
            constraint=None,
            num_layers=None,
            beta=beta,
            mu=mu,
            graph=graph,
        )
    weighted = WeightedGraph(3, mu, matrix="identity", normalization=normalization)  # type: ignore[arg-type]
    return CertifiedBlock(3, [weighted], None, constraint=None, beta=beta)


def exact(layer, x, edge_index, normalization):
    """The minimiser in double, of the same weights, and x, β and μ, which it is a function of."""
    wide = torch.promote_types(x.dtype, torch.float32)
    diffusivity = AdjacencyDiffusivity(normalization, direction="undirected")  # type: ignore[arg-type]
    weights = diffusivity(x.to(wide), Graph(NODES, edge_index)).to_dense()[0].double()
    laplacian = torch.diag(weights.sum(1)) - weights
    mu = layer.mu if isinstance(layer, CertifiedConv) else layer.terms[0].weight
    leaves = [
        x.double().clone(),
        layer.beta().detach().double(),
        mu().detach().double(),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    source, beta, weight = leaves
    system = beta * torch.eye(NODES, dtype=DOUBLE) + weight * laplacian
    return torch.linalg.solve(system, beta * source), leaves


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("normalization", ["sum", "sym"])
@pytest.mark.parametrize("layer", ["block", "conv"])
def test_the_solution_is_right_at_any_weight(layer, normalization, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(NODES, 3, generator=generator) + 1).to(dtype)
    readout = torch.randn(NODES, 3, generator=generator, dtype=DOUBLE)
    rounding = max(1e-6, 2 * torch.finfo(dtype).eps)
    for ratio in (1e2, 1e4, 1e6, 1e8):
        module = limit(layer, ratio, normalization)
        if dtype == DOUBLE:
            module = module.double()
        expected, leaves = exact(module, x, edges(kind), normalization)
        slopes = torch.autograd.grad((expected * readout).sum(), leaves)
        leaf = x.clone().requires_grad_()
        try:
            got = module(leaf, edges(kind))
            (got.double() * readout).sum().backward()
        except ConvergenceError:
            assert ratio == 1e8  # double precision resolves no larger condition number
            continue
        assert relative(got.detach(), expected.detach()) <= rounding
        assert relative(leaf.grad, slopes[0]) <= rounding
        # Beyond, what is left of these gradients is below the rounding of the reference.
        if ratio <= 1e4:
            mu = (
                module.mu
                if isinstance(module, CertifiedConv)
                else module.terms[0].weight
            )
            for weight, slope in zip((module.beta, mu), slopes[1:], strict=True):
                by_raw = slope * weight.raw.detach().double().sigmoid()
                assert relative(weight.raw.grad, by_raw) <= max(
                    1e-5, 8 * torch.finfo(dtype).eps
                )


@pytest.mark.parametrize("heads", [1, 3])
def test_every_column_of_every_graph_is_right(heads):
    """Columns of very different sizes, and graphs that do not converge at the same time."""
    graph = Graph(NODES, edges("apart"), ptr=torch.tensor([0, NODES // 2, NODES]))
    coupling = AdjacencyDiffusivity("sum")(torch.zeros(NODES, 1), graph)
    x = torch.randn(NODES, heads, 2, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-8, 8, heads * 2).view(1, heads, 2)
    x[: NODES // 2] *= 1e-5
    dense = coupling.to_dense()[0].double()
    laplacian = torch.diag(dense.sum(1)) - dense
    for update, rate in (
        (Equilibrium(leak=1e-5), 1e-5),
        (ImplicitEuler(1e4, leak=1e-4), 2e-4),
    ):
        shift = rate * torch.eye(NODES, dtype=DOUBLE)
        right = x.double() * (1.0 if isinstance(update, Equilibrium) else 1e-4)
        expected = torch.linalg.solve(laplacian + shift, right.flatten(1)).view_as(
            right
        )
        got = update(x, coupling).double()
        for rows in (slice(0, NODES // 2), slice(NODES // 2, NODES)):
            error = (got[rows] - expected[rows]).norm(dim=0) / expected[rows].norm(
                dim=0
            )
            assert float(error.max()) <= 1e-6


def test_couplings_as_terms_are_solved_like_the_layers():
    graph = Graph(NODES, edges("path"))
    coupling = AdjacencyDiffusivity("sum")(torch.zeros(NODES, 1), graph)
    x = torch.randn(NODES, 3, generator=torch.Generator().manual_seed(0))
    block = built(
        lambda: CertifiedBlock(
            3, [1e3 * CouplingTerm(coupling)], None, constraint=None, beta=1e-3
        )
    )
    matrices = built(lambda: limit("block", 1e6, "sum"))
    assert_close(block(x, graph), matrices(x, graph), rtol=1e-5, atol=1e-6)


class Toward(EnergyTerm):
    """‖Z − C‖², which says only what a term has to say."""

    quadratic = True

    def __init__(self, centre):
        self.centre = centre

    def value(self, z, graph):
        return (z - self.centre).double().square().sum()

    def half_gradient(self, z, graph):
        return z - self.centre

    def bound(self, z, graph):
        return z.new_ones(1, 1, 1)


def test_a_quadratic_term_of_ones_own_pulls_to_its_centre():
    x = randn(NODES, 3)
    centre = randn(NODES, 1, 3, seed=1)
    terms = [Toward(centre)]
    block = CertifiedBlock(3, terms, None, constraint=None, beta=0.5).double()
    assert_close(block(x), (0.5 * x + centre.squeeze(1)) / 1.5)


def test_what_is_not_reached_is_an_error():
    matrix = torch.diag(torch.logspace(-14, 0, 20, dtype=DOUBLE))
    turn = torch.linalg.qr(randn(20, 20))[0]
    matrix = turn @ matrix @ turn.mT
    matrix = (matrix + matrix.mT) / 2
    b = torch.ones(20, 1, 1, dtype=DOUBLE)
    with pytest.raises(
        ConvergenceError,
        match=r"relative error of .* in the precision of torch.float64; tol=1e-12",
    ):
        conjugate_gradients(
            lambda v: (matrix @ v.flatten(1)).view_as(v),
            b,
            least=1e-14,
            max_iter=10_000,
        )


@pytest.mark.parametrize(("spread", "accepted"), [(1.5e-6, True), (2.5e-6, False)])
def test_six_digits_are_enough_and_fewer_are_an_error(spread, accepted):
    """One iteration on diag(1, 1 + s) leaves the relative residual s/2."""
    matrix = torch.tensor([1.0, 1.0 + spread], dtype=DOUBLE).view(2, 1, 1)
    solve = lambda: conjugate_gradients(  # noqa: E731
        lambda v: matrix * v, torch.ones(2, 1, 1, dtype=DOUBLE), least=1.0, max_iter=1
    )
    if accepted:
        assert_close(solve() * matrix, torch.ones_like(matrix), rtol=1e-6, atol=0)
    else:
        with pytest.raises(ConvergenceError, match=r"error of 1\.25e-06 in max_iter=1"):
            solve()
