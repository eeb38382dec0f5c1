"""Rows of a table that are fitted to the training data at once, not trained by epochs."""

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone, is_classifier
from torch import Tensor, nn
from torch.nn.functional import one_hot

from diffusion_mp.checks import PositiveNumber, checked
from diffusion_mp.data.knn import Metric
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.models import LabelPropagation
from diffusion_mp_experiments.train.batch_modules import (
    BatchDataModule,
    SnapshotDataModule,
)
from diffusion_mp_experiments.train.datamodules import FullGraphDataModule


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


class Constant(Predictor):
    """The shares of the classes among the training labels, for every node."""

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        shares = one_hot(y[y >= 0], num_classes).float().mean(0)
        return shares.repeat(len(y), 1)


class LogisticRegression(Predictor):
    """Scikit-learn's logistic regression on the features, without the graph; C is the inverse of the penalty."""

    @checked
    def __init__(self, C: PositiveNumber = 1.0) -> None:
        super().__init__()
        self.inverse_penalty = C

    def scores(self, x: Tensor, graph: Graph, y: Tensor, num_classes: int) -> Tensor:
        from sklearn.linear_model import LogisticRegression as Regression

        features = _array(x)
        labelled = (y >= 0).cpu().numpy()
        fitted = Regression(C=self.inverse_penalty, max_iter=2000).fit(
            features[labelled], y.cpu().numpy()[labelled]
        )
        return _scores(
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
        features = _array(x).astype(np.float64)
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
        return _scores(model.classes_, np.log(found), num_classes).to(y.device)


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
            _array(x), y.cpu().numpy()
        )
        logarithms = np.log(fitted.states_.clip(1e-40))
        return _scores(fitted.classes_, logarithms, num_classes).to(y.device)


def _array(x: Tensor) -> np.ndarray:
    return (x if x.layout is torch.strided else x.to_dense()).cpu().numpy()


def _scores(classes: np.ndarray, logarithms: np.ndarray, num_classes: int) -> Tensor:
    # A class without a training label has a score that never wins.
    scores = torch.full((len(logarithms), num_classes), -100.0)
    scores[:, torch.from_numpy(classes)] = torch.from_numpy(logarithms).float()
    return scores


class NoCorrection(nn.Module):
    """Leave the base of a forecast as the data module has fitted it (see `SnapshotDataModule`)."""

    def fit(self, data: SnapshotDataModule) -> None:
        """Do nothing."""

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return torch.zeros_like(x[:, :1])


class GraphConstant(nn.Module):
    """The shares of the classes among the training graphs, for every graph."""

    share: Tensor

    def fit(self, data: BatchDataModule) -> None:
        labels = torch.cat([batch.y for batch in data.train_dataloader()])
        self.register_buffer(
            "share", one_hot(labels, data.num_classes).float().mean(0), persistent=False
        )

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return self.share.expand(graph.num_graphs, -1)
