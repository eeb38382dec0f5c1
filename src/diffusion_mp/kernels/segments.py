"""Ragged batches: graphs of equal size are stacked, so no padding row exists and none can enter a sum."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

# A set of rows: one run of rows as a slice (a view, nothing is copied), or [graphs, size] row numbers.
Rows = slice | Tensor


def buckets(ptr: Tensor | None, num_nodes: int) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(size, starts)`` for every distinct size of graph: the first rows [b] of all graphs of that size.

    There are at most √(2N) distinct sizes, so this is a short loop also for thousands of graphs.
    """
    if ptr is None:
        if num_nodes:
            yield num_nodes, torch.zeros(1, dtype=torch.long)
        return
    sizes = ptr.diff()
    order = torch.argsort(sizes, stable=True)
    distinct, counts = torch.unique_consecutive(sizes[order], return_counts=True)
    for size, members in zip(distinct.tolist(), order.split(counts.tolist()), strict=True):
        if size:
            yield size, ptr[members]


def slices(ptr: Tensor | None, num_nodes: int) -> list[slice]:
    """The rows of every graph."""
    bounds = [0, num_nodes] if ptr is None else ptr.tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


def common_size(ptr: Tensor | None, num_nodes: int) -> int | None:
    """The size of all graphs that have any row, or ``None`` where they differ."""
    if ptr is None:
        return num_nodes
    sizes = ptr.diff()
    largest = int(sizes.max())
    return largest if bool(((sizes == largest) | (sizes == 0)).all()) else None


def rows_of(starts: Tensor, size: int, device: torch.device) -> Rows:
    """The rows of the graphs that begin at ``starts``: a slice for one graph, else indices [b, size]."""
    if starts.numel() == 1:
        first = int(starts)
        return slice(first, first + size)
    return (starts[:, None] + torch.arange(size)).to(device)


def gather(x: Tensor, rows: Rows) -> Tensor:
    """[N, H, F] → [b, H, size, F], the layout of batched matrix products."""
    stacked = x[rows].unsqueeze(0) if isinstance(rows, slice) else x[rows]
    return stacked.transpose(1, 2)


def scatter(out: Tensor, rows: Rows, value: Tensor, *, add: bool = False) -> None:
    """Write [b, H, size, F] back to rows of ``out`` [N, H, F], in place; rows are distinct, so adding is exact too."""
    stacked = value.transpose(1, 2).to(out.dtype)
    stacked = stacked.squeeze(0) if isinstance(rows, slice) else stacked
    if add:
        out[rows] += stacked
    else:
        out[rows] = stacked


def stack(x: Tensor, rows: Rows) -> Tensor:
    """[N, H, F] → [b H, size, F], the layout of ``torch.bmm``; a view where the rows are a slice."""
    return x[rows].transpose(0, 1) if isinstance(rows, slice) else gather(x, rows).flatten(0, 1)


def put(out: Tensor, rows: Rows, value: Tensor) -> None:
    """Write [b H, size, F] back to rows of ``out`` [N, H, F], in place."""
    if isinstance(rows, slice):
        out[rows] = value.transpose(0, 1)
    else:
        scatter(out, rows, value.unflatten(0, (-1, out.size(1))))


def row_blocks(
    ptr: Tensor | None, num_nodes: int, height: int | Callable[[int], int], device: torch.device, least: int = 1
) -> Iterator[tuple[int, Rows, list[Rows]]]:
    """Yield (size, rows, blocks) until all graphs are covered: the rows of one graph, and the same ``height`` at a
    time; or those of several graphs of equal size in one block, where a graph counts as ``least`` rows at least.

    ``height`` may be a function of the size of the graphs.
    """
    for size, starts in buckets(ptr, num_nodes):
        high = max(1, height if isinstance(height, int) else height(size))
        for some in starts.split(max(1, high // max(size, least))):
            rows = rows_of(some, size, device)
            blocks: list[Rows] = [rows]
            if isinstance(rows, slice):
                blocks = [slice(first, min(first + high, rows.stop)) for first in range(rows.start, rows.stop, high)]
            yield size, rows, blocks
