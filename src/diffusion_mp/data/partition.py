"""A random partition of the nodes, and the parts of a graph that it cuts, from one pass over the edges."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

# Edges looked at together: what is kept of a chunk in between, a few bytes an edge, stays in the cache.
CHUNK = 1 << 20


def random_partition(
    num_nodes: int,
    num_parts: int,
    generator: torch.Generator,
    clusters: Int[Tensor, " N"] | None = None,
    needed: Bool[Tensor, " N"] | None = None,
) -> Integer[Tensor, " N"]:
    """The part of every node: nodes in random order, cut into parts that differ by one node at most.

    With `clusters`, whose clusters are in random order, the nodes of each together (Cluster-GCN, Chiang et al. 2019,
    but for the cut, which keeps the parts even and divides `num_parts` − 1 clusters at most).

    With `needed`, of which there must be one for every part: a part without any exchanges one of its nodes for one of a
    part that has most. So the distribution is that of the uniform partition, as published, wherever each of its parts
    has one anyway; at Pokec's size that fails with probability 10^-4000.

    Shapes: clusters [N], 0 .. C − 1; needed [N] → part [N] in the smallest integers that hold it.
    """
    order = torch.randperm(num_nodes, generator=generator)
    if clusters is not None:
        count = int(clusters.max()) + 1
        place = torch.randperm(count, generator=generator).to(_smallest(count))
        order = order[_sorting(place[clusters[order]])]
    part = torch.empty(num_nodes, dtype=_smallest(num_parts))
    part[order] = (torch.arange(num_nodes) * num_parts // num_nodes).to(part.dtype)
    if needed is not None:
        _exchange(part, num_parts, needed.nonzero().flatten(), generator)
    return part


def _exchange(part: Tensor, num_parts: int, needed: Tensor, generator: torch.Generator) -> None:
    """Gives every part one of the nodes `needed`, in place."""
    held = torch.bincount(part[needed], minlength=num_parts)
    for poor in (held == 0).nonzero().flatten().tolist():
        rich = int(held.argmax())
        given = _one_of(needed[part[needed] == rich], generator)
        taken = _one_of((part == poor).nonzero().flatten(), generator)
        part[given], part[taken] = poor, rich
        held[rich] -= 1
        held[poor] = 1


def _one_of(nodes: Tensor, generator: torch.Generator) -> int:
    return int(nodes[torch.randint(len(nodes), (1,), generator=generator)])


class Part(NamedTuple):
    """One part of a graph: its own `batch_size` nodes in ascending order, then those it only looks at.

    `n_id` [n] and `e_id` [e] are their and its edges' numbers in the whole graph, `edge_index` [2, e] has its own.
    """

    n_id: Int[Tensor, " n"]
    batch_size: int
    e_id: Int[Tensor, " e"]
    edge_index: Int[Tensor, "two e"]


class Cut:
    """All parts of a graph: `cut[k]`, the nodes of part k and the edges among them, in the order of the whole graph.

    Without `halo`, an edge is kept if its ends share a part. With it a part has every edge that arrives at its own
    nodes, and beside those the nodes these come from, with their loops: every edge but a loop is in exactly one part.

    One pass over the edges, in chunks: look up the parts of both ends, keep, and sort what was kept by part. Tables are
    13 to 16 bytes a node, and 12 bytes an edge that was kept. Threads take a chunk each, in numpy: torch would share
    out every one of these short operations, and wait for the last thread of each.

    Shapes: edge_index [2, E]; part [N], 0 .. num_parts − 1.
    """

    def __init__(
        self, edge_index: Integer[Tensor, "two E"], part: Integer[Tensor, " N"], num_parts: int, *, halo: bool = False
    ) -> None:
        self._part, self._halo = part.numpy(), halo
        self._own = np.split(_sorting(part).numpy(), np.bincount(self._part, minlength=num_parts).cumsum()[:-1])
        self._local = np.empty(len(part), np.int32 if len(part) < 2**31 else np.int64)
        for own in self._own:
            self._local[own] = np.arange(len(own))
        edges = edge_index.numpy()
        self._loops = np.flatnonzero(edges[0] == edges[1]) if halo else np.empty(0, np.int64)
        self._looped = edges[0, self._loops].astype(self._local.dtype)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            chunks = (edges[:, first : first + CHUNK] for first in range(0, edges.shape[1], CHUNK))
            self._chunks = list(pool.map(self._by_part, chunks))

    def _by_part(self, chunk: Integer[np.ndarray, "two e"]) -> tuple[list[Integer[np.ndarray, " some"]], ...]:
        """Of a chunk of edges: numbers in it, sources and targets of what every part keeps."""
        source, target = chunk
        owner = self._part.take(target)
        if self._halo:
            order = owner.argsort(kind="stable")
        else:
            kept = np.flatnonzero(self._part.take(source) == owner)
            owner = owner[kept]
            order = kept[owner.argsort(kind="stable")]
        bounds = np.bincount(owner, minlength=len(self)).cumsum()[:-1]
        columns = order, source[order], target[order]
        return tuple(np.split(column.astype(self._local.dtype), bounds) for column in columns)

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, k: int) -> Part:
        own, none = self._own[k], self._local[:0]
        offsets = (order[k].astype(np.int64) + chunk * CHUNK for chunk, (order, _, _) in enumerate(self._chunks))
        e_id = np.concatenate([none.astype(np.int64), *offsets])
        source = np.concatenate([none, *(source[k] for _, source, _ in self._chunks)])
        target = np.concatenate([none, *(target[k] for _, _, target in self._chunks)])
        context = np.unique(source[self._part[source] != k]) if self._halo else none
        loop = np.isin(self._looped, context)
        if loop.any():
            e_id = np.concatenate([e_id, self._loops[loop]])
            order = e_id.argsort()
            e_id = e_id[order]
            source, target = (np.concatenate([ends, self._looped[loop]])[order] for ends in (source, target))

        def local_number(nodes: Integer[np.ndarray, " e"]) -> Integer[np.ndarray, " e"]:
            local = self._local[nodes].astype(np.int64)
            if len(context):
                outside = np.flatnonzero(self._part[nodes] != k)
                local[outside] = len(own) + np.searchsorted(context, nodes[outside])
            return local

        n_id, edge_index = np.concatenate([own, context]), np.stack([local_number(source), local_number(target)])
        return Part(torch.from_numpy(n_id), len(own), torch.from_numpy(e_id), torch.from_numpy(edge_index))


def _sorting(values: Tensor) -> Int[Tensor, " n"]:
    """The stable order; numpy's is a radix sort where the integers have 16 bits or less."""
    return torch.from_numpy(values.numpy().argsort(kind="stable"))


def _smallest(count: int) -> torch.dtype:
    """For numbers 0 .. count − 1; small enough, and a table of them stays in the cache."""
    dtypes = torch.uint8, torch.int16, torch.int32, torch.int64
    return next(dtype for dtype in dtypes if count <= torch.iinfo(dtype).max + 1)
