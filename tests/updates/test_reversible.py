"""Reversible couplings: solved in their own metric, preconditioned, against dense algebra in values and gradients."""

from functools import partial

import pytest
import torch
from dense_updates import DOUBLE, both, dense_update
from torch.testing import assert_close

from diffusion_mp.couplings import (
    IdentityCoupling,
    LinearAttentionCoupling,
    LowRankCoupling,
    PairwiseCoupling,
    PolynomialCoupling,
    ReweightedCoupling,
    SparseCoupling,
    SumCoupling,
    distance_features,
    row_normalized,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    GaussianDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
)
from diffusion_mp.energies.spectrum import laplacian_extremes
from diffusion_mp.errors import (
    ConvergenceError,
    CouplingMismatchError,
    SingularSystemError,
)
from diffusion_mp.graph import Graph
from diffusion_mp.testing import check_coupling
from diffusion_mp.testing.problems import random_problem
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    HeatKernel,
    ImplicitEuler,
    implicit,
)
from diffusion_mp.updates.base import Laplacian
from diffusion_mp.updates.implicit import precondition
from helpers import agree, close, randn

N = 30
PTR = torch.tensor([0, 9, 9, 10, 30])
X = randn(N, 2, 3, seed=7)


def edges(num_nodes=N, per_node=3):
    pairs = torch.randint(
        num_nodes - 1,
        (2, per_node * num_nodes),
        generator=torch.Generator().manual_seed(3),
    )
    weight = randn(pairs.size(1), seed=4).exp()
    return Graph(num_nodes, torch.cat([pairs, pairs.flip(0)], 1), weight.repeat(2))


def symmetric_graph(num_nodes=N):
    return SparseCoupling(edges(num_nodes), nonnegative=True)


def attention(num_nodes=N, ptr=None, heads=2):
    feature = randn(num_nodes, heads, 4, seed=5).abs()
    return LowRankCoupling(
        feature, feature, ptr, nonnegative=True, positive_semidefinite=True
    )


def gaussian(*, normalize=True, ptr=None, **more):
    query, key = distance_features(1.5 * randn(N, 2, 3, seed=6))
    promises = {"symmetric": not normalize, "mutual": True}
    return PairwiseCoupling(query, key, ptr, normalize=normalize, **promises, **more)


KINDS = {
    "rows-of-a-graph": lambda: row_normalized(symmetric_graph()),
    "adjacency": lambda: AdjacencyDiffusivity("row")(X[:, 0], edges()),
    "attention-and-graph": lambda: row_normalized(
        0.5 * attention() + 2.0 * symmetric_graph()
    ),
    "ragged-attention-and-graph": lambda: row_normalized(
        attention(ptr=PTR) + symmetric_graph()
    ),
    "gaussian": gaussian,
    "gaussian-ragged": lambda: gaussian(ptr=PTR),
    "gaussian-others": lambda: gaussian(ptr=PTR, loops=False),
    "gaussian-and-graph": lambda: row_normalized(
        gaussian(normalize=False) + symmetric_graph()
    ),
    "softmax": lambda: PairwiseCoupling(*2 * [randn(N, 2, 3, seed=6)], mutual=True),
    "polynomial": lambda: PolynomialCoupling(
        row_normalized(symmetric_graph()),
        torch.tensor([0.5, 0.5], dtype=DOUBLE),
        nonnegative=True,
    ),
    "half-lazy": lambda: (
        0.5 * row_normalized(symmetric_graph())
        + 0.5 * IdentityCoupling(N, dtype=DOUBLE)
    ),
    "rescaled": lambda: ReweightedCoupling(
        symmetric_graph(),
        randn(N, 2).exp(),
        randn(N, 1, seed=1).exp(),
        nonnegative=True,
        positive=True,
    ),
}
UPDATES = [
    HeatKernel(2.0),
    HeatKernel(2.0, "residual"),
    ImplicitEuler(5.0, beta=0.3, leak=0.1),
]
UPDATES += [CrankNicolson(1.0, "residual", leak=0.1), Equilibrium(leak=0.05)]
UPDATES.append(Equilibrium("residual", beta=0.5, leak=0.05))


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_dense_algebra(kind, update):
    coupling = KINDS[kind]()
    assert coupling.reversible
    assert not coupling.symmetric
    if kind == "rescaled" and update.form == "residual":
        return  # its row sums are far above one
    close(*both(update, coupling, X), "layer")


@pytest.mark.parametrize("update", [UPDATES[2], UPDATES[5], HeatKernel(0.5)], ids=repr)
@pytest.mark.parametrize("kind", ["graph", "both", "gaussian", "label-spreading"])
def test_all_gradients_are_those_of_dense_algebra(kind, update):
    graph = edges()
    feature = randn(N, 2, 3, seed=5).requires_grad_()
    weight = graph.edge_weight[: graph.num_edges // 2].clone().requires_grad_()
    x = X.clone().requires_grad_()
    promises = {"symmetric": True, "nonnegative": True}
    sparse = SparseCoupling(graph, weight.repeat(2), **promises)
    if kind == "graph":
        coupling = row_normalized(sparse)
    elif kind == "both":
        size = feature.abs()
        pairs = LowRankCoupling(size, size, **promises, positive_semidefinite=True)
        coupling = row_normalized(pairs + sparse)
    elif kind == "gaussian":
        coupling = PairwiseCoupling(*distance_features(feature), mutual=True)
    else:
        options = {"loops": False, "symmetric": True, "normalize": "symmetric"}
        coupling = PairwiseCoupling(*distance_features(feature), **options)
    leaves = (x, weight, feature)
    agree(*both(update, coupling, x), leaves, (1e-9, 1e-10), (1e-8, 1e-9), unused=True)


@pytest.mark.parametrize("num_nodes", [40, 400])
def test_a_contracting_coupling_needs_no_leak(num_nodes):
    rows = row_normalized(symmetric_graph(num_nodes))
    x = randn(num_nodes, 1, 2)
    update = Equilibrium("residual")
    for damped in (0.9 * rows, 0.9 * random_problem(num_nodes, "residual").coupling):
        close(update(x, damped), dense_update(update, damped, x, x), "solve")
    with pytest.raises(SingularSystemError, match="smallest eigenvalue"):
        update(x, rows)
    for form in ("conservative", "residual"):
        ends = laplacian_extremes(0.9 * rows, form)
        dense = Laplacian(0.9 * rows, form, DOUBLE).dense()[0]
        exact = torch.linalg.eigvals(dense).real
        assert ends == pytest.approx((float(exact.min()), float(exact.max())), abs=1e-7)


@pytest.mark.parametrize(
    "kind", [SimpleDiffusivity, SigmoidDiffusivity, GaussianDiffusivity]
)
@pytest.mark.parametrize("measure", ["inner", "distance"])
def test_attention_is_reversible_where_queries_are_keys(kind, measure):
    assert kind(measure=measure)(X[:, 0]).reversible
    assert kind(3, measure=measure, projection="tied").double()(X[:, 0]).reversible
    assert (
        not kind(3, measure=measure, projection="separate").double()(X[:, 0]).reversible
    )


def test_nothing_is_promised_that_may_be_false():
    rows = row_normalized(symmetric_graph())
    query = randn(N, 1, 3)
    one_way = Graph(3, torch.tensor([[0, 1], [1, 2]]))
    for coupling in (
        LinearAttentionCoupling(query, query, mutual=True),  # row sums may be negative
        LinearAttentionCoupling(query.abs(), query.abs(), nonnegative=True),
        row_normalized(SparseCoupling(one_way, torch.ones(2), nonnegative=True)),
        row_normalized(LowRankCoupling(query, query, positive_semidefinite=True)),
        SumCoupling([rows, symmetric_graph()]),
        SumCoupling([rows, row_normalized(attention(heads=1))]),
        ReweightedCoupling(symmetric_graph(), query[:, :, 0]),
        AdjacencyDiffusivity("row")(X[:, 0], Graph(N, torch.tensor([[0, 1], [1, 2]]))),
    ):
        assert not coupling.reversible
        with pytest.raises(
            CouplingMismatchError if not coupling.low_rank else ConvergenceError
        ):
            Equilibrium(leak=1e-9)(X[: coupling.num_nodes, :1] * float("nan"), coupling)


def test_a_false_metric_is_found():
    query = randn(N, 1, 3).abs()
    with pytest.raises(
        AssertionError,
        match=r"breaks the law 'metric'.*diag\(metric\) S against its transpose",
    ):
        check_coupling(
            LinearAttentionCoupling(query, query.flip(0), nonnegative=True, mutual=True)
        )


def unaided(patch):
    patch.setattr(implicit, "precondition", lambda *_: None)


@pytest.mark.parametrize("update", [Equilibrium, partial(ImplicitEuler, 1.0)])
def test_features_beside_edges_are_the_preconditioner(update, monkeypatch):
    """λΩ + μA in one solve: what is left to conjugate gradients is the graph."""
    feature = randn(500, 1, 8, seed=5).abs() * (2 * randn(500, 1, 1, seed=6)).exp()
    pairs = LowRankCoupling(
        feature, feature, positive_semidefinite=True, nonnegative=True
    )
    coupling = 0.05 * pairs + symmetric_graph(500)
    x = randn(500, 1, 3).requires_grad_()
    update(leak=0.5, max_iter=50)(x, coupling).sum().backward()
    unaided(monkeypatch)
    with pytest.raises(ConvergenceError, match="max_iter=400"):
        update(leak=0.5, max_iter=400)(x, coupling)


@pytest.mark.parametrize("normalize", [True, False])
def test_all_pairs_are_factorised_where_they_are_few(normalize, monkeypatch):
    coupling = gaussian(normalize=normalize)
    assert coupling.quadratic
    assert (0.5 * coupling + symmetric_graph()).quadratic
    assert not symmetric_graph().quadratic
    x = X.clone().requires_grad_()
    direct = Equilibrium(leak=1e-4, max_iter=3)
    got = direct(x, coupling)
    got.sum().backward()
    expected = dense_update(direct, coupling, X, X)
    assert_close(got, expected, rtol=1e-9, atol=1e-7)
    monkeypatch.setattr(implicit, "DENSE", 2 * N * N - 1)
    with pytest.raises(ConvergenceError, match="max_iter=3"):
        direct(X, coupling)


def test_an_indefinite_dense_system_is_left_to_the_iteration_which_sees_it():
    query = randn(N, 1, 3)
    coupling = PairwiseCoupling(
        query, query, normalize=False, symmetric=True, mutual=True
    )
    assert precondition(coupling, 1.0, None, None, False) is None
    with pytest.raises(ConvergenceError, match="not positive definite"):
        Equilibrium("residual", leak=0.1)(randn(N, 1, 2), coupling)


@pytest.mark.parametrize("row_stochastic", [True, False])
def test_a_float32_state_over_all_pairs_is_right_to_six_digits(row_stochastic):
    x = randn(300, 5, seed=2).float()
    y = randn(300, 1, 4).float()
    diffusivity = GaussianDiffusivity(
        normalize=None, measure="distance", row_stochastic=row_stochastic
    )
    coupling = diffusivity(x)
    double = diffusivity(x.double())
    update = Equilibrium(leak=0.01)
    expected = dense_update(update, double, y.double(), y.double())
    error = (update(y, coupling).double() - expected).abs().max() / expected.abs().max()
    assert error <= 1e-6
