"""Edges by node, and operations on edges and batches; custom ones where the size of the result depends on values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.checks import check_range
from diffusion_mp.runtime.cache import (
    batch_cache,
    cached_property,
    may_keep,
    persistent,
    values_only,
)

#: Edges of which a function is computed at a time where no gradients are recorded.
CHUNK_EDGES = 1 << 18

#: A number of rows, which is a symbol while torch traces.
Size = int | torch.SymInt

Parts = tuple[Tensor, Tensor | None, Tensor]


@torch.library.custom_op(
    "diffusion_mp::batch_pointers", mutates_args=(), schema="(Tensor batch) -> Tensor"
)
def batch_pointers(batch: Tensor) -> Tensor:
    """Return the row boundaries [B+1] on the CPU of a sorted ``batch`` vector [N]; B = batch[-1] + 1."""
    return pad(torch.bincount(batch.cpu()).cumsum(0), (1, 0))


@batch_pointers.register_fake
def _(batch: Tensor) -> Tensor:
    return torch.empty(
        torch.library.get_ctx().new_dynamic_size(min=1), dtype=torch.long
    )


def compress(
    node: Tensor, opposite: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges by node: bounds [N+1] of the entries of each, the edge of each entry [E] and its other end [E].

    Edges keep their order within a node. All results are int32 if that holds N and E (faster), and int64 in traces.
    """
    if not values_only() or node.is_meta:
        return _compress(node, opposite, num_nodes)
    return _counted(node, opposite, num_nodes, _narrowest(node.numel(), num_nodes))


def bounds(ordered: Tensor, num_nodes: int) -> Tensor:
    """Return the bounds [N+1] of the entries of each node in a sorted [E]."""
    check_range(ordered, "edge_index", num_nodes)
    dtype = _narrowest(ordered.numel(), num_nodes)
    return pad(
        torch.bincount(ordered, minlength=num_nodes).cumsum(0, dtype=dtype), (1, 0)
    )


def _counted(
    node: Tensor, opposite: Tensor, num_nodes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compress on the CPU in one counting pass, O(N + E): transpose the sparse matrix with edge e in column e."""
    if node.device.type != "cpu":
        # SciPy has no arrays on a GPU, where a stable sort takes hardly any time.
        ordered, order = torch.sort(node, stable=True)
        return (
            bounds(ordered, num_nodes).to(dtype),
            order.to(dtype),
            opposite[order].to(dtype),
        )
    # Imported here, since it takes a fifth of the import time of the library.
    from scipy.sparse import csc_array

    # SciPy would write beyond its arrays.
    check_range(node, "edge_index", num_nodes)
    # SciPy's counting pass instead of a sort: its transpose keeps the order of columns within a row.
    num_edges = node.numel()
    # Edge e is the only entry of column e: its row is the node, its value the other end.
    columns = torch.arange(num_edges + 1, dtype=dtype, device="cpu")
    by_edge = tuple(part.to(dtype).numpy() for part in (opposite, node, columns))
    by_node = csc_array(by_edge, shape=(num_nodes, num_edges)).tocsr()
    ptr = torch.from_numpy(by_node.indptr).to(dtype)
    order = torch.from_numpy(by_node.indices).to(dtype)
    return ptr, order, torch.from_numpy(by_node.data)


def _narrowest(num_edges: int, num_nodes: int) -> torch.dtype:
    return torch.int32 if max(num_edges, num_nodes) < 1 << 31 else torch.int64


@torch.library.custom_op(
    "diffusion_mp::compress",
    mutates_args=(),
    schema="(Tensor node, Tensor opposite, SymInt num_nodes) -> (Tensor, Tensor, Tensor)",
)
def _compress(
    node: Tensor, opposite: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _counted(node, opposite, num_nodes, torch.int64)


@_compress.register_fake
def _(node: Tensor, opposite: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    order = node.new_empty(node.numel(), dtype=torch.int64)
    return order.new_empty(num_nodes + 1), order, torch.empty_like(order)


def graph_of(ptr: Tensor, nodes: Tensor) -> Tensor:
    """Return the graph number of each node in a ragged batch."""
    # right=True skips empty graphs: a boundary belongs to the last graph that starts there. torch warns of strides.
    return torch.bucketize(nodes.contiguous(), ptr[1:].to(nodes.device), right=True)


def detached_mean_rows(x: Tensor, ptr: Tensor | None) -> Tensor:
    """Return the mean row of each row's graph, without gradient: [1, ...] for one graph, [N, ...] for a batch."""
    # Distances do not depend on the origin, so no gradient is lost.
    x = x.detach()
    if ptr is None:
        return x.sum(0, keepdim=True) / max(x.size(0), 1)
    member, count = members(ptr, x.size(0), x.device)
    sums = x.new_zeros(count.size(0), *x.shape[1:])
    sums = sums.index_add(0, member, x)
    sizes = count.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
    return (sums / sizes)[member]


def members(
    ptr: Tensor, num_nodes: Size, device: torch.device
) -> tuple[Int[Tensor, " N"], Int[Tensor, " B"]]:
    """Return the graph of every row and the number of rows of every graph, on a device, cached by ``ptr``."""

    def number() -> tuple[Tensor, Tensor]:
        count = ptr.diff()
        graph = torch.arange(count.size(0), device="cpu")
        graph = graph.repeat_interleave(count, output_size=num_nodes)
        return graph.to(device), count.to(device)

    # Row boundaries are on the CPU, where a captured CUDA graph may read them.
    if not values_only(captured=True):
        return persistent(number)
    values = batch_cache(ptr)
    key = ("members", device)
    if key not in values:
        values[key] = persistent(number)
    return cast("tuple[Tensor, Tensor]", values[key])


def max_rows(x: Tensor, ptr: Tensor | None) -> Tensor:
    """Return the maximum over the rows of each row's graph: [1, ...] for one graph, [N, ...] for a batch."""
    if ptr is None:
        # torch has no maximum over zero rows, and no size may decide this while it compiles.
        if torch.compiler.is_compiling() or not len(x):
            x = torch.cat([x, x.new_full((1, *x.shape[1:]), -torch.inf)])
        return x.amax(0, keepdim=True)
    member, count = members(ptr, x.size(0), x.device)
    # torch scatters numbers and not rows: every number of a row has the index of the row.
    index = member.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    # A graph without rows keeps −∞, which no row reads.
    largest = x.new_full((count.size(0), *x.shape[1:]), -torch.inf)
    largest = largest.scatter_reduce(0, index, x, "amax")
    return largest.gather(0, index)


def graph_sizes(ptr: Tensor | None, num_nodes: int) -> list[int]:
    """Return the number of nodes of every graph of a ragged batch; without boundaries there is one graph."""
    return [num_nodes] if ptr is None else ptr.diff().tolist()


@torch.library.custom_op(
    "diffusion_mp::walk_pairs",
    mutates_args=(),
    schema="(Tensor edge_index, Tensor weight, SymInt num_nodes, int hops) -> Tensor",
)
def walk_pairs(edge_index: Tensor, weight: Tensor, num_nodes: int, hops: int) -> Tensor:
    """Return every pair (source, target) with a walk of 1 to ``hops`` edges of positive weight, once, [2, E]."""
    # Imported here, since it takes a fifth of the import time of the library.
    from scipy.sparse import csr_array

    # By SciPy, on a GPU too: torch's sparse product is empty in a custom operation.
    source, target = edge_index[:, weight > 0].cpu().numpy()
    joined = np.ones(len(source), dtype=bool)
    steps = csr_array((joined, (source, target)), shape=(num_nodes, num_nodes))
    walks = steps
    for _ in range(hops - 1):
        # Each round makes the walks longer by at most one edge.
        walks = steps + walks @ steps
    # Also puts the pairs in order.
    walks.sum_duplicates()
    ends = np.stack(walks.nonzero())
    return torch.from_numpy(ends).to(edge_index)


@walk_pairs.register_fake
def _(edge_index: Tensor, weight: Tensor, num_nodes: int, hops: int) -> Tensor:
    return edge_index.new_empty(2, torch.library.get_ctx().new_dynamic_size())


def by_edges(
    function: Callable[[Int[Tensor, "two E"]], Tensor], edges: Int[Tensor, "two E"]
) -> Tensor:
    """Return a function of edges, whose intermediate values without gradients are those of some edges at a time."""
    if torch.is_grad_enabled() or not values_only():
        return function(edges)
    return torch.cat([function(part) for part in edges.split(CHUNK_EDGES, 1)])


def entries_at(
    pairs: Tensor, edge_index: Tensor, weight: Tensor, num_nodes: int
) -> Tensor:
    """Return a_ij [P, H] of listed pairs (j, i), for edges j → i of weights [E, H], in O((E + P) log E).

    Parallel edges add up.
    """
    # A pair of nodes is one number, so a search in a sorted list of numbers finds it.
    source, target = edge_index
    keys, edge_key = torch.unique(target * num_nodes + source, return_inverse=True)
    # The last entry is zero, for pairs without an edge.
    entries = weight.new_zeros(len(keys) + 1, weight.size(1))
    entries = entries.index_add(0, edge_key, weight)
    pair = pairs[1] * num_nodes + pairs[0]
    place = torch.searchsorted(keys, pair)
    is_edge = pad(keys, (0, 1), value=-1)[place] == pair
    return entries[place.where(is_edge, len(keys))]


def is_symmetric(edge_index: Tensor, weight: Tensor, num_nodes: int) -> bool:
    """Return whether a_ij = a_ji for all pairs and heads of weights [E, H], up to rounding; O(E log E)."""
    with torch.no_grad():
        keys, place = _both_ways(edge_index, num_nodes)
        along, against = place.chunk(2)
        zeros = weight.new_zeros(len(keys), weight.size(1))
        forth = zeros.index_add(0, along, weight)
        back = zeros.index_add(0, against, weight)
        scale = float(forth.abs().max()) if len(forth) else 0.0
        # Weights divided by degrees agree up to single precision; an infinite weight tells nothing.
        return math.isfinite(scale) and torch.allclose(
            forth, back, rtol=1e-5, atol=1e-6 * scale
        )


def symmetric_entries(
    edge_index: Tensor, weight: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """Return the edges of ½(A + Aᵀ), each pair once and ordered by target, and their weights; O(E log E)."""
    keys, place = _both_ways(edge_index, num_nodes)
    half = weight * 0.5
    entries = half.new_zeros(len(keys)).index_add(0, place, torch.cat([half, half]))
    target = keys.div(max(num_nodes, 1), rounding_mode="floor")
    return torch.stack([keys - target * num_nodes, target]), entries


def _both_ways(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Return the pairs of nodes that an edge joins in either direction, and the place of all edges and of all reversed.

    A pair is one number, by which the pairs are ordered: the target, and then the source.
    """
    source, target = edge_index
    pairs = torch.cat([target * num_nodes + source, source * num_nodes + target])
    return torch.unique(pairs, return_inverse=True)


class Compressed:
    """The edges by one end ``node`` [E], with the other end ``opposite``: CSR over targets, or CSC over sources.

    ``ptr`` is given if the edges are known to be in this order already.

    Attributes:
        ptr: [N+1], bounds of the entries of each node. Computed on first access, like the others.
        order: [E], the edge of each entry.
        other: [E], the other end of each entry.
    """

    def __init__(
        self,
        node: Int[Tensor, " E"],
        opposite: Int[Tensor, " E"],
        num_nodes: int,
        ptr: Tensor | None = None,
    ) -> None:
        self.node = node
        self.opposite = opposite
        self.num_nodes = num_nodes
        if ptr is not None:
            self.parts = (ptr, None, opposite.to(ptr.dtype))

    @property
    def ptr(self) -> Int[Tensor, " N_plus_one"]:
        return self.parts[0]

    @cached_property
    def order(self) -> Int[Tensor, " E"]:
        ptr, moved, other = self.parts
        if moved is not None:
            return moved
        # The identity, which products leave out; made for callers that need an order.
        return persistent(
            lambda: torch.arange(other.numel(), dtype=ptr.dtype, device=ptr.device)
        )

    @property
    def other(self) -> Int[Tensor, " E"]:
        return self.parts[2]

    @property
    def is_sorted(self) -> bool:
        """Whether the form has been computed already."""
        return "parts" in self.__dict__

    @cached_property
    def parts(self) -> Parts:
        """``ptr``; ``order``, or ``None`` if the edges are already in order, which saves a pass; ``other``."""
        return persistent(self._sort)

    def _sort(self) -> Parts:
        node = self.node
        # Whether edges are in order is a value, which a trace may not read, so a trace always sorts.
        if node.is_meta or not values_only() or bool((node[1:] < node[:-1]).any()):
            return compress(node, self.opposite, self.num_nodes)
        ptr = bounds(node, self.num_nodes)
        return ptr, None, self.opposite.to(ptr.dtype)


class Entries(NamedTuple):
    """A `Pattern` as operations take it, with the parts of `Compressed`; the parts by column if gradients need them."""

    rows: int
    cols: int
    row: Tensor
    col: Tensor
    row_ptr: Tensor
    row_moved: Tensor | None
    row_other: Tensor
    col_ptr: Tensor | None
    col_moved: Tensor | None
    col_other: Tensor | None

    @property
    def T(self) -> Entries:
        by_row = (self.row_ptr, self.row_moved, self.row_other)
        if self.col_ptr is None or self.col_other is None:
            # Only gradients of gradients come here: other callers have sorted both ways before.
            by_col: Parts = compress(self.col, self.row, self.cols)
        else:
            by_col = (self.col_ptr, self.col_moved, self.col_other)
        return Entries(self.cols, self.rows, self.col, self.row, *by_col, *by_row)


class Pattern:
    """The places of the entries of a sparse operator: edges by row, the target, and by column, the source."""

    def __init__(self, by_row: Compressed, by_col: Compressed) -> None:
        self.by_row = by_row
        self.by_col = by_col

    @property
    def T(self) -> Pattern:
        return Pattern(self.by_col, self.by_row)

    @cached_property
    def entries(self) -> Entries:
        """The entries by row, and by column if they are sorted already: only gradients need the entries by column."""
        return self._entries(self.by_col.is_sorted)

    def both_ways(self) -> Entries:
        """Return the entries by row and by column, and keep them."""
        entries = self._entries(True)
        if may_keep():
            self.entries = entries
        return entries

    def _entries(self, by_col: bool) -> Entries:
        rows = self.by_row
        cols = self.by_col
        of_cols = cols.parts if by_col else (None, None, None)
        return Entries(
            rows.num_nodes, cols.num_nodes, rows.node, cols.node, *rows.parts, *of_cols
        )
