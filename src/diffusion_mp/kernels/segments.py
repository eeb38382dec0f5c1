"""Ragged batches: graphs of nearly one size are stacked, so that a batch takes a few large matrix products.

A shorter graph is padded with copies of its first row, so that no value of another graph, not even NaN, enters it.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from diffusion_mp.runtime.cache import batch_cache
from diffusion_mp.runtime.torch_private import transforms_active

# A set of rows: one run of rows as a slice (a view, nothing is copied), or [graphs, size] row numbers.
Rows = slice | Tensor
# All rows of a stack.
ALL = slice(None)
# Rows of padding in a bucket before another one is opened: computing them costs as much as a few more calls.
PADDING = 128
# Rows of small graphs that are computed at once: those of all inputs and results stay in cache.
ROWS = 1 << 13
# A GPU computes this many times as many entries, and rows, at once as a CPU.
ON_GPU = 64


class Chunk:
    """Consecutive graphs of a batch, from their row boundaries, stacked in buckets of nearly one size.

    Their rows x[chunk.rows] are [n, H, F]; a bucket is [b H, size, F] with the heads of a graph next to each other.
    One graph, or graphs of one size with one head, are stacked where they are.
    """

    def __init__(self, bounds: Tensor) -> None:
        self.rows = slice(int(bounds[0]), int(bounds[-1]))
        sizes, order = bounds.diff().sort(descending=True, stable=True)
        self._sizes = sizes[sizes > 0]
        self._first = bounds[order[: len(self._sizes)]] - bounds[0]
        self._buckets = self._sizes.split(_bucket_lengths(self._sizes.tolist()))
        self.shapes = [(len(sizes), int(sizes[0])) for sizes in self._buckets]
        self._height = sum(graphs * size for graphs, size in self.shapes)
        self.alone = len(self._sizes) == 1
        self._equal = bool(self._sizes[0] == self._sizes[-1])
        self._places: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._masks: dict[
            tuple[int, torch.dtype, torch.device], list[Tensor | None]
        ] = {}

    def masks(self, x: Tensor) -> list[Tensor | None]:
        """Return for every bucket one for nodes and zero for padding, [b H, size, 1]; ``None``: all are nodes."""
        heads, dtype, device = key = (
            x.size(1),
            torch.promote_types(x.dtype, torch.float32),
            x.device,
        )
        if key not in self._masks:
            nodes = [
                torch.arange(int(size[0]), device="cpu")
                < size.repeat_interleave(heads).unsqueeze(1)
                for size in self._buckets
            ]
            self._masks[key] = [
                None if bool(some.all()) else some.unsqueeze(2).to(device, dtype)
                for some in nodes
            ]
        return self._masks[key]

    def _in_place(self, heads: int) -> bool:
        return self.alone or (heads == 1 and self._equal)

    def stack(self, x: Tensor) -> list[Tensor]:
        """Return the buckets [b H, size, F] of rows [n, H, F]."""
        return self.views(
            x
            if self._in_place(x.size(1))
            else x.flatten(0, 1).index_select(0, self._at(x)[0])
        )

    def empty(self, rows: Tensor) -> Tensor:
        """Return memory for the stacked results of ``rows`` [n, H, D]: ``rows`` itself where they are in place."""
        _, heads, channels = rows.shape
        if self._in_place(heads):
            return rows
        return rows.new_empty(heads * self._height, channels)

    def views(self, stack: Tensor) -> list[Tensor]:
        """Return the buckets [b H, size, F] of a stack, which is [n, H, F] where it is in place."""
        if self.alone:
            return [stack.transpose(0, 1)]
        if len(self.shapes) == 1:
            size = self.shapes[0][1]
            return [stack.view(len(stack) // size, size, stack.size(-1))]
        heads = stack.size(0) // self._height
        shapes = [(heads * graphs, size) for graphs, size in self.shapes]
        parts = stack.split_with_sizes([graphs * size for graphs, size in shapes])
        return [
            part.view(*shape, stack.size(1))
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def unstack(self, stack: Tensor, rows: Tensor) -> None:
        """Write a stack of results to their rows [n, H, D]; padding is left out."""
        if stack is not rows:
            flat = rows.view(
                len(rows) * rows.size(1), rows.size(2)
            )  # of no column, possibly
            torch.index_select(stack, 0, self._at(rows)[1], out=flat)

    def _at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row [n H] for every row of the stack, and the row of the stack for every row [n H]."""
        heads, device = key = x.size(1), x.device
        if key in self._places:
            return self._places[key]
        height = torch.cat([sizes[:1].expand_as(sizes) for sizes in self._buckets])
        graph = torch.repeat_interleave(height)
        above = height.cumsum(0) - height
        within = torch.arange(len(graph), device="cpu") - above.index_select(0, graph)
        node = within < self._sizes.index_select(0, graph)
        row = self._first.index_select(0, graph) + within * node
        head = torch.arange(heads, device="cpu")
        position = (heads * above.index_select(0, graph) + within).unsqueeze(
            1
        ) + height.index_select(0, graph).outer(head)
        source = torch.empty_like(position).flatten()
        target = torch.empty(int(node.sum()) * heads, dtype=torch.long)
        source[position] = row.unsqueeze(1) * heads + head
        target[source[position[node]]] = position[node]
        self._places[key] = source.to(device), target.to(device)
        return self._places[key]


def chunks(ptr: Tensor, rows: int) -> list[Chunk]:
    """Return chunks of at most so many rows; a larger graph is a chunk of its own. Cached."""
    cache = batch_cache(ptr)
    if rows not in cache:
        cache[rows] = list(_chunks(ptr, rows))
    return cache[rows]


def stacks(
    ptr: Tensor | None, rows: int, results: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Iterator[tuple[Tensor | None, list[Tensor], list[Tensor]]]:
    """Yield graphs of nearly one size until all are covered: a mask, and views of results and inputs [N, H, F].

    Views are [b, n, F], each b a graph and head; those of results are to be written. A chunk has at most ``rows`` rows
    unless it is a single graph. The mask [b, n, 1] is one for nodes and zero for padding; ``None``: all are nodes.
    """
    if ptr is None:
        if inputs[0].size(0):
            yield (
                None,
                [x.transpose(0, 1) for x in results],
                [x.transpose(0, 1) for x in inputs],
            )
        return
    for chunk in chunks(ptr, max(1, rows)):
        targets = [result[chunk.rows] for result in results]
        stacked = [chunk.empty(x) for x in targets]
        written = zip(*map(chunk.views, stacked), strict=True)
        read = zip(*[chunk.stack(x[chunk.rows]) for x in inputs], strict=True)
        for mask, mine, theirs in zip(
            chunk.masks(inputs[0]), written, read, strict=True
        ):
            yield mask, list(mine), list(theirs)
        for stack, x in zip(stacked, targets, strict=True):
            chunk.unstack(stack, x)


def at_once(entries: int, like: Tensor) -> int:
    """Return how many entries are computed at once on the device of ``like`` if a CPU computes ``entries``."""
    return entries if like.is_cpu else ON_GPU * entries


def by_stacks(
    compute: Callable[..., tuple[Tensor, ...]],
    ptr: Tensor | None,
    inputs: Sequence[Tensor],
    pairs: int,
) -> list[Tensor]:
    """Apply ``compute`` to stacks [B, n, F] of inputs [N, H, F] and the mask of :func:`stacks`; results are [N, H, D].

    B graphs and heads have together at most ``pairs`` pairs of rows, and ROWS rows (more of both on a GPU), or B is 1.
    """
    n, heads = inputs[0].shape[:2]
    pairs = at_once(pairs, inputs[0])
    rows = at_once(ROWS, inputs[0])
    chunk = None if ptr is None or not n else chunks(ptr, n)[0]
    stacked: Iterable[tuple[Tensor | None, *tuple[Tensor, ...]]]
    if chunk is None or chunk.alone:
        chunk = None
        stacked = [(None, *(x.transpose(0, 1) for x in inputs))]
    else:
        stacked = zip(chunk.masks(inputs[0]), *map(chunk.stack, inputs), strict=True)
    parts: list[tuple[Tensor, ...]] = []
    for mask, *bucket in stacked:
        together, size = bucket[0].shape[:2]
        most = max(1, min(pairs // max(1, size**2), rows // max(1, size)))
        if together <= most:
            parts.append(compute(*bucket, mask))
            continue
        for some in even(together, most):
            parts.append(
                compute(
                    *(x[some] for x in bucket), None if mask is None else mask[some]
                )
            )
    if chunk is None:
        return [
            joined(found, 0).transpose(0, 1).contiguous()
            for found in zip(*parts, strict=True)
        ]
    results = []
    for found in zip(*parts, strict=True):
        stack = joined([x.flatten(0, 1) for x in found], 0)
        results.append(stack.new_empty(n, heads, stack.size(1)))
        chunk.unstack(stack, results[-1])
    return results


def cut(x: Tensor, rows: slice) -> Tensor:
    """Return some rows of a stack, or for :data:`ALL` the stack itself, since a view takes time."""
    return x if rows is ALL else x[:, rows]


def even(size: int, most: int) -> list[slice]:
    """Split 0 … size into as few slices of at most ``most`` as possible, all about equal."""
    count = max(1, -(-size // most))
    return [
        slice(size * part // count, size * (part + 1) // count) for part in range(count)
    ]


def joined(parts: Sequence[Tensor | None], dim: int) -> Tensor:
    """Concatenate the parts that are not ``None``; a single one is not copied."""
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present, dim)


def _chunks(ptr: Tensor, rows: int) -> Iterator[Chunk]:
    first = 0
    last = len(ptr) - 1
    while first < last:
        end = max(
            int(torch.searchsorted(ptr, ptr[first] + rows, right=True)) - 1, first + 1
        )
        if ptr[end] > ptr[first]:
            yield Chunk(ptr[first : end + 1])
        first = end


def _bucket_lengths(sizes: list[int]) -> list[int]:
    """Return how many of graphs in falling order go into each bucket."""
    lengths: list[int] = []
    largest = added = 0
    for size in sizes:
        added += largest - size
        if lengths and added <= PADDING:
            lengths[-1] += 1
        else:
            lengths.append(1)
            largest = size
            added = 0
    return lengths


def by_size(ptr: Tensor | None, num_nodes: int, device: torch.device) -> Iterator[Rows]:
    """Yield the rows of all graphs of one size: a slice for one graph, else indices [b, size]; at most √(2N) times."""
    if ptr is None:
        if num_nodes:
            yield slice(0, num_nodes)
        return
    sizes = ptr.diff()
    order = torch.argsort(sizes, stable=True)
    distinct, counts = torch.unique_consecutive(sizes[order], return_counts=True)
    for size, members in zip(
        distinct.tolist(), order.split(counts.tolist()), strict=True
    ):
        first = ptr[members]
        if size and len(members) == 1:
            yield slice(int(first), int(first) + size)
        elif size:
            yield (first[:, None] + torch.arange(size, device="cpu")).to(device)


def slices(ptr: Tensor | None, num_nodes: int) -> list[slice]:
    if ptr is None:
        return [slice(0, num_nodes)]
    # Before torch 2.13 a tensor made inside a transform has no `tolist`.
    if transforms_active():
        bounds = [int(bound) for bound in ptr.unbind()]
    else:
        bounds = ptr.tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


def largest(ptr: Tensor | None, num_nodes: int) -> int:
    if ptr is None:
        return num_nodes
    if len(ptr) > 1:
        return int(ptr.diff().max())
    return 0


def gather(x: Tensor, rows: Rows) -> Tensor:
    """[N, H, F] → [b, H, size, F], the layout of batched matrix products."""
    stacked = x[rows].unsqueeze(0) if isinstance(rows, slice) else x[rows]
    return stacked.transpose(1, 2)


class Buffers:
    """Scratch memory by name, valid until the name is used again.

    A thread on the CPU keeps it for later operations, since mapping new memory costs more than writing it.
    """

    _kept = threading.local()

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like = like
        self.dtype = dtype
        self._taken: dict[str, Tensor] = (
            self._kept.__dict__.setdefault(str(dtype), {}) if like.is_cpu else {}
        )

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self._taken or self._taken[name].numel() < size:
            # Memory of inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._taken[name] = self.like.new_empty(size, dtype=self.dtype)
        return self._taken[name][:size].view(shape)

    def inner(
        self, a: Tensor, b: Tensor, name: str = "s", scale: float = 1.0
    ) -> Tensor:
        """Return ``scale`` a bᵀ for stacks."""
        out = self(name, a.size(0), a.size(1), b.size(1))
        return torch.baddbmm(out, a, b.transpose(1, 2), beta=0, alpha=scale, out=out)
