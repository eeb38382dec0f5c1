"""Positional encodings that depend on the graph alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import eigsh
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import get_laplacian, is_undirected, to_scipy_sparse_matrix

from diffusion_mp.errors import check_counts, check_kind
from diffusion_mp.graph import Graph

_DENSE = 2_000  # nodes up to which a dense solver is as fast as the sparse one


class AddLaplacianPE(BaseTransform):
    """The k eigenvectors of L = I − D^-½AD^-½ after the first, in ascending order, with eigenvalues and a mask.

    What PyG's `AddLaplacianEigenvectorPE` computes, with four differences: no random signs (that draw comes from the
    global generator, and the encoding of a graph must not depend on it); graphs of k nodes or fewer are padded with
    zeros; the eigenvalues, which tell an encoder which vector is which, are kept; and vectors have mean square 1
    instead of norm 1, so that entries do not fade as graphs grow. The sign of every vector is
    arbitrary: read them with a sign-invariant encoder (`LaplacianEncoder`). Vectors of a repeated eigenvalue, such as 0
    in a graph of several components, are one of many bases of their space, as everywhere.

    PyG's `AddRandomWalkPE` needs no such care and goes into the same `Compose`.

    Shapes: adds `laplacian_eigenvectors` and `laplacian_eigenvalues`, float [N, k], 0 where there is none, and
    `laplacian_mask`, bool [N, k]: by node, so that batches of graphs concatenate them.

    Args:
        k: the number of eigenvectors.

    Raises:
        TypeError, ValueError: where `Graph.from_data` has them; ValueError for a graph without edge_index, or one that
            is not undirected.

    Examples:
        >>> data = AddLaplacianPE(2)(Data(x=x, edge_index=edge_index))
        >>> data.laplacian_eigenvectors.shape
        torch.Size([6, 2])
    """

    def __init__(self, k: int) -> None:
        check_counts(k=k)
        self.k = k

    def forward(self, data: Data) -> Data:
        """The (shallow) copy of `data` that PyG hands over, with the three attributes."""
        check_kind(data, "data", BaseData, "a torch_geometric Data")
        if data.edge_index is None:
            raise ValueError("AddLaplacianPE needs edge_index; got data without it.")
        graph = Graph.from_data(data)  # its edges have 64 bits: PyG multiplies numbers of nodes in those that came
        if not is_undirected(graph.edges, graph.edge_weight, graph.num_nodes):
            raise ValueError(
                "AddLaplacianPE needs an undirected graph, every edge in both directions with one weight; "
                "torch_geometric.transforms.ToUndirected() makes one."
            )
        size = graph.num_nodes
        found = max(min(self.k, size - 1), 0)
        dtype = torch.get_default_dtype()
        vectors, values = torch.zeros(size, self.k, dtype=dtype), torch.zeros(size, self.k, dtype=dtype)
        if found:
            value, vector = _lowest(_laplacian(graph), found + 1)
            vectors[:, :found] = torch.from_numpy(vector[:, 1:]) * math.sqrt(size)
            values[:, :found] = torch.from_numpy(value[1:])
        device = graph.edges.device
        data.laplacian_eigenvectors, data.laplacian_eigenvalues = vectors.to(device), values.to(device)
        data.laplacian_mask = (torch.arange(self.k, device=device) < found).repeat(size, 1)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k})"


def _laplacian(graph: Graph) -> csc_matrix:
    weight = None if graph.edge_weight is None else graph.edge_weight.double()
    edges = get_laplacian(graph.edges, weight, normalization="sym", dtype=torch.float64, num_nodes=graph.num_nodes)
    return to_scipy_sparse_matrix(*edges, num_nodes=graph.num_nodes).tocsc()


def _lowest(laplacian: csc_matrix, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues [count], ascending, and eigenvectors [N, count]; the same on every call."""
    size = laplacian.shape[0]
    if size <= _DENSE:
        value, vector = eigh(laplacian.toarray(), subset_by_index=(0, count - 1))
        return value, vector
    # Shifted below the spectrum [0, 2], so that the factor exists; the start is drawn, lest it be an eigenvector.
    start = np.random.default_rng(0).standard_normal(size)
    value, vector = eigsh(laplacian, k=count, sigma=-0.01, which="LM", v0=start)
    order = value.argsort()
    return value[order], vector[:, order]
