"""PATTERN and CLUSTER (Dwivedi et al. 2023) without a download: graphs of the stochastic block model.

Everything is drawn from one `torch.Generator` on the CPU as uniform numbers in double precision, and compared and
sorted from there, so that a seed gives the same graphs on every machine and whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from diffusion_mp.errors import as_whole, check_choice, check_counts, describe
from diffusion_mp_experiments.graphs.cached import CachedDataset

_SIZES = {
    "PATTERN": {"train": 10_000, "val": 2_000, "test": 2_000},
    "CLUSTER": {"train": 10_000, "val": 1_000, "test": 1_000},
}
_NUM_PATTERNS = 100
_COMMUNITY = (5, 34)  # nodes of a community, ends included
_LETTERS = 3  # of PATTERN
# Communities, and the probabilities of an edge within one and between two.
_PATTERN = (5, 0.5, 0.35)
_CLUSTER = (6, 0.55, 0.25)
_PLANTED = 0.5  # the probability of an edge between a pattern's node and any other, and within the pattern
_VERSION = 1  # goes up whenever the same seed gives other graphs, so that no older file is read


class SBMDataset(CachedDataset):
    """PATTERN or CLUSTER of Dwivedi et al. (2023), drawn from the published block models.

    PATTERN: find the nodes of a planted subgraph (y is 1 there). Five communities (p = 0.5, q = 0.35), letters 0–2 as
    features, and one of 100 fixed patterns of 20 nodes and edge probability 0.5, joined to the rest with 0.5; graph i
    of every split carries pattern i mod 100. CLUSTER: six communities (p = 0.55, q = 0.25); one node of each shows its
    number as a feature, and y is the community of every node. The score of both is `weighted_accuracy`.

    Communities have 5..34 nodes as in the released generator, whose upper end is exclusive, not 5–35 as in the article:
    only so CLUSTER's graphs have the published 117.2 nodes. The article's patterns have 20 nodes; those of the released
    files have 5..34, fixed for each pattern: `pattern_sizes=(5, 34)`.

    The distribution is that of the released files, not the graphs. Graph i depends on `seed`, split and i alone. PyG's
    `GNNBenchmarkDataset` reads the released files (it unpickles them) and has the same shapes.

    Shapes: x [N, 3] (PATTERN) or [N, 7] (CLUSTER), one-hot float; edge_index [2, E] both directions; y [N].

    Args:
        root: a writable folder; graphs are kept in `root/processed/<parameters>`.
        name: "PATTERN" or "CLUSTER".
        split: "train", "val" or "test".
        num_graphs: graphs of the split; by default 10 000/2 000/2 000 (PATTERN) or 10 000/1 000/1 000 (CLUSTER).
        seed: draws patterns and graphs, 0 .. 2³⁰ − 1.
        pattern_sizes: smallest and largest number of nodes of a pattern, (20, 20) by default; PATTERN only.
        options: transform, pre_transform, force_reload and log of `CachedDataset`.

    Raises:
        TypeError, ValueError: an argument is unknown or out of range.

    Examples:
        >>> len(SBMDataset(folder, "CLUSTER", num_graphs=2))
        2
    """

    def __init__(
        self,
        root: str | Path,
        name: Literal["PATTERN", "CLUSTER"],
        split: Literal["train", "val", "test"] = "train",
        *,
        num_graphs: int | None = None,
        seed: int = 0,
        pattern_sizes: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        check_choice(name, "name", _SIZES)
        check_choice(split, "split", _SIZES[name])
        num_graphs = _SIZES[name][split] if num_graphs is None else num_graphs
        check_counts(num_graphs=num_graphs)
        seed = as_whole(seed, "seed")
        if not 0 <= seed < 2**30:  # four streams each, and a torch.Generator tells 2**32 seeds apart
            raise ValueError(f"seed must lie in 0 .. 2**30 - 1; got {seed}.")
        if pattern_sizes is not None and name != "PATTERN":
            raise ValueError(f"pattern_sizes {pattern_sizes} belong to PATTERN; leave them out for {name}.")
        low, high = _pair(pattern_sizes or (20, 20))
        if not 1 <= low <= high:
            must = "(smallest, largest) with 1 <= smallest <= largest"
            raise ValueError(f"pattern_sizes must be {must}; got {low, high}.")
        self.name, self.split, self.seed = name, split, seed
        self._count, self._pattern_sizes = num_graphs, (low, high)
        sizes = f"-patterns{low}to{high}" if name == "PATTERN" else ""
        super().__init__(root, f"{name}{sizes}-{split}-{num_graphs}-seed{seed}-v{_VERSION}", num_graphs, **options)

    def make(self) -> Iterator[Data]:
        """Yield the graphs of this split, in order."""
        generator = self._generator(1 + list(_SIZES[self.name]).index(self.split))
        if self.name == "CLUSTER":
            yield from (cluster_graph(generator) for _ in range(self._count))
            return
        shared = self._generator(0)
        patterns = [draw_pattern(shared, sizes=self._pattern_sizes) for _ in range(_NUM_PATTERNS)]
        yield from (pattern_graph(patterns[i % _NUM_PATTERNS], generator) for i in range(self._count))

    def _generator(self, stream: int) -> torch.Generator:
        """Streams: 0 the patterns, which all splits share, 1 to 3 the splits."""
        return torch.Generator().manual_seed(4 * self.seed + stream)


def _pair(sizes: object) -> tuple[int, int]:
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
        raise TypeError(f"pattern_sizes must be two whole numbers, (smallest, largest); got {describe(sizes)}.")
    return as_whole(sizes[0], "pattern_sizes[0]"), as_whole(sizes[1], "pattern_sizes[1]")


class PlantedPattern(NamedTuple):
    """A fixed subgraph to be found: its undirected edges, each once, and the letter of each node."""

    pairs: Int[Tensor, "2 P"]
    letters: Int[Tensor, " N"]


def block_model_pairs(
    block: Int[Tensor, " N"], probability: Float[Tensor, "K K"], generator: torch.Generator
) -> Int[Tensor, "2 P"]:
    """Join any two nodes i < j with `probability[block[i], block[j]]`, independently; each edge once."""
    pairs = torch.triu_indices(len(block), len(block), 1)
    first, second = block[pairs]
    return pairs[:, _uniform(pairs.size(1), generator) < probability[first, second]]


def draw_pattern(generator: torch.Generator, *, sizes: tuple[int, int] = (20, 20)) -> PlantedPattern:
    """Draw a graph of edge probability 1/2 with random letters; its size is uniform on `sizes`, ends included."""
    block = torch.zeros(int(_integers(1, *sizes, generator)), dtype=torch.long)
    pairs = block_model_pairs(block, torch.full((1, 1), _PLANTED, dtype=torch.float64), generator)
    return PlantedPattern(pairs, _integers(len(block), 0, _LETTERS - 1, generator))


def pattern_graph(pattern: PlantedPattern, generator: torch.Generator) -> Data:
    """Draw a graph of PATTERN, a block model with random letters and `pattern` planted in it, in random order."""
    communities, within, between = _PATTERN
    block = _communities(communities, generator)
    planted = torch.full_like(pattern.letters, communities)
    probability = torch.full((communities + 1, communities + 1), between, dtype=torch.float64).fill_diagonal_(within)
    probability[-1], probability[:, -1] = _PLANTED, _PLANTED
    probability[-1, -1] = 0  # its own edges are fixed
    background = _integers(len(block), 0, _LETTERS - 1, generator)
    fixed = pattern.pairs + len(block)
    block = torch.cat([block, planted])
    pairs = torch.cat([block_model_pairs(block, probability, generator), fixed], dim=1)
    letters = torch.cat([background, pattern.letters])
    return _shuffled(pairs, letters, _LETTERS, (block == communities).long(), generator)


def cluster_graph(generator: torch.Generator) -> Data:
    """Draw a graph of CLUSTER, a block model in which a random node per community shows its number, in random order.

    Column c + 1 of x is 1 at the node that shows community c, and column 0 at all others.
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
    return torch.repeat_interleave(torch.arange(count), _integers(count, *_COMMUNITY, generator))


def _shuffled(pairs: Tensor, letter: Tensor, letters: int, y: Tensor, generator: torch.Generator) -> Data:
    """Rename the nodes at random, so that their order tells nothing."""
    order = _uniform(len(y), generator).argsort()
    name = torch.empty_like(order)
    name[order] = torch.arange(len(order))
    edge_index = to_undirected(name[pairs], num_nodes=len(y))
    return Data(x=one_hot(letter[order], letters).float(), edge_index=edge_index, y=y[order])


def _uniform(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _integers(count: int, low: int, high: int, generator: torch.Generator) -> Tensor:
    """Draw uniformly from low..high, both included."""
    return low + (_uniform(count, generator) * (high - low + 1)).long()
