"""The row problem on observed edges against dense rows in which all other pairs are closed."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.graph import Graph
from diffusion_mp.kernels.sparse_flow import EdgeFlow, sparse_flow_edges
from flow_rows import solve_rows
from helpers import close

DOUBLE = torch.float64
NODES = 6
# Node 4 has one sender, node 5 none, node 3 only edges without weight; one edge is given twice.
SOURCE = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 5, 3, 3, 0, 1])
TARGET = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 4, 2, 3, 3])


def inputs(dtype: torch.dtype = DOUBLE) -> list[Tensor]:
    """s, u, prior, λ and 1/α."""
    generator = torch.Generator().manual_seed(0)
    s, u = (torch.randn(14, 2, generator=generator, dtype=DOUBLE) for _ in range(2))
    prior = torch.rand(14, 1, generator=generator, dtype=DOUBLE) + 0.5
    prior[12:] = 0
    lam, leak = (
        torch.rand(NODES, 2, generator=generator, dtype=DOUBLE) + 0.1 for _ in range(2)
    )
    return [t.to(dtype) for t in (s, u, prior, lam, leak)]


def by_rows(
    s: Tensor, u: Tensor, prior: Tensor, lam: Tensor, leak: Tensor, target: Tensor
) -> EdgeFlow:
    """Every node and head by itself."""
    flow = torch.zeros_like(s)
    potential = torch.zeros_like(lam)
    for node in range(lam.size(0)):
        here = (target == node) & (prior[:, 0] > 0)
        log_prior = prior[here, 0].log()
        for head in range(s.size(1)):
            log_c = s[here, head] + log_prior + (log_prior - s[here, head]).logsumexp(0)
            f = (u[here, head] - (log_prior + u[here, head]).logsumexp(0)).exp()
            z, mu = solve_rows(log_c, lam[node, head] * f, 1 / leak[node, head])
            flow = flow.index_put((here.nonzero()[:, 0], torch.tensor(head)), z)
            potential = potential.index_put(
                (torch.tensor(node), torch.tensor(head)), mu
            )
    return EdgeFlow(flow, potential)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("conserved", [False, True])
def test_edges_solve_the_row_problem(scale, conserved):
    s, u, prior, lam, leak = inputs()
    lam = scale * lam
    leak = (0 if conserved else 1) * leak
    leaves = [s, u, prior, lam] if scale else [s, u, prior]
    for leaf in leaves:
        leaf.requires_grad_()
    got = sparse_flow_edges(s, u, prior, lam, leak, TARGET)
    expected = by_rows(s, u, prior, lam, leak, TARGET)
    flows = (prior > 0).squeeze(1)
    for ours, theirs in zip(got, expected, strict=True):
        close(ours, theirs)
        weight = torch.linspace(-1, 2, ours.numel(), dtype=DOUBLE).view_as(ours)
        mine, other = (
            torch.autograd.grad(out, leaves, weight, retain_graph=True)
            for out in (ours, theirs)
        )
        for leaf, slope, right in zip(leaves, mine, other, strict=True):
            assert slope.isfinite().all()
            # An edge without weight has a derivative that is of no use.
            compared = slice(None) if leaf is lam else flows
            close(slope[compared], right[compared], "gradient")


def test_nodes_without_senders_have_zero_rows():
    s, u, prior, lam, leak = inputs()
    flow, potential = sparse_flow_edges(s, u, prior, lam, leak, TARGET)
    assert flow[12:].eq(0).all()
    assert_close(potential[[3, 5]], 1 / leak[[3, 5]])
    flow, potential = sparse_flow_edges(s, u, prior, lam, 0 * leak, TARGET)
    assert potential[[3, 5]].eq(0).all()
    total = torch.zeros(NODES, 2, dtype=DOUBLE).index_add(0, TARGET, flow)
    assert_close(
        total, torch.tensor([1.0, 1, 1, 0, 1, 0], dtype=DOUBLE)[:, None].expand(-1, 2)
    )
    none = sparse_flow_edges(s[:0], u[:0], prior[:0], lam, leak, TARGET[:0])
    assert none.flow.shape == (0, 2)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_walks_reach_what_powers_of_the_adjacency_reach(hops):
    weight = torch.ones(14)
    weight[12:] = 0
    near = Graph(NODES, torch.stack([SOURCE, TARGET]), weight).within(hops)
    adjacency = torch.zeros(NODES, NODES)
    adjacency[TARGET[:12], SOURCE[:12]] = 1
    reached = (
        sum(torch.linalg.matrix_power(adjacency, p) for p in range(1, hops + 1)) > 0
    )
    assert near.num_edges == int(reached.sum())
    assert bool(reached[near.edges[1], near.edges[0]].all())
    assert near.edge_weight is None
    arguments = (torch.stack([SOURCE, TARGET]), weight, NODES, hops)
    torch.library.opcheck(
        torch.ops.diffusion_mp.walk_pairs.default,
        arguments,
        test_utils=("test_schema",),
    )
