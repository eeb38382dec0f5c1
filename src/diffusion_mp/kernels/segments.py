"""Ragged batches: graphs of nearly one size are stacked, so that a batch takes a few large matrix products.

A shorter graph is padded with copies of its first row, so that no value of another graph, not even NaN, enters it.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.runtime.cache import batch_cache
from diffusion_mp.runtime.precision import wide_dtype
from diffusion_mp.runtime.torch_private import transforms_active

# A set of rows: one run of rows as a slice (a view, nothing is copied), or [graphs, size] row numbers.
Rows = slice | Tensor
# All rows of a stack.
ALL = slice(None)
# Rows of padding in a bucket before another one is opened: computing them costs as much as a few more calls.
PADDING = 128
# Rows of small graphs that are computed at once: the rows of all inputs and results stay in cache.
ROWS = 1 << 13
# Chunks of so many times these rows, since a longer one has more graphs of nearly one size.
CHUNK = 8
# A GPU computes this many times as many entries, and rows, at once as a CPU.
ON_GPU = 64


class Layout(NamedTuple):
    """Of every row of a stack its row [n H], of every row [n H] its row of the stack, and the mask of every bucket."""

    source: Tensor
    target: Tensor
    masks: list[Tensor | None]


class Chunk:
    """Consecutive graphs of a batch, from their row boundaries, stacked in buckets of nearly one size.

    Their rows x[chunk.rows] are [n, H, F]. A bucket is [b H, size, F], with the heads of a graph next to each other.
    One graph, or graphs of one size with one head, are stacked without a copy.
    """

    def __init__(self, bounds: Tensor) -> None:
        self.rows = slice(int(bounds[0]), int(bounds[-1]))
        sizes, order = bounds.diff().sort(descending=True, stable=True)
        # Empty graphs are the last, and left out.
        sizes = sizes[sizes > 0]
        first = bounds[order[: len(sizes)]] - bounds[0]
        lengths = _bucket_lengths(sizes.tolist())
        #: Of every bucket the sizes of its graphs, and their first rows.
        self._graphs = list(
            zip(sizes.split(lengths), first.split(lengths), strict=True)
        )
        self.shapes = [(len(sizes), int(sizes[0])) for sizes, _ in self._graphs]
        self._height = sum(graphs * size for graphs, size in self.shapes)
        self._equal = bool(sizes[0] == sizes[-1])
        self._layouts: dict[tuple[int, torch.device], Layout] = {}

    def _in_place(self, heads: int) -> bool:
        graphs, _ = self.shapes[0]
        return self._equal and 1 in (graphs, heads)

    def masks(self, x: Tensor) -> list[Tensor | None]:
        """Return the mask of every bucket [b H, size, 1], one for nodes, zero for padding; ``None``: all are nodes."""
        if self._in_place(x.size(1)):
            return [None]
        dtype = wide_dtype(x.dtype)
        masks = self._layout(x).masks
        return [None if mask is None else mask.to(dtype) for mask in masks]

    def stack(self, x: Tensor) -> list[Tensor]:
        """Return the buckets [b H, size, F] of rows [n, H, F]."""
        if not self._in_place(x.size(1)):
            x = x.flatten(0, 1).index_select(0, self._layout(x).source)
        return self.views(x)

    def empty(self, rows: Tensor) -> Tensor:
        """Return memory for the stacked results of ``rows`` [n, H, D]: ``rows`` itself where they are in place."""
        _, heads, channels = rows.shape
        if self._in_place(heads):
            return rows
        return rows.new_empty(heads * self._height, channels)

    def views(self, stack: Tensor) -> list[Tensor]:
        """Return the buckets [b H, size, F] of a stack, which is [n, H, F] where it is in place."""
        if stack.dim() == 3:
            by_graph = stack.unflatten(0, self.shapes[0])
            return [by_graph.transpose(1, 2).flatten(0, 1)]
        heads = len(stack) // self._height
        heights = [heads * graphs * size for graphs, size in self.shapes]
        return [
            part.view(heads * graphs, size, stack.size(-1))
            for part, (graphs, size) in zip(
                stack.split(heights), self.shapes, strict=True
            )
        ]

    def unstack(self, stack: Tensor, rows: Tensor) -> None:
        """Write a stack of results to their rows [n, H, D]; padding is left out."""
        if stack is not rows:
            # Not flattened: rows without a column would be copied.
            flat = rows.view(len(rows) * rows.size(1), rows.size(2))
            torch.index_select(stack, 0, self._layout(rows).target, out=flat)

    def _layout(self, x: Tensor) -> Layout:
        """Return the layout for as many heads as x has, on its device; cached, since all layers of a model share it."""
        key = heads, device = x.size(1), x.device
        if key in self._layouts:
            return self._layouts[key]
        head = torch.arange(heads, device="cpu").unsqueeze(1)
        sources = []
        present = []
        masks: list[Tensor | None] = []
        for sizes, first in self._graphs:
            within = torch.arange(int(sizes[0]), device="cpu")
            nodes = within < sizes.view(-1, 1, 1)
            # Padding copies the first row of its own graph.
            row = first.view(-1, 1, 1) + within * nodes
            sources.append((row * heads + head).flatten())
            nodes = nodes.expand(-1, heads, -1)
            present.append(nodes.flatten())
            mask = nodes.flatten(0, 1).unsqueeze(2).to(device, torch.float32)
            # Most buckets have no padding, and need no product with a mask.
            masks.append(None if bool(nodes.all()) else mask)
        source = torch.cat(sources)
        position = torch.cat(present).nonzero().flatten()
        target = torch.empty_like(position)
        # Nodes only: padding copies a row, and no row has its place there.
        target[source[position]] = position
        layout = Layout(source.to(device), target.to(device), masks)
        self._layouts[key] = layout
        return layout


def chunks(ptr: Tensor, rows: int) -> list[Chunk]:
    """Return chunks of at most ``rows`` rows; a larger graph is a chunk of its own. Cached."""
    cache = batch_cache(ptr)
    if rows not in cache:
        cache[rows] = list(_chunks(ptr, rows))
    return cache[rows]


def stacks(
    ptr: Tensor | None,
    rows: int,
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> Iterator[tuple[Tensor | None, list[Tensor], list[Tensor]]]:
    """Yield graphs of nearly one size until all are covered: a mask, and views of results and inputs [N, H, F].

    A view is [b, n, F], where b counts graphs and heads; views of results are to be written. A chunk has at most
    ``rows`` rows unless it is a single graph. The mask [b, n, 1] is one for nodes and zero for padding; ``None`` means
    that all are nodes.
    """
    if ptr is None:
        if inputs[0].size(0):
            views = [[x.transpose(0, 1) for x in rows] for rows in (results, inputs)]
            yield None, *views
        return
    for chunk in chunks(ptr, max(1, rows)):
        targets = [result[chunk.rows] for result in results]
        stacked = [chunk.empty(x) for x in targets]
        buckets = zip(
            chunk.masks(inputs[0]),
            zip(*map(chunk.views, stacked), strict=True),
            zip(*[chunk.stack(x[chunk.rows]) for x in inputs], strict=True),
            strict=True,
        )
        for mask, written, read in buckets:
            yield mask, list(written), list(read)
        for stack, x in zip(stacked, targets, strict=True):
            chunk.unstack(stack, x)


def at_once(entries: int, like: Tensor) -> int:
    """Return how many entries the device of ``like`` computes at once if a CPU computes ``entries``."""
    return entries if like.is_cpu else ON_GPU * entries


def by_stacks(
    compute: Callable[..., Sequence[Tensor]],
    ptr: Tensor | None,
    inputs: Sequence[Tensor],
    widths: Sequence[int],
    pairs: int,
) -> list[Tensor]:
    """Apply ``compute`` to stacks [B, n, F] of inputs [N, H, F] and their mask; results are [N, H, width].

    A stack has at most ``pairs`` pairs of nodes of one graph on the CPU, unless it is a single graph and head.
    """
    like = inputs[0]
    results = [like.new_empty(*like.shape[:2], width) for width in widths]
    # Pairs bound the memory of products, and rows the memory of inputs and results.
    pairs = at_once(pairs, like)
    rows = at_once(ROWS, like)
    for mask, written, read in stacks(ptr, CHUNK * rows, results, inputs):
        together, size = read[0].shape[:2]
        for some in even(together, min(pairs // size**2, rows // size)):
            views = (None if x is None else cut(x, some, 0) for x in (*read, mask))
            for result, part in zip(written, compute(*views), strict=True):
                cut(result, some, 0).copy_(part)
    return results


def cut(x: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """Return some rows of a stack, or graphs if ``dim`` is 0; for :data:`ALL` the stack itself: a view takes time."""
    if rows is ALL:
        return x
    return x[:, rows] if dim else x[rows]


def even(size: int, most: int) -> list[slice]:
    """Split 0 … size into as few slices of at most ``most`` as possible, all about equal; one is :data:`ALL`."""
    if size <= most:
        return [ALL]
    count = math.ceil(size / max(1, most))
    return [
        slice(size * part // count, size * (part + 1) // count) for part in range(count)
    ]


def _chunks(ptr: Tensor, rows: int) -> Iterator[Chunk]:
    first = 0
    last = len(ptr) - 1
    while first < last:
        # The last boundary that is not too far away.
        end = int(torch.searchsorted(ptr, ptr[first] + rows, right=True)) - 1
        # A larger graph is a chunk all the same.
        end = max(end, first + 1)
        if ptr[end] > ptr[first]:
            yield Chunk(ptr[first : end + 1])
        first = end


def _bucket_lengths(sizes: list[int]) -> list[int]:
    """Return how many of the graphs, in falling order of size, go into each bucket."""
    lengths: list[int] = []
    largest = added = 0
    for size in sizes:
        # In falling order, so that the first of a bucket is its largest.
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
    firsts: dict[int, list[int]] = {}
    for rows in slices(ptr, num_nodes):
        firsts.setdefault(rows.stop - rows.start, []).append(rows.start)
    for size, first in firsts.items():
        if size and len(first) == 1:
            yield slice(first[0], first[0] + size)
        elif size:
            within = torch.arange(size, device="cpu")
            yield (torch.tensor(first, device="cpu")[:, None] + within).to(device)


def slices(ptr: Tensor | None, num_nodes: int) -> list[slice]:
    if ptr is None:
        return [slice(0, num_nodes)]
    # Before torch 2.13 a tensor made inside a transform has no `tolist`.
    if transforms_active():
        bounds = [int(bound) for bound in ptr.unbind()]
    else:
        bounds = ptr.tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


def gather(x: Tensor, rows: Rows) -> Tensor:
    """[N, H, F] → [b, H, size, F], the layout of batched matrix products."""
    stacked = x[rows].unsqueeze(0) if isinstance(rows, slice) else x[rows]
    return stacked.transpose(1, 2)


def scatter(parts: Sequence[Tensor], runs: Sequence[Rows]) -> Tensor:
    """Invert :func:`gather`: [b, H, size, F] of all graphs, by size, → [N, H, F]."""
    out = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    if len(runs) == 1 and isinstance(runs[0], slice):
        return out
    node = torch.arange(len(out), device=out.device)
    order = torch.cat([node[rows].flatten() for rows in runs])
    return out[order.argsort()]


def nodes_first(x: Tensor) -> Tensor:
    """Invert :func:`.operation.heads_first`: [N, D], or [H, N, D] → [N, H, D]."""
    return x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1)


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
        self,
        a: Tensor,
        b: Tensor,
        name: str = "s",
        scale: float = 1.0,
    ) -> Tensor:
        """Return ``scale`` a bᵀ for stacks."""
        out = self(name, a.size(0), a.size(1), b.size(1))
        return torch.baddbmm(out, a, b.transpose(1, 2), beta=0, alpha=scale, out=out)
