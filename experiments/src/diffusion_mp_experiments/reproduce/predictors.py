"""Rows of a table that are fitted to the training data at once, not trained by epochs."""

import math
from copy import copy
from typing import Any

import numpy as np
import torch
from sklearn import linear_model
from sklearn.base import BaseEstimator, clone, is_classifier
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.data import Data

from diffusion_mp.checks import PositiveNumber, checked
from diffusion_mp.data.knn import Metric
from diffusion_mp.diffusivities import Diffusivity
from diffusion_mp.estimators import DiffusionClassifier
from diffusion_mp.graph import Graph
from diffusion_mp.models import LabelPropagation
from diffusion_mp_experiments.train.batch_modules import SnapshotDataModule
from diffusion_mp_experiments.train.datamodules import (
    FullGraphDataModule,
    SplitDataModule,
    has_label,
)


class Predictor(nn.Module):
    """Base class: scores [N, C] or numbers [N, 1] of the nodes of a graph, computed once by `scores` of a subclass."""

    fixed_scores: Tensor

    def fit(self, data: FullGraphDataModule) -> None:
        nodes = copy(data.data)
        unknown = math.nan if nodes.y.is_floating_point() else -1
        # So no predictor can see another label, whatever it computes.
        nodes.y = nodes.y.where(nodes.train_mask, unknown)
        scores = self.scores(nodes, data.num_classes)
        # A buffer, to move with the module; and no part of a saved model, which is computed anew.
        self.register_buffer("fixed_scores", scores, persistent=False)

    def scores(self, nodes: Data, num_classes: int) -> Tensor:
        """Return scores from the features, the edges, and the labels y, -1 or NaN where they are not known."""
        raise NotImplementedError(
            f"{type(self).__name__} must define scores(nodes, num_classes)."
        )

    def forward(self, *inputs: Any) -> Tensor:
        return self.fixed_scores


class Estimator(Predictor):
    """A classifier or regressor of scikit-learn, or one with its interface, on the features.

    Args:
        estimator: the estimator. Its random state, if any, is the seed of the run.
        unlabelled: whether it is also fitted to rows without a label, which have -1, or NaN, in y.
    """

    precision = torch.float64

    def __init__(self, estimator: BaseEstimator, unlabelled: bool = False) -> None:
        super().__init__()
        self.estimator = estimator
        self.unlabelled = unlabelled

    def scores(self, nodes: Data, num_classes: int) -> Tensor:
        model = clone(self.estimator)
        if "random_state" in model.get_params():
            model.set_params(random_state=_seed())
        features = nodes.x.to_dense().to(self.precision).numpy()
        chosen = has_label(nodes.y) | self.unlabelled
        model.fit(features[chosen], nodes.y[chosen].numpy())
        return predicted(model, features, num_classes)


class LogisticRegression(Estimator):
    """Scikit-learn's logistic regression on the features, without the graph; C is the inverse of the penalty."""

    # In double precision its solver ends elsewhere than in the records of the tables.
    precision = torch.float32

    @checked
    def __init__(self, C: PositiveNumber = 1.0) -> None:
        super().__init__(linear_model.LogisticRegression(C=C, max_iter=2000))


class Labels(Predictor):
    """`LabelPropagation` from the training nodes, over the graph or over all pairs; an attention reads the features.

    A number y between the least and the largest one is spread as shares (b − y, y − a)/(b − a) of these two.
    """

    def __init__(
        self,
        num_layers: int | None = 50,
        alpha: float = 0.9,
        diffusivity: Diffusivity | None = None,
    ) -> None:
        super().__init__()
        self.propagation = LabelPropagation(num_layers, alpha, diffusivity)

    def scores(self, nodes: Data, num_classes: int) -> Tensor:
        known = has_label(nodes.y)
        y = nodes.y[known]
        numbers = y.is_floating_point()
        shares = torch.zeros(len(known), 2 if numbers else num_classes)
        if numbers:
            least, most = y.aminmax()
            height = (y - least) / (most - least).clamp(min=1e-30)
            shares[known] = torch.stack([1 - height, height], 1)
        else:
            shares[known] = one_hot(y, num_classes).float()
        spread: Tensor = self.propagation(
            shares,
            Graph.from_data(nodes),
            features=nodes.x if self.propagation.reads_features else None,
        )
        if not numbers:
            # A node that no label reaches has zeros.
            return spread.clamp(min=1e-9).log()
        total = spread.sum(1, keepdim=True)
        height = torch.where(total > 0, spread[:, 1:] / total, height.mean())
        return least + (most - least) * height


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
        self.classifier = DiffusionClassifier(
            n_neighbors=n_neighbors,
            metric=metric,
            sharpness=sharpness,
            mu=mu,
            dropout=dropout,
            rounds=4,
            cv=None,
        )

    def scores(self, nodes: Data, num_classes: int) -> Tensor:
        model = clone(self.classifier).set_params(random_state=_seed())
        model.fit(nodes.x.to_dense().numpy(), nodes.y.numpy())
        return class_scores(model, model.states_.clip(1e-40), num_classes)


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


def predicted(
    model: Any, features: np.ndarray, num_classes: int, least: float = 1e-6
) -> Tensor:
    """Return log p [N, C] of a classifier of scikit-learn, p at `least`, or the numbers [N, 1] of a regressor."""
    if not is_classifier(model):
        return torch.from_numpy(model.predict(features)).float().view(-1, 1)
    # Label spreading has no probabilities where no label arrives.
    shares = np.nan_to_num(model.predict_proba(features)).clip(least)
    return class_scores(model, shares / shares.sum(1, keepdims=True), num_classes)


def class_scores(model: Any, shares: np.ndarray, num_classes: int) -> Tensor:
    # A class without a training label has a score that never wins.
    scores = torch.full((len(shares), num_classes), -100.0)
    scores[:, torch.from_numpy(model.classes_)] = torch.from_numpy(shares).log().float()
    return scores


def _seed() -> int:
    # scikit-learn takes a seed; torch's is the seed of the run.
    return int(torch.randint(2**31 - 1, ()))
