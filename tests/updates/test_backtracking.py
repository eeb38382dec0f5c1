"""Backtracking: the energy never rises, τ shrinks when it must and only then."""

import math

import numpy as np
import pytest
import torch

import diffusion_mp as dm
from diffusion_mp.couplings import row_normalized
from diffusion_mp.errors import ConvergenceError, CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.testing.problems import complete_problem, random_problem
from diffusion_mp.updates import Backtracking, ExplicitEuler
from diffusion_mp.updates.explicit import first_minimum
from energy_forms import Explicit

PENALTIES = [dm.SimplePenalty(), dm.SigmoidPenalty(), dm.SoftmaxPenalty(4), dm.GaussianPenalty()]


def ball(num_nodes: int, heads: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_nodes, heads, 4, dtype=torch.float64, generator=generator)
    return x / (1 + x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("tau", [3.0, 1e4])
def test_shrinks_a_step_that_goes_up(form: str, tau: float) -> None:
    problem = random_problem(form=form)
    x = problem.state
    s = problem.coupling
    update = Backtracking(dm.QuadraticPenalty(), tau=tau, form=problem.form)

    def energy(x: torch.Tensor) -> float:
        return float(torch.einsum("ihd,ij,jhd->", x, problem.laplacian, x))

    torch.testing.assert_close(update.energy(x, s).item(), energy(x))
    assert energy(ExplicitEuler(tau, problem.form)(x, s)) > energy(x) >= energy(update(x, s))
    halvings = math.log2(tau / update.last_tau)
    assert halvings > 0
    assert halvings == pytest.approx(round(halvings))
    assert energy(ExplicitEuler(2 * update.last_tau, problem.form)(x, s)) > energy(
        x
    )  # no smaller than needed


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_all_pair_penalties_go_down_layer_after_layer(penalty: dm.Penalty, normalize: bool) -> None:
    x = ball(25, heads=2)
    update = Backtracking(penalty, tau=8.0)
    for _ in range(4):
        after = update(x, penalty.coupling(x, normalize=normalize))
        assert penalty.total(after) < penalty.total(x)
        x = after


def test_ragged_batch_measures_pairs_of_the_same_graph_only() -> None:
    penalty = dm.SigmoidPenalty()
    ptr = torch.tensor([0, 7, 20])
    x = ball(20)
    coupling = penalty.coupling(x, ptr)
    update = Backtracking(penalty, tau=4.0)
    edge = dm.couplings.SparseCoupling(Graph(20, torch.tensor([[0], [1]]), ptr=ptr))
    weight = x.new_full((20, 1), 0.5)
    made_of_it = [
        coupling,
        coupling.T,
        coupling + 0.5 * coupling,
        edge + 0.5 * edge,
        row_normalized(coupling),
    ]
    made_of_it.append(dm.couplings.ReweightedCoupling(coupling + edge, weight, weight))
    made_of_it.append(dm.couplings.PolynomialCoupling(0.5 * coupling, x.new_ones(2)))
    for other in made_of_it:
        assert other.ptr.tolist() == ptr.tolist()
        assert update.energy(x, other).tolist() == [
            float(penalty.total(part)) for part in (x[:7], x[7:])
        ]
    after = update(x, coupling)
    assert penalty.total(after, ptr) < penalty.total(x, ptr)
    assert penalty.coupling(x).ptr is None


def batched(kind: str):
    """An update, and the coupling of some rows of a batch, for every energy that there is."""
    penalty = dm.QuadraticPenalty() if kind in ("quadratic", "residual") else dm.SimplePenalty()
    form = "residual" if kind == "residual" else "conservative"
    weight = random_problem(20).matrix
    x = ball(20, heads=2)
    weight[:7, 7:] = weight[7:, :7] = 0
    weight[:7] *= 30
    x[:7] *= 0.1

    def couple(rows: slice, ptr: torch.Tensor | None) -> dm.Coupling:
        if kind in ("simple", "exact"):
            return penalty.coupling(x[rows], ptr)
        part = weight[rows, rows]
        sender, receiver = part.nonzero(as_tuple=True)
        graph = Graph(len(part), torch.stack([sender, receiver]), part[sender, receiver], ptr=ptr)
        return dm.couplings.SparseCoupling(graph)

    return Backtracking(penalty, 0.9, form=form, exact=kind == "exact"), couple


@pytest.mark.parametrize("kind", ["quadratic", "residual", "edges", "simple", "exact"])
def test_a_graph_takes_the_same_step_alone_and_in_a_batch(kind: str) -> None:
    """However different the steps are that its mates need; an empty graph has any."""
    update, couple = batched(kind)
    x = ball(20, heads=2)
    ptr = torch.tensor([0, 7, 7, 20])
    x[:7] *= 0.1
    together = update(x, couple(slice(0, 20), ptr))
    taus = update.last_tau
    alone = []
    found = []
    for rows in (slice(0, 7), slice(7, 20)):
        alone.append(update(x[rows], couple(rows, None)))
        found.append(update.last_tau)
    assert taus.shape == (3,)
    assert taus[[0, 2]].tolist() == pytest.approx(found, rel=1e-12)
    assert found[0] != found[1]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-14)


def test_a_function_of_the_state_may_give_the_energy_of_a_batch_or_of_every_graph() -> None:
    penalty = dm.SigmoidPenalty()
    ptr = torch.tensor([0, 2, 20])
    x = ball(20)
    one = Backtracking(lambda x: penalty.total(x, ptr), tau=64.0)
    each = Backtracking(
        lambda x: torch.stack([penalty.total(x[:2]), penalty.total(x[2:])]), tau=64.0
    )
    coupling = penalty.coupling(x, ptr)
    assert penalty.total(one(x, coupling), ptr) < penalty.total(x, ptr)
    after = each(x, coupling)
    assert isinstance(one.last_tau, float)
    assert each.last_tau.max() > each.last_tau.min() == one.last_tau
    assert torch.equal(after, Backtracking(penalty, tau=64.0)(x, coupling))
    problem = random_problem()
    quadratic = dm.QuadraticPenalty()
    steps = [
        Backtracking(energy, tau=2.0)
        for energy in (Explicit(quadratic, coupling=problem.coupling), quadratic)
    ]
    torch.testing.assert_close(*(step(problem.state, problem.coupling) for step in steps))
    assert steps[0].last_tau == steps[1].last_tau


@pytest.mark.parametrize("seed", range(30))
def test_the_simple_energy_along_a_step_is_a_quartic(seed: int) -> None:
    """Its coefficients from moments, against the energy itself, at lengths over six decades."""
    x = ball(5 + seed, heads=1 + seed % 3, seed=seed)
    down = ball(5 + seed, heads=1 + seed % 3, seed=100 + seed) + 3
    p = dm.SimplePenalty().along(x, down)
    powers = torch.arange(5)
    for tau in torch.logspace(-3, 3, 13, dtype=torch.float64):
        direct = dm.SimplePenalty().total(x + tau * down)
        size = (p.abs() * tau**powers).sum()
        assert abs((p * tau**powers).sum() - direct) <= 1e-13 * size


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_no_other_step_is_better_than_the_exact_one(seed: int, normalize: bool) -> None:
    """On a fine grid of τ up to where the state leaves the domain, from starts near consensus and far from it."""
    penalty = dm.SimplePenalty()
    scale = 10.0 ** -(seed % 5)
    x = scale * ball(12, heads=2, seed=seed) + 1
    coupling = penalty.coupling(x, normalize=normalize)
    slope = coupling.degree().unsqueeze(2) * x - coupling @ x
    update = Backtracking(penalty, tau=1e-3, exact=True)
    after = penalty.total(update(x, coupling))
    for factor in torch.linspace(0, 1.5, 61, dtype=torch.float64):
        other = x - factor * update.last_tau * slope
        if (
            penalty.reach(x.dtype)
            >= torch.cdist(other.transpose(0, 1), other.transpose(0, 1)).max() ** 2
        ):
            assert penalty.total(other) >= after * (1 - 1e-13)
    lower = Backtracking(penalty, tau=1.0 if normalize else 0.05)
    assert after < penalty.total(lower(x, coupling))


@pytest.mark.parametrize(
    ("p", "tau"),
    [
        ([0, 1, 1], None),
        ([3, -1, -1, -1, -1], None),
        ([0, -4, 1, 0, 0], 2.0),
        (
            [0, -6e-14, 3, -5 / 3, 1 / 4],
            1e-14,
        ),  # its slope has the roots 2 and 3 too, as exact as the largest
    ],
)
def test_the_first_minimum(p: list[float], tau: float | None) -> None:
    assert first_minimum(np.array(p, dtype=float)) == (
        tau if tau is None else pytest.approx(tau, rel=1e-12, abs=0)
    )


def test_sparse_coupling_measures_its_edges() -> None:
    """The energy-based extension of Example 5: f over the observed edges."""
    penalty = dm.SigmoidPenalty()
    x = ball(40)
    graph = random_problem().coupling.graph
    sender, receiver = graph.edges

    def squared(x: torch.Tensor) -> torch.Tensor:
        return (x[sender] - x[receiver]).square().sum(-1)

    coupling = dm.couplings.SparseCoupling(
        graph, penalty.f(squared(x)), symmetric=True, nonnegative=True
    )
    update = Backtracking(penalty, tau=16.0)
    after = update(x, coupling)
    assert penalty.delta(squared(after)).sum() < penalty.delta(squared(x)).sum()
    assert update.last_tau < 16.0
    weight = torch.linspace(0.5, 2.0, sender.numel(), dtype=torch.float64)
    weighted = dm.couplings.SparseCoupling(Graph(40, graph.edges, weight))
    torch.testing.assert_close(
        update.energy(x, weighted), (weight * penalty.delta(squared(x)).squeeze(1)).sum()
    )


def test_near_consensus_a_step_is_as_long_as_anywhere_else() -> None:
    """Energies are compared in double, and without the mean, beside which they would be rounding."""
    problem = random_problem()
    update = Backtracking(dm.QuadraticPenalty(), tau=3.0)
    assert (
        update.energy(problem.state.float(), problem.coupling.to(torch.float32)).dtype
        == torch.float64
    )
    update(problem.state, problem.coupling)
    tau = update.last_tau
    update(1 + 1e-9 * problem.state, problem.coupling)
    assert update.last_tau == tau


@pytest.mark.parametrize("tau", [0.05, 2.0])
def test_the_accepted_step_is_an_explicit_one_and_differentiated_with_tau_held_constant(
    tau: float,
) -> None:
    problem = random_problem(12)
    x = problem.state[:, :1].clone().requires_grad_()
    update = Backtracking(dm.QuadraticPenalty(), tau=tau)
    got = update(x, problem.coupling)
    expected = ExplicitEuler(update.last_tau)(x, problem.coupling)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.square().sum(), x) for out in (got, expected))
    )
    assert (update.last_tau == tau) == (tau < 1)  # a step that goes down already is kept


def test_a_wrong_energy_is_an_error_not_a_silent_step() -> None:
    problem = complete_problem()
    with pytest.raises(ConvergenceError, match=r"no τ down to .* that lowers the energy"):
        Backtracking(lambda x: -x.square().sum(), tau=0.1)(problem.state, problem.coupling)
    with pytest.raises(
        ConvergenceError, match=r"no τ down to 0\.025 that"
    ):  # the last of three that were tried
        Backtracking(lambda x: -x.square().sum(), tau=0.1, max_steps=3)(
            problem.state, problem.coupling
        )
    for shape in ((), (1,)):
        level = Backtracking(lambda x, shape=shape: x.new_zeros(shape), tau=0.1)
        level(problem.state, problem.coupling)
        assert level.last_tau == 0.1  # an energy that stays is none that rises
    with pytest.raises(
        CouplingMismatchError, match="knows the energy of all pairs; got SparseCoupling"
    ):
        Backtracking(dm.SimplePenalty(), exact=True)(problem.state, problem.coupling)
    for other in (3.0, problem.state.new_zeros(2)):
        with pytest.raises(
            TypeError, match=r"penalty\(x\) must be one number as a tensor, or one of every graph"
        ):
            Backtracking(lambda x, other=other: other)(problem.state, problem.coupling)
    broken = problem.state.clone()
    broken[0, 0, 0] = float("nan")
    with pytest.raises(ConvergenceError, match="finite"):
        Backtracking(dm.QuadraticPenalty())(broken, problem.coupling)


@pytest.mark.parametrize("sparse", [False, True])
def test_outside_the_domain_the_penalty_is_no_energy(sparse: bool) -> None:
    """For z² > 4 the simple penalty decreases, so an explosion would count as descent (docs/errata.md, D7)."""
    penalty = dm.SimplePenalty()
    x = 5.0 * ball(40)
    coupling = random_problem().coupling if sparse else penalty.coupling(x)
    with pytest.raises(
        ValueError, match=r"x must lie in the domain of SimplePenalty.*Normalise"
    ) as raised:
        Backtracking(penalty)(x, coupling)
    named = float(str(raised.value).split("squared distance ")[1].split(". ")[0])
    assert (
        torch.cdist(x[:, 0], x[:, 0]).square().sub(named).abs().min() <= 1e-5 * named
    )  # of two nodes, not of a sum
    huge = ball(40) - 1e6 * (ball(40) - penalty.coupling(ball(40), normalize=True) @ ball(40))
    assert penalty.total(huge) < penalty.total(ball(40))
    after = Backtracking(penalty, tau=1e6)(ball(40), penalty.coupling(ball(40), normalize=True))
    assert after.norm(dim=-1).max() < 2


@pytest.mark.parametrize("seed", range(5))
def test_a_state_at_rest_keeps_the_first_step(seed: int) -> None:
    """Where all nodes agree, what is left of the slope is rounding; a search among its energies would shrink τ."""
    problem = random_problem(seed=seed)
    update = Backtracking(dm.QuadraticPenalty(), tau=0.05)
    for level in (0.1, 0.3, 1 / 3, 100.1):
        x = torch.full_like(problem.state, level)
        torch.testing.assert_close(update(x, problem.coupling), x, rtol=1e-14, atol=0)
        assert update.last_tau == 0.05
