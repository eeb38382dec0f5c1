"""Limits of the graphs of a batch: every graph is accelerated, stopped and compared in energy on its own."""

import pytest
import torch
from dense_updates import DOUBLE
from torch.testing import assert_close
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_undirected, unbatch

from diffusion_mp.errors import ConvergenceError
from diffusion_mp.layers import CertifiedBlock, RowAttention, TiedMLP, WeightedGraph
from diffusion_mp.updates import fixed_point
from diffusion_mp.updates.fixed_point import iterate
from helpers import built, close, randn


def wells(z):
    """A gradient step on Σ z⁴/4 − 15z² + 3z, row by row."""
    return z - 0.01 * (z**3 - 30 * z + 3)


def depth(z):
    return (z**4 / 4 - 15 * z**2 + 3 * z).sum(1)


PTR = torch.arange(21)
STARTS = torch.linspace(-8, 8, 20, dtype=DOUBLE).unsqueeze(1)


def by_graph(ptr, z):
    return torch.stack([depth(part).sum() for part in z.split(ptr.diff().tolist())])


def test_no_graph_ends_above_its_own_start():
    """Of twenty starts the acceleration leads some to the hill between the wells, and the total still falls."""
    unguarded = fixed_point(wells, STARTS, ptr=PTR)
    assert depth(unguarded).sum() < depth(STARTS).sum()
    assert (depth(unguarded) > depth(STARTS) + 1e-9).any()
    guarded_by_total = fixed_point(
        wells, STARTS, energy=lambda z: depth(z).sum(), ptr=PTR
    )
    assert torch.equal(guarded_by_total, unguarded)
    apart = fixed_point(wells, STARTS, energy=depth, ptr=PTR)
    assert (depth(apart) <= depth(STARTS) + 1e-9).all()
    alone = torch.stack(
        [fixed_point(wells, start[None], energy=depth)[0] for start in STARTS]
    )
    close(apart, alone)


@pytest.mark.parametrize("ptr", [[0, 3, 3, 4, 20], [0, 20], [0, 0, 20]])
def test_graphs_of_all_sizes(ptr):
    bounds = torch.tensor(ptr)
    limit = fixed_point(wells, STARTS, energy=lambda z: by_graph(bounds, z), ptr=bounds)
    parts = []
    for start in STARTS.split(bounds.diff().tolist()):
        parts.append(fixed_point(wells, start, energy=lambda z: depth(z).sum()))
    close(limit, torch.cat(parts))


def test_a_graph_takes_the_steps_that_it_takes_alone():
    """A slow graph beside a fast one does not move it once it has arrived, and is as fast as alone."""
    rate = torch.tensor([[0.1], [0.97], [0.97]], dtype=DOUBLE)
    h = torch.tensor([[1.0], [1.0], [-2.0]], dtype=DOUBLE)
    turn = torch.tensor([[1.0, 0, 0], [0, 0.6, 0.8], [0, -0.8, 0.6]], dtype=DOUBLE)
    count = [0]

    def step(z):
        count[0] += 1
        return h + rate * (turn @ z).sin()

    ptr = torch.tensor([0, 1, 3])
    counts = []
    for tol in (1e-3, 1e-12):
        count[0] = 0
        together = iterate(
            step, torch.zeros_like(h), tol=tol, max_iter=500, memory=10, ptr=ptr
        )
        counts.append(count[0])
        alone = iterate(
            lambda z: 1.0 + 0.1 * z.sin(), h[:1] * 0, tol=tol, max_iter=500, memory=10
        )
        assert torch.equal(together[:1], alone)
    assert counts[0] < counts[1]


def test_gradients_of_a_graph_do_not_depend_on_others():
    h = randn(7, 3).requires_grad_()
    ptr = torch.tensor([0, 2, 7])

    def limit(h, ptr):
        return fixed_point(
            lambda z: (h + 0.5 * z.flip(1)).tanh(), torch.zeros_like(h), ptr=ptr
        )

    (together,) = torch.autograd.grad(limit(h, ptr)[:2].square().sum(), h)
    (alone,) = torch.autograd.grad(limit(h[:2], None).square().sum(), h)
    assert_close(together, alone, rtol=1e-9, atol=1e-12)


def test_an_energy_has_one_number_or_one_for_every_graph():
    with pytest.raises(TypeError, match="one number, or 20, one for every graph"):
        fixed_point(wells, STARTS, energy=lambda z: z.flatten()[:3], ptr=PTR)
    with pytest.raises(ValueError, match="ptr must rise from 0 to num_nodes = 20"):
        fixed_point(wells, STARTS, ptr=torch.tensor([0, 7]))


@pytest.mark.parametrize("constraint", ["ball", "sphere", "nonnegative", None])
def test_limits_of_molecules_are_those_alone(constraint):
    """Of states of very different sizes, too."""
    terms = [WeightedGraph(4)]
    if constraint is not None:
        terms += [RowAttention(4), TiedMLP(4, 5, 0.1)]
    block = built(
        lambda: CertifiedBlock(4, terms, None, constraint=constraint, beta=9.0)
    ).double()
    scales = [-6, -4, -2, 0, 3]
    if constraint == "sphere":
        # Rows keep their length there, whatever the source: one that is small beside them leaves a minimum that is
        # nearly flat, which rounding decides about.
        scales = [-1, 0, 1, 2, 3]
    together = Batch.from_data_list(
        [
            Data(
                x=10.0**scale * randn(size, 4, seed=size),
                edge_index=to_undirected(torch.arange(size).unfold(0, 2, 1).T),
            )
            for size, scale in zip([2, 3, 2, 5, 4], scales, strict=True)
        ]
    )
    limits = block(together.x, together.edge_index, None, together.batch)
    for limit, data in zip(
        unbatch(limits, together.batch), together.to_data_list(), strict=True
    ):
        alone = block(data.x, data.edge_index).detach()
        atol = 1e-9 * float(alone.abs().max())
        assert_close(limit.detach(), alone, rtol=1e-7, atol=atol)


def test_a_graph_that_does_not_arrive_is_an_error():
    def step(z):
        return torch.where(torch.tensor([[True], [False]]), 0.5 * z, z + 1)

    with pytest.raises(ConvergenceError, match="the last one moved the state by 1"):
        fixed_point(step, torch.ones(2, 1), ptr=torch.tensor([0, 1, 2]), max_iter=30)
