"""``RandomPartitionLoader``: every epoch a fresh random partition of a large graph, as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from random import Random
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch_geometric.data import Data
from torch_geometric.utils import select

from diffusion_mp.data.partition import Cut, Part, PartOf, random_partition
from diffusion_mp.errors import as_whole, check_counts, check_flags, describe, index_vector
from diffusion_mp.graph import Graph


class RandomPartitionLoader(DataLoader[Data]):
    r"""Random parts of a graph with the edges inside them: the published recipe for large graphs (Wu, Wipf & Yan 2025).

    Every pass over the loader draws a new uniform partition into parts whose sizes differ by one at most, and cuts all
    of them from one pass over the edges, O(E) an epoch whatever the number of parts. A partition into p parts keeps
    about 1/p of the edges, which the paper does not say (D12 in docs/errata.md); with `clusters` or `halo` more of them
    are kept, and with `degrees` those that are kept have the entries that they have in the whole graph.

    A batch is a `Data` with whatever attributes of nodes and edges `data` has, and

    - `n_id` [n], its nodes' numbers in `data`; its own, the first `batch_size`, in ascending order;
    - `edge_index` [2, e] and `e_id` [e], its edges and their numbers in `data`, in the order of `data`: without
      `halo` what `torch_geometric.utils.subgraph(n_id, edge_index, relabel_nodes=True)` gives;
    - `kept_edges`, and with `degrees="full"` `full_degree`: see :class:`PartOf`.

    The partition depends on `seed` and epoch alone, on no worker and no global state; the first pass is epoch 0, each
    further one the next, and `set_epoch(epoch)` says which one the next pass is (Lightning calls it). Attributes are
    gathered when a batch is asked for, by the workers if there are any, so tensors may be memory-mapped
    (`torch.from_numpy(numpy.memmap(...))`) and larger than memory: they are read a chunk or a batch at a time. (Worker
    processes that are spawned, not forked, get copies of the attributes.)

    On several processes of `torch.distributed` every one draws the same partition and yields its share of the parts.

    Args:
        data: one graph, on the CPU.
        num_parts: parts of an epoch, a multiple of `num_replicas`; or instead
        batch_size: the most nodes a part may have; there are then ⌈N / batch_size⌉ parts, or a few more until
            `num_replicas` divides them.
        clusters: [N], cluster 0 .. C − 1 of every node, as :func:`find_clusters` makes them: a part is then made of
            random whole clusters (all but p − 1, which are cut to keep the parts even).
        halo: add to a part every edge that arrives at its nodes, and the nodes these come from. They are attended to
            and have features, but are in no mask, and no edge arrives at them but their loops.
        degrees: ``"batch"`` or ``"full"``, what the graph term of `Graph.from_data(batch)` normalises by: see
            :class:`PartOf`.
        allow_unlabelled: accept parts without a node of `train_mask`; otherwise such a part gets one in exchange for a
            node of its own, see :func:`random_partition`. Data without `train_mask` has nothing to exchange.
        seed: of all partitions.
        num_replicas, rank: over how many processes the parts of an epoch are shared, and which of them this is; those
            of `torch.distributed` by default, 1 and 0 without.
        options: of `torch.utils.data.DataLoader`: `num_workers`, `persistent_workers`, `pin_memory`, `prefetch_factor`.

    Raises:
        TypeError, ValueError: data that is not one graph on the CPU, more parts than nodes or than training nodes, and
            a `num_parts` that processes can not share evenly.

    Examples:
        >>> data = Data(x=x, edge_index=edge_index, y=torch.arange(6) % 2)
        >>> sorted(batch.num_nodes for batch in RandomPartitionLoader(data, num_parts=2))
        [3, 3]
    """

    def __init__(
        self,
        data: Data,
        num_parts: int | None = None,
        batch_size: int | None = None,
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
        check_flags(halo=halo, allow_unlabelled=allow_unlabelled)
        parts = _Batches(data, PartOf(data, degrees))
        size, edges = int(data.num_nodes or 0), Graph.from_data(data, validate=False).edges
        needed = None if allow_unlabelled else _training_nodes(data)
        clusters = None if clusters is None else _numbered(clusters, size)

        # Partials, and no functions in here, so that the loader can be pickled for processes that are spawned.
        cut = partial(_cut, edges, size, clusters, needed, halo)
        count = partial(_num_parts, num_parts, batch_size, size, None if needed is None else int(needed.sum()))
        sampler = PartSampler(cut, count, seed, num_replicas, rank)
        # Without one of its own, DataLoader draws the seed of its workers from the global state.
        options = {"generator": torch.Generator()} | options
        super().__init__(parts, batch_size=None, sampler=sampler, **options)

    def set_epoch(self, epoch: int) -> None:
        """The next pass over the loader is this epoch."""
        cast("PartSampler", self.sampler).set_epoch(as_whole(epoch, "epoch"))

    def __getstate__(self) -> dict[str, Any]:
        """With the generator by value: torch pickles its state as a tensor in memory that is gone when it is read."""
        return self.__dict__ | {"generator": self.generator and self.generator.get_state().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.generator is not None:
            self.__dict__["generator"] = torch.Generator().set_state(torch.from_numpy(state["generator"]))


def _cut(
    edges: Tensor,
    size: int,
    clusters: Tensor | None,
    needed: Tensor | None,
    halo: bool,
    count: int,
    generator: torch.Generator,
) -> Cut:
    return Cut(edges, random_partition(size, count, generator, clusters, needed), count, halo=halo)


class PartSampler(DistributedSampler[Part]):
    """Draws the partition of an epoch and yields this process's share of its parts, ready cut.

    A `DistributedSampler`, so that Lightning leaves it in place and calls `set_epoch`; but how many processes there are
    is asked when it is used, since Lightning starts them after loaders are made.
    """

    def __init__(
        self,
        cut: Callable[[int, torch.Generator], Cut],
        count: Callable[[int], int],
        seed: int,
        num_replicas: int | None,
        rank: int | None,
    ) -> None:
        self._cut, self._count, self._given = cut, count, (num_replicas, rank)
        seed = as_whole(seed, "seed")
        replicas, rank = self._share()
        super().__init__(cast("Dataset[Part]", range(count(replicas))), replicas, rank, seed=seed)

    def _share(self) -> tuple[int, int]:
        """Over how many processes the parts are shared, and which of them this is."""
        started = distributed.is_available() and distributed.is_initialized()
        here = (distributed.get_world_size(), distributed.get_rank()) if started else (1, 0)
        replicas, rank = (own if given is None else given for given, own in zip(self._given, here, strict=True))
        replicas, rank = as_whole(replicas, "num_replicas"), as_whole(rank, "rank")
        if not 0 <= rank < replicas:
            raise ValueError(f"rank must lie in 0 .. num_replicas - 1 = {replicas - 1}; got {rank}.")
        return replicas, rank

    def __len__(self) -> int:
        replicas, _ = self._share()
        return self._count(replicas) // replicas

    def __iter__(self) -> Iterator[Part]:
        # Nothing happens before the first part is asked for: a DataLoader with workers calls this twice.
        self.num_replicas, self.rank = self._share()
        count = self._count(self.num_replicas)
        random = Random(f"partition/{self.seed}/{self.epoch}")  # the same everywhere, and no other epoch's
        self.epoch += 1
        parts = self._cut(count, torch.Generator().manual_seed(int(random.random() * 2**32)))
        for k in range(self.rank, count, self.num_replicas):
            yield parts[k]


def _num_parts(num_parts: int | None, batch_size: int | None, size: int, labelled: int | None, replicas: int) -> int:
    """How many parts there are: as many as was said, or as `batch_size` and the number of processes make necessary."""
    if (num_parts is None) == (batch_size is None):
        raise ValueError(f"pass num_parts or batch_size, one of them; got {num_parts} and {batch_size}.")
    given = "num_parts" if batch_size is None else "batch_size"
    if batch_size is not None:
        check_counts(batch_size=batch_size)
        least = -(-size // batch_size)
        count = least + -least % replicas
    else:
        count = cast("int", num_parts)
        check_counts(num_parts=count)
    if count % replicas:
        raise ValueError(
            f"num_parts must be a multiple of the {replicas} processes, or some would wait for the others; "
            f"got {count}. Pass {count + -count % replicas}, or batch_size."
        )
    if count > size:
        raise ValueError(f"{given} must leave every part a node; got {count} parts of {size} nodes.")
    if labelled is not None and count > labelled:
        raise ValueError(
            f"{given} must leave every part a training node; got {count} parts, and {labelled} nodes in train_mask. "
            "Take fewer parts, or accept parts without any: allow_unlabelled=True."
        )
    return count


class _Batches(Dataset[Data]):
    """From a part to its batch: attributes are gathered here, in a worker where there is one."""

    def __init__(self, data: Data, part_of: PartOf) -> None:
        self._data, self._part_of = data, part_of

    def __getitem__(self, part: Part) -> Data:
        data, batch = self._data, copy(self._data)
        for name, value in data:
            rows = part.n_id if data.is_node_attr(name) else part.e_id if data.is_edge_attr(name) else None
            if name == "edge_index":
                batch.edge_index = part.edge_index
            elif rows is not None:
                batch[name] = select(value, rows, data.__cat_dim__(name, value))
        if "ptr" in batch:
            # Where each of several graphs begins among the rows of `data`: not true of the rows here. Their `batch`,
            # which was selected like any attribute of nodes, still says which graph each row belongs to.
            del batch.ptr
        batch.n_id, batch.e_id = part.n_id, part.e_id
        batch.num_nodes, batch.batch_size = len(part.n_id), part.batch_size
        return self._part_of(batch)


def _training_nodes(data: Data) -> Tensor | None:
    mask = getattr(data, "train_mask", None)
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (data.num_nodes,)
    ):
        raise ValueError(
            f"train_mask must be a bool tensor [{data.num_nodes}], one split; got {describe(mask)}. "
            "Split.of(data, column).apply_to(data) takes one of several."
        )
    return mask


def _numbered(clusters: object, size: int) -> Int[Tensor, " N"]:
    """The clusters as long, checked; an array or a list will do."""
    numbers = index_vector(clusters, "clusters", "[num_nodes]")
    if len(numbers) != size:
        raise ValueError(f"clusters must hold an integer for each of {size} nodes; got {describe(numbers)}.")
    if size and int(numbers.min()) < 0:
        raise ValueError(f"clusters must be numbered from 0; the smallest is {int(numbers.min())}.")
    if size and int(numbers.max()) >= size:
        raise ValueError(
            f"clusters must be numbered 0 .. C - 1, and {size} nodes have at most as many; the largest is "
            f"{int(numbers.max())}. clusters.unique(return_inverse=True)[1] numbers them anew."
        )
    return numbers
