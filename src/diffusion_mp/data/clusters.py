"""Clusters of nodes, for batches that keep more edges than random ones."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from scipy.sparse import csr_array
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.data.part_of import observed
from diffusion_mp.errors import as_whole, check_choice, check_counts
from diffusion_mp.graph import Graph


def find_clusters(
    data: Data,
    num_clusters: int | None = None,
    method: Literal["metis", "label_propagation"] = "metis",
    *,
    seed: int = 0,
) -> Int[Tensor, " N"]:
    """The cluster of every node, 0 .. C − 1, for `RandomPartitionLoader(data, p, clusters=...)`.

    - `"metis"` (Karypis & Kumar 1998), as Cluster-GCN does (Chiang et al. 2019): `num_clusters` of nearly one size,
      few edges between them; take several times as many as parts. Through pymetis (the extra `metis`), or where that
      is not installed through PyG's `ClusterData` with pyg-lib or torch-sparse, which takes no seed.
    - `"label_propagation"` (Raghavan et al. 2007), as many as it finds, of any size, by networkx, which PyTorch brings:
      for graphs of up to a million edges or so. A graph without communities ends in one cluster, and parts are then as
      without clusters.

    Both look at who touches whom, not at directions or weights. Clusters from elsewhere are as welcome.

    Args:
        data: one graph on the CPU, with `edge_index`.
        num_clusters: how many, for METIS.
        method: "metis" or "label_propagation".
        seed: of either.

    Returns:
        The cluster of every node, [N] long.

    Raises:
        ImportError: METIS is asked for and there is none.
        ValueError: a number of clusters where the method finds it, and none where it needs one.
        TypeError: a number of clusters or a seed that is none.

    Examples:
        >>> find_clusters(Data(x=x, edge_index=edge_index), 2).shape  # the cluster of every node
        torch.Size([6])
    """
    check_choice(method, "method", ["metis", "label_propagation"])
    seed = as_whole(seed, "seed")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must lie in 0 .. 2**31 - 1, which every method takes; got {seed}.")
    graph = observed(data)
    if (num_clusters is None) == (method == "metis"):
        raise ValueError(
            f"num_clusters is what METIS needs, and label propagation finds; got {num_clusters} with method={method!r}."
        )
    if num_clusters is None:
        return _label_propagation(graph, seed)
    check_counts(num_clusters=num_clusters)
    if num_clusters > max(graph.num_nodes, 1):
        raise ValueError(f"num_clusters must be at most the number of nodes, {graph.num_nodes}; got {num_clusters}.")
    return _metis(_neighbours(graph), num_clusters, seed)


def _neighbours(graph: Graph) -> csr_array:
    """Who touches whom, both ways, once and without loops."""
    source, target = graph.edges[:, graph.edges[0] != graph.edges[1]].numpy()
    ones = np.ones(len(source), dtype=bool)
    one_way = csr_array((ones, (source, target)), shape=(graph.num_nodes, graph.num_nodes))
    return one_way + one_way.T


def _metis(neighbours: csr_array, num_clusters: int, seed: int) -> Tensor:
    try:
        import pymetis
    except ImportError:
        return _metis_of_pyg(neighbours, num_clusters)
    options = pymetis.Options(seed=seed)
    adjacency = pymetis.CSRAdjacency(neighbours.indptr, neighbours.indices)
    _, found = pymetis.part_graph(num_clusters, adjacency, options=options, recursive=False)
    return torch.as_tensor(found, dtype=torch.long)


def _metis_of_pyg(neighbours: csr_array, num_clusters: int) -> Tensor:
    from torch_geometric.loader import ClusterData

    size = neighbours.shape[0]
    edge_index = torch.from_numpy(np.stack(neighbours.nonzero())).long()
    try:
        found = ClusterData(Data(edge_index=edge_index, num_nodes=size), num_clusters, log=False).partition
    except ImportError as error:
        raise ImportError(
            "method='metis' needs METIS: none of pymetis, pyg-lib and torch-sparse is installed. "
            "pip install diffusion-mp[metis] brings pymetis; method='label_propagation' needs nothing."
        ) from error
    clusters = torch.empty(size, dtype=torch.long)
    clusters[found.node_perm] = torch.arange(num_clusters).repeat_interleave(found.partptr.diff())
    return clusters


def _label_propagation(graph: Graph, seed: int) -> Tensor:
    import networkx as nx

    network: Any = nx.from_scipy_sparse_array(_neighbours(graph))
    clusters = torch.empty(graph.num_nodes, dtype=torch.long)
    for number, members in enumerate(nx.community.fast_label_propagation_communities(network, seed=seed)):
        clusters[list(members)] = number
    return clusters
