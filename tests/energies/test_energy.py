"""Every term of ``Energy`` against the formula written out with loops or dense matrices."""

import warnings

import pytest
import torch
from energy_cases import DOUBLE, every_penalty, from_dense, laplacian, squares
from torch.testing import assert_close

from diffusion_mp.couplings import DenseCoupling, SparseCoupling
from diffusion_mp.energies import (
    CouplingTerm,
    Energy,
    ProximalTerm,
    QuadraticPenalty,
    SourceTerm,
)
from diffusion_mp.energies.pairs import large_distance
from diffusion_mp.graph import Graph
from energy_forms import Explicit, Joint
from helpers import agree, close, randn, refuses


def same(got, expected):
    assert got.dtype == DOUBLE
    assert got.shape == ()
    close(got, torch.as_tensor(expected, dtype=DOUBLE), "layer")


@every_penalty
def test_eq_13_over_all_pairs_eq_8_over_those_of_a_graph_and_eq_25_over_both(
    penalty, ball, symmetric_graph
):
    x = ball(9, 3)
    previous = ball(9, 3)
    s = symmetric_graph(9)
    moved = (x - previous).square().sum()
    cost = 0.3 * penalty.delta(squares(x))
    same(Explicit(penalty, 0.3)(x, previous), moved + cost.sum())
    same(Explicit(penalty, 0.3)(x), cost.sum())
    weight = s.to_dense()[0]
    same(Explicit(penalty, 0.3, coupling=s)(x, previous), moved + (weight * cost).sum())
    eq_25 = moved + (cost.sum() + 0.3 * (weight * squares(x)).sum()) / 2
    same(Explicit(penalty, 0.3, graph_term=s)(x, previous), eq_25)


def test_lambda_multiplies_the_double_sum(ball, symmetric_graph):
    """Σ_ij s_ij‖z_i − z_j‖² = 2 tr ZᵀΔZ: our λ is half of the one before tr ZᵀΔZ."""
    x = ball(9, 3)
    s = symmetric_graph(9)
    for form in ("conservative", "residual"):
        got = Explicit("quadratic", 0.7, coupling=s, residual=form == "residual")(x)
        same(got, 0.7 * 2 * torch.trace(x.T @ laplacian(s, form) @ x))


@pytest.mark.parametrize("weighted", [False, True])
def test_source_and_leak(weighted, ball, symmetric_graph):
    """The falling form, and that of Eqs. 11 and 26; they differ by a constant within one step."""
    x = ball(9, 3)
    other = ball(9, 3)
    previous = ball(9, 3)
    h = ball(9, 3)
    s = symmetric_graph(9)
    m = torch.linspace(1, 2, 9, dtype=DOUBLE) if weighted else None
    weight = m[:, None] if m is not None else torch.ones(9, 1, dtype=DOUBLE)
    terms = {"coupling": s, "source": h, "beta": 0.8, "leak": 0.2, "metric": m}
    pairs = (s.to_dense()[0] * squares(x)).sum()
    free = 0.3 * (pairs + 0.4 * (weight * x * x).sum() - 3.2 * (weight * h * x).sum())
    falling = Explicit("quadratic", 0.3, **terms)
    printed = Explicit("quadratic", 0.3, printed=True, **terms)
    same(falling(x), free)
    same(falling(x, previous), free + (x - previous).square().sum())
    eta = 2 * 0.3 * 0.8 * weight
    square = (x - previous - eta * h).square().sum()
    same(printed(x, previous), square + 0.3 * (pairs + 0.4 * (weight * x * x).sum()))
    same(
        printed(x, previous) - printed(other, previous),
        falling(x, previous) - falling(other, previous),
    )


@every_penalty
@pytest.mark.parametrize("over_edges", [False, True])
def test_surrogate_majorises(penalty, over_edges, ball, symmetric_graph):
    """Proposition 6: Ẽ ≥ E for ω from anywhere, equal at ω = f; and it is the formula of Eq. 14."""
    s = symmetric_graph(9) if over_edges else None
    energy = Explicit(penalty, 0.3, coupling=s, source=ball(9, 3), leak=0.1)
    weight = s.to_dense()[0] if s is not None else torch.ones(9, 9, dtype=DOUBLE)
    gaps = []
    for _ in range(20):
        x = ball(9, 3)
        previous = ball(9, 3)
        at = ball(9, 3)
        value = energy(x, previous)
        surrogate = energy.surrogate(x, previous, at)
        same(energy.surrogate(x, previous, x), value)
        omega = penalty.f(squares(at))
        conjugate = omega * squares(at) - penalty.delta(squares(at))
        eq_14 = (
            0.3
            * (
                weight * (omega * squares(x) - conjugate - penalty.delta(squares(x)))
            ).sum()
        )
        same(surrogate - value, eq_14)
        gaps.append(float(surrogate - value))
    assert min(gaps) >= -1e-11
    if not isinstance(penalty, QuadraticPenalty):
        assert max(gaps) > 1e-3


@every_penalty
def test_surrogate_touches_with_the_same_gradient(penalty, ball):
    """So that one gradient step on either is the same diffusion step (proof of Theorem 7)."""
    x = ball(7, 3).requires_grad_()
    previous = ball(7, 3)
    energy = Explicit(penalty, 0.3)
    surrogate = energy.surrogate(x, previous, x.detach())
    agree(energy(x, previous), surrogate, [x], (1e-9, 1e-10))


def test_edges_of_several_heads_add_up(ball, symmetric_graph):
    x = ball(24, 3).view(12, 2, 3)
    previous = ball(24, 3).view(12, 2, 3)
    s = symmetric_graph(12)
    weight = torch.cat([s.weight, 2 * s.weight], 1)
    two = SparseCoupling(s.graph, weight, symmetric=True, nonnegative=True)
    one = Explicit("sigmoid", coupling=s)
    energy = Explicit("sigmoid", coupling=two)
    same(energy(x), one(x[:, 0]) + 2 * one(x[:, 1]))
    same(energy(x, previous) - energy(x), (x - previous).square().sum())


def test_a_proximal_term_counts_with_its_weight(ball):
    x = ball(9, 3)
    previous = ball(9, 3)
    moved = (x - previous).square().sum()
    same(
        Energy([ProximalTerm(), 0.5 * (3.0 * ProximalTerm())])(x, previous), 2.5 * moved
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_give_float64(dtype, ball):
    x = ball(9, 3).to(dtype).requires_grad_()
    previous = ball(9, 3).to(dtype)
    value = Explicit("sigmoid", 0.3)(x, previous)
    assert value.dtype == DOUBLE
    assert_close(
        value,
        Explicit("sigmoid", 0.3)(x.double(), previous.double()),
        rtol=1e-2,
        atol=0,
    )
    value.backward()
    assert x.grad.dtype == dtype


X = torch.ones(6, 4)
test_what_does_not_fit_is_refused = refuses(
    (lambda: Energy([], graph=Graph(5))(X), "^x must have 5 rows"),
    (lambda: Energy([SourceTerm(X[:5])])(X), "^source"),
    (lambda: Energy([SourceTerm(X, X[:5, 0])]), "^metric"),
    (lambda: Energy([CouplingTerm(from_dense(torch.ones(5, 5)))])(X), "^x"),
    (lambda: Energy([ProximalTerm()])(X, X[:, :3]), "^x_prev"),
    error=ValueError,
)


def test_beyond_the_domain_of_its_penalty_an_energy_warns(ball, symmetric_graph):
    """There the simple penalty falls without end: of a state ten times as large as it should be it is below −10⁴."""
    x = ball(12, 3)
    far = 10 * x / x.norm(dim=1).max()
    options = (
        {},
        {"ptr": torch.tensor([0, 0, 5, 12])},
        {"coupling": symmetric_graph(12)},
    )
    energies = [Explicit("simple", **each) for each in options]
    energies.append(Joint("simple", constraint=None))
    energies.append(Joint("simple", constraint="ball", radius=11.0, mean=True))
    for energy in energies:
        sentence = r"(Pair|Edge)Term of a state that leaves the domain of SimplePenalty\(\): .*radius 1"
        with pytest.warns(UserWarning, match=sentence):
            energy(far)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for energy in energies:
            energy(x)
            energy(x.bfloat16() / 1.1)
        Explicit("gaussian")(far)
        Explicit("simple", coupling=SparseCoupling(Graph(12), far.new_zeros(0, 1)))(far)
        Joint("simple", constraint="ball")(far)  # infinite, and said to be
        assert Explicit("simple")(far[:1]) == 0


def test_the_large_distance_is_a_quarter_of_the_largest_at_least(ball):
    for seed in range(5):
        x = randn(9, 2, 3, seed=seed)
        largest = float(squares(x).max())
        assert largest / 4 <= large_distance(x) <= largest * (1 + 1e-12)


def test_a_coupling_may_cross_the_graphs_of_a_batch():
    """Differences are measured by the graphs of the coupling: by those of the batch a step raised F once."""
    swap = DenseCoupling(
        torch.eye(3, dtype=torch.float64).flip(0)[None],
        symmetric=True,
        nonnegative=True,
    )
    batch = Graph(3, ptr=torch.tensor([0, 2, 3]))
    z = torch.arange(12.0, dtype=torch.float64).view(3, 1, 4).cos()
    energy = Energy([CouplingTerm(swap), 0.001 * SourceTerm(z)], graph=batch)
    assert energy(energy.step(z)) < energy(z)
