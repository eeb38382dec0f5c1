"""Graphs of the stochastic block model: the generators behind PATTERN and CLUSTER (Dwivedi et al. 2023).

Everything is drawn from one `torch.Generator` on the CPU as uniform numbers in double precision, and compared and
sorted from there, so that a seed gives the same graphs on every machine and whatever the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected


class Pattern(NamedTuple):
    """A fixed subgraph to be found: its undirected edges, each once, and the letter of each node."""

    pairs: Int[Tensor, "2 P"]
    letters: Int[Tensor, " N"]


def block_model_pairs(
    block: Int[Tensor, " N"], probability: Float[Tensor, "K K"], generator: torch.Generator
) -> Int[Tensor, "2 P"]:
    """Joins every two nodes i < j with `probability[block[i], block[j]]`, independently; each edge once."""
    pairs = torch.triu_indices(len(block), len(block), 1)
    first, second = block[pairs]
    return pairs[:, _uniform(pairs.size(1), generator) < probability[first, second]]


def draw_pattern(
    generator: torch.Generator, *, sizes: tuple[int, int] = (20, 20), p: float = 0.5, letters: int = 3
) -> Pattern:
    """A random graph of edge probability `p` with random letters; its size is uniform on `sizes`, ends included."""
    block = torch.zeros(int(_integers(1, *sizes, generator)), dtype=torch.long)
    pairs = block_model_pairs(block, torch.full((1, 1), p, dtype=torch.float64), generator)
    return Pattern(pairs, _integers(len(block), 0, letters - 1, generator))


def pattern_graph(
    pattern: Pattern,
    generator: torch.Generator,
    *,
    communities: int = 5,
    sizes: tuple[int, int] = (5, 34),
    p: float = 0.5,
    q: float = 0.35,
    q_pattern: float = 0.5,
    letters: int = 3,
) -> Data:
    """A graph of PATTERN: a block model with random letters, and `pattern` planted in it (Dwivedi et al. 2023).

    Nodes of one community are joined with probability p, of two with q, a node of the pattern and any other with
    q_pattern; nodes are in random order.

    Shapes: x [N, letters] one-hot float, edge_index [2, E] both directions, y [N], 1 in the pattern and 0 outside.
    """
    block = _communities(communities, sizes, generator)
    planted = torch.full_like(pattern.letters, communities)
    probability = torch.full((communities + 1, communities + 1), q, dtype=torch.float64).fill_diagonal_(p)
    probability[-1], probability[:, -1] = q_pattern, q_pattern
    probability[-1, -1] = 0  # its own edges are fixed
    background = _integers(len(block), 0, letters - 1, generator)

    offset = len(block)
    block = torch.cat([block, planted])
    pairs = torch.cat([block_model_pairs(block, probability, generator), pattern.pairs + offset], dim=1)
    return _shuffled(pairs, torch.cat([background, pattern.letters]), letters, (block == communities).long(), generator)


def cluster_graph(
    generator: torch.Generator,
    *,
    communities: int = 6,
    sizes: tuple[int, int] = (5, 34),
    p: float = 0.55,
    q: float = 0.25,
) -> Data:
    """A graph of CLUSTER: a block model in which one random node per community shows its number (Dwivedi et al. 2023).

    Nodes of one community are joined with probability p, of two with q; nodes are in random order.

    Shapes: x [N, communities + 1] one-hot float, column c + 1 at the node that shows community c and column 0 at all
    others; edge_index [2, E] both directions; y [N], the community 0..communities − 1.
    """
    block = _communities(communities, sizes, generator)
    probability = torch.full((communities, communities), q, dtype=torch.float64).fill_diagonal_(p)
    pairs = block_model_pairs(block, probability, generator)
    size = torch.bincount(block, minlength=communities)  # the first of each shows; renaming makes it any of them
    number = torch.zeros_like(block)
    number[size.cumsum(0) - size] = torch.arange(1, communities + 1)
    return _shuffled(pairs, number, communities + 1, block, generator)


def _communities(count: int, sizes: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.repeat_interleave(torch.arange(count), _integers(count, *sizes, generator))


def _shuffled(pairs: Tensor, letter: Tensor, letters: int, y: Tensor, generator: torch.Generator) -> Data:
    """The graph with its nodes renamed at random, so that their order tells nothing."""
    order = _uniform(len(y), generator).argsort()
    name = torch.empty_like(order)
    name[order] = torch.arange(len(order))
    edge_index = to_undirected(name[pairs], num_nodes=len(y))
    return Data(x=one_hot(letter[order], letters).float(), edge_index=edge_index, y=y[order])


def _uniform(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _integers(count: int, low: int, high: int, generator: torch.Generator) -> Tensor:
    """Uniform on low..high, both included."""
    return low + (_uniform(count, generator) * (high - low + 1)).long()
