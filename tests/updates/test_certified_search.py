"""Theorem T1 of docs/certified.md against gradient ascent on the rise of F in a step of the library.

Many small problems, each with numbers of its own, are the graphs of one batch: one backward pass is a step for all.
"""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from dense_updates import DOUBLE
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp import MixturePenalty
from diffusion_mp.couplings import ReweightedCoupling, SparseCoupling
from diffusion_mp.energies import (
    Ball,
    Sphere,
    get_constraint,
    get_penalty,
)
from diffusion_mp.energies.constraints import CONSTRAINTS
from diffusion_mp.graph import Graph
from diffusion_mp.updates import CertifiedStep, ExplicitEuler
from energy_forms import Joint

pytestmark = pytest.mark.unwatched

PENALTIES = ("simple", "sigmoid", "softmax", "gaussian", "quadratic")
CASES = [(p, c, g) for p, c, g in product(PENALTIES, CONSTRAINTS, (False, True))]
CHANNELS = 2
DECADES = 3.0  # β, λ and μ lie between 10^-3 and 10^3


class Problems:
    """Problems on graphs of these sizes; the ascent moves all that is in ``free``."""

    offset: float | Tensor = 0.0
    dtype = DOUBLE

    def __init__(self, count, seed, sizes=range(2, 9)):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.tensor([sizes[k % len(sizes)] for k in range(count)])
        self.ptr = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        self.member = torch.repeat_interleave(torch.arange(count), sizes)
        first = self.ptr[:-1].tolist()
        nodes = int(self.ptr[-1])
        half = torch.cat(
            [
                torch.triu_indices(n, n, 1) + k
                for n, k in zip(sizes.tolist(), first, strict=True)
            ],
            1,
        )
        self.graph = Graph(nodes, torch.cat([half, half.flip(0)], 1), ptr=self.ptr)

        def randn(*shape):
            return torch.randn(shape, generator=generator, dtype=DOUBLE)

        self.scale = 10 ** (0.5 * randn(count, 1))[self.member]
        self.free = {name: randn(nodes, CHANNELS) for name in "xh"} | {
            "m": randn(nodes),
            "a": 3 * randn(half.size(1)),
        }
        self.free |= {name: randn(count) for name in ("beta", "lam", "mu")}
        for number in self.free.values():
            number.requires_grad_()

    def weight(self, name):
        return 10 ** (DECADES * torch.tanh(self.free[name]))[self.member]

    def rows(self, name):
        """State or source of every node, as exact as the dtype has it; the gradient is that of exact numbers."""
        return (self.offset + self.scale * self.free[name]).unsqueeze(1).to(self.dtype)

    @property
    def edges(self):
        return torch.sigmoid(self.free["a"]).repeat(2)

    def sums(self, of_nodes=None, of_pairs=None):
        total = torch.zeros(len(self.ptr) - 1, dtype=DOUBLE)
        if of_nodes is not None:
            total = total.index_add(0, self.member, of_nodes)
        if of_pairs is None:
            return total
        return total.index_add(0, self.member[self.graph.edges[0]], of_pairs)

    def distances(self, x):
        source, target = self.graph.edges
        return (x[source] - x[target]).square().sum((1, 2))


class Single(Problems):
    """Problems in single precision, far from the origin and small beside it, or in one place of a ball's surface."""

    dtype = torch.float32

    def __init__(self, count, seed, sizes=range(2, 9)):
        super().__init__(count, seed, sizes)
        generator = torch.Generator().manual_seed(seed)
        where, offset, scale = torch.rand(
            3, count, 1, generator=generator, dtype=DOUBLE
        )
        offset = torch.where(
            where < 0.2, 0.0, torch.where(where < 0.4, 0.5**0.5, 10 ** (6 * offset))
        )
        scale = 10 ** torch.where(offset == 0.5**0.5, 4 * scale - 4, 8 * scale - 4)
        self.offset = offset[self.member]
        self.scale = scale[self.member]


def certified(problems, penalty, constraint, graph, taken_for=None):
    """Where states lie, the library's step, T1's F of every problem, with δ from δ(0) on, and Σ p_i ‖x_i‖²."""
    bounded = penalty.domain[1] < np.inf and constraint.diameter == np.inf
    # where f ≥ 0, as T1 asks of the state that a step starts from
    if bounded:
        inside = Ball()
    else:
        inside = constraint
    pairs_of = problems.graph.edges[0]
    lam = problems.weight("lam").to(problems.dtype)
    metric = (problems.weight("beta") * problems.free["m"].exp()).to(problems.dtype)
    edges = (problems.weight("mu")[pairs_of] * problems.edges).to(problems.dtype)
    source = problems.rows("h")

    def coupling(x):
        omega = penalty.coupling(x, problems.ptr, constraint=inside)
        root = lam.sqrt().unsqueeze(1)
        scaled = ReweightedCoupling(omega, root, root, nonnegative=omega.nonnegative)
        if not graph:
            return scaled
        return scaled + SparseCoupling(
            problems.graph, edges, symmetric=True, nonnegative=True
        )

    update = CertifiedStep(constraint=taken_for or constraint)

    def step(x):
        moved = update(x, coupling(x), source=source, metric=metric)
        assert constraint.holds(moved.detach())  # the energy below does not ask
        return moved

    def energy(x):
        s = problems.distances(x.double())
        pairs = (
            lam.double()[pairs_of]
            / 2
            * (penalty.delta(s) - penalty.delta(torch.zeros_like(s)))
        )
        if graph:
            pairs = pairs + edges.double() / 2 * s
        return problems.sums(
            metric.double() * (x.double() - source.double()).square().sum((1, 2)), pairs
        )

    def size(x):
        damping = coupling(x).majorant(True).double() + metric.double().view(len(x), -1)
        return problems.sums((damping * x.double().square().sum(2)).sum(1))

    return lambda x: constraint.project(inside.project(x)), step, energy, size


def printed(problems, penalty, tau):
    """Eq. 24 of TfD as printed, ½ D̄⁻¹Ω and ½ Ã each normalised by itself, against its Eq. 25."""
    source, target = problems.graph.edges
    degree = torch.zeros_like(problems.free["m"]).index_add(0, target, problems.edges)
    weight = problems.edges / (degree[source] * degree[target]).sqrt()
    graph_term = SparseCoupling(
        problems.graph, weight, symmetric=True, nonnegative=True
    )

    def step(x):
        attention = penalty.coupling(x, problems.ptr, normalize=True)
        return ExplicitEuler(tau)(x, 0.5 * attention + 0.5 * graph_term)

    def energy(x):
        s = problems.distances(x)
        pairs = penalty.delta(s) - penalty.delta(torch.zeros_like(s)) + weight * s
        return problems.sums(of_pairs=pairs / 2)

    return lambda x: x, step, energy, None


def rise(problems, attack):
    """(F(x′) − F(x)) / F(x) of every problem, x and x′; in single precision per F(x) + Σ p_i ‖x_i‖²."""
    confine, step, energy, size = attack(problems)
    x = confine(problems.rows("x"))
    moved = step(x)
    before = energy(x)
    scale = before
    if problems.dtype == torch.float32:
        with torch.no_grad():
            scale = before + size(x)
    return (energy(moved) - before) / scale.clamp(min=1e-300), x, moved


def climb(problems, attack, iterations):
    """The largest (F(x′) − F(x)) / F(x) on the way up, of every problem.

    Half of the problems climb on that number, which is zero where nothing moves; the others on it per length moved.
    """
    ascent = torch.optim.Adam(problems.free.values(), lr=0.1, maximize=True)
    count = len(problems.ptr) - 1
    best = torch.full((count,), -torch.inf, dtype=DOUBLE)
    for _ in range(iterations):
        share, x, moved = rise(problems, attack)
        best = torch.maximum(best, share.detach())
        moves = ((t / problems.scale.unsqueeze(1)).double() for t in (moved - x, x))
        length, size = (problems.sums(t.square().sum((1, 2))) for t in moves)
        aim = share / torch.where(
            torch.arange(count) % 2 == 0, 1.0, length / (size + 1e-9) + 1e-9
        )
        assert aim.isfinite().all()
        ascent.zero_grad()
        aim[aim != 0].sum().backward()  # at F = 0 there is no slope
        ascent.step()
    return best


def named(penalty):
    return get_penalty(penalty, **({"dim": CHANNELS} if penalty == "softmax" else {}))


ALL = range(2, 9)
ROUNDING = 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("kind", "starts", "iterations", "sizes", "rounding"),
    [
        (Problems, 400, 5, range(3, 9, 5), 1e-12),
        pytest.param(Problems, 30_000, 40, ALL, 1e-12, marks=pytest.mark.slow),
        (Single, 480, 6, ALL, ROUNDING),
        pytest.param(Single, 30_000, 40, ALL, ROUNDING, marks=pytest.mark.slow),
    ],
)
def test_no_rise_is_found(kind, starts, iterations, sizes, rounding):
    rises = {}
    for seed, (penalty, constraint, graph) in enumerate(CASES):
        attack = partial(
            certified,
            penalty=named(penalty),
            constraint=get_constraint(constraint),
            graph=graph,
        )
        problems = kind(-(-starts // len(CASES)), seed, sizes)
        rises[penalty, constraint, graph] = climb(problems, attack, iterations).max()
    assert max(rises.values()) <= rounding, rises


@torch.no_grad()
def test_no_rise_on_the_way_to_rest():
    """Twenty steps from random starts; of what may be rounding, the share of pairs that lie together is known."""
    for seed, (name, constraint, graph) in enumerate(CASES):
        problems = Problems(14, seed, range(2, 9))
        penalty = named(name)
        confine, step, energy, _ = certified(
            problems, penalty, get_constraint(constraint), graph
        )
        lowest = penalty.delta(torch.zeros((), dtype=DOUBLE)).abs()
        rounding = problems.sums(
            of_pairs=lowest * problems.weight("lam")[problems.graph.edges[0]]
        )
        x = confine(problems.rows("x"))
        for _ in range(20):
            moved = step(x)
            before = energy(x)
            after = energy(moved)
            assert (after - before <= 1e-12 * (before + rounding)).all(), (
                name,
                constraint,
                graph,
            )
            x = confine(moved)


class CalledConvex(Sphere):
    """A sphere that claims what only a convex set has, so that p is w in place of 2w."""

    convex = True


@pytest.mark.parametrize("penalty", ["simple", "gaussian"])
def test_the_search_finds_rises_with_row_sums_on_a_sphere_beside_a_graph(penalty):
    attack = partial(
        certified,
        penalty=named(penalty),
        constraint=Sphere(),
        graph=True,
        taken_for=CalledConvex(),
    )
    assert (climb(Problems(20, 0, range(3, 9, 5)), attack, 25) > 0.01).sum() >= 5


def test_the_search_finds_rises_with_equation_24_as_printed():
    attack = partial(printed, penalty=named("sigmoid"), tau=1.0)
    assert (climb(Problems(12, 0, range(16, 17)), attack, 120) > 0.01).any()


@pytest.mark.data
@pytest.mark.parametrize(
    ("penalty", "rises"),
    [
        ("sigmoid", {1e-3: 0.002263, 0.1: 0.2436, 1.0: 3.831}),
        ("simple", {1e-3: 0.007166, 0.1: 0.4847}),
    ],
)
def test_at_the_counterexamples_equation_24_rises_and_one_denominator_mends_it(
    data_root, penalty, rises
):
    example = np.load(data_root / "counterexamples" / f"eq25_{penalty}.npz")
    x, adjacency = (torch.from_numpy(example[name]) for name in ("x", "A"))
    receiver, sender = adjacency.nonzero(as_tuple=True)
    graph = Graph(len(x), torch.stack([sender, receiver]))
    graph_term = SparseCoupling(
        graph, adjacency[receiver, sender], symmetric=True, nonnegative=True
    )
    energy = Joint(penalty, graph_term=graph_term)
    attention = named(penalty).coupling(x, normalize=True)
    for tau, rise in rises.items():
        moved = ExplicitEuler(tau)(x, 0.5 * attention + 0.5 * graph_term)
        assert float(energy(moved) - energy(x)) == pytest.approx(rise, rel=1e-3)
    # As in a ball: so the simple f is not negative.
    assert penalty != "simple" or torch.cdist(x, x).max() <= 2
    for _ in range(10):
        moved = CertifiedStep(0.0)(
            x, named(penalty).coupling(x, constraint=Ball()) + graph_term
        )
        assert energy(moved) < energy(x)
        x = moved


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_energy_of_the_search_is_the_joint_energy(penalty, constraint):
    problems = Problems(1, 3, range(6, 7))
    confine, _, energy, _ = certified(
        problems, named(penalty), get_constraint(constraint), graph=True
    )
    with torch.no_grad():
        x = confine(problems.rows("x"))
        lam, mu = (float(problems.weight(name)[0]) for name in ("lam", "mu"))
        edges = SparseCoupling(problems.graph, problems.edges)
        metric = problems.weight("beta") * problems.free["m"].exp()
        options = {
            "mu": mu,
            "source": problems.rows("h"),
            "metric": metric,
            "constraint": constraint,
        }
        joint = Joint(named(penalty), lam, graph_term=edges, **options)
        lowest = lam / 2 * 36 * named(penalty).delta(torch.zeros((), dtype=DOUBLE))
        assert_close(energy(x)[0], joint(x) - lowest, rtol=1e-11, atol=1e-11)


def mixture(seed):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(2, 1 + seed % 4, generator=generator, dtype=DOUBLE) - 0.5
    widths, weights = (10 ** (exponents * torch.tensor([[4.0], [6.0]]))).tolist()
    return MixturePenalty(widths, weights).double().requires_grad_(False)


@pytest.mark.parametrize(
    ("mixtures", "starts", "iterations"),
    [(4, 9, 4), pytest.param(30, 24, 30, marks=pytest.mark.slow)],
)
def test_no_mixture_makes_the_energy_rise(mixtures, starts, iterations):
    for seed in range(mixtures):
        for k, name in enumerate(CONSTRAINTS):
            graph = (seed + k) % 2 > 0
            attack = partial(
                certified,
                penalty=mixture(seed),
                constraint=get_constraint(name),
                graph=graph,
            )
            assert (
                climb(
                    Problems(starts, 10 * seed + k, range(2, 8, 2)), attack, iterations
                ).max()
                <= 1e-12
            )


class NotMonotone(MixturePenalty):
    @property
    def weights(self):
        return super().weights * torch.tensor([1.0, -0.99], dtype=DOUBLE)


def test_a_negative_weight_would_be_found():
    penalty = NotMonotone([1.0, 0.4], [1.0, 1.0]).double().requires_grad_(False)
    attack = partial(
        certified, penalty=penalty, constraint=get_constraint(None), graph=False
    )
    assert climb(Problems(12, 0, range(2, 8, 2)), attack, 40).max() > 1e-3
