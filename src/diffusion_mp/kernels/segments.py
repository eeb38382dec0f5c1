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
    """How a chunk is copied to a stack with the heads of a graph next to each other, and back."""

    source: Tensor  # of every row of the stack its row [n H]
    target: Tensor  # of every row [n H] its row of the stack
    shapes: list[tuple[int, int]]  # of every bucket: graphs and heads, rows of each
    masks: list[
        Tensor | None
    ]  # [b H, size, 1], one for nodes, zero for padding; ``None``: all are nodes

    def buckets(self, stack: Tensor) -> list[Tensor]:
        """Return the buckets [b H, size, F] of a stack."""
        parts = stack.split([number * size for number, size in self.shapes])
        return [
            part.view(*shape, stack.size(1))
            for part, shape in zip(parts, self.shapes, strict=True)
        ]


class Chunk:
    """Consecutive graphs of a batch, from their row boundaries, in buckets of nearly one size.

    Their rows are x[chunk.rows], [n, H, F]. One graph, or graphs of one size with one head, are stacked without a copy.
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
        self._equal = bool(sizes[0] == sizes[-1])
        self._layouts: dict[tuple[int, torch.device], Layout] = {}

    def layout(self, x: Tensor) -> Layout | None:
        """Return the layout for the heads and the device of x, or ``None`` if rows are in place.

        Cached, since all layers of a model share it.
        """
        key = heads, device = x.size(1), x.device
        graphs, _ = self.shapes[0]
        if self._equal and 1 in (graphs, heads):
            return None
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
        shapes = [(heads * graphs, size) for graphs, size in self.shapes]
        layout = Layout(source.to(device), target.to(device), shapes, masks)
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
            yield None, _in_place(results, 1), _in_place(inputs, 1)
        return
    for chunk in chunks(ptr, max(1, rows)):
        targets = [x[chunk.rows] for x in results]
        sources = [x[chunk.rows] for x in inputs]
        layout = chunk.layout(inputs[0])
        if layout is None:
            ((graphs, _),) = chunk.shapes
            yield None, _in_place(targets, graphs), _in_place(sources, graphs)
            continue
        height = len(layout.source)
        stacked = [x.new_empty(height, x.size(2)) for x in targets]
        copies = [x.flatten(0, 1).index_select(0, layout.source) for x in sources]
        dtype = wide_dtype(inputs[0].dtype)
        buckets = zip(
            layout.masks,
            zip(*map(layout.buckets, stacked), strict=True),
            zip(*map(layout.buckets, copies), strict=True),
            strict=True,
        )
        for mask, written, read in buckets:
            yield None if mask is None else mask.to(dtype), [*written], [*read]
        for stack, x in zip(stacked, targets, strict=True):
            # Not flattened: rows without a column would be copied.
            flat = x.view(len(x) * x.size(1), x.size(2))
            torch.index_select(stack, 0, layout.target, out=flat)


def _in_place(rows: Sequence[Tensor], graphs: int) -> list[Tensor]:
    """Return views [b H, size, F] of the rows of one graph, or of graphs of one size with one head."""
    if graphs == 1:
        return [x.transpose(0, 1) for x in rows]
    return [x.squeeze(1).unflatten(0, (graphs, -1)) for x in rows]


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
