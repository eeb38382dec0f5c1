"""A graph where there is none: everybody is joined to the nearest in feature space."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from diffusion_mp.data.arguments import as_whole
from diffusion_mp.errors import check_choice, check_kind, check_state
from diffusion_mp.extras import needed_by

Metric = Literal["euclidean", "cosine"]
_FEW = 64  # channels up to which a tree is quick enough


class KNNGraph(BaseTransform):
    """Joins two nodes, in both directions, wherever one is among the k nearest of the other.

    It reads all features and no label. By "cosine" nobody is joined whose features have nothing in common, an angle of
    90° or more: so an empty document has no neighbours instead of arbitrary ones.

    Args:
        k: neighbours that every node has at most on its own account, below the number of nodes.
        metric: "euclidean" or "cosine".

    Shapes: reads x [N, C] of `Data`, and sets edge_index [2, E], sorted, without self-loops.

    Raises:
        TypeError, ValueError: an option does not fit, k is not below the number of nodes, or x is not [N, C].
        ModuleNotFoundError: scikit-learn is not installed.
    """

    def __init__(self, k: int = 5, metric: Metric = "euclidean") -> None:
        self.k = as_whole(k, "k")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {k}.")
        check_choice(metric, "metric", get_args(Metric))
        self.metric = metric

    def forward(self, data: Any) -> Data:
        """The (shallow) copy of data that PyG hands over, with its edges."""
        check_kind(data, "data", Data, "a torch_geometric Data")
        check_state(data.x, "data.x")
        if self.k >= len(data.x):
            raise ValueError(f"k must be below the number of nodes, {len(data.x)}; got {self.k}.")
        data.edge_index = self._edges(data.x.detach().cpu()).to(data.x.device)
        return data

    def _edges(self, x: Tensor) -> Tensor:
        with needed_by("KNNGraph", "diffusion-mp[train]"):
            from sklearn.neighbors import NearestNeighbors
        # A tree takes no matrix product: distances of whole numbers are exact, so ties fall the same way everywhere.
        tree = self.metric == "euclidean" and x.size(1) <= _FEW
        search = NearestNeighbors(n_neighbors=self.k, metric=self.metric, algorithm="kd_tree" if tree else "brute")
        nearest = search.fit(x.double().numpy()).kneighbors_graph(mode="distance").tocoo()
        if self.metric == "cosine":
            near = nearest.data < 1
            nearest = type(nearest)((nearest.data[near], (nearest.row[near], nearest.col[near])), nearest.shape)
        source = np.concatenate([nearest.col, nearest.row]).astype(np.int64)
        target = np.concatenate([nearest.row, nearest.col]).astype(np.int64)
        pairs = torch.from_numpy(np.unique(source * len(x) + target))
        return torch.stack([pairs // len(x), pairs % len(x)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(k={self.k}, metric={self.metric!r})"
