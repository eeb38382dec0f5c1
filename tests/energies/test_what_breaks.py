"""Theorem T1 of docs/certified.md needs what it says: each premise left out, and an energy that rises."""

import pytest
import torch
from energy_cases import DOUBLE

from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import SigmoidPenalty
from diffusion_mp.graph import Graph
from diffusion_mp.updates import CertifiedStep
from energy_forms import Joint
from helpers import randn

PENALTY = SigmoidPenalty()


def edges(num_nodes, ends, both=True):
    index = torch.tensor(ends).T
    index = torch.cat([index, index.flip(0)], 1) if both else index
    return SparseCoupling(
        Graph(num_nodes, index),
        torch.ones(index.size(1), 1, dtype=DOUBLE),
        nonnegative=True,
    )


def column(*values):
    return torch.tensor(values, dtype=DOUBLE).reshape(-1, 1, 1)


def moved(x, coupling, source, beta, p):
    """x + (β(h − x) − L_W x) / (β + p), with any p."""
    return x + (beta * (source - x) - coupling.laplacian(x)) / (beta + p)


@pytest.mark.parametrize(("share", "falls"), [(0.9, False), (1.1, True)])
def test_without_a_constraint_p_must_reach_the_row_sums(share, falls):
    """Two nodes that an edge joins overshoot with less."""
    x = column(1, -1)
    coupling = edges(2, [(0, 1)])
    energy = Joint(None, graph_term=coupling, source=0 * x, beta=0.01)
    assert bool(energy(moved(x, coupling, 0 * x, 0.01, share)) < energy(x)) == falls


def test_on_the_sphere_p_must_be_twice_the_row_sums_of_a_graph():
    """With p = w two nodes that pull at each other change places, and both leave their source: F = 4.02 → 11.22."""
    x = column(1, -1)
    source = column(0.9, -0.9)
    coupling = edges(2, [(0, 1)])
    energy = Joint(None, graph_term=coupling, source=source, constraint="sphere")
    swapped = moved(x, coupling, source, 1.0, p=1.0).sign()
    assert float(energy(x)) == pytest.approx(4.02)
    assert float(energy(swapped)) == pytest.approx(11.22)
    assert torch.equal(
        CertifiedStep(constraint="sphere")(x, coupling, source=source), x
    )


def test_a_directed_graph_has_no_energy():
    """Three nodes hear a fourth, which hears a fifth: what the fifth says raises the energy of three edges."""
    x = column(0, 0, 0, 0, 1)
    ends = [(3, 0), (3, 1), (3, 2), (4, 3)]
    # Everybody takes over what is heard; the fifth hears nothing.
    after = edges(5, ends, both=False) @ x
    after[4] = x[4]
    energy = Joint(None, graph_term=edges(5, ends))
    assert [float(energy(state)) for state in (x, after)] == pytest.approx([1.0, 3.0])


def setting():
    source = randn(6, 1, 4)
    ring = edges(6, [(i, (i + 1) % 6) for i in range(6)])
    x = source
    for _ in range(150):
        x = CertifiedStep()(x, PENALTY.coupling(x) + ring, source=source)
    return x, source, ring


def average(w, x, source):
    return (source + (w @ x.squeeze(1)).unsqueeze(1)) / (1 + w.sum(1)).reshape(-1, 1, 1)


def certified(x, source, ring, values=None):
    return average(
        (PENALTY.coupling(x) + ring).to_dense()[0],
        x if values is None else values,
        source,
    )


def separate_projections(x, source, ring):
    query = x.squeeze(1)
    key = x.squeeze(1).roll(1, 1)
    return average(
        PENALTY.f(torch.cdist(query, key).square()) + ring.to_dense()[0], x, source
    )


def separate_denominators(x, source, ring):
    pairs = PENALTY.coupling(x)
    return x + 0.1 * (
        source
        - x
        - pairs.laplacian(x) / pairs.degree().unsqueeze(2)
        - ring.laplacian(x) / 2
    )


LAYERS = {
    "certified": certified,
    "layer norm": lambda *inputs: torch.nn.functional.layer_norm(
        certified(*inputs), (4,)
    ),
    "tanh": lambda *inputs: certified(*inputs).tanh(),
    "dropout on values": lambda x, source, ring: certified(
        x, source, ring, torch.cat([0 * x[:1], x[1:]])
    ),
    "value transform": lambda x, source, ring: certified(x, source, ring, 0.9 * x),
    "separate projections": separate_projections,
    "separate denominators": separate_denominators,
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_leaves_the_least_energy_does_not_descend_it(name):
    """From where F is least the certified step does not move; every other layer does, and F rises."""
    x, source, ring = setting()
    energy = Joint(PENALTY, graph_term=ring, source=source)
    before = energy(x)
    after = energy(LAYERS[name](x, source, ring))
    rise = float((after - before) / before.abs())
    assert (rise > 1e-3) == (name != "certified")
    assert rise > -1e-12


def test_a_ball_or_an_orthant_that_holds_the_source_never_acts():
    """A certified step is a weighted mean of source and states, so where these lie in a convex C it does, too."""
    source = (
        torch.rand(6, 1, 4, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
        / 2
    )
    coupling = PENALTY.coupling(source) + edges(6, [(0, 1), (1, 2)])
    steps = (CertifiedStep(constraint=name) for name in (None, "nonnegative", "ball"))
    free, confined, ball = (
        step(source.flip(0), coupling, source=source) for step in steps
    )
    assert torch.equal(free, confined)
    assert torch.equal(free, ball)
