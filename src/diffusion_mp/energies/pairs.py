"""Sums and maxima over all pairs of nodes of the same graph, in less than O(N²) memory, computed in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffusion_mp.checks import check_device, check_tensor, describe
from diffusion_mp.graph import Graph
from diffusion_mp.graph.arguments import row_bounds
from diffusion_mp.graph.ops import graph_sizes

TILE_ENTRIES = 2_097_152  # pairs held at a time by the O(N²) sums (16 MiB of float64)

#: A state by head; what every node and every graph has; a number in float64; a bound
#: that may broadcast.
HeadState = Float[Tensor, "N H D"]
PerNode = Float[Tensor, " N"]
PerGraph = Float[Tensor, " B"]
Scalar = Float[Tensor, ""]
Bound = Float[Tensor, "#N #H one"]
State = Float[Tensor, "N C"] | HeadState
Metric = PerNode | Float[Tensor, "N H"]


def check_heads(x: Tensor, name: str = "x") -> None:
    """Raise unless ``x`` is a floating-point state [N, C] or [N, H, D]."""
    check_tensor(x, name, "[num_nodes, channels] or [num_nodes, heads, channels]")
    if x.dim() not in (2, 3) or (x.dim() == 3 and not x.size(1)):
        raise ValueError(
            f"{name} must be [num_nodes, channels] or [num_nodes, heads, channels]; got {describe(x)}."
        )


def by_head(x: State) -> HeadState:
    """Return the state by head; a state [N, C] has one head."""
    return x.unsqueeze(1) if x.dim() == 2 else x


def check_metric(metric: Tensor, x: State, heads: int | None = None) -> None:
    """Raise unless ``metric`` weighs the nodes of ``x``, [N], or the nodes of each head, [N, 1] or [N, heads]."""
    check_tensor(metric, "metric", "[num_nodes] or [num_nodes, heads]")
    heads = by_head(x).size(1) if heads is None else heads
    nodes = len(x)
    if metric.shape not in ((nodes,), (nodes, 1), (nodes, heads)):
        shape = f"[{nodes}] or [{nodes}, heads] as the state is {list(x.shape)}"
        raise ValueError(f"metric must be {shape}; got {describe(metric)}.")
    check_device(metric, "metric", x.device, "the state")


def check_channels(z: Tensor, name: str, matrix: Tensor | None) -> None:
    """Raise unless a matrix can read a state [N, 1, C]; ``None`` stands for the identity."""
    channels = z.size(-1) if matrix is None else matrix.size(-1)
    if z.shape[1:] != (1, channels):
        raise ValueError(
            f"{name} reads states of one head and {channels} channels; the state is {describe(z)}, "
            f"and {name} {describe(matrix)}."
        )
    if matrix is not None:
        check_device(matrix, name, z.device, "the state")


def blocks(x: State, ptr: Tensor | None = None) -> list[Tensor]:
    """Return the state [n, D] of every non-empty graph and head. Pairs lie within such a block."""
    check_heads(x)
    sizes = graph_sizes(row_bounds(ptr, x.size(0)), x.size(0))
    graphs = by_head(x).split(sizes)
    return [head for graph in graphs if len(graph) for head in graph.unbind(1)]


def sum_squared_distances(x: State, ptr: Tensor | None) -> Scalar:
    """Return Σ_ij ‖x_i − x_j‖² over ordered pairs, as 2n Σ‖x_i − c‖² − 2‖Σ(x_i − c)‖² in O(N d)."""

    def total(block: Tensor) -> Tensor:
        y = _centred(block)
        squares = y.square().sum()
        # Rounding of the mean leaves a sum, and its square corrects that.
        m = y.sum(0)
        return 2 * len(y) * squares - 2 * m.square().sum()

    return _sum_over_blocks(total, x, ptr)


def sum_fourth_powers(x: State, ptr: Tensor | None) -> Scalar:
    """Return Σ_ij ‖x_i − x_j‖⁴ over ordered pairs, exact in O(N d²).

    With a_i = ‖y_i‖², m = Σ y_i, q = Σ a_i y_i, M = YᵀY and y_i = x_i − c it is 2n Σa_i² + 2 (Σa_i)² − 8 q·m + 4 ‖M‖²_F
    for every shift c. With c the mean, m = 0 and nothing cancels. c is held constant, which keeps gradients exact.
    """

    def total(block: Tensor) -> Tensor:
        y = _centred(block)
        a = y.square().sum(1)
        m = y.sum(0)
        q = a @ y
        gram = y.T @ y
        squares = len(y) * a.square().sum() + a.sum().square()
        return 2 * squares - 8 * q @ m + 4 * gram.square().sum()

    return _sum_over_blocks(total, x, ptr)


def sum_over_pairs(
    function: Callable[[Tensor], Tensor], x: State, ptr: Tensor | None
) -> Scalar:
    """Return Σ_ij function(‖x_i − x_j‖²) over ordered pairs in O(N² d), in tiles that the backward pass recomputes."""

    def total(block: Tensor) -> Tensor:
        centred = _centred(block)
        tiles = [
            checkpoint(
                _tile_sum,
                function,
                start,
                stop,
                centred,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start, stop in _tiles(len(block))
        ]
        return torch.stack(tiles).sum()

    return _sum_over_blocks(total, x, ptr)


def _sum_over_blocks(
    total: Callable[[Tensor], Tensor], x: State, ptr: Tensor | None
) -> Scalar:
    """Return the sum of ``total`` over all graphs and heads, zero if there are none."""
    totals = map(total, blocks(x, ptr))
    return sum(totals, x.new_zeros((), dtype=torch.float64))


def edge_distance(z: HeadState, graph: Graph) -> Float[Tensor, "E H"]:
    """Return ‖z_i − z_j‖² of the ends of every edge, by head."""
    source, target = graph.edges
    return (z[target] - z[source]).square().sum(2)


@torch.no_grad()
def find_distance_above(
    limit: float, x: State, ptr: Tensor | None = None
) -> float | None:
    """Return a squared distance > limit of two nodes of a graph, or ``None``; in O(N d) for most states, else O(N²)."""
    for block in blocks(x, ptr):
        centred = _centred(block)
        # Rows in a ball of radius r, around the mean or the origin, are at most 2r
        # apart.
        around_mean = centred.square().sum(1).max()
        around_origin = block.double().square().sum(1).max()
        if 4 * min(around_mean, around_origin) <= limit:
            continue
        # A far pair is nearly always among these, and all pairs are asked only if it is not.
        witness = _farthest(centred)
        if not witness <= limit:  # NaN is no distance within the limit either
            return witness
        for start, stop in _tiles(len(centred)):
            witness = float(
                squared_distances(centred[start:stop], centred[start:]).max()
            )
            if witness > limit:
                return witness
    return None


@torch.no_grad()
def large_distance(x: State, ptr: Tensor | None = None) -> float:
    """Return at least a quarter of the largest squared distance of two nodes of a graph, in O(N d)."""
    farthest = (_farthest(_centred(block)) for block in blocks(x, ptr))
    return max(farthest, default=0.0)


def squared_distances(
    a: Float[Tensor, "n D"], b: Float[Tensor, "m D"]
) -> Float[Tensor, "n m"]:
    """Return ‖a_i − b_j‖² by one matrix product."""
    return a.square().sum(1).unsqueeze(1) + b.square().sum(1) - 2 * a @ b.T


def _farthest(centred: Float[Tensor, "n D"]) -> float:
    """Return the largest squared distance from the node farthest from the mean."""
    # No pair is more than twice as far apart as this node is from the mean: its square is a quarter of the largest.
    node = centred[centred.square().sum(1).argmax()].unsqueeze(0)
    return float(squared_distances(node, centred).max())


def _tile_sum(
    function: Callable[[Tensor], Tensor], start: int, stop: int, block: Tensor
) -> Tensor:
    """Sum over pairs (i, j) with start ≤ i < stop and j ≥ start; pairs with j ≥ stop count for (j, i) as well."""
    values = function(squared_distances(block[start:stop], block[start:]))
    return 2 * values.sum() - values[:, : stop - start].sum()


def _tiles(n: int) -> Iterator[tuple[int, int]]:
    step = max(1, TILE_ENTRIES // n)
    return ((start, min(start + step, n)) for start in range(0, n, step))


def _centred(block: Tensor) -> Tensor:
    # The mean is held constant: no function of differences depends on it.
    return block.double() - block.detach().mean(0, dtype=torch.float64)
