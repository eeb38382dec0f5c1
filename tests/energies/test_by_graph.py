"""F of every graph of a batch is that of the graph alone."""

import pytest
import torch
from energy_cases import DOUBLE
from torch.testing import assert_close

from diffusion_mp import Graph
from diffusion_mp.energies import EnergyTerm, FunctionPenalty
from diffusion_mp.layers import CertifiedBlock, CertifiedConv
from diffusion_mp.layers.certified_block import RowAttention, TiedMLP, WeightedGraph
from energy_forms import Joint
from helpers import built, close, randn

SIZES = (4, 1, 0, 5)
EDGES = torch.tensor(
    [
        [0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 5],
        [1, 0, 3, 2, 0, 6, 5, 8, 7, 5, 9],
    ]
)
PTR = torch.tensor([0, *SIZES]).cumsum(0)
C = 4


class Own(EnergyTerm):
    """Σ_i log cosh z_i + 1, which is not zero at zero."""

    def value(self, z, graph):
        return (z.double().cosh().log() + 1).sum()

    def half_gradient(self, z, graph):
        return z.tanh() / 2

    def bound(self, z, graph):
        return torch.full_like(z[:, :, :1], 0.25)


LAYERS = {
    "graph": lambda: CertifiedBlock(C, [WeightedGraph(C)]),
    "directed graph": lambda: CertifiedBlock(
        C, [WeightedGraph(C, symmetric=False, gate=True, hops=2)]
    ),
    "attention": lambda: CertifiedBlock(C, [RowAttention(C, 2)]),
    "neighbours": lambda: CertifiedBlock(C, [RowAttention(C, 2, neighbours=True)]),
    "MLP": lambda: CertifiedBlock(C, [TiedMLP(C, 7), 0.3 * Own()], constraint=None),
    "conv": lambda: CertifiedConv(C),
    "heads": lambda: CertifiedConv(C, penalty="gaussian", constraint="sphere", heads=2),
    "tied": lambda: CertifiedConv(
        C, penalty=FunctionPenalty(lambda z2: 1 / (1 + z2)), heads=2, projection="tied"
    ),
    "no pairs": lambda: CertifiedConv(C, penalty=None, constraint="nonnegative"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_energy_of_a_graph_is_that_of_the_graph_alone(name):
    layer = built(LAYERS[name]).double().requires_grad_(False)
    x = randn(10, C)
    state = layer.update.constraint.project(layer.by_head(randn(10, C, seed=1)))
    energy = layer.energy(x, Graph(10, EDGES, ptr=PTR))
    values = energy.by_graph(state)
    assert values.dtype == DOUBLE
    assert values.shape == (4,)
    close(values.sum(), energy(state), "entries")
    for number, (start, end) in enumerate(
        zip(PTR[:-1].tolist(), PTR[1:].tolist(), strict=True)
    ):
        inside = (EDGES[0] >= start) & (EDGES[0] < end)
        alone = layer.energy(x[start:end], Graph(end - start, EDGES[:, inside] - start))
        expected = alone(state[start:end])
        if "MLP" in name:  # a constant of a term of one's own is shared equally
            expected = expected - 0.3 * C * (end - start) + 0.3 * C * 10 / 4
        close(values[number], expected, "entries")
        assert alone.by_graph(state[start:end]).shape == (1,)


def test_only_the_graph_that_leaves_the_constraint_is_infinite():
    energy = Joint(None, source=randn(10, C), constraint="ball", ptr=PTR)
    state = energy.constraint.project(randn(10, C))
    state[7] *= 3
    assert energy.by_graph(state).isinf().tolist() == [False, False, False, True]


def test_energies_by_graph_add_up():
    layer = built(LAYERS["heads"]).double()
    batch = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    by_graph = layer.energies(randn(10, C), EDGES, None, batch, by_graph=True)
    assert by_graph.shape == (2, 4)
    assert_close(by_graph.sum(1), layer.energies(randn(10, C), EDGES, None, batch))
