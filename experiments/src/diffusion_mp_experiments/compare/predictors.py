"""Rows of a comparison that are fitted at once: scikit-learn on features, and common neighbours."""

from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.decomposition import TruncatedSVD
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch_geometric.nn import global_max_pool, global_mean_pool
from torch_geometric.utils import to_scipy_sparse_matrix

from diffusion_mp.checks import PositiveNumber, checked
from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp_experiments.reproduce.predictors import labelled, predicted
from diffusion_mp_experiments.train.datamodules import SplitDataModule

#: Columns from which on trees read a fourth as many principal ones.
_COLUMNS = 256


class OnFeatures(nn.Module):
    """A model of scikit-learn on the features of nodes, or on means and largest features of graphs.

    Args:
        model: "linear", logistic regression or ridge regression; or "boosting", gradient boosting by histograms.
        neighbours: whether the means over the neighbours of a node are further features.
        strength: inverse of the penalty of a linear model.
        learning_rate: learning rate of boosting.
        leaf: smallest number of rows in a leaf of boosting.
    """

    @checked
    def __init__(
        self,
        model: Literal["linear", "boosting"],
        neighbours: bool = False,
        strength: PositiveNumber = 1.0,
        learning_rate: PositiveNumber = 0.1,
        leaf: int = 20,
    ) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.trees = model == "boosting"
        self.classifier: BaseEstimator = LogisticRegression(C=strength, max_iter=1000)
        self.regressor: BaseEstimator = Ridge(alpha=1 / strength)
        if self.trees:
            options = {
                "learning_rate": learning_rate,
                "min_samples_leaf": leaf,
                "random_state": 0,
            }
            self.classifier = HistGradientBoostingClassifier(**options)
            self.regressor = HistGradientBoostingRegressor(**options)

    def fit(self, data: SplitDataModule) -> None:
        self.num_classes = data.num_classes
        features = []
        labels = []
        for batch, mask in labelled(data):
            graph = batch.get("graph", batch.edge_index)
            features.append(self._features(batch.x, graph)[mask.numpy()])
            labels.append(batch.y[mask])
        y = torch.cat(labels)
        steps = [self.regressor if y.is_floating_point() else self.classifier]
        if len(y.unique()) == 1:
            # Nothing to learn, which scikit-learn's classifiers refuse.
            steps = [DummyRegressor() if y.is_floating_point() else DummyClassifier()]
        if not self.trees:
            # One penalty for all columns means something only in one unit.
            steps.insert(0, StandardScaler())
        elif features[0].shape[1] > _COLUMNS:
            # Trees look at every column, of which a bag of words has thousands.
            steps.insert(0, TruncatedSVD(_COLUMNS // 4, random_state=0))
        self._fitted = make_pipeline(*steps).fit(np.concatenate(features), y.numpy())

    def forward(
        self, x: Tensor, graph: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        features = self._features(x, graph)
        return predicted(self._fitted, features, self.num_classes, least=1e-12)

    def _features(self, x: Tensor, graph: Any) -> np.ndarray:
        x = x.to_dense()
        parts = [x]
        if isinstance(graph, Graph):
            # One row for a graph: what its nodes are on average, and how many they are.
            sizes = graph.batch.bincount(minlength=graph.num_graphs)
            parts = [
                global_mean_pool(x, graph.batch),
                global_max_pool(x, graph.batch),
                sizes.to(x).unsqueeze(1),
            ]
        elif self.neighbours:
            parts.append(AdjacencyDiffusivity("row")(x, Graph.coerce(x, graph)) @ x)
        return torch.cat(parts, 1).numpy()


class CommonNeighbours(nn.Module):
    """The score of a pair of nodes is the sum of 1/log d over their common neighbours (Adamic & Adar, 2003)."""

    def fit(self, data: SplitDataModule) -> None:
        """Do nothing: the edges that train are in every batch."""

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_label_index: Tensor | None = None,
    ) -> Tensor:
        assert edge_label_index is not None
        degree = edge_index[1].bincount(minlength=len(x)).float()
        weight = 1 / degree.clamp(min=2).log()
        adjacency = to_scipy_sparse_matrix(edge_index, num_nodes=len(x)).tocsr()
        source, target = edge_label_index.numpy()
        common = adjacency[source].multiply(adjacency[target])
        return torch.from_numpy(common @ weight.numpy())
