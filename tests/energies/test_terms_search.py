"""Gradient ascent on the relative rise of energies with weights, over parameters, states and edges (Theorem T11)."""

import math

import pytest
import torch
from test_terms import CHANNELS, CONSTRAINTS, NODES, Bounded
from torch import Tensor, nn

from diffusion_mp import Graph
from diffusion_mp.energies.terms import ScaledTerm, SourceTerm
from diffusion_mp.layers.certified_block import CertifiedBlock, RowAttention, TiedMLP, WeightedGraph

PARTS = {
    "graph": lambda: WeightedGraph(CHANNELS),
    "directed graph": lambda: WeightedGraph(CHANNELS, symmetric=False, gate=True, hops=2),
    "attention": lambda: RowAttention(CHANNELS),
    "attention to neighbours": lambda: RowAttention(CHANNELS, neighbours=True),
    "MLP": lambda: TiedMLP(CHANNELS, 4, activation="tanh"),
}
COMBINATIONS = [["graph"], ["directed graph"], ["attention"], ["attention to neighbours"], ["MLP"],
                ["graph", "attention"], ["graph", "attention", "MLP"]]  # fmt: skip


def largest_rise(parts: list[str], constraint: str | None, factor: float, seed: int, ascent: int = 25) -> float:
    """The largest rise of F by one step, relative to its terms, with bounds multiplied by ``factor``."""
    torch.manual_seed(seed)
    graph = Graph(NODES, torch.randint(NODES, (2, 5 + seed % 20)))
    block = CertifiedBlock(CHANNELS, [PARTS[name]() for name in parts], 1, constraint=constraint).double()
    leaves = [nn.Parameter(10 ** float(torch.empty(()).uniform_(-1, 1)) * torch.randn(NODES, CHANNELS).double())]
    leaves.append(nn.Parameter(10 ** float(torch.empty(()).uniform_(-1, 1)) * torch.randn(NODES, CHANNELS).double()))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * (3 if parameter.dim() == 0 else 0.3))
    optimizer = torch.optim.Adam([*leaves, *block.parameters()], lr=0.1)
    found = -math.inf
    for _ in range(ascent):
        z, h = leaves
        terms = [ScaledTerm(block.beta(), SourceTerm(h)), *(Bounded(t, factor) for t in block.made(h, graph))]
        start = block.update.constraint.project(z.unsqueeze(1))

        def values(state: Tensor, terms: list = terms) -> Tensor:
            return torch.stack([term.value(state, graph) for term in terms])

        before, after = values(start), values(block.update.descent(start, terms, graph)(start))
        rise = (after.sum() - before.sum()) / (before.abs().sum() + after.abs().sum()).clamp(min=1e-300)
        found = max(found, float(rise.detach()))
        optimizer.zero_grad()
        (-rise).backward()
        optimizer.step()
    return found


def search(starts: int, factor: float) -> list[float]:
    cases = [(parts, constraint) for parts in COMBINATIONS for constraint in CONSTRAINTS]
    return [largest_rise(*cases[seed % len(cases)], factor, seed) for seed in range(starts)]


def test_ascent_finds_no_rise() -> None:
    assert max(search(len(COMBINATIONS) * len(CONSTRAINTS), 1.0)) <= 1e-12


@pytest.mark.parametrize("parts", [parts for parts in COMBINATIONS if parts != ["MLP"]], ids=", ".join)
def test_ascent_finds_rises_where_bounds_are_too_small(parts: list[str]) -> None:
    rises = [largest_rise(parts, constraint, 0.4, seed) for seed in range(3) for constraint in CONSTRAINTS]
    assert max(rises) > 1e-3


@pytest.mark.slow
def test_ascent_from_many_starts_finds_no_rise() -> None:
    assert max(search(30_000, 1.0)) <= 1e-12
