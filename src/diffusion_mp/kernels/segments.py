"""Ragged batches: graphs of nearly one size are stacked, so that a product of all of them is a few large ones.

A batch is cut into parts, runs of graphs. Those of a part are sorted into buckets, [graphs, rows of the largest]; below
a smaller one its first row is repeated, so that nothing of another graph is there, or a row of zeros, which is exact in
every sum. What all of that is, the plan of a batch, is found once for its row boundaries and kept with them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# A set of rows: one run of rows as a slice (a view, nothing is copied), or [graphs, size] row numbers.
Rows = slice | Tensor

# Rows that are added to a bucket before there is another one: a few more calls take as long as these.
PADDING = 128

# Rows of small graphs that are computed at once: those of all inputs and results stay in cache.
ROWS = 1 << 13

# A GPU wants this many times as many entries, and rows, at once as a CPU.
ON_GPU = 64


class Bucket(NamedTuple):
    """Graphs of nearly one size."""

    sizes: Tensor
    """Their nodes [b], the largest first."""
    size: int
    """Those of the first, and the rows that every graph gets."""

    @property
    def mask(self) -> Tensor | None:
        """Whether a row is a node, [b, 1, size] on the CPU; ``None`` where all rows are."""
        full = int(self.sizes[-1]) == self.size
        return None if full else (torch.arange(self.size) < self.sizes.unsqueeze(1)).unsqueeze(1)


class _Places(NamedTuple):
    """Where rows of a part [n H, F] are in its stack [Σ b H size, F], and rows of the stack in the part."""

    source: Tensor
    """The row of the part for every row of the stack."""
    target: Tensor
    """The row of the stack for every row of the part."""


class Piece(NamedTuple):
    """Some graphs of a bucket and their heads, B in all."""

    rows: Tensor
    """The row of [N H, F] for each of their rows [B size]; below a graph its first row is repeated."""
    size: int
    mask: Tensor | None
    """One for nodes, and zero below the end of a graph, [B, size, 1]; ``None``: all are nodes."""

    def take(self, x: Tensor) -> Tensor:
        """[B, size, F] of rows [N H, F]."""
        return x.index_select(0, self.rows).view(self.rows.size(0) // self.size, self.size, x.size(1))


class Part:
    """A run of graphs of a batch, from their row boundaries.

    Its rows, x[part.rows] of shape [n, H, F], are stacked by ``stack``. ``views`` are the buckets of a
    stack, a graph and head in every b of [b H, size, F]; ``unstack`` makes rows of a stack again. One graph, or
    graphs of one size with one head, are where they are: their stack is the rows themselves, and nothing is copied.
    """

    def __init__(self, bounds: Tensor) -> None:
        self.rows = slice(int(bounds[0]), int(bounds[-1]))
        sizes = bounds.diff()
        order = sizes.argsort(descending=True, stable=True)
        self._first = (bounds[order] - bounds[0])[: int((sizes > 0).sum())]
        self._sizes = sizes[order][: len(self._first)]
        self.buckets = [Bucket(part, int(part[0])) for part in self._sizes.split(_bucket_lengths(self._sizes.tolist()))]
        self._shapes = [(len(bucket.sizes), bucket.size) for bucket in self.buckets]
        self._places: dict[tuple[int, torch.device], _Places] = {}
        self._masks: dict[tuple[int, torch.dtype, torch.device], list[Tensor | None]] = {}

    @property
    def alone(self) -> bool:
        """Whether this is one graph."""
        return len(self._sizes) == 1

    def masks(self, heads: int, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """One for nodes and zero below the end of a graph, [b H, size, 1] for every bucket; ``None``: all are nodes."""
        key = (heads, dtype, device)
        if key not in self._masks:
            found = [bucket.mask for bucket in self.buckets]
            self._masks[key] = [
                None if mask is None else mask.transpose(1, 2).repeat_interleave(heads, 0).to(device, dtype)
                for mask in found
            ]
        return self._masks[key]

    def _in_place(self, heads: int) -> bool:
        return self.alone or (heads == 1 and len(self.buckets) == 1 and self.buckets[0].mask is None)

    def stack(self, x: Tensor) -> Tensor:
        """The stack of rows [n, H, F]; below a graph that is not the largest its first row is repeated."""
        if self._in_place(x.size(1)):
            return x
        return x.flatten(0, 1).index_select(0, self._at(x).source)

    def room(self, rows: Tensor) -> Tensor:
        """An uninitialised stack of results for ``rows`` [n, H, D]; these themselves where they are in place."""
        if self._in_place(rows.size(1)):
            return rows
        return rows.new_empty(sum(len(b.sizes) * b.size for b in self.buckets) * rows.size(1), rows.size(2))

    def views(self, stack: Tensor) -> list[Tensor]:
        """The buckets of a stack, [b H, size, F] each."""
        if stack.dim() == 3:
            return [
                stack.transpose(0, 1)
                if self.alone
                else stack.view(len(self._sizes), self.buckets[0].size, stack.size(2))
            ]
        heads = stack.size(0) // sum(graphs * size for graphs, size in self._shapes)
        parts = stack.split_with_sizes([heads * graphs * size for graphs, size in self._shapes])
        channels = stack.size(1)
        return [
            part.view(heads * graphs, size, channels) for part, (graphs, size) in zip(parts, self._shapes, strict=True)
        ]

    def unstack(self, stack: Tensor, rows: Tensor) -> None:
        """Write the results of a stack that ``room`` made to their rows [n, H, D]."""
        if stack is not rows:
            flat = rows.view(len(rows) * rows.size(1), rows.size(2))  # of no column, possibly
            torch.index_select(stack, 0, self._at(rows).target, out=flat)

    def _at(self, x: Tensor) -> _Places:
        key = (x.size(1), x.device)
        if key not in self._places:
            self._places[key] = _Places(*(places.to(x.device) for places in self._find(key[0])))
        return self._places[key]

    def _find(self, heads: int) -> _Places:
        high = torch.cat([bucket.sizes.new_full(bucket.sizes.shape, bucket.size) for bucket in self.buckets])
        graph = torch.repeat_interleave(high)
        above = high.cumsum(0) - high
        within = torch.arange(len(graph)) - above.index_select(0, graph)
        node = within < self._sizes.index_select(0, graph)
        row = self._first.index_select(0, graph) + within * node
        # A graph of a bucket has its heads one after the other.
        head = torch.arange(heads)
        place = (heads * above.index_select(0, graph) + within).unsqueeze(1) + high.index_select(0, graph).outer(head)
        source, target = torch.empty_like(place).flatten(), torch.empty(len(row) * heads, dtype=torch.long)
        source[place] = row.unsqueeze(1) * heads + head
        padding = place[~node].flatten()
        target = target[: len(source) - len(padding)]
        target[source[place[node]]] = place[node]
        return _Places(source, target)

    def pieces(self, like: Tensor, pairs: int, rows: int) -> Iterator[Piece]:
        """Graphs and heads of rows ``like`` [n, H, F] that together have at most so many pairs of rows, and rows."""
        heads = like.size(1)
        taken = self._at(like).source.split([heads * graphs * size for graphs, size in self._shapes])
        masks = self.masks(heads, like.dtype, like.device)
        for source, mask, (_, size) in zip(taken, masks, self._shapes, strict=True):
            most = max(1, min(pairs // size**2, rows // size))
            parts = source.split(most * size)
            for part, some in zip(parts, [None] * len(parts) if mask is None else mask.split(most), strict=True):
                yield Piece(part, size, some)


class Plan:
    """How a batch with these row boundaries is cut into parts."""

    def __init__(self, ptr: Tensor) -> None:
        self.ptr = ptr
        self._parts: dict[int, list[Part]] = {}
        self._pieces: dict[tuple[object, ...], list[Piece]] = {}
        self.stencils: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}  # what `kernels.neumann` finds

    def parts(self, rows: int) -> list[Part]:
        """Runs of graphs of at most so many rows together; a larger graph is a part of its own. Found once."""
        if rows not in self._parts:
            self._parts[rows] = list(_parts(self.ptr, rows))
        return self._parts[rows]

    def pieces(self, like: Tensor, pairs: int, rows: int) -> list[Piece]:
        """All graphs and heads of ``like`` [N, H, F], at most so many pairs of rows, and rows, at once. Found once."""
        key = (like.size(1), like.dtype, like.device, pairs, rows)
        if key not in self._pieces:
            (whole,) = self.parts(like.size(0))
            self._pieces[key] = list(whole.pieces(like, pairs, rows))
        return self._pieces[key]


def batch_plan(ptr: Tensor) -> Plan:
    """The plan for row boundaries, kept for as long as this tensor exists and holds the same.

    A ``Graph`` has one such tensor, so that layers, heads, forward and backward share the plan.
    """
    kept = _PLANS.get(id(ptr))
    if kept is not None and kept[0]() is ptr and torch.equal(kept[1].ptr, ptr):
        return kept[1]
    plan = Plan(ptr.clone())
    key = id(ptr)
    _PLANS[key] = weakref.ref(ptr, lambda _: _PLANS.pop(key, None)), plan
    return plan


_PLANS: dict[int, tuple[weakref.ref[Tensor], Plan]] = {}


#: A mask, or none; rows of results and rows of inputs.
Stack = tuple[Tensor | None, list[Tensor], list[Tensor]]


def stacks(ptr: Tensor | None, rows: int, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterable[Stack]:
    """Rows of some graphs of nearly one size, until all are covered, of at most ``rows`` where they are several.

    Yields a mask [b, n, 1], one for nodes and zero below the ends of graphs (``None``: all are nodes), then the rows
    [b, n, F] of the results, to be written, and of the inputs, all of [N, H, F]; each b is a graph and head.
    """
    if ptr is not None:
        return _stacks(batch_plan(ptr).parts(max(1, rows)), results, inputs)
    if not inputs[0].size(0):
        return []
    return [(None, [x.transpose(0, 1) for x in results], [x.transpose(0, 1) for x in inputs])]


def _stacks(parts: list[Part], results: Sequence[Tensor], inputs: Sequence[Tensor]) -> Iterator[Stack]:
    """Those of a batch; results are written to their rows when the stacks of a part were."""
    for part in parts:
        there = [result[part.rows] for result in results]
        rooms = [part.room(x) for x in there]
        masks = part.masks(inputs[0].size(1), torch.promote_types(inputs[0].dtype, torch.float32), inputs[0].device)
        written = zip(*[part.views(room) for room in rooms], strict=True)
        read = zip(*[part.views(part.stack(x[part.rows])) for x in inputs], strict=True)
        for mask, mine, theirs in zip(masks, written, read, strict=True):
            yield mask, list(mine), list(theirs)
        for room, x in zip(rooms, there, strict=True):
            part.unstack(room, x)


def at_once(entries: int, like: Tensor) -> int:
    """How many entries of such tensors are computed at once where a CPU takes so many."""
    return entries if like.is_cpu else ON_GPU * entries


def by_stacks(
    compute: Callable[..., tuple[Tensor, ...]], ptr: Tensor | None, inputs: Sequence[Tensor], pairs: int
) -> list[Tensor]:
    """Apply ``compute`` to stacks [B, n, F] of the inputs [N, H, F] and their mask [B, n, 1]; results are [N, H, D].

    Graphs and heads are taken together as long as they have at most so many pairs of rows, and ROWS (more of both on a
    GPU). The mask is one for nodes, and zero below the ends of graphs, where results have to be zero; ``None``: all
    are nodes.
    """
    n, heads = inputs[0].shape[:2]
    pairs = at_once(pairs, inputs[0])
    if ptr is None or not n:
        stacked = [x.transpose(0, 1) for x in inputs]
        together = max(1, pairs // max(1, n * n))
        groups = [stacked] if together >= heads else zip(*(x.split(together) for x in stacked), strict=True)
        found = side_by_side([compute(*some, None) for some in groups], 0)
        return [x.transpose(0, 1).contiguous() for x in found]
    results: list[Tensor] = []
    flat = [x.flatten(0, 1) for x in inputs]
    for piece in batch_plan(ptr).pieces(inputs[0], pairs, at_once(ROWS, inputs[0])):
        found = compute(*map(piece.take, flat), piece.mask)
        results = results or [x.new_zeros(n * heads, x.size(2)) for x in found]
        for result, values in zip(results, found, strict=True):
            result.index_add_(0, piece.rows, values.flatten(0, 1))
    return [result.unflatten(0, (n, heads)) for result in results]


def even(size: int, most: int) -> list[slice]:
    """0 … size in as few parts of at most ``most`` as there can be, all about equal."""
    if size <= most:
        return [slice(0, size)]
    count = -(-size // most)
    return [slice(*bounds) for bounds in pairwise([size * part // count for part in range(count + 1)])]


def joined(parts: Sequence[Tensor | None], dim: int) -> Tensor:
    """The parts there are as one tensor; a single one is that already."""
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def side_by_side(parts: Sequence[tuple[Tensor, ...]], dim: int) -> tuple[Tensor, ...]:
    """Results of parts as those of the whole, which a single part is."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(found, dim) for found in zip(*parts, strict=True))


def plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """a b, added to the total if there is one already."""
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)


def _parts(ptr: Tensor, rows: int) -> Iterator[Part]:
    first, last = 0, len(ptr) - 1
    while first < last:
        end = int(torch.searchsorted(ptr, ptr[first] + rows, right=True)) - 1
        end = max(end, first + 1)
        if ptr[end] > ptr[first]:
            yield Part(ptr[first : end + 1])
        first = end


def _bucket_lengths(sizes: list[int]) -> list[int]:
    """How many of graphs in falling order go into each bucket."""
    lengths: list[int] = []
    largest = added = 0
    for size in sizes:
        added += largest - size
        if lengths and added <= PADDING:
            lengths[-1] += 1
        else:
            lengths.append(1)
            largest, added = size, 0
    return lengths


def by_size(ptr: Tensor | None, num_nodes: int, device: torch.device) -> Iterator[Rows]:
    """The rows of all graphs of one size, for every distinct size: a slice for one graph, else indices [b, size].

    There are at most √(2N) distinct sizes, so this is a short loop also for thousands of graphs.
    """
    if ptr is None:
        if num_nodes:
            yield slice(0, num_nodes)
        return
    sizes = ptr.diff()
    order = torch.argsort(sizes, stable=True)
    distinct, counts = torch.unique_consecutive(sizes[order], return_counts=True)
    for size, members in zip(distinct.tolist(), order.split(counts.tolist()), strict=True):
        first = ptr[members]
        if size and len(members) == 1:
            yield slice(int(first), int(first) + size)
        elif size:
            yield (first[:, None] + torch.arange(size)).to(device)


def slices(ptr: Tensor | None, num_nodes: int) -> list[slice]:
    """The rows of every graph."""
    bounds = [0, num_nodes] if ptr is None else ptr.tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


def largest(ptr: Tensor | None, num_nodes: int) -> int:
    """The nodes of the largest graph."""
    return num_nodes if ptr is None else int(ptr.diff().max()) if len(ptr) > 1 else 0


def gather(x: Tensor, rows: Rows) -> Tensor:
    """[N, H, F] → [b, H, size, F], the layout of batched matrix products."""
    stacked = x[rows].unsqueeze(0) if isinstance(rows, slice) else x[rows]
    return stacked.transpose(1, 2)


class Buffers:
    """Tensors by name: a new one would be unmapped with its block, and mapping it anew costs more than writing it.

    A tensor is valid until its name is asked for again.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self._taken: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape."""
        size = math.prod(shape)
        if name not in self._taken or self._taken[name].numel() < size:
            self._taken[name] = self.like.new_empty(size, dtype=self.dtype)
        return self._taken[name][:size].view(shape)
