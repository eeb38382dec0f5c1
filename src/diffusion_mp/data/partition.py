"""Random partitions of a large graph, the parts that they cut, and clusters of nodes that parts keep together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import NoneType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import remove_self_loops

from diffusion_mp.checks import (
    Count,
    as_whole,
    check_kind,
    check_range,
    checked,
    index_vector,
    needed_by,
    plain,
)
from diffusion_mp.graph import Graph, PartEdgeIndex


class PartOf(BaseTransform):
    """Transform of a batch that records how the batch relates to the whole graph it was cut from.

    PyG's loaders give a batch `n_id`, the numbers of its nodes in the whole graph, and `batch_size`. The first
    `batch_size` nodes are the batch's own; without `batch_size` all nodes are. For `ClusterLoader` set `data.n_id`
    before. `RandomPartitionLoader` applies this transform itself.

    The transform sets

    - `kept_edges`: the fraction that the batch keeps of the edges that arrive at its own nodes in the whole graph;
    - Boolean node attributes named `*_mask`: false at nodes that are not the batch's own;
    - with `degrees="full"`, `full_degree` [n, 2], the weighted in- and out-degrees in the whole graph, and `edge_index`
      as a `PartEdgeIndex`, which brings the degrees to `model(batch.x, batch.edge_index, batch.edge_weight)`. The
      entries of `AdjacencyDiffusivity` are then the entries in the whole graph.

    Args:
        data: the whole graph, on the CPU, with `edge_index`. It is read once and not kept.
        degrees: `"batch"` for degrees within the batch, the default because it is the published recipe, or `"full"` for
            degrees in the whole graph.

    Examples:
        >>> part = PartOf(Data(x=x, edge_index=edge_index), degrees="full")  # NeighborLoader(..., transform=part)
    """

    @checked
    def __init__(self, data: Data, degrees: Literal["batch", "full"] = "batch") -> None:
        # Only counts of edges are kept, so that workers do not get a copy of the graph.
        graph = observed(data)
        self.arriving: Int[Tensor, " N"] = torch.bincount(
            graph.edges[1], minlength=graph.num_nodes
        )
        self.full_degree: Float[Tensor, "N two"] | None = None
        if degrees == "full":
            self.full_degree = torch.stack([graph.degree("in"), graph.degree("out")], 1)

    def forward(self, data: Data) -> Data:
        """Add these attributes to the batch, of which PyG passes a shallow copy."""
        n_id = getattr(data, "n_id", None)
        if n_id is None:
            raise TypeError(
                "a batch must have n_id [n], the numbers of its nodes in the whole graph. PyG's loaders set it; for "
                "ClusterLoader set data.n_id = torch.arange(data.num_nodes) before."
            )
        n_id = index_vector(n_id, "n_id", "[n], the batch's nodes in the whole graph")
        check_range(n_id, "n_id", len(self.arriving))
        batch_size = getattr(data, "batch_size", None)
        size = len(n_id) if batch_size is None else as_whole(batch_size, "batch_size")
        if not 0 <= size <= len(n_id):
            raise ValueError(
                f"batch_size must be at most the number of nodes, {len(n_id)}; got {size}."
            )
        arriving = int(self.arriving[n_id[:size]].sum())
        kept = 0
        if data.edge_index is not None:
            # Edges may have any integer dtype, and torch does not compare all of them.
            kept = int((data.edge_index[1].long() < size).sum())
        # If no edge arrives at the nodes of a part, the part has lost no edge.
        data.kept_edges = kept / arriving if arriving else 1.0
        for name in data.node_attrs():
            if name.endswith("_mask") and data[name].dtype == torch.bool:
                # A copy: the mask may be a view of the one in the whole graph.
                data[name] = data[name].clone()
                data[name][size:] = False
        if self.full_degree is not None:
            data.full_degree = self.full_degree[n_id]
            if data.edge_index is not None:
                edges = cast("Tensor", plain(data.edge_index))
                data.edge_index = PartEdgeIndex.of(edges, data.full_degree)
        return data


def observed(data: Data) -> Graph:
    """Return the validated graph of `data`, which must be on the CPU and have `edge_index`."""
    check_kind(data, "data", Data, "one graph, a torch_geometric Data")
    edge_index = data.edge_index
    check_kind(edge_index, "edge_index", (Tensor, NoneType), "a tensor [2, num_edges]")
    if edge_index is None and getattr(data, "adj_t", None) is not None:
        raise ValueError(
            "data must have edge_index; got adj_t, whose edges have no order. Set edge_index."
        )
    if edge_index is not None and edge_index.device.type != "cpu":
        raise ValueError(
            f"data must be on the CPU, where parts are cut; got edge_index on {edge_index.device}. Pass data.cpu(), "
            f"and move every batch: batch.to(device)."
        )
    return Graph.from_data(data)


Method = Literal["metis", "label_propagation"]


@checked
def find_clusters(
    data: Data,
    num_clusters: Count | None = None,
    method: Method = "metis",
    *,
    seed: int = 0,
) -> Int[Tensor, " N"]:
    """Return the cluster 0 .. C − 1 of every node [N], for `RandomPartitionLoader(data, p, clusters=...)`.

    Args:
        data: one graph on the CPU, with `edge_index`.
        num_clusters: number of clusters, for METIS only; take several times as many clusters as parts.
        method: `"metis"`, the default, finds clusters of nearly equal size with few edges between them (Karypis & Kumar
            1998; Chiang et al. 2019). It needs pymetis (the extra `metis`). `"label_propagation"` (Raghavan et al.
            2007) uses networkx. It finds clusters of any size, in graphs of up to about a million edges.
        seed: seed of the method; equal seeds give equal clusters.

    Raises:
        ModuleNotFoundError: pymetis is not installed.

    Examples:
        >>> find_clusters(Data(x=x, edge_index=edge_index), 2).shape  # the cluster of every node
        torch.Size([6])
    """
    # networkx and METIS take seeds of different sizes.
    seed = as_whole(seed, "seed")
    if not 0 <= seed < 2**31:
        raise ValueError(
            f"seed must lie in 0 .. 2**31 - 1, which every method takes; got {seed}."
        )
    graph = observed(data)
    if (num_clusters is None) == (method == "metis"):
        raise ValueError(
            f"num_clusters is what METIS needs, and label propagation finds; got {num_clusters} with "
            f"method={method!r}."
        )
    neighbours = _neighbours(graph)
    if num_clusters is None:
        return _communities(neighbours, seed)
    if num_clusters > max(graph.num_nodes, 1):
        raise ValueError(
            f"num_clusters must be at most the number of nodes, {graph.num_nodes}; got {num_clusters}."
        )
    with needed_by("find_clusters(method='metis')", "diffusion-mp[metis]"):
        import pymetis
    _, clusters = pymetis.part_graph(
        num_clusters,
        pymetis.CSRAdjacency(neighbours.indptr, neighbours.indices),
        options=pymetis.Options(seed=seed),
        recursive=False,
    )
    return torch.as_tensor(clusters, dtype=torch.long)


def _neighbours(graph: Graph) -> scipy.sparse.csr_array:
    """Return the symmetric boolean adjacency without self-loops."""
    edges, _ = remove_self_loops(graph.edges)
    # Booleans, whose sums are true: parallel edges count once.
    ones = np.ones(edges.size(1), dtype=bool)
    size = graph.num_nodes
    one_way = scipy.sparse.csr_array((ones, tuple(edges.numpy())), shape=(size, size))
    return one_way + one_way.T


def _communities(neighbours: scipy.sparse.csr_array, seed: int) -> Tensor:
    import networkx as nx

    network: Any = nx.from_scipy_sparse_array(neighbours)
    communities = nx.community.fast_label_propagation_communities(network, seed=seed)
    clusters = torch.empty(neighbours.shape[0], dtype=torch.long, device="cpu")
    for number, members in enumerate(communities):
        clusters[list(members)] = number
    return clusters


CHUNK = 1 << 20  # edges, whose intermediate results fit into the cache


def random_partition(
    num_nodes: int,
    num_parts: int,
    generator: torch.Generator,
    clusters: Int[Tensor, " N"] | None = None,
    needed: Bool[Tensor, " N"] | None = None,
) -> Integer[Tensor, " N"]:
    """Return the part of every node: nodes in random order, cut into parts whose sizes differ by at most one.

    The nodes of a cluster stay adjacent in that order (Cluster-GCN, Chiang et al. 2019). With `needed`, a part without
    any needed node exchanges a node for a needed node of a part that has the most.
    """
    order = torch.randperm(num_nodes, generator=generator, device="cpu")
    if clusters is not None:
        count = int(clusters.max()) + 1
        rank = torch.randperm(count, generator=generator, device="cpu")
        rank = rank.to(_smallest(count))
        # A stable sort keeps the random order of the nodes inside every cluster.
        order = order[_sorting(rank[clusters[order]])]
    # Cut by rounding, so sizes differ by at most one and no part is empty.
    numbers = torch.arange(num_nodes, device="cpu") * num_parts // num_nodes
    part = torch.empty(num_nodes, dtype=_smallest(num_parts), device="cpu")
    part[order] = numbers.to(part.dtype)
    if needed is not None:
        _exchange(part, num_parts, needed.nonzero().flatten(), generator)
    return part


def _exchange(
    part: Tensor,
    num_parts: int,
    needed: Tensor,
    generator: torch.Generator,
) -> None:
    """Exchange nodes in place, until every part has one of the nodes `needed`."""
    held = torch.bincount(part[needed], minlength=num_parts)

    def any_of(nodes: Tensor) -> Tensor:
        return nodes[torch.randint(len(nodes), (1,), generator=generator, device="cpu")]

    # By exchanges, so that parts keep their sizes.
    for poor in (held == 0).nonzero().flatten().tolist():
        # The part with most can spare one as long as there are enough in all.
        rich = int(held.argmax())
        moved = any_of(needed[part[needed] == rich])
        exchanged = any_of((part == poor).nonzero().flatten())
        part[moved] = poor
        part[exchanged] = rich
        held[rich] -= 1
        held[poor] = 1


class Part(NamedTuple):
    """One part of a graph: its own `batch_size` nodes in ascending order, then their neighbours in other parts.

    `n_id` [n] and `e_id` [e] are numbers of nodes and edges in the whole graph. `edge_index` [2, e] is local.
    """

    n_id: Int[Tensor, " n"]
    batch_size: int
    e_id: Int[Tensor, " e"]
    edge_index: Int[Tensor, "two e"]


class Cut:
    """All parts of a graph: `cut[k]` is part k, with its nodes and edges in the order of the whole graph.

    Without `halo` a part keeps the edges within it. With `halo` a part has all edges that arrive at its own nodes or
    leave them, and the nodes at their other ends with their self-loops.

    Edges are read once, in chunks. Threads filter a chunk and sort it by part, in numpy, since torch would synchronise
    after each short operation.
    """

    def __init__(
        self,
        edge_index: Integer[Tensor, "two E"],
        part: Integer[Tensor, " N"],
        num_parts: int,
        *,
        halo: bool = False,
    ) -> None:
        self._part = part.numpy()
        self._halo = halo
        ends = np.bincount(self._part, minlength=num_parts).cumsum()
        self._core = np.split(_sorting(part).numpy(), ends[:-1])
        # Half the bytes where they suffice: the table is read at random for every edge.
        dtype = np.int32 if len(part) < 2**31 else np.int64
        self._local = np.empty(len(part), dtype)
        for core in self._core:
            self._local[core] = np.arange(len(core))
        edges = edge_index.numpy()
        # The self-loops of nodes in other parts are in no list of `_by_part`, but change the degrees of a halo.
        self._loops = np.empty(0, np.int64)
        if halo:
            self._loops = np.flatnonzero(edges[0] == edges[1])
        self._looped = edges[0, self._loops].astype(self._local.dtype)
        starts = range(0, max(edges.shape[1], 1), CHUNK)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            chunks = (edges[:, start : start + CHUNK] for start in starts)
            self._chunks = list(pool.map(self._by_part, chunks))

    def _by_part(
        self,
        chunk: Integer[np.ndarray, "two e"],
    ) -> list[Integer[np.ndarray, "three some"]]:
        """Return the positions in the chunk, the sources and the targets of the edges that every part keeps."""
        source, target = chunk
        owner = self._part.take(target)
        sender_owner = self._part.take(source)
        if self._halo:
            # An edge between two parts is in both, twice in this list.
            edge = np.repeat(np.arange(len(owner)), 1 + (sender_owner != owner))
            owner = owner[edge]
            again = np.flatnonzero(edge[1:] == edge[:-1]) + 1
            owner[again] = sender_owner[edge[again]]
        else:
            # Chosen before they are sorted: of p parts, one edge in p is left.
            edge = np.flatnonzero(sender_owner == owner)
            owner = owner[edge]
        order = edge[owner.argsort(kind="stable")]
        bounds = np.bincount(owner, minlength=len(self)).cumsum()[:-1]
        # Narrow, since the lists of all edges are kept until the epoch ends.
        kept = np.stack([order, source[order], target[order]], dtype=self._local.dtype)
        return np.split(kept, bounds, axis=1)

    def __len__(self) -> int:
        return len(self._core)

    def __getitem__(self, k: int) -> Part:
        core = self._core[k]
        kept = [chunk[k] for chunk in self._chunks]
        position, source, target = np.concatenate(kept, axis=1)
        # Positions in a chunk are narrow, numbers of edges are not.
        starts = np.arange(len(kept)) * CHUNK
        sizes = [edges.shape[1] for edges in kept]
        e_id = position + starts.repeat(sizes)
        # Nodes at the other ends of edges that leave the part.
        context = core[:0]
        if self._halo:
            nodes = np.concatenate([source, target])
            context = np.unique(nodes[self._part[nodes] != k])
        # The self-loops of those nodes change their degrees, and are edges within other parts.
        loop = np.isin(self._looped, context)
        if loop.any():
            e_id = np.concatenate([e_id, self._loops[loop]])
            order = e_id.argsort()
            e_id = e_id[order]
            source = np.concatenate([source, self._looped[loop]])[order]
            target = np.concatenate([target, self._looped[loop]])[order]

        def local_number(nodes: Integer[np.ndarray, " e"]) -> Integer[np.ndarray, " e"]:
            local = self._local[nodes].astype(np.int64)
            if len(context):
                outside = np.flatnonzero(self._part[nodes] != k)
                # Nodes of the context follow the nodes of the part, in ascending order.
                position = np.searchsorted(context, nodes[outside])
                local[outside] = len(core) + position
            return local

        n_id = np.concatenate([core, context])
        edge_index = np.stack([local_number(source), local_number(target)])
        return Part(
            n_id=torch.from_numpy(n_id),
            batch_size=len(core),
            e_id=torch.from_numpy(e_id),
            edge_index=torch.from_numpy(edge_index),
        )


def _sorting(values: Tensor) -> Int[Tensor, " n"]:
    """Return the stable sorting order, by numpy, which has a radix sort for integers of at most 16 bits."""
    return torch.from_numpy(values.numpy().argsort(kind="stable"))


def _smallest(count: int) -> torch.dtype:
    """Return the smallest integer dtype for 0 .. count − 1, so that tables fit into the cache."""
    dtypes = torch.uint8, torch.int16, torch.int32, torch.int64
    return next(dtype for dtype in dtypes if count <= torch.iinfo(dtype).max + 1)
