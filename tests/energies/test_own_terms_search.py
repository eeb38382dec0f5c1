"""`certificate` against terms of one's own, right and wrong: never yes where a step that is taken raises F.

Nor does a term that bounds itself ever get a no.
"""

import math
import random
import warnings
from collections import Counter
from itertools import pairwise

import pytest
import torch
from energy_cases import DOUBLE, HalfSpace, TooFar

from diffusion_mp import Graph
from diffusion_mp.energies import CouplingTerm, EnergyTerm
from diffusion_mp.layers import CertifiedBlock
from diffusion_mp.layers.certified_block import RowAttention, TiedMLP, WeightedGraph
from diffusion_mp.testing.laws import seeded

pytestmark = pytest.mark.unwatched
C = 3

#: V, V′ / 2 and a bound on V″ / 4 of a function of every entry; of the last two there is none.
ENTRIES = {
    "square": (lambda t: t.square(), lambda t: t, 0.5),
    "log cosh": (
        lambda t: torch.nn.functional.softplus(2 * t) - t,
        lambda t: t.tanh() / 2,
        0.25,
    ),
    "Huber": (
        lambda t: torch.where(t.abs() < 1, t * t, 2 * t.abs() - 1),
        lambda t: t.clamp(-1, 1),
        0.5,
    ),
    "cosine": (lambda t: t.cos(), lambda t: -t.sin() / 2, 0.25),
    "well": (
        lambda t: t**4 / (1 + t * t),
        lambda t: t * (1 - (1 + t * t) ** -2),
        0.625,
    ),
    "concave": (
        lambda t: -(1 + t * t).sqrt(),
        lambda t: -t / (1 + t * t).sqrt() / 2,
        0.0,
    ),
    "absolute value": (lambda t: t.abs(), lambda t: t.sign() / 2, math.nan),
    "quartic": (lambda t: t**4, lambda t: 2 * t**3, math.nan),
}


class Own(EnergyTerm):
    """Σ V of the entries of z or of the differences along edges, with changes of its gradient and its bound."""

    def __init__(self, name, edges, share, slope, noise):
        self.function, self.derivative, self.curvature = ENTRIES[name]
        self.edges = edges
        self.share = share
        self.slope = slope
        self.noise = noise
        if math.isnan(self.curvature):
            self.curvature = 0.5

    def value(self, z, graph):
        z = z.double()
        if self.edges:
            z = z[graph.edges[1]] - z[graph.edges[0]]
        return self.function(z).sum()

    def half_gradient(self, z, graph):
        if self.edges:
            away = self.derivative(z[graph.edges[1]] - z[graph.edges[0]])
            half = (
                torch.zeros_like(z)
                .index_add(0, graph.edges[1], away)
                .index_add(0, graph.edges[0], -away)
            )
        else:
            half = self.derivative(z)
        return self.slope * half + self.noise * z.sin()

    def bound(self, z, graph):
        p = torch.ones_like(z[:, :, :1])
        if self.edges:  # of an edge, as of a graph
            p = (
                2
                * (graph.degree("in", DOUBLE) + graph.degree("out", DOUBLE)).to(z)[
                    :, None, None
                ]
            )
        return self.share * self.curvature * p


class Draws(random.Random):
    def share(self):
        return self.choice(
            [1.0, 1.0, 1.0, self.uniform(0.45, 0.99), 10 ** self.uniform(-2, 1)]
        )

    def term(self):
        """A term, and whether it is right."""
        name = self.choice([*ENTRIES])
        edges = self.random() < 0.5
        share = self.share()
        slope = self.choice(
            [1.0, 1.0, 1.0, 1.0, self.choice([0.5, 0.99, 1.1, -1.0, 2.0, 0.0])]
        )
        noise = self.choice([0.0, 0.0, 0.0, 0.0, 10 ** self.uniform(-3, 0)])
        right = (
            share >= 1
            and slope == 1
            and not noise
            and name not in ("absolute value", "quartic")
        )
        term = Own(name, edges, share, slope, noise)
        if self.random() < 0.3:
            factor = 10 ** self.uniform(-2, 2)
            term = (
                self.choice(
                    [factor, torch.tensor(factor, dtype=DOUBLE), lambda: factor]
                )
                * term
            )
        return term, right


def case(seed):
    d = Draws(seed)
    generator = torch.Generator().manual_seed(seed)
    size = d.randint(1, 9)
    ptr = None
    if d.random() < 0.5:
        ptr = torch.tensor(
            [0, *sorted(d.choices(range(size + 1), k=d.randint(0, 3))), size]
        )
    ends = torch.randint(size, (2, d.randint(0, 3 * size)), generator=generator)
    if ptr is not None:
        member = torch.searchsorted(ptr, torch.arange(size), right=True)
        ends = ends[:, member[ends[0]] == member[ends[1]]]
    graph = Graph(size, torch.cat([ends, ends.flip(0)], 1), ptr=ptr)
    terms = []
    right = True
    for _ in range(d.randint(1, 2)):
        term, fine = d.term()
        terms.append(term)
        right = right and fine
    if d.random() < 0.2:
        coupling = TooFar(graph, nonnegative=True)
        coupling.share = d.share()
        right = right and coupling.share >= 1
        terms.append(CouplingTerm(coupling))
    with seeded(seed):
        library = [WeightedGraph(C), RowAttention(C), TiedMLP(C, 4)]
        terms += [module for module in library if d.random() < 0.2]
    constraint = d.choice([None, None, "nonnegative", "ball", "sphere", "own"])
    if constraint == "own":
        end = d.choice([0.5, 0.5, 0.3])
        right = right and end == 0.5
        constraint = HalfSpace(end)
    beta = 10 ** d.uniform(-3, 1)
    block = CertifiedBlock(
        C,
        terms,
        d.randint(1, 8),
        constraint=constraint,
        beta=beta,
        radius=10 ** d.uniform(-1, 1),
    )
    dtype = d.choice([DOUBLE, DOUBLE, torch.float32])
    scale = 10 ** d.uniform(-2, 2)
    x = (scale * torch.randn(size, C, generator=generator, dtype=DOUBLE)).to(dtype)
    return block.to(dtype).requires_grad_(False), x, graph, right


def largest_rise(block, x, graph):
    """The largest rise of F of a graph in a step that is taken, in units of the rounding that is allowed."""
    energy = block.energy(x, graph)
    states = [block.by_head(state) for state in block.states(x, graph)]
    eps = torch.finfo(x.dtype).eps
    worst = -math.inf
    for before, after in pairwise(states):
        values = [
            torch.stack([term.by_graph(z, graph) for term in energy.terms])
            for z in (before, after)
        ]
        bound = sum(term.bound(before, graph) for term in energy.terms)
        squares = float((bound * (before.square() + after.square())).sum())
        size = values[0].abs().sum() + values[1].abs().sum() + squares
        excess = (values[1].sum(0) - values[0].sum(0)) / (64 * eps * size).clamp(
            min=1e-300
        )
        worst = max(worst, float(excess.max()) if excess.numel() else 0.0)
    return worst


def search(seeds):
    said = Counter()
    for seed in seeds:
        block, x, graph, right = case(seed)
        certificate = block.certificate(x, graph)
        if certificate:
            assert certificate.searched > 0
            rise = largest_rise(block, x, graph)
            assert rise <= 1, (seed, rise, str(certificate))
        elif right:
            raise AssertionError((seed, certificate.reason))
        said[f"{'right' if right else 'wrong'}, {'yes' if certificate else 'no'}"] += 1
    return said


@pytest.mark.parametrize("cases", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_step_that_is_taken_raises_what_is_certified(cases):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        said = search(range(cases))
    print(dict(said))
    assert said["right, yes"] > 0.1 * cases
    assert said["wrong, no"] > 0.3 * cases
