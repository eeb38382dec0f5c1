"""``JointEnergy`` against its definition, term by term over pairs written out."""

import math

import pytest
import torch
from energy_cases import DOUBLE, squares
from torch.testing import assert_close

from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import (
    Energy,
    PairTerm,
    SoftmaxPenalty,
    SourceTerm,
    certify,
    get_constraint,
    get_penalty,
)
from diffusion_mp.graph import Graph
from energy_forms import Joint
from helpers import agree, close, randn

PENALTIES = ["simple", "sigmoid", "gaussian", "quadratic", SoftmaxPenalty(3)]
PTR = torch.tensor([0, 4, 4, 9])
EDGES = torch.tensor(
    [
        [0, 1, 2, 1, 5, 6, 7, 5],
        [1, 0, 1, 2, 6, 5, 5, 7],
    ]
)


def edges(heads):
    weight = randn(4, heads, seed=5).exp().repeat_interleave(2, 0)
    return SparseCoupling(
        Graph(9, EDGES, ptr=PTR), weight, symmetric=True, nonnegative=True
    )


def plain(penalty, x, projected, h, m, ptr):
    """3 ‖x − h‖²_M + ½·2 Σ δ + ½·5 Σ a s over pairs."""
    bounds = torch.tensor([0, 9]) if ptr is None else ptr
    member = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    same = member.unsqueeze(1) == member
    total = 3 * (m.unsqueeze(2) * (x - h).square()).sum()
    total = total + get_penalty(penalty).delta(squares(projected))[same].sum()
    weight = edges(x.size(1)).to_dense().permute(1, 2, 0)
    return total + 2.5 * (weight * squares(x)).sum()


@pytest.mark.parametrize("ptr", [None, PTR], ids=["one", "ragged"])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.filterwarnings("ignore:.*leaves the domain")
def test_the_energy_is_its_definition_with_gradient(penalty, ptr):
    x = randn(9, 2, 3).requires_grad_()
    h = randn(9, 2, 3, seed=1)
    m = randn(9, 2, seed=2).exp()
    options = {"graph_term": edges(2), "source": h, "metric": m, "ptr": ptr}
    energy = Joint(
        penalty, torch.tensor(2.0), mu=torch.tensor(5.0), beta=3.0, **options
    )
    agree(
        energy(x, x + 1),
        plain(penalty, x, x, h, m, ptr),
        [x],
        (1e-12, 1e-12),
        (1e-11, 1e-11),
    )


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.filterwarnings("ignore:.*leaves the domain")
def test_projected_heads_see_one_state(penalty):
    x = randn(9, 1, 4)
    h = randn(9, 1, 4, seed=1)
    w = randn(2, 3, 4, seed=2)
    options = {"graph_term": edges(1), "mu": 5.0, "beta": 3.0, "projection": w}
    got = Joint(penalty, 2.0, source=h, **options)(x)
    projected = torch.einsum("hdc,nkc->nhd", w, x)
    expected = plain(penalty, x, projected, h, torch.ones(9, 1, dtype=x.dtype), None)
    close(got, expected, "entries")
    assert Joint(penalty, 2.0, source=h[:, 0], **options)(x[:, 0]) == got


@pytest.mark.parametrize("constraint", ["nonnegative", "ball", "sphere"])
def test_it_is_infinite_outside_of_the_constraint(constraint):
    energy = Joint(None, constraint=constraint, source=torch.zeros(9, 3), radius=2.0)
    inside = get_constraint(constraint, 2.0).project(randn(9, 3))
    assert energy(inside).isfinite()
    assert energy(inside.float()).dtype == DOUBLE
    inside[4] = -3.0
    assert energy(inside) == math.inf


def test_a_radius_may_have_a_square_that_overflows():
    energy = Joint("simple", constraint="ball", radius=1e200)
    x = torch.zeros(9, 3)
    assert energy(x) == 0
    assert "lets rows be inf apart" in certify(energy, x).reason


def test_a_mean_divides_the_pairs_of_every_graph_by_its_nodes():
    x = randn(9, 2, 3)
    penalty = get_penalty("gaussian")
    expected = 1.5 * (penalty.total(x[:4]) / 4 + penalty.total(x[4:]) / 5)
    energy = Joint(penalty, torch.tensor(3.0, requires_grad=True), ptr=PTR, mean=True)
    assert_close(energy(x), expected)
    assert_close(Joint(penalty, 3.0, mean=True)(x), 1.5 * penalty.total(x) / 9)


def test_terms_may_be_left_out_and_repr_names_the_rest():
    x = randn(9, 3)
    no = torch.zeros(0, 3)
    assert (
        Joint("gaussian", source=no, metric=torch.ones(0), constraint="sphere")(no) == 0
    )
    assert Joint(None)(x) == 0
    assert float(Joint(None, source=x + 1, beta=2.0)(x)) == pytest.approx(54)
    energy = Energy(
        [0.5 * PairTerm(get_penalty("simple")), torch.tensor(10.0) * SourceTerm(x)],
        "ball",
    )
    assert (
        repr(energy)
        == "Energy(0.5 * PairTerm(SimplePenalty()) + 10 * SourceTerm(), constraint=Ball(radius=1.0))"
    )
