"""Graphs that are drawn: PATTERN and CLUSTER of the stochastic block model, and a graph of Pokec's size.

A `torch.Generator` on the CPU draws everything, so a seed gives the same graphs for any number of threads. The graphs
of the block model come from uniform numbers in double precision, the same on every machine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from diffusion_mp.checks import (
    Count,
    NonnegativeNumber,
    Share,
    as_whole,
    check_counts,
    check_kind,
    check_seed,
    checked,
)
from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.graphs.cached import (
    ArrayFolder,
    CachedDataset,
    mapped_graph,
)

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
# go up whenever the same seed gives other graphs, so that no older file is read
_VERSION = 1
_POKEC_VERSION = "1"
_EDGES = 1 << 22  # edges, or numbers of features, in memory at a time
_SPREAD = 100


class SBMDataset(CachedDataset):
    """PATTERN or CLUSTER of Dwivedi et al. (2023), drawn from the published block models.

    PATTERN: find the nodes of a planted subgraph (y is 1 there). A graph has five communities (p = 0.5, q = 0.35) and
    letters 0–2 as features. The subgraph is one of 100 fixed patterns of 20 nodes with edge probability 0.5, joined to
    the rest with probability 0.5; graph i of every split carries pattern i mod 100.

    CLUSTER: find the community of every node (y). A graph has six communities (p = 0.55, q = 0.25). One node of each
    community shows the number of the community as a feature.

    `weighted_accuracy` is the score of both. Communities have 5..34 nodes as in the released generator, not 5–35 as in
    the article: only with 5..34 do CLUSTER's graphs have the published 117.2 nodes. The released patterns have 5..34
    nodes too: `pattern_sizes=(5, 34)`.

    The graphs have the distribution of the released files, but are not the same graphs. Graph i depends only on `seed`,
    split and i. PyG's `GNNBenchmarkDataset` reads the released files (it unpickles them).

    Args:
        root: a writable folder. Graphs are kept in `root/processed/<parameters>`.
        name: "PATTERN" or "CLUSTER".
        split: "train", "val" or "test".
        num_graphs: number of graphs of the split. By default the published number: 10 000/2 000/2 000 for PATTERN, 10
            000/1 000/1 000 for CLUSTER.
        seed: draws patterns and graphs, 0 .. 2³⁰ − 1.
        pattern_sizes: smallest and largest number of nodes of a pattern, PATTERN only. By default (20, 20), as
            described above.
        options: transform and pre_transform of `CachedDataset`.

    Shapes:
        x: [N, 3] (PATTERN) or [N, 7] (CLUSTER), one-hot float.
        edge_index: [2, E] in both directions.
        y: [N].

    Examples:
        >>> len(SBMDataset(folder, "CLUSTER", num_graphs=2))
        2
    """

    @checked
    def __init__(
        self,
        root: str | Path,
        name: Literal["PATTERN", "CLUSTER"],
        split: Literal["train", "val", "test"] = "train",
        *,
        num_graphs: Count | None = None,
        seed: int = 0,
        pattern_sizes: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        num_graphs = num_graphs or _SIZES[name][split]
        seed = as_whole(seed, "seed")
        # Four streams each, and a torch.Generator tells 2**32 seeds apart.
        if not 0 <= seed < 2**30:
            raise ValueError(f"seed must lie in 0 .. 2**30 - 1; got {seed}.")
        if pattern_sizes is not None and name != "PATTERN":
            raise ValueError(
                f"pattern_sizes {pattern_sizes} belong to PATTERN; leave them out for {name}."
            )
        sizes = (20, 20) if pattern_sizes is None else pattern_sizes
        check_kind(sizes, "pattern_sizes", (tuple, list), "two whole numbers")
        low, high = sizes
        if not 1 <= as_whole(low, "pattern_sizes") <= as_whole(high, "pattern_sizes"):
            raise ValueError(
                f"pattern_sizes must have 1 <= smallest <= largest; got {low, high}."
            )
        self.name = name
        self.split = split
        self.seed = seed
        self._pattern_sizes = (low, high)
        patterns = f"-patterns{low}to{high}" if name == "PATTERN" else ""
        super().__init__(
            root,
            f"{name}{patterns}-{split}-{num_graphs}-seed{seed}-v{_VERSION}",
            num_graphs,
            **options,
        )

    def make(self) -> Iterator[Data]:
        generator = self._generator(1 + list(_SIZES[self.name]).index(self.split))
        if self.name == "CLUSTER":
            yield from (cluster_graph(generator) for _ in range(self._num_graphs))
            return
        shared = self._generator(0)
        patterns = [
            draw_pattern(shared, sizes=self._pattern_sizes)
            for _ in range(_NUM_PATTERNS)
        ]
        yield from (
            pattern_graph(patterns[i % _NUM_PATTERNS], generator)
            for i in range(self._num_graphs)
        )

    def _generator(self, stream: int) -> torch.Generator:
        """Return the generator of a stream: 0 for the patterns, which all splits share, 1 to 3 for the splits."""
        return torch.Generator().manual_seed(4 * self.seed + stream)


class PlantedPattern(NamedTuple):
    """A fixed subgraph to be found: its undirected edges, each once, and the letter of each node."""

    pairs: Int[Tensor, "2 P"]
    letters: Int[Tensor, " N"]


def block_model_pairs(
    block: Int[Tensor, " N"],
    probability: Float[Tensor, "K K"],
    generator: torch.Generator,
) -> Int[Tensor, "2 P"]:
    """Join any two nodes i < j with probability `probability[block[i], block[j]]`, independently; each edge once."""
    pairs = torch.triu_indices(len(block), len(block), 1)
    first, second = block[pairs]
    return pairs[:, _uniform(pairs.size(1), generator) < probability[first, second]]


def draw_pattern(
    generator: torch.Generator, *, sizes: tuple[int, int] = (20, 20)
) -> PlantedPattern:
    """Draw a graph with edge probability 1/2 and random letters; its size is uniform on `sizes`, ends included."""
    block = torch.zeros(int(_integers(1, *sizes, generator)), dtype=torch.long)
    pairs = block_model_pairs(
        block, torch.full((1, 1), _PLANTED, dtype=torch.float64), generator
    )
    return PlantedPattern(pairs, _integers(len(block), 0, _LETTERS - 1, generator))


def pattern_graph(pattern: PlantedPattern, generator: torch.Generator) -> Data:
    """Draw a graph of PATTERN: a block model with random letters and a planted `pattern`, nodes in random order."""
    block, probability = _block_model(*_PATTERN, 1, generator)
    probability[-1] = _PLANTED
    probability[:, -1] = _PLANTED
    probability[-1, -1] = 0  # its own edges are fixed
    background = _integers(len(block), 0, _LETTERS - 1, generator)
    fixed = pattern.pairs + len(block)
    block = torch.cat([block, torch.full_like(pattern.letters, len(probability) - 1)])
    pairs = torch.cat([block_model_pairs(block, probability, generator), fixed], dim=1)
    letters = torch.cat([background, pattern.letters])
    return _shuffled(
        pairs, letters, _LETTERS, (block == len(probability) - 1).long(), generator
    )


def cluster_graph(generator: torch.Generator) -> Data:
    """Draw a graph of CLUSTER: x is 1 in column c + 1 at the node that shows community c, in column 0 at all others."""
    block, probability = _block_model(*_CLUSTER, 0, generator)
    pairs = block_model_pairs(block, probability, generator)
    # The first of each shows; renaming makes it any of them.
    size = block.bincount(minlength=len(probability))
    number = torch.zeros_like(block)
    number[size.cumsum(0) - size] = torch.arange(1, len(size) + 1)
    return _shuffled(pairs, number, len(size) + 1, block, generator)


def _block_model(
    communities: int,
    within: float,
    between: float,
    others: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the community of every node, and the probabilities of edges between communities and `others`."""
    block = torch.arange(communities).repeat_interleave(
        _integers(communities, *_COMMUNITY, generator)
    )
    probability = torch.full(
        (communities + others, communities + others), between, dtype=torch.float64
    )
    return block, probability.fill_diagonal_(within)


def _shuffled(
    pairs: Tensor, letter: Tensor, letters: int, y: Tensor, generator: torch.Generator
) -> Data:
    """Rename the nodes at random, so that their order says nothing."""
    # Not `randperm`, whose numbers another version of torch may draw in another way.
    order = _uniform(len(y), generator).argsort()
    edge_index = to_undirected(order.argsort()[pairs], num_nodes=len(y))
    return Data(
        x=one_hot(letter[order], letters).float(), edge_index=edge_index, y=y[order]
    )


def _uniform(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _integers(count: int, low: int, high: int, generator: torch.Generator) -> Tensor:
    return low + (_uniform(count, generator) * (high - low + 1)).long()


@checked
def synthetic_pokec(
    num_nodes: int = 1_632_803,
    num_edges: Count = 30_622_564,
    num_features: Count = 65,
    *,
    seed: int = 0,
    homophily: Share = 0.444,
    signal: NonnegativeNumber = 0.3,
    spread: NonnegativeNumber = 1.5,
    unlabelled: Share = 1e-4,
    cache: str | Path | None = None,
) -> Data:
    """Draw a directed graph of two classes with Pokec's number of users and friendships, in seconds.

    - y_i is 0 for one half of the nodes and 1 for the other half. A share `unlabelled` has the label −1, but features
      and edges of its class.
    - x_i = signal · s_i u + ε_i with s_i = ±1 the class, u = (1, …, 1)/√C and ε_i ~ N(0, I). No rule that reads x_i
      alone is right more often than Φ(signal): 62 % for 0.3.
    - Every node has a weight w_i = e^{spread · N(0, 1)}. The out-degree of i is E·w_i/Σw, rounded so that all sum to E.
      Each edge ends in the sender's class with probability `homophily`, at a node j of the class with probability
      proportional to w_j. With a spread of 1.5 and a mean of 18.75 the median degree is 6 and the largest about 2·10⁴.
      Loops and parallel edges remain.

    Args:
        num_nodes: N. The default is Pokec's number of users.
        num_edges: E. The default is Pokec's number of friendships.
        num_features: C. The default is Pokec's number of features.
        seed: draws everything.
        homophily: probability that an edge ends in the class of its sender. In Pokec 44.4 % of the friendships join one
            gender (counted for 20 000 users).
        signal: half the distance between the means of the two classes, in standard deviations of the noise.
        spread: standard deviation of log w_i. The default 1.5 is our choice.
        unlabelled: share of the nodes without a label.
        cache: a folder from which the arrays are then memory-mapped. By default they are in memory.

    Shapes:
        x: [N, C] float32.
        edge_index: [2, E], sorted by source.
        y: [N].

    Examples:
        >>> synthetic_pokec(num_nodes=100, num_edges=400, num_features=3).x.shape
        torch.Size([100, 3])
    """
    check_counts(2, num_nodes=num_nodes)
    if spread > _SPREAD:
        raise ValueError(
            f"spread must be at most {_SPREAD}, or e^(spread·N(0, 1)) is no number; got {spread}."
        )
    check_seed(seed := as_whole(seed, "seed"))
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        hidden = torch.randperm(num_nodes, generator=generator) % 2
        weight = torch.randn(num_nodes, generator=generator, dtype=torch.float64)
        weight = weight.mul_(spread).exp_()
        # In a dtype that is named: the default may be another, and draws other numbers.
        share = torch.rand(num_nodes, generator=generator, dtype=torch.float32)
        y = hidden.masked_fill(share < unlabelled, -1)
        x = torch.empty(num_nodes, num_features, dtype=torch.float32)
        step = signal / num_features**0.5
        rows = _EDGES // num_features + 1
        for part, classes in zip(x.split(rows), hidden.split(rows), strict=True):
            torch.randn(part.shape, generator=generator, out=part)
            part += (2 * classes - 1)[:, None].float() * step
        edge_index = _edges(hidden, weight, num_edges, homophily, generator)
        return {"edge_index": edge_index, "x": x, "y": y}

    if cache is None:
        return Data(**draw())

    def make(arrays: ArrayFolder) -> None:
        for name, tensor in draw().items():
            arrays.put(name, tensor.numpy())

    sizes = (
        num_nodes,
        num_edges,
        num_features,
        seed,
        homophily,
        signal,
        spread,
        unlabelled,
    )
    made_by = f"synthetic_pokec {_POKEC_VERSION} {sizes}"
    return mapped_graph(as_path(cache, "cache"), make, made_by=made_by, classes=2)


def _edges(
    hidden: Int[Tensor, " N"],
    weight: Float[Tensor, " N"],
    num_edges: int,
    homophily: float,
    generator: torch.Generator,
) -> Int[Tensor, "2 E"]:
    """Return edges sorted by source; a target is drawn by inverting the cumulative weights of its class."""
    ends = (weight.cumsum(0) * (num_edges / float(weight.sum()))).round_().long()
    # Sums in floating point may miss it by one.
    ends[-1] = num_edges
    # Filled block by block, so that what is drawn on the way takes little memory.
    edges = torch.empty(2, num_edges, dtype=torch.long)
    edges[0] = torch.repeat_interleave(
        torch.arange(len(hidden)), ends.diff(prepend=ends.new_zeros(1))
    )
    members = [(hidden == c).nonzero().flatten() for c in (0, 1)]
    totals = [weight[nodes].cumsum(0) for nodes in members]
    for source, target in zip(*(row.split(_EDGES) for row in edges), strict=True):
        share = torch.rand(len(source), generator=generator, dtype=torch.float32)
        position = torch.rand(len(source), generator=generator, dtype=torch.float64)
        to = torch.where(share < homophily, hidden[source], 1 - hidden[source])
        for c in (0, 1):
            chosen = (to == c).nonzero().flatten()
            # A position next to the total may be rounded up to it, which is the end of no interval.
            at = torch.searchsorted(
                totals[c], position[chosen] * totals[c][-1], right=True
            )
            target[chosen] = members[c][at.clamp_(max=len(members[c]) - 1)]
    return edges
