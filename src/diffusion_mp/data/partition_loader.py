"""``RandomPartitionLoader``: batches of a large graph from a new random partition in every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from random import Random
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch_geometric.data import Data
from torch_geometric.utils import select

from diffusion_mp.checks import (
    Count,
    as_whole,
    check_kind,
    check_range,
    checked,
    describe,
    index_vector,
)
from diffusion_mp.data.partition import Cut, Part, PartOf, random_partition
from diffusion_mp.graph import Graph
from diffusion_mp.graph.sparse_rows import SPARSE, select_rows


class RandomPartitionLoader(DataLoader[Data]):
    r"""Load random parts of a large graph with the edges inside them, a new partition in every epoch.

    This is the published recipe for large graphs (Wu, Wipf & Yan 2025). Every pass draws a uniform partition into parts
    whose sizes differ by at most one, in O(E). With p parts about 1/p of the edges are kept, which the paper does not
    mention (D12 in docs/errata.md); `clusters` and `halo` keep more.

    A batch is a `Data` with the node and edge attributes of `data`, dense or sparse, and the attributes of
    :class:`PartOf`. `n_id` [n] and `e_id` [e] are the numbers of its nodes and edges in `data`. The first `batch_size`
    nodes are the batch's own, in ascending order.

    The partition depends only on `seed` and the epoch. `set_epoch(epoch)`, which Lightning calls, sets the next epoch.
    Processes of `torch.distributed` load shares of the same partition. Tensors may be memory-mapped.

    Args:
        data: one graph, on the CPU.
        num_parts: number of parts in an epoch, a multiple of `num_replicas`. Pass either `num_parts` or `batch_size`.
        batch_size: the largest number of nodes of a part; the loader then takes the fewest parts that respect it.
        clusters: the cluster 0 .. C − 1 of every node [N], see :func:`find_clusters`. All clusters stay whole, except p
            − 1 at most. By default nodes are assigned to parts independently of the edges.
        halo: whether a part gets all edges that arrive at its nodes or leave them, and the nodes at the other ends with
            their self-loops. With `degrees="full"`, one layer over edges then computes for the part's own nodes, the
            first `batch_size` rows of `model(batch.x, batch.edge_index, batch.edge_weight)`, what it computes for them
            in `data`. Off by default, as in the published recipe.
        degrees: `"batch"` for degrees within the batch, as in the published recipe, or `"full"` for degrees in `data`;
            see :class:`PartOf`.
        allow_unlabelled: whether to accept parts without a node of `train_mask`. By default such a part exchanges one
            of its nodes for a node of `train_mask`, so that every step has a loss.
        seed: seed of the partitions; equal seeds give equal partitions in every epoch.
        num_replicas: number of processes; by default the number of processes of `torch.distributed`, or 1.
        rank: index of this process; by default its rank in `torch.distributed`, or 0.
        options: further options of `torch.utils.data.DataLoader`: `num_workers`, `persistent_workers`, `pin_memory`,
            `prefetch_factor`.

    Raises:
        ValueError: both or neither of `num_parts` and `batch_size` are given, a part would have no node, or a part
            would have no node of `train_mask`.
        TypeError: an attribute of `data` has a row for every node or edge and cannot be cut.

    Examples:
        >>> [batch.num_nodes for batch in RandomPartitionLoader(Data(x=x, edge_index=edge_index), num_parts=2)]
        [3, 3]
    """

    @checked
    def __init__(
        self,
        data: Data,
        num_parts: Count | None = None,
        batch_size: Count | None = None,
        *,
        clusters: Int[Tensor, " N"] | None = None,
        halo: bool = False,
        degrees: Literal["batch", "full"] = "batch",
        allow_unlabelled: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        parts = _Batches(data, PartOf(data, degrees))
        _check_attributes(data)
        size = int(data.num_nodes or 0)
        needed = None if allow_unlabelled else _training_nodes(data)
        labelled = None if needed is None else int(needed.sum())
        if clusters is not None:
            clusters = _numbered(clusters, size)
        # Partials, not closures: the loader must be picklable for spawned processes.
        sampler = PartSampler(
            count=partial(_num_parts, num_parts, batch_size, size, labelled),
            draw=partial(random_partition, size, clusters=clusters, needed=needed),
            cut=partial(Cut, Graph.from_data(data, validate=False).edges, halo=halo),
            seed=as_whole(seed, "seed"),
            num_replicas=num_replicas,
            rank=rank,
        )
        # With batch_size=None nothing is collated: a part is a batch already.
        super().__init__(parts, batch_size=None, sampler=sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose partition the next pass draws."""
        cast("PartSampler", self.sampler).set_epoch(as_whole(epoch, "epoch"))

    def __iter__(self) -> Any:
        # DataLoader draws the seed of its workers from torch's generator, which others use.
        with torch.random.fork_rng(devices=[]):
            return super().__iter__()


class PartSampler(DistributedSampler[Part]):
    """Sampler of this process's share of an epoch's parts.

    The number of processes is asked anew in every epoch, since Lightning starts them after the sampler was made.
    """

    # A DistributedSampler, since Lightning replaces any other by its own, which would give every process other parts.

    def __init__(
        self,
        count: Callable[[int], int],
        draw: Callable[[int, torch.Generator], Tensor],
        cut: Callable[[Tensor, int], Cut],
        seed: int,
        num_replicas: int | None,
        rank: int | None,
    ) -> None:
        self._count = count
        self._draw = draw
        self._cut = cut
        # Asked again in every epoch: processes may start after the loader was made.
        self._options = (num_replicas, rank)
        replicas, rank = self._replicas_and_rank()
        super().__init__(
            cast("Dataset[Part]", range(count(replicas))), replicas, rank, seed=seed
        )

    def _replicas_and_rank(self) -> tuple[int, int]:
        """Return the number of replicas and the rank, those of the process group where the user gave none."""
        replicas, rank = self._options
        started = distributed.is_available() and distributed.is_initialized()
        if replicas is None:
            replicas = distributed.get_world_size() if started else 1
        if rank is None:
            rank = distributed.get_rank() if started else 0
        replicas = as_whole(replicas, "num_replicas")
        rank = as_whole(rank, "rank")
        if not 0 <= rank < replicas:
            raise ValueError(
                f"rank must lie in 0 .. num_replicas - 1 = {replicas - 1}; got {rank}."
            )
        return replicas, rank

    def __len__(self) -> int:
        replicas, _ = self._replicas_and_rank()
        # All processes have as many parts, since `_num_parts` refuses numbers that leave a rest.
        return self._count(replicas) // replicas

    def __iter__(self) -> Iterator[Part]:
        # A generator, so that nothing is drawn before the first part: a DataLoader with workers calls this twice.
        self.num_replicas, self.rank = self._replicas_and_rank()
        count = self._count(self.num_replicas)
        # The same on all processes, and another in every epoch.
        random = Random(f"partition/{self.seed}/{self.epoch}")
        self.epoch += 1
        generator = torch.Generator().manual_seed(int(random.random() * 2**32))
        parts = self._cut(self._draw(count, generator), count)
        for k in range(self.rank, count, self.num_replicas):
            yield parts[k]


def _num_parts(
    num_parts: int | None,
    batch_size: int | None,
    size: int,
    labelled: int | None,
    replicas: int,
) -> int:
    """Return the number of parts: `num_parts`, or the least multiple of `replicas` that respects `batch_size`."""
    if (num_parts is None) == (batch_size is None):
        raise ValueError(
            f"pass num_parts or batch_size, one of them; got {num_parts} and {batch_size}."
        )
    if batch_size is not None:
        # Every process has as many parts as any other, or some would wait.
        count = math.ceil(math.ceil(size / batch_size) / replicas) * replicas
    else:
        count = cast("int", num_parts)
    if count % replicas:
        raise ValueError(
            f"num_parts must be a multiple of the {replicas} processes, or some would wait for the others; got "
            f"{count}. Pass batch_size, which makes it one."
        )
    if count > size:
        raise ValueError(
            f"num_parts or batch_size must leave every part a node; got {count} parts of {size} nodes."
        )
    if labelled is not None and count > labelled:
        raise ValueError(
            f"num_parts or batch_size must leave every part a training node; got {count} parts, and {labelled} nodes "
            f"in train_mask. Take fewer parts, or accept parts without any: allow_unlabelled=True."
        )
    return count


class _Batches(Dataset[Data]):
    """Dataset that collects the attributes of a part, in a worker if there is one."""

    def __init__(self, data: Data, part_of: PartOf) -> None:
        self._data = data
        self._part_of = part_of

    def __getitem__(self, part: Part) -> Data:
        data = self._data
        # Shallow: attributes of the graph itself are shared by all parts.
        batch = copy(self._data)
        for name, value in data:
            dim = data.__cat_dim__(name, value)
            if name == "edge_index":
                batch.edge_index = part.edge_index
            elif data.is_node_attr(name):
                batch[name] = _rows(value, part.n_id, dim)
            elif data.is_edge_attr(name):
                batch[name] = _rows(value, part.e_id, dim)
        # Boundaries of graphs in `data` do not hold here; `batch`, a node attribute, does.
        batch.pop("ptr", None)
        batch.n_id = part.n_id
        batch.e_id = part.e_id
        batch.num_nodes = len(part.n_id)
        batch.batch_size = part.batch_size
        return self._part_of(batch)


def _rows(value: Any, rows: Tensor, dim: int) -> Any:
    """Return the entries of an attribute at some nodes or edges."""
    if isinstance(value, np.ndarray):
        # Arrays of words or objects have no tensor.
        return value.take(rows.numpy(), axis=dim)
    if not isinstance(value, Tensor):
        return select(value, rows, dim)
    if value.layout is not torch.strided:
        # torch selects rows of sparse tensors in one layout only.
        return select_rows(value, rows)
    return value.index_select(dim, rows)


def _check_attributes(data: Data) -> None:
    """Raise for an attribute that has a row for every node or edge and cannot be cut: each part would get all of it."""
    # PyG copies what it cannot cut into every batch, where its rows would belong to other nodes.
    lengths = (data.num_nodes, data.num_edges)
    for name, value in data:
        # A 0-dimensional tensor has the shape (), and most other values have none: they have no rows.
        shape: Any = getattr(value, "shape", None) or (None,)
        if name == "edge_index" or shape[0] not in lengths:
            continue
        can_be_cut = isinstance(value, np.ndarray)
        if isinstance(value, Tensor):
            # PyG takes a sparse attribute named adj for pairs of nodes, and cuts no rows.
            of_rows = data.is_node_attr(name) or data.is_edge_attr(name)
            can_be_cut = value.layout is torch.strided or (
                value.layout in SPARSE and of_rows
            )
        if not can_be_cut:
            raise TypeError(
                f"data.{name} has {shape[0]} rows and can not be cut; got {describe(value)}. Convert it to a tensor, "
                f"dense or sparse CSR, of a row for each; or leave it out: del data.{name}."
            )


def _training_nodes(data: Data) -> Tensor | None:
    mask = getattr(data, "train_mask", None)
    if mask is None:
        return None
    shapes = ((data.num_nodes,), (data.num_nodes, 1))
    check_kind(mask, "train_mask", Tensor, "a bool tensor [num_nodes]")
    if mask.dtype != torch.bool or mask.shape not in shapes:
        raise ValueError(
            f"train_mask must be a bool tensor [{data.num_nodes}], one split; got {describe(mask)}. "
            f"Split.of(data, column).apply_to(data) takes one of several."
        )
    return mask.flatten()


def _numbered(clusters: object, size: int) -> Int[Tensor, " N"]:
    numbers = index_vector(clusters, "clusters", "[num_nodes]")
    if len(numbers) != size:
        raise ValueError(
            f"clusters must hold an integer for each of {size} nodes; got {describe(numbers)}."
        )
    check_range(numbers, "clusters", size, "clusters at most")
    return numbers
