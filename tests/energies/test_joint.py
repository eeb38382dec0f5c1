"""``JointEnergy`` against its definition, term by term over pairs written out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import JointEnergy, SoftmaxPenalty, certify, get_constraint, get_penalty
from diffusion_mp.graph import Graph
from helpers import agree, randn, refuses

PENALTIES = ["simple", "sigmoid", "gaussian", "quadratic", SoftmaxPenalty(3)]
PTR = torch.tensor([0, 4, 4, 9])
EDGES = torch.tensor([[0, 1, 2, 1, 5, 6, 7, 5], [1, 0, 1, 2, 6, 5, 5, 7]])


def edges(heads: int) -> SparseCoupling:
    weight = randn(4, heads, seed=5).exp().repeat_interleave(2, 0)
    return SparseCoupling(Graph(9, EDGES, ptr=PTR), weight, symmetric=True, nonnegative=True)


def plain(
    penalty: object, x: Tensor, seen: Tensor, h: Tensor, m: Tensor, ptr: Tensor | None
) -> Tensor:
    """3 ‖x − h‖²_M + ½·2 Σ δ + ½·5 Σ a s over pairs."""
    bounds = torch.tensor([0, 9]) if ptr is None else ptr
    member = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    same = member.unsqueeze(1) == member
    total = 3 * (m.unsqueeze(2) * (x - h).square()).sum()
    squares = (seen.unsqueeze(1) - seen.unsqueeze(0)).square().sum(3)
    total = total + get_penalty(penalty).delta(squares)[same].sum()
    squares = (x.unsqueeze(1) - x.unsqueeze(0)).square().sum(3)
    return total + 2.5 * (edges(x.size(1)).to_dense().permute(1, 2, 0) * squares).sum()


@pytest.mark.parametrize("ptr", [None, PTR], ids=["one", "ragged"])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.filterwarnings("ignore:.*leaves the domain")
def test_the_energy_is_its_definition_with_gradient(penalty: object, ptr: Tensor | None) -> None:
    x = randn(9, 2, 3).requires_grad_()
    h = randn(9, 2, 3, seed=1)
    m = randn(9, 2, seed=2).exp()
    options = {"graph_term": edges(2), "source": h, "metric": m, "ptr": ptr}
    energy = JointEnergy(penalty, torch.tensor(2.0), mu=torch.tensor(5.0), beta=3.0, **options)
    agree(energy(x, x + 1), plain(penalty, x, x, h, m, ptr), [x], (1e-12, 1e-12), (1e-11, 1e-11))


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.filterwarnings("ignore:.*leaves the domain")
def test_projected_heads_see_one_state(penalty: object) -> None:
    x = randn(9, 1, 4)
    h = randn(9, 1, 4, seed=1)
    w = randn(2, 3, 4, seed=2)
    options = {"graph_term": edges(1), "mu": 5.0, "beta": 3.0, "projection": w}
    got = JointEnergy(penalty, 2.0, source=h, **options)(x)
    seen = torch.einsum("hdc,nkc->nhd", w, x)
    expected = plain(penalty, x, seen, h, torch.ones(9, 1, dtype=x.dtype), None)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert JointEnergy(penalty, 2.0, source=h[:, 0], **options)(x[:, 0]) == got


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_the_surrogate_touches_from_above(penalty: object) -> None:
    at = get_constraint("ball").project(randn(9, 2, 3))
    h = randn(9, 2, 3, seed=1)
    energy = JointEnergy(penalty, 2.0, graph_term=edges(2), mu=5.0, source=h, beta=3.0, ptr=PTR)
    torch.testing.assert_close(energy.surrogate(at, at), energy(at), rtol=1e-13, atol=1e-13)
    for seed in range(5):
        x = get_constraint("ball").project(at + 0.5 * randn(9, 2, 3, seed=seed))
        assert energy.surrogate(x, at) >= energy(x) - 1e-11


@pytest.mark.parametrize("constraint", ["nonnegative", "ball", "sphere"])
def test_it_is_infinite_outside_of_the_constraint(constraint: str) -> None:
    energy = JointEnergy(None, constraint=constraint, source=torch.zeros(9, 3), radius=2.0)
    inside = get_constraint(constraint, 2.0).project(randn(9, 3))
    assert energy(inside).isfinite()
    assert energy(inside.float()).dtype == torch.float64
    inside[4] = -3.0
    assert energy(inside) == math.inf


def test_a_radius_may_have_a_square_that_overflows() -> None:
    energy = JointEnergy("simple", constraint="ball", radius=1e200)
    x = torch.zeros(9, 3)
    assert energy(x) == 0
    assert "lets rows be inf apart" in certify(energy, x).reason


def test_a_mean_divides_the_pairs_of_every_graph_by_its_nodes() -> None:
    x = randn(9, 2, 3)
    at = get_constraint("ball").project(randn(9, 2, 3, seed=1))
    penalty = get_penalty("gaussian")
    expected = 1.5 * (penalty.total(x[:4]) / 4 + penalty.total(x[4:]) / 5)
    energy = JointEnergy(penalty, torch.tensor(3.0, requires_grad=True), ptr=PTR, mean=True)
    torch.testing.assert_close(energy(x), expected)
    torch.testing.assert_close(energy.surrogate(at, at), energy(at))
    assert energy.surrogate(x, at) > energy(x)
    torch.testing.assert_close(JointEnergy(penalty, 3.0, mean=True)(x), 1.5 * penalty.total(x) / 9)
    assert "mean" in repr(energy)


def test_terms_may_be_left_out_and_repr_names_the_rest() -> None:
    x = randn(9, 3)
    no = torch.zeros(0, 3)
    assert JointEnergy("gaussian", source=no, metric=torch.ones(0), constraint="sphere")(no) == 0
    assert JointEnergy(None)(x) == 0
    assert float(JointEnergy(None, source=x + 1, beta=2.0)(x)) == pytest.approx(54)
    energy = JointEnergy(
        "simple", 0.5, graph_term=edges(1), mu=torch.tensor(10.0), source=x, constraint="ball"
    )
    assert (
        repr(energy)
        == "JointEnergy(SimplePenalty(), lam=0.5, mu=10, beta=1, constraint=Ball(radius=1.0))"
    )
    assert (
        repr(JointEnergy(None, ptr=PTR))
        == "JointEnergy(None, lam=1, constraint=Unconstrained(), ptr)"
    )


def of(**options: object) -> Callable[[], Tensor]:
    return lambda: JointEnergy("gaussian", **options)(X)


X = randn(9, 3)
test_what_does_not_fit_is_refused_in_sentences = refuses(
    (of(graph=EDGES), TypeError, "graph must be a Graph or None; got an int64 tensor"),
    (of(graph=Graph(8)), "x must have 8 rows, one per node of the graph; got 9"),
    (
        of(lam=torch.tensor(2)),
        "lam must be a number or a 0-dimensional tensor; got an int64 tensor",
    ),
    (of(projection=X), r"projection must be \[heads, head_channels, channels\]"),
    (of(projection=randn(2, 3, 4)), "projection reads states of one head and 4 channels"),
    (of(source=randn(9, 4)), r"source must have the shape \[9, 3\] of the state"),
    (of(source=X, metric=torch.ones(8)), r"metric must be \[9\] or \[9, heads\]"),
    (of(source=X, metric=torch.ones(9, 2)), r"metric must be \[9\] or \[9, heads\]"),
    (of(ptr=torch.tensor([0, 8])), "ptr must rise from 0 to num_nodes = 9"),
    error=ValueError,
)
