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

_SIZES = (5, 34)  # nodes of a community, ends included
_LETTERS = 3  # of PATTERN
# Communities, and the probabilities of an edge within one and between two.
_PATTERN = (5, 0.5, 0.35)
_CLUSTER = (6, 0.55, 0.25)
_PLANTED = 0.5  # the probability of an edge between a pattern's node and any other, and within the pattern


class PlantedPattern(NamedTuple):
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


def draw_pattern(generator: torch.Generator, *, sizes: tuple[int, int] = (20, 20)) -> PlantedPattern:
    """A random graph of edge probability 1/2 with random letters; its size is uniform on `sizes`, ends included."""
    block = torch.zeros(int(_integers(1, *sizes, generator)), dtype=torch.long)
    pairs = block_model_pairs(block, torch.full((1, 1), _PLANTED, dtype=torch.float64), generator)
    return PlantedPattern(pairs, _integers(len(block), 0, _LETTERS - 1, generator))


def pattern_graph(pattern: PlantedPattern, generator: torch.Generator) -> Data:
    """A graph of PATTERN: a block model with random letters, and `pattern` planted in it (Dwivedi et al. 2023).

    Nodes are in random order.

    Shapes: x [N, 3] one-hot float, edge_index [2, E] both directions, y [N], 1 in the pattern and 0 outside.
    """
    communities, within, between = _PATTERN
    block = _communities(communities, generator)
    planted = torch.full_like(pattern.letters, communities)
    probability = torch.full((communities + 1, communities + 1), between, dtype=torch.float64).fill_diagonal_(within)
    probability[-1], probability[:, -1] = _PLANTED, _PLANTED
    probability[-1, -1] = 0  # its own edges are fixed
    background = _integers(len(block), 0, _LETTERS - 1, generator)

    offset = len(block)
    block = torch.cat([block, planted])
    pairs = torch.cat([block_model_pairs(block, probability, generator), pattern.pairs + offset], dim=1)
    letters = torch.cat([background, pattern.letters])
    return _shuffled(pairs, letters, _LETTERS, (block == communities).long(), generator)


def cluster_graph(generator: torch.Generator) -> Data:
    """A graph of CLUSTER: a block model in which one random node per community shows its number (Dwivedi et al. 2023).

    Nodes are in random order.

    Shapes: x [N, 7] one-hot float, column c + 1 at the node that shows community c and column 0 at all others;
        edge_index [2, E] both directions; y [N], the community 0..5.
    """
    communities, within, between = _CLUSTER
    block = _communities(communities, generator)
    probability = torch.full((communities, communities), between, dtype=torch.float64).fill_diagonal_(within)
    pairs = block_model_pairs(block, probability, generator)
    size = torch.bincount(block, minlength=communities)  # the first of each shows; renaming makes it any of them
    number = torch.zeros_like(block)
    number[size.cumsum(0) - size] = torch.arange(1, communities + 1)
    return _shuffled(pairs, number, communities + 1, block, generator)


def _communities(count: int, generator: torch.Generator) -> Tensor:
    return torch.repeat_interleave(torch.arange(count), _integers(count, *_SIZES, generator))


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
