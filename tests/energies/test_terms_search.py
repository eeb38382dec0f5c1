"""Gradient ascent on the relative rise of energies with weights, over parameters, states and edges (Theorem T11).

Starts are graphs of a batch, each with a state and a source of its own; the graphs of a batch share the parameters.
"""

import math

import pytest
import torch
from energy_cases import DOUBLE
from test_terms import CONSTRAINTS, Bounded
from torch import nn

from cases import CHANNELS, NODES
from diffusion_mp import Graph
from diffusion_mp.energies import Energy
from diffusion_mp.energies.terms import ScaledTerm, SourceTerm
from diffusion_mp.layers.certified_block import (
    CertifiedBlock,
    RowAttention,
    TiedMLP,
    WeightedGraph,
)
from helpers import close

pytestmark = pytest.mark.unwatched

PARTS = {
    "graph": lambda: WeightedGraph(CHANNELS),
    "directed graph": lambda: WeightedGraph(
        CHANNELS, symmetric=False, gate=True, hops=2
    ),
    "attention": lambda: RowAttention(CHANNELS),
    "attention to neighbours": lambda: RowAttention(CHANNELS, neighbours=True),
    "MLP": lambda: TiedMLP(CHANNELS, 4, activation="tanh"),
}
COMBINATIONS = [
    ["graph"],
    ["directed graph"],
    ["attention"],
    ["attention to neighbours"],
    ["MLP"],
    ["graph", "attention"],
    ["graph", "attention", "MLP"],
]
CASES = [(parts, constraint) for parts in COMBINATIONS for constraint in CONSTRAINTS]


def batch(graphs):
    edges = [k * NODES + torch.randint(NODES, (2, 5 + k % 20)) for k in range(graphs)]
    return Graph(
        graphs * NODES, torch.cat(edges, 1), ptr=NODES * torch.arange(graphs + 1)
    )


def largest_rise(parts, constraint, factor, seed, starts, ascent):
    """The largest rise of F by one step, relative to its terms, with bounds multiplied by ``factor``."""
    torch.manual_seed(seed)
    graph = batch(starts)
    block = CertifiedBlock(
        CHANNELS, [PARTS[name]() for name in parts], 1, constraint=constraint
    ).double()
    sizes = 10 ** torch.empty(2, starts, 1, dtype=DOUBLE).uniform_(
        -1, 1
    ).repeat_interleave(NODES, 1)
    leaves = [
        nn.Parameter(size * torch.randn(starts * NODES, CHANNELS).double())
        for size in sizes
    ]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(
                torch.randn_like(parameter) * (3 if parameter.dim() == 0 else 0.3)
            )
    optimizer = torch.optim.Adam([*leaves, *block.parameters()], lr=0.1)
    largest = -math.inf
    for step in range(ascent):
        z, h = leaves
        terms = [
            ScaledTerm(block.beta(), SourceTerm(h)),
            *block.energy(h, graph).terms[:-1],
        ]
        bounded = [terms[0], *(Bounded(term, factor) for term in terms[1:])]
        start = block.update.constraint.project(z.unsqueeze(1))
        moved = Energy(bounded, block.update.constraint, graph=graph).step(start)
        before, after = (
            torch.stack([term.by_graph(state, graph) for term in terms])
            for state in (start, moved)
        )
        rise = (after.sum(0) - before.sum(0)) / (
            before.abs().sum(0) + after.abs().sum(0)
        ).clamp(min=1e-300)
        largest = max(largest, float(rise.detach().max()))
        if not step:  # these are the values of the library
            total = torch.stack([term.value(moved, graph) for term in terms])
            close(after.sum(1), total, "layer")
        optimizer.zero_grad()
        (-rise).sum().backward()
        optimizer.step()
    return largest


@pytest.mark.parametrize(
    ("starts", "batches", "ascent"),
    [(5, len(CASES), 10), pytest.param(25, 1200, 25, marks=pytest.mark.slow)],
)
def test_ascent_finds_no_rise(starts, batches, ascent):
    for seed in range(batches):
        parts, constraint = CASES[seed % len(CASES)]
        assert largest_rise(parts, constraint, 1.0, seed, starts, ascent) <= 1e-12, (
            parts,
            constraint,
            seed,
        )


@pytest.mark.parametrize(
    "parts", [parts for parts in COMBINATIONS if parts != ["MLP"]], ids=", ".join
)
def test_ascent_finds_rises_where_bounds_are_too_small(parts):
    assert any(
        largest_rise(parts, constraint, 0.4, 0, 3, 25) > 1e-3
        for constraint in CONSTRAINTS
    )
