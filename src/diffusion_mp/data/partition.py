"""A random partition of the nodes, and the parts of a graph that it cuts, from one pass over the edges."""

from __future__ import annotations

from typing import NamedTuple

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
    13 to 16 bytes a node, and 12 bytes an edge that was kept.

    Shapes: edge_index [2, E]; part [N], 0 .. num_parts − 1.
    """

    def __init__(
        self, edge_index: Integer[Tensor, "two E"], part: Integer[Tensor, " N"], num_parts: int, *, halo: bool = False
    ) -> None:
        self._part = part
        order = _sorting(part)
        self._own = order.split(torch.bincount(part, minlength=num_parts).tolist())
        self._local = torch.empty(len(part), dtype=torch.int32 if len(part) < 2**31 else torch.int64)
        for own in self._own:
            self._local[own] = torch.arange(len(own), dtype=self._local.dtype)
        self._loops = (edge_index[0] == edge_index[1]).nonzero().flatten() if halo else order[:0]
        self._looped = edge_index[0, self._loops].to(self._local.dtype)
        self._chunks = [
            self._by_part(*edge_index[:, first : first + CHUNK], halo=halo)
            for first in range(0, edge_index.size(1), CHUNK)
        ]

    def _by_part(self, source: Tensor, target: Tensor, *, halo: bool) -> tuple[tuple[Tensor, ...], ...]:
        """Of a chunk of edges: numbers in it, sources and targets of what every part keeps."""
        owner = self._part.index_select(0, target)
        if halo:
            order = _sorting(owner)
        else:
            kept = (self._part.index_select(0, source) == owner).nonzero().flatten()
            owner = owner.index_select(0, kept)
            order = kept.index_select(0, _sorting(owner))
        sizes = torch.bincount(owner, minlength=len(self)).tolist()
        columns = order, source.index_select(0, order), target.index_select(0, order)
        return tuple(column.to(self._local.dtype).split(sizes) for column in columns)

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, k: int) -> Part:
        own, none = self._own[k], self._local[:0]
        offsets = (order[k].long() + chunk * CHUNK for chunk, (order, _, _) in enumerate(self._chunks))
        e_id = torch.cat([none.long(), *offsets])
        source = torch.cat([none, *(source[k] for _, source, _ in self._chunks)])
        target = torch.cat([none, *(target[k] for _, _, target in self._chunks)])
        context = source[self._part.index_select(0, source) != k].unique()
        loop = torch.isin(self._looped, context)
        if loop.any():
            e_id, order = torch.cat([e_id, self._loops[loop]]).sort()
            source, target = (torch.cat([ends, self._looped[loop]])[order] for ends in (source, target))

        def local_number(nodes: Tensor) -> Tensor:
            local = self._local.index_select(0, nodes).long()
            outside = (self._part.index_select(0, nodes) != k).nonzero().flatten()
            local[outside] = len(own) + torch.searchsorted(context, nodes[outside])
            return local

        edge_index = torch.stack([local_number(source), local_number(target)])
        return Part(torch.cat([own, context]), len(own), e_id, edge_index)


def _sorting(values: Tensor) -> Int[Tensor, " n"]:
    """The stable order; numpy's is a radix sort where the integers have 16 bits or less."""
    return torch.from_numpy(values.numpy().argsort(kind="stable"))


def _smallest(count: int) -> torch.dtype:
    """For numbers 0 .. count − 1; small enough, and a table of them stays in the cache."""
    dtypes = torch.uint8, torch.int16, torch.int32, torch.int64
    return next(dtype for dtype in dtypes if count <= torch.iinfo(dtype).max + 1)
