"""Transforms of data and batches: Laplacian encodings, validated graphs for layers, and padded sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import BaseData
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import get_laplacian, is_undirected, to_scipy_sparse_matrix

from diffusion_mp.checks import (
    Count,
    as_whole,
    check_choice,
    check_counts,
    check_kind,
    checked,
    index_vector,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops

_DENSE = 2_000  # nodes up to which a dense solver is as fast as the sparse one


@dataclass(eq=False)
class AddLaplacianPE(BaseTransform):
    """Transform that adds the k eigenvectors of L = I − D^-½AD^-½ after the first, with eigenvalues and a mask.

    A is the adjacency without self-loops. Eigenvectors are in ascending order of their eigenvalues. The signs of
    eigenvectors are arbitrary, and so are the bases of repeated eigenvalues: see `LaplacianEncoder`.

    Unlike PyG's `AddLaplacianEigenvectorPE`, the transform draws no signs, pads graphs of at most k nodes with zeros,
    and scales eigenvectors to mean square 1.

    Args:
        k: number of eigenvectors.

    Shapes:
        laplacian_eigenvectors, laplacian_eigenvalues: [N, k].
        laplacian_mask: [N, k], false for padding.

    Raises:
        ValueError: the data are a batch, have no edges, or are a directed graph.

    Examples:
        >>> AddLaplacianPE(2)(Data(x=x, edge_index=edge_index)).laplacian_eigenvectors.shape
        torch.Size([6, 2])
    """

    k: int

    def __post_init__(self) -> None:
        check_counts(k=self.k)

    def forward(self, data: Data) -> Data:
        """Add the three attributes to `data`, of which PyG passes a shallow copy."""
        check_kind(data, "data", BaseData, "a torch_geometric Data")
        if data.edge_index is None:
            raise ValueError("AddLaplacianPE needs edge_index; got data without it.")
        # Its edges are int64: PyG multiplies numbers of nodes in the dtype of edge_index.
        graph = Graph.from_data(data)
        if graph.num_graphs > 1:
            raise ValueError(
                f"AddLaplacianPE takes one graph; got {graph.num_graphs}. Apply it before batching."
            )
        if not is_undirected(graph.edges, graph.edge_weight, graph.num_nodes):
            raise ValueError(
                "AddLaplacianPE needs an undirected graph, every edge in both directions with one weight; "
                "torch_geometric.transforms.ToUndirected() makes one."
            )
        size = graph.num_nodes
        device = graph.edges.device
        # The first eigenvector says nothing: it is constant up to the degrees.
        count = max(min(self.k, size - 1), 0)
        vectors = torch.zeros(size, self.k, device=device)
        values = torch.zeros(size, self.k, device=device)
        if count:
            weight = graph.weights(torch.empty(0, dtype=torch.float64, device=device))
            laplacian = get_laplacian(
                graph.edges, weight, normalization="sym", num_nodes=size
            )
            matrix = to_scipy_sparse_matrix(*laplacian, num_nodes=size).tocsc()
            eigenvalues, eigenvectors = _lowest(matrix, count + 1)
            # Mean square one: the entries of unit vectors would shrink with the number of nodes.
            vectors[:, :count] = torch.from_numpy(eigenvectors[:, 1:]) * math.sqrt(size)
            values[:, :count] = torch.from_numpy(eigenvalues[1:])
        data.laplacian_eigenvectors = vectors
        data.laplacian_eigenvalues = values
        data.laplacian_mask = (torch.arange(self.k, device=device) < count).repeat(
            size, 1
        )
        return data


def _lowest(
    laplacian: scipy.sparse.csc_matrix, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least eigenvalues [count], ascending, and eigenvectors [N, count], deterministically."""
    size = laplacian.shape[0]
    # A sparse solver is slower for few nodes, and refuses to find all eigenvectors.
    if size <= _DENSE or count == size:
        return scipy.linalg.eigh(laplacian.toarray(), subset_by_index=(0, count - 1))
    # The shift lies below the spectrum [0, 2], so that the factor exists; a random start is not an eigenvector.
    start = np.random.default_rng(0).standard_normal(size)
    value, vector = scipy.sparse.linalg.eigsh(
        laplacian, k=count, sigma=-0.01, which="LM", v0=start
    )
    order = value.argsort()
    return value[order], vector[:, order]


@dataclass(eq=False)
class ToDiffusionGraph(BaseTransform):
    """Transform that adds ``data.graph``, a validated `Graph`, for ``model(data.x, data.graph)``.

    The graph caches what layers derive from it, and moves with ``data.to(device)`` and between processes. It does not
    follow a later replacement of the edges, so put this transform last. As the ``collate_fn`` of a ``DataLoader``, the
    transform makes a batch of a list of data, with its graph.

    Args:
        self_loops: the policy for self-loops of the layers that will use the graph. The graph is then prepared for
            them, in the worker instead of the training loop. By default nothing is prepared.

    Examples:
        >>> data = ToDiffusionGraph()(Data(x=x, edge_index=edge_index))
    """

    self_loops: SelfLoops | None = None

    def __post_init__(self) -> None:
        check_choice(self.self_loops, "self_loops", [*get_args(SelfLoops), None])

    def forward(self, data: Any) -> Data:
        """Add the graph to data, of which PyG passes a shallow copy, or to the batch of a list of data."""
        what = "a torch_geometric Data or Batch, or a list of Data"
        if isinstance(data, list) and data:
            for part in data:
                check_kind(part, "data", Data, what)
            data = Batch.from_data_list(data)
        check_kind(data, "data", Data, what)
        graph = Graph.from_data(data)
        data.graph = graph
        # Prepared here, a worker sorts the edges while the model computes.
        if self.self_loops is not None:
            graph.with_self_loops(self.self_loops).prepare()
        return data


@checked
def pad(
    batch: Sequence[tuple[Any, ...]],
    max_length: Count | None = None,
) -> tuple[Tensor, ...]:
    """Collate items of different lengths into a batch, for `DataLoader(..., collate_fn=pad)`.

    An item is (tokens, label), or (tokens, other tokens, label) for a pair of texts. The result of the first is
    (tokens, mask, labels); a pair gives two pairs of tokens and mask. Take a batch apart as `*inputs, labels =
    pad(batch)`.

    Args:
        batch: a list of items. Sequences are padded with 0 to the longest one in the batch.
        max_length: length to which sequences are truncated. By default they are not.

    Shapes:
        tokens: [B, L] of int64.
        mask: [B, L] of bool, true at tokens.
        labels: [B] of int64.

    Examples:
        >>> tokens, mask, labels = pad([(torch.tensor([5, 6, 7]), 0), (torch.tensor([8]), 1)])
        >>> tokens.shape, mask.sum(1).tolist()
        (torch.Size([2, 3]), [3, 1])
    """
    check_kind(batch, "batch", (list, tuple), "a list of items")
    if not batch:
        raise ValueError("batch must hold at least one item; got none.")
    for item in batch:
        if not isinstance(item, list | tuple) or not 2 <= len(item) == len(batch[0]):
            raise TypeError(
                "every item of batch must be tokens and a label, or tokens twice and a label, like the first."
            )
    labels = [as_whole(item[-1], "the label of an item of batch") for item in batch]
    # Texts of a pair are padded apart: each to the longest of its own side.
    padded: list[Tensor] = []
    for side in range(len(batch[0]) - 1):
        sequences = [
            index_vector(item[side], "tokens of an item of batch", "[L]")[:max_length]
            for item in batch
        ]
        tokens = pad_sequence(sequences, batch_first=True)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = torch.arange(tokens.size(1)) < lengths[:, None]
        padded += [tokens, mask]
    return (*padded, torch.tensor(labels))
