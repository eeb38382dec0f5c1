"""A random graph of Pokec's size, to run and measure what is meant for Pokec."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.errors import as_whole, check_counts, check_number, check_positive
from diffusion_mp_experiments.files.reading import as_path
from diffusion_mp_experiments.graphs.mapped import ArrayFolder, mapped_graph

_BLOCK = 1 << 22  # edges, or numbers of features, in memory at a time
_VERSION = "1"
_SPREAD = 100


def synthetic_pokec(
    num_nodes: int = 1_632_803,
    num_edges: int = 30_622_564,
    num_features: int = 65,
    *,
    seed: int = 0,
    homophily: float = 0.444,
    signal: float = 0.3,
    spread: float = 1.5,
    unlabelled: float = 1e-4,
    cache: str | Path | None = None,
) -> Data:
    """Draw a directed graph of two classes with Pokec's number of users and friendships, in seconds.

    - y_i is 0 for one half of the nodes and 1 for the other; a share `unlabelled` has −1 instead, and features and
      edges of its hidden class.
    - x_i = signal · s_i u + ε_i with s_i = ±1 the class, u = (1, …, 1)/√C and ε_i ~ N(0, I). No rule that reads x_i
      alone is right more often than Φ(signal): 62 % for 0.3.
    - Every node has a weight w_i = e^{spread · N(0, 1)}. The out-degree of i is E·w_i/Σw, rounded so that all sum to E;
      each edge ends in the sender's class with probability `homophily`, at a node j of it with probability proportional
      to w_j. Both degrees are thus log-normal: with a spread of 1.5 and a mean of 18.75 the median is 6 and the largest
      about 2·10⁴. Loops and parallel edges remain.

    In Pokec 44.4 % of the friendships join one gender (counted for 20 000 users). The spread is our choice.

    Args:
        num_nodes, num_edges, num_features: N, E, C.
        seed: decides everything, for any number of threads.
        homophily, signal, spread, unlabelled: see above.
        cache: a folder of memory-mapped arrays; without it they are in memory.

    Returns:
        The graph with x [N, C] float32, edge_index [2, E] sorted by source, and y [N].

    Raises:
        TypeError, ValueError: an argument is out of range, or the cache is damaged.

    Examples:
        >>> synthetic_pokec(num_nodes=100, num_edges=400, num_features=3).x.shape
        torch.Size([100, 3])
    """
    check_counts(num_nodes=num_nodes, num_edges=num_edges, num_features=num_features)
    if num_nodes < 2:
        raise ValueError("num_nodes must be at least 2, a node for each class; got 1.")
    for name, share in (("homophily", homophily), ("unlabelled", unlabelled)):
        check_number(share, name)
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be a probability; got {share}, which is not from 0 to 1.")
    check_positive(signal, "signal", allow_zero=True)
    check_positive(spread, "spread", allow_zero=True)
    if spread > _SPREAD:
        raise ValueError(f"spread must be at most {_SPREAD}, or e^(spread·N(0, 1)) is no number; got {spread}.")
    if not -(2**63) <= as_whole(seed, "seed") < 2**63:
        raise ValueError(f"seed must have 64 bits; got {seed}.")
    generator = torch.Generator().manual_seed(as_whole(seed, "seed"))

    def draw() -> dict[str, Tensor]:
        hidden = torch.randperm(num_nodes, generator=generator) % 2
        weight = torch.randn(num_nodes, generator=generator, dtype=torch.float64).mul_(spread).exp_()
        y = hidden.masked_fill(torch.rand(num_nodes, generator=generator, dtype=torch.float32) < unlabelled, -1)
        x = torch.empty(num_nodes, num_features, dtype=torch.float32)
        for rows, sign in zip(*(t.split(_BLOCK // num_features + 1) for t in (x, 2 * hidden - 1)), strict=True):
            torch.randn(rows.shape, generator=generator, out=rows)
            rows += sign[:, None].float() * (signal / num_features**0.5)
        return {"edge_index": _edges(hidden, weight, num_edges, homophily, generator), "x": x, "y": y}

    if cache is None:
        return Data(**draw())

    def make(arrays: ArrayFolder) -> None:
        for name, tensor in draw().items():
            arrays.put(name, tensor.numpy())

    sizes = (num_nodes, num_edges, num_features, seed, homophily, signal, spread, unlabelled)
    made_by = f"synthetic_pokec {_VERSION} {sizes}"
    return mapped_graph(as_path(cache, "cache"), make, made_by=made_by, classes=2)


def _edges(
    hidden: Int[Tensor, " N"], weight: Float[Tensor, " N"], num_edges: int, homophily: float, generator: torch.Generator
) -> Int[Tensor, "2 E"]:
    """Edges sorted by source; a target is drawn by inverting the cumulative weights of its class."""
    ends = (weight.cumsum(0) * (num_edges / float(weight.sum()))).round_().long()
    ends[-1] = num_edges
    edges = torch.empty(2, num_edges, dtype=torch.long)
    edges[0] = torch.repeat_interleave(torch.arange(len(hidden)), ends.diff(prepend=ends.new_zeros(1)))
    members = [(hidden == c).nonzero().flatten() for c in (0, 1)]
    totals = [weight[nodes].cumsum(0) for nodes in members]
    for source, target in zip(*(row.split(_BLOCK) for row in edges), strict=True):
        same = torch.rand(len(source), generator=generator, dtype=torch.float32) < homophily
        place = torch.rand(len(source), generator=generator, dtype=torch.float64)
        to = torch.where(same, hidden[source], 1 - hidden[source])
        for c in (0, 1):
            chosen = (to == c).nonzero().flatten()
            at = torch.searchsorted(totals[c], place[chosen] * totals[c][-1], right=True)
            target[chosen] = members[c][at.clamp_(max=len(members[c]) - 1)]
    return edges
