"""Promises of couplings: computed once, on first access, and true."""

# ruff: noqa: F403, F405 (everything public)
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp import *
from diffusion_mp.couplings import *
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.testing import check_coupling
from helpers import randn

PTR = torch.tensor([0, 3, 3, 4, 9])
PATH = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


class Asked(Coupling):
    """The identity, which records the promises that are accessed."""

    def __init__(self, answer: bool = True) -> None:
        super().__init__(4, 1, randn(1))
        self.answer = answer
        self.asked: list[str] = []
        self.examines = True

    def _record(self, name: str) -> bool:
        self.asked.append(name)
        return self.answer

    @cached_property
    def symmetric(self) -> bool:
        return self._record("symmetric")

    @cached_property
    def nonnegative(self) -> bool:
        return self._record("nonnegative")

    def _product(self, v: Tensor) -> Tensor:
        return v

    def _transpose(self) -> Coupling:
        return IdentityCoupling(4, dtype=self.dtype)

    def degree(self) -> Tensor:
        return torch.ones(4, 1, dtype=self.dtype)


@pytest.fixture
def never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("the edges were searched, which sorts them")

    monkeypatch.setattr("diffusion_mp.graph.ops.entries_at", refuse)


def test_a_promise_is_computed_on_first_access_and_kept():
    part = Asked()
    v = randn(4, 1, 2)
    made_of_it = [
        0.5 * part,
        part + part,
        ReweightedCoupling(part),
        PolynomialCoupling(part, v.new_ones(2)),
    ]
    for coupling in made_of_it:
        (
            coupling @ v,
            coupling.T @ v,
            coupling.degree(),
            coupling.dirichlet(v),
            repr(coupling),
        )
    assert not part.asked
    for _ in range(2):
        assert made_of_it[0].symmetric
        assert made_of_it[1].symmetric
        assert made_of_it[1].nonnegative
    assert part.asked == ["symmetric", "nonnegative"]
    assert (
        repr(made_of_it[1])
        == "SumCoupling(num_nodes=4, heads=1, symmetric, nonnegative)"
    )


FLAGS: dict[str, Callable[..., Coupling]] = {
    "dense": lambda **flags: DenseCoupling(torch.eye(3), **flags),
    "sparse": lambda **flags: SparseCoupling(Graph(3, PATH), **flags),
    "low rank": lambda **flags: LowRankCoupling(
        X, X, **flags, positive_semidefinite=True
    ),
    "reweighted": lambda **flags: ReweightedCoupling(GRAM, R, **flags),
}


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("name", ["symmetric", "row_stochastic", "nonnegative"])
def test_a_promise_is_a_bool(kind, name):
    with pytest.raises(TypeError, match=name):
        FLAGS[kind](**{name: "yes"})


@pytest.mark.usefixtures("never_looked_at")
def test_no_layer_examines_the_edges_for_a_promise_it_does_not_need():
    x = torch.randn(5, 8)
    edges = torch.randint(5, (2, 12))
    readme = 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym")
    for layer in (
        DiffusionConv(8, 8, readme, ExplicitEuler(tau=0.5)),
        GINConv(8, nn.Linear(8, 8)),
    ):
        layer(x, edges)
        layer(x, Graph(5, edges))


def test_edges_are_symmetric_where_their_weights_are():
    graph = Graph(3, PATH)
    assert SparseCoupling(graph).symmetric
    assert (0.5 * AdjacencyDiffusivity("sym")(randn(3, 2), graph)).symmetric
    assert not SparseCoupling(Graph(3, PATH[:, :1])).symmetric
    assert not SparseCoupling(graph, torch.arange(4.0)).symmetric


def gram(q: Tensor, bounds: list[int] | None = None) -> Coupling:
    ptr = None if bounds is None else torch.tensor(bounds)
    return LowRankCoupling(q, q, ptr, positive_semidefinite=True)


def test_a_sum_is_as_precise_and_as_whole_as_its_terms():
    identity = IdentityCoupling(9)
    assert (identity + IdentityCoupling(9, dtype=torch.float64)).dtype == torch.float64
    part = UniformCoupling(9)
    part.whole = False  # as one is whose rows lie with several processes
    assert not (identity + part).whole
    assert not (part + identity).whole


def test_a_sum_is_reversible_in_one_metric_alone():
    q = randn(9, 1, 2).abs()
    one, other = (
        row_normalized(
            LowRankCoupling(x, x, nonnegative=True, positive_semidefinite=True)
        )
        for x in (q, q.square())
    )
    assert (one + 0.5 * one).metric is not None
    assert (one + other).metric is None


def test_a_sum_has_the_coarsest_boundaries_of_its_terms():
    q = randn(9, 1, 2)
    bounds = PTR.tolist()
    batch = gram(q, bounds)
    identity = IdentityCoupling(9, dtype=q.dtype)
    nested = 0.5 * (batch + 2 * batch)
    for coupling, expected in (
        (batch, bounds),
        (batch.T, bounds),
        (batch + identity, bounds),
        (identity + batch, bounds),
        (nested, bounds),
        (batch + gram(q, [0, 4, 9]), [0, 4, 9]),
        (gram(q, [0, 5, 9]) + gram(q, [0, 4, 9]), [0, 9]),  # in which all is one
    ):
        assert coupling.ptr is not None
        assert coupling.ptr.tolist() == expected
    assert (batch + gram(q)).ptr is None
    assert (gram(q) + identity).ptr is None
    for coupling in (identity + batch, nested):
        check_coupling(coupling)
    # One low-rank form needs the same boundaries.
    assert (batch + identity).low_rank
    for other in (gram(q), gram(q, [0, 4, 9])):
        assert not (batch + other).low_rank
        assert (batch + other).low_rank_form(q.dtype) is None
    edges = Graph(9, torch.tensor([[0, 1, 4], [1, 2, 4]]), ptr=PTR)
    assert torch.equal(SparseCoupling(edges).ptr, PTR)
    assert torch.equal(NeumannCoupling(9, randn(1, 1), ptr=PTR).ptr, PTR)


def test_which_mixtures_of_row_stochastic_couplings_are_row_stochastic():
    q = randn(9, 1, 2)
    attention = PairwiseCoupling(q, q, mutual=True)
    mean = UniformCoupling(9, dtype=q.dtype)
    assert (0.25 * attention + 0.75 * mean).row_stochastic
    assert SumCoupling([attention]).row_stochastic
    assert (2.0 * attention + -1.0 * mean).row_stochastic
    for other in (
        attention + mean,
        SumCoupling([0.5 * mean]),
        0.5 * attention,
        q.new_tensor(1.0) * mean + mean,
    ):
        assert not other.row_stochastic
    edges = Graph(9, PATH)
    rows = row_normalized(SparseCoupling(edges, randn(4).abs(), nonnegative=True))
    assert rows.row_stochastic
    assert (0.5 * rows + 0.5 * rows).row_stochastic
    mixed = 0.5 * rows + 0.5 * UniformCoupling(9, dtype=torch.float64)
    assert mixed.degree()[-1].item() == pytest.approx(0.5)
    assert not mixed.row_stochastic
    check_coupling(mixed)


X = randn(9, 2, 4, seed=1)
Y = randn(9, 2, 4, seed=2)
R = randn(9, 2, seed=3)
GRAM = LowRankCoupling(X, X, PTR, positive_semidefinite=True)
# E^‖x‖² is what a node weighs in its own row; where that is 1e8, the others drown in its rounding.
SMALL = 0.5 * X
DEFINITE: dict[str, Callable[[], Coupling]] = {
    "identity": lambda: IdentityCoupling(9, dtype=torch.float64),
    "mean": lambda: UniformCoupling(9, PTR, dtype=torch.float64),
    "sum": lambda: UniformCoupling(9, normalize=False, dtype=torch.float64),
    "gram": lambda: GRAM,
    "multiple": lambda: 0.5 * GRAM,
    "nothing": lambda: 0.0 * GRAM,
    "total": lambda: 0.5 * GRAM + 2 * UniformCoupling(9, PTR, dtype=torch.float64),
    "congruence": lambda: ReweightedCoupling(GRAM, R, R),
    "given": lambda: PairwiseCoupling(
        SMALL, SMALL, normalize=False, positive_semidefinite=True, mutual=True
    ),
}
NOT_PROMISED: dict[str, Callable[[], Coupling]] = {
    "different": lambda: LowRankCoupling(X, Y),
    "negative": lambda: -1.0 * GRAM,
    "learnable": lambda: nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) * GRAM,
    "other sides": lambda: ReweightedCoupling(GRAM, R, R.clone()),
    "one side": lambda: ReweightedCoupling(GRAM, R),
    "normalized": lambda: LinearAttentionCoupling(X.abs(), X.abs(), mutual=True),
    "difference": lambda: GRAM + -0.5 * GRAM,
    "edges": lambda: SparseCoupling(Graph(3, PATH)),
    "polynomial": lambda: PolynomialCoupling(GRAM, randn(2)),
}


@pytest.mark.parametrize("name", DEFINITE)
def test_positive_semidefinite_couplings_say_so(name):
    coupling = DEFINITE[name]()
    assert coupling.positive_semidefinite
    assert coupling.symmetric
    check_coupling(coupling)


@pytest.mark.parametrize("name", NOT_PROMISED)
def test_nothing_is_promised_that_may_be_false(name):
    assert not NOT_PROMISED[name]().positive_semidefinite


@pytest.mark.parametrize("measure", ["inner", "distance"])
@pytest.mark.parametrize(
    "kind",
    [SimpleDiffusivity, SigmoidDiffusivity, SoftmaxDiffusivity, GaussianDiffusivity],
)
def test_positive_definite_scores_say_so(kind, measure):
    """exp(a(s + c)) is positive definite, and so is 1 + q·k; σ is not, nor is 2 − ½z² for vectors of any norm."""
    diffusivity = kind(
        4,
        row_stochastic=False,
        measure=measure,
        normalize="row" if measure == "inner" else None,
    )  # type: ignore[arg-type]
    coupling = diffusivity(X[:, 0])
    expected = kind in (SoftmaxDiffusivity, GaussianDiffusivity) or (
        kind is SimpleDiffusivity and measure == "inner"
    )
    assert coupling.positive_semidefinite == expected
    assert coupling.symmetric
    if expected:
        assert torch.linalg.eigvalsh(coupling.to_dense()).min() > -1e-12
    assert not kind(4, measure=measure)(X[:, 0]).positive_semidefinite  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [UniformCoupling(5), DenseCoupling(torch.ones(3, 4, 4))],
    ids=["nodes", "heads"],
)
def test_terms_of_a_sum_couple_the_same_nodes(other):
    # Of two heads and four nodes: the other has as many of one of the two.
    with pytest.raises(
        ValueError, match="must couple the same nodes, with one number of heads"
    ):
        SumCoupling([DenseCoupling(torch.ones(2, 4, 4)), other])


def test_the_metric_of_an_isolated_node_is_one():
    graph = Graph(4, PATH)
    metric = AdjacencyDiffusivity("row")(randn(4, 1), graph).metric
    assert metric is not None
    assert metric.flatten().tolist() == [1, 2, 1, 1]
