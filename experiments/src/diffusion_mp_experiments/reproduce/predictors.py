"""Rows of a table that are fitted to the training data at once, not trained by epochs."""

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone, is_classifier
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.data import Data

from diffusion_mp.checks import PositiveNumber, checked
from diffusion_mp.data.knn import Metric
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.models import LabelPropagation
from diffusion_mp_experiments.train.batch_modules import SnapshotDataModule
from diffusion_mp_experiments.train.datamodules import (
    FullGraphDataModule,
    SplitDataModule,
)


class Predictor(nn.Module):
    """Base class: scores [N, C] or numbers [N, 1] of the nodes of a graph, computed once by `scores` of a subclass."""

    fixed_scores: Tensor

    def fit(self, data: FullGraphDataModule) -> None:
        nodes = data.data
        unknown = math.nan if nodes.y.is_floating_point() else -1
        # So no predictor can see another label, whatever it computes.
        y = nodes.y.where(nodes.train_mask, unknown)
        scores = self.scores(nodes.x, Graph.from_data(nodes), y, data.num_classes)
        # A buffer, to move with the module; and no part of a saved model, which is computed anew.
        self.register_buffer("fixed_scores", scores, persistent=False)

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} must define scores(x, graph, y, num_classes)."
        )

    def forward(self, *inputs: Any) -> Tensor:
        return self.fixed_scores


class LogisticRegression(Predictor):
    """Scikit-learn's logistic regression on the features, without the graph; C is the inverse of the penalty."""

    @checked
    def __init__(self, C: PositiveNumber = 1.0) -> None:
        super().__init__()
        self.inverse_penalty = C

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        from sklearn.linear_model import LogisticRegression as Regression

        features = dense_array(x)
        labelled = (y >= 0).cpu().numpy()
        fitted = Regression(C=self.inverse_penalty, max_iter=2000).fit(
            features[labelled], y.cpu().numpy()[labelled]
        )
        return class_scores(
            fitted.classes_, fitted.predict_log_proba(features), num_classes
        ).to(y.device)


class Estimator(Predictor):
    """A classifier or regressor of scikit-learn, or one with its interface, on the features.

    Args:
        estimator: the estimator. Its random state, if any, is the seed of the run.
        unlabelled: whether it is also fitted to rows without a label, which have -1, or NaN, in y.
    """

    def __init__(self, estimator: BaseEstimator, unlabelled: bool = False) -> None:
        super().__init__()
        self.estimator = estimator
        self.unlabelled = unlabelled

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        model = clone(self.estimator)
        if "random_state" in model.get_params():
            model.set_params(random_state=int(torch.randint(2**31 - 1, ())))
        features = dense_array(x).astype(np.float64)
        labels = y.cpu().numpy()
        known = labels >= 0 if is_classifier(model) else ~np.isnan(labels)
        chosen = np.ones(len(labels), bool) if self.unlabelled else known
        model.fit(features[chosen], labels[chosen])
        if not is_classifier(model):
            return (
                torch.from_numpy(model.predict(features))
                .float()
                .view(-1, 1)
                .to(y.device)
            )
        # Label spreading has no probabilities where no label arrives.
        found = np.nan_to_num(model.predict_proba(features)).clip(1e-6)
        found /= found.sum(1, keepdims=True)
        return class_scores(model.classes_, np.log(found), num_classes).to(y.device)


class Labels(Predictor):
    """`LabelPropagation` from the training nodes, over the graph or over all pairs; an attention reads the features."""

    def __init__(
        self,
        num_layers: int | None = 50,
        alpha: float = 0.9,
        diffusivity: Diffusivity | None = None,
    ) -> None:
        super().__init__()
        self.propagation = LabelPropagation(num_layers, alpha, diffusivity)

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        soft = one_hot(y.clamp(min=0), num_classes).float()
        features = x if self.propagation.reads_features else None
        spread: Tensor = self.propagation(soft, graph, mask=y >= 0, features=features)
        # A node that no label reaches has zeros.
        return spread.clamp(min=1e-9).log()


class Diffusion(Predictor):
    """`DiffusionClassifier` on the features, in four rounds and without a logistic regression.

    It makes a graph of its own.
    """

    def __init__(
        self,
        n_neighbors: int = 10,
        metric: Metric = "euclidean",
        sharpness: float = 8.0,
        mu: float = 10.0,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.options = {
            "n_neighbors": n_neighbors,
            "metric": metric,
            "sharpness": sharpness,
            "mu": mu,
            "dropout": dropout,
            "rounds": 4,
            "cv": None,
        }

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        from diffusion_mp.estimators import DiffusionClassifier

        # scikit-learn takes a seed; torch's is the seed of the run.
        seed = int(torch.randint(2**31 - 1, ()))
        fitted = DiffusionClassifier(**self.options, random_state=seed).fit(
            dense_array(x), y.cpu().numpy()
        )
        logarithms = np.log(fitted.states_.clip(1e-40))
        return class_scores(fitted.classes_, logarithms, num_classes).to(y.device)


class Constant(nn.Module):
    """The shares of the classes among the training labels, or the mean of the numbers, for every node or graph."""

    share: Tensor

    def fit(self, data: SplitDataModule) -> None:
        parts = labelled(data)
        # Graphs are divided among the loaders, nodes by a mask.
        self.of_graphs = "train_mask" not in parts[0][0]
        labels = torch.cat([batch.y[mask] for batch, mask in parts])
        if labels.is_floating_point():
            share = labels.mean().view(1)
        else:
            share = one_hot(labels, data.num_classes).float().mean(0)
        self.register_buffer("share", share, persistent=False)

    def forward(
        self, x: Tensor, graph: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        rows = graph.num_graphs if self.of_graphs else len(x)
        return self.share.expand(rows, -1)


class NoCorrection(nn.Module):
    """Leave the base of a forecast as the data module has fitted it (see `SnapshotDataModule`)."""

    def fit(self, data: SnapshotDataModule) -> None:
        """Do nothing."""

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return torch.zeros_like(x[:, :1])


def labelled(data: SplitDataModule) -> list[tuple[Data, Tensor]]:
    """Return the graphs that train, each with the mask of the rows of y that train."""
    found = []
    for batch in data.train_dataloader():
        mask = torch.ones(len(batch.y), dtype=torch.bool)
        found.append((batch, batch.get("train_mask", mask)))
    return found


def dense_array(x: Tensor) -> np.ndarray:
    return (x if x.layout is torch.strided else x.to_dense()).cpu().numpy()


def class_scores(
    classes: np.ndarray, logarithms: np.ndarray, num_classes: int
) -> Tensor:
    # A class without a training label has a score that never wins.
    scores = torch.full((len(logarithms), num_classes), -100.0)
    scores[:, torch.from_numpy(classes)] = torch.from_numpy(logarithms).float()
    return scores
