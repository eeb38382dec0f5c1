"""``DiffusionClassifier``: semi-supervised classification of rows of features, as an estimator of scikit-learn."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from diffusion_mp.checks import (
    as_whole,
    check_choice,
    check_counts,
    check_flags,
    check_positive,
    check_probability,
    python_number,
)
from diffusion_mp.data.knn import Metric, comparable, farthest, joined, nearest, similar
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.spmm import matrix
from diffusion_mp.layers import CertifiedConv
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.runtime.precision import inverse_root
from diffusion_mp.runtime.progress import progress_bar, show_progress

_BATCH = 256  # rows per step of Adam
_COLUMNS = 10  # with fewer, dropout removes what distinguishes the rows
_FARTHER = 10  # factor of μ while labels are the only sources
# Held while a fit draws from torch's generator: dropout and initialisation know no other, and all threads share it.
_DRAWING = threading.Lock()


class DiffusionClassifier(ClassifierMixin, BaseEstimator):
    r"""Spread few labels over the graph of nearest neighbours, alternating with a network trained on all rows.

        P = argmin_Z Σ_i ‖z_i − h_i‖² + (μ/2) Σ_ij a_ij ‖z_i − z_j‖²,   ŷ_i = argmax_c w_c P_ic

    As in scikit-learn's ``LabelSpreading`` (Zhou et al., 2004), -1 in y marks a row without a label. At first the
    sources h are the labels. They spread over the weighted edges of `KNNGraph`, with 10 μ in place of μ since they are
    few. Then, in every round, a network f of one hidden layer is trained on ŷ, and h_i is f(x_i), or the label where it
    is known. This follows Iscen, Tolias, Avrithis & Chum (2019), but with a new network in every round. In P, classes
    have equal weights: the labels of a class share one unit as sources. In training, a row weighs 1/(rows of its
    class).

    The spreading is a `CertifiedConv` at its steady state, with D^-½AD^-½ for A and no attention. :meth:`predict`
    minimises the same energy over each new row, with the other states fixed. It searches the rows of fit, which are
    kept, for the neighbours of m new rows in O(mn) time. The graph takes O(n²) time.

    Args:
        n_neighbors: Number of neighbours of a row in the graph; see `KNNGraph`.
        metric ({"euclidean", "cosine"}): Metric of the graph. "cosine" suits texts, and often images.
        approximate: Search neighbours approximately; see `knn_graph`. Sparse rows are always searched exactly.
        sharpness: Sharpness of the weights of the edges; see `KNNGraph`. The default was chosen on images of digits;
            half of it suits texts better.
        mu: μ, the weight of neighbours. Values of 1 to 3 suit texts.
        class_weight ({"balanced", dict, None}): "balanced" is w = 1. With None, w_c is the number of labels of class c;
            with a dict, this number times the entry of c.
        rounds: Number of rounds of training and spreading.
        hidden_channels: Number of hidden units of the network.
        dropout: Dropout rate on the features in training. None is 0.5, or 0 for fewer than ten columns, where dropout
            would remove what distinguishes the rows. 0.8 suits texts.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        max_iter: Number of steps of Adam in every round, with 256 rows each.
        random_state (int, RandomState or None): A seed. None trains other networks in every fit.
        verbose: 1 shows a progress bar.

    Attributes:
        classes_: The sorted labels [n_classes].
        transduction_: The label of every row of fit [N].
        label_distributions_: P of the last round [N, n_classes].
        sources_: h of the last round [N, n_classes].
        network_: f of the last round, from scaled rows to logits.
        conv_: The spreading, for `certify`; ``conv_(h, graph)`` is P.
        edge_index_: The edges of the graph [2, E].
        edge_weight_: The weights of the edges [E].

    Shapes:
        X: [N, n_features], an array, a sparse matrix or a DataFrame.
        y: [N]. If y has only -1 and 1, these are classes. Or [N, n_classes], where labels are known in part: every row
            is a distribution over classes (uniform over its candidates, for example), or zeros. The distributions are
            sources in place of labels, and a network learns the likeliest class.

    Examples:
        >>> import numpy as np
        >>> X = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> y = np.array(["low", -1, -1, "high", -1, -1], dtype=object)  # an array of objects holds names and -1
        >>> classifier = DiffusionClassifier(n_neighbors=2, random_state=0).fit(X, y)
        >>> print(*classifier.transduction_, *classifier.predict([[0.3], [4.0]]))
        low low low high high high low high
    """

    def __init__(
        self,
        n_neighbors: int = 10,
        metric: Metric = "euclidean",
        *,
        approximate: bool = False,
        sharpness: float = 8.0,
        mu: float = 10.0,
        class_weight: Any = "balanced",
        rounds: int = 4,
        hidden_channels: int = 256,
        dropout: float | None = None,
        learning_rate: float = 0.002,
        weight_decay: float = 1e-4,
        max_iter: int = 300,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.sharpness = sharpness
        self.mu = mu
        self.rounds = rounds
        self.hidden_channels = hidden_channels
        self.dropout = dropout
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.random_state = random_state
        self.approximate = approximate
        self.class_weight = class_weight
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> DiffusionClassifier:
        """Learn from all rows of X and the labels of some of them.

        Args:
            X: Rows of features [N, n_features].
            y: Labels [N] with -1 where they are unknown, or distributions over classes [N, n_classes].
        """
        self._check_options()
        shape = np.asarray(y, dtype=object).shape
        soft = len(shape) == 2 and shape[1] > 1
        if not soft:
            _check_known(
                y, "a label for every row, and the number -1 where it is unknown"
            )
        # In double precision, so that rounding does not make a row in predict depend on the others.
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=np.float64,
            ensure_min_samples=2,
            multi_output=soft,
        )
        self.X_ = X
        labelled, self.classes_, targets = _distributions(y) if soft else _labels(y)
        self._class_weight = self._weights(targets.sum(0))
        k = min(self.n_neighbors, len(y) - 1)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with (
            show_progress(bool(self.verbose)),
            progress_bar(
                "neighbours", "round", self.rounds, delay=0, leave=True
            ) as bar,
            torch.inference_mode(False),  # a network is trained
            torch.device("cpu"),  # the rows are there, whatever the default device
        ):
            self.edge_index_, self.edge_weight_, self._reach = joined(
                X, k, self.metric, self.approximate, self.sharpness
            )
            self.conv_ = self._spreading(float(self.mu))
            self._fit_scale(X)
            with _DRAWING, torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                self._alternate(
                    torch.from_numpy(labelled), torch.from_numpy(targets), bar
                )
        self.transduction_ = self.classes_[
            (self._class_weight * self.label_distributions_).argmax(1)
        ]
        self.n_iter_ = self.max_iter
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the share of rows whose predicted label is correct.

        Args:
            X: Rows of features [M, n_features].
            y: The label of every row [M].
            sample_weight: Weights of the rows [M]; equal weights by default.
        """
        _check_known(y, "the label of every row")
        return float(super().score(X, y, sample_weight))

    def predict(self, X: Any) -> Any:
        """Return the labels [M] of new rows.

        Args:
            X: Rows of features [M, n_features].
        """
        # First the probabilities, which raise NotFittedError before there are classes.
        numbers = self.predict_proba(X).argmax(1)
        return self.classes_[numbers]

    @torch.no_grad()
    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities [M, n_classes] of new rows, in the order of ``classes_``.

        Args:
            X: Rows of features [M, n_features].
        """
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        # Neighbours are found among rows of one kind; sparse rows of fit are never filled in, they may not fit.
        if issparse(X) != issparse(self.X_):
            X = csr_array(X) if issparse(self.X_) else X.toarray()
        states = self.label_distributions_
        k = min(self.n_neighbors, len(states))
        row, column, square = nearest(self.X_, k, self.metric, self.approximate, X)
        reach = farthest(row, square, X.shape[0])
        near = similar(row, column, square, reach, self._reach, self.sharpness)
        degree = np.bincount(self.edge_index_[1], self.edge_weight_, len(states))
        # D^-½AD^-½ with the degrees of fit: a new row must not change the weights of the old ones, nor of each other.
        rows = inverse_root(torch.from_numpy(near.sum(1))).numpy()
        columns = inverse_root(torch.from_numpy(degree)).numpy()
        weights = near.multiply(rows[:, None]).multiply(columns).tocsr()
        # The minimiser of the energy of one row given its neighbours is a weighted mean.
        beta = self.conv_.beta().item()
        mu = self.conv_.mu().item()
        # The total pull of the neighbours; a row without neighbours keeps its source.
        pull = weights.sum(1)[:, None]
        source = self._probabilities(self._scaled(X)).numpy()
        state = (beta * source + mu * (weights @ states)) / (beta + mu * pull)
        weighted = state * self._class_weight
        return weighted / weighted.sum(1, keepdims=True)

    def _alternate(self, labelled: Tensor, targets: Tensor, bar: Any) -> None:
        """Spread the labels [R, n_classes] of some rows; then train and spread a new network in every round."""
        graph = Graph(len(labelled), self.edge_index_, self.edge_weight_)
        X = self._scaled(self.X_)
        source = targets.new_zeros(len(labelled), targets.size(1))
        # Each class has one unit in all, or the class with most labels would take over the rows far from any.
        source[labelled] = targets / targets.sum(0)
        bar.set_description("labels spread")
        spread = _at_rest(self._spreading(_FARTHER * float(self.mu)), graph, source)
        for _ in range(self.rounds):
            likely = spread * torch.from_numpy(self._class_weight)
            likely[labelled] *= targets  # of a label, only its class is left
            taught = likely.argmax(1)
            # In the first round, rows that no label reaches are left out.
            # Their argmax would be the first class, for no reason.
            rows = (labelled | (spread.sum(1) > 0)).nonzero().squeeze(1)
            bar.set_description("a network learns")
            self.network_ = self._learned(X, rows, taught[rows])
            source = self._probabilities(X)
            source[labelled] = targets
            bar.set_description("what it says spreads")
            spread = _at_rest(self.conv_, graph, source)
            bar.update()
        self.sources_ = source.numpy()
        self.label_distributions_ = spread.numpy()

    def _weights(self, labels: Any) -> Any:
        """Return w [n_classes], of mean one, from the numbers of labels."""
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            return np.ones(len(labels))
        weights = labels * compute_class_weight(
            self.class_weight, classes=self.classes_, y=self.classes_
        )
        if not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(
                f"class_weight must have finite weights > 0; got {self.class_weight}."
            )
        return weights / weights.mean()

    def _spreading(self, mu: float) -> CertifiedConv:
        conv = CertifiedConv(
            len(self.classes_), penalty=None, constraint=None, mu=mu, num_layers=None
        )
        return conv.double().requires_grad_(False)

    def _learned(self, X: Any, rows: Tensor, targets: Tensor) -> nn.Sequential:
        width = int(self.hidden_channels)  # torch takes no integers of NumPy
        classes = len(self.classes_)
        # A class of many rows would be the answer for all where features say little.
        weight = 1 / targets.bincount(minlength=classes).double()
        network = nn.Sequential(
            FeatureLinear(X.shape[1], width), nn.ReLU(), nn.Linear(width, classes)
        ).double()
        rate = self.dropout
        if rate is None:
            rate = 0.5 * (X.shape[1] >= _COLUMNS)
        optimizer = torch.optim.Adam(
            network.parameters(),
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            fused=True,  # half the time for 80 000 columns
        )
        with torch.enable_grad():
            for batch in islice(_batches(len(rows)), self.max_iter):
                optimizer.zero_grad()
                features = dropout(_tensor(X[rows[batch].numpy()]), rate)
                cross_entropy(network(features), targets[batch], weight).backward()
                optimizer.step()
        return network.requires_grad_(False)

    def _probabilities(self, X: Any) -> Tensor:
        return self.network_(_tensor(X)).softmax(1)

    def _fit_scale(self, X: Any) -> None:
        """Fit centre and scale to mean zero and mean square one; sparse rows are only scaled."""
        X = comparable(X, self.X_, self.metric)
        # One scale for all columns, so that the network sees the distances that the neighbours are found by.
        if issparse(X):
            self._centre = 0.0  # to subtract a mean would fill in the zeros
            square = (X.data**2).sum() / np.prod(X.shape)
        else:
            self._centre = X.mean(0)
            square = ((X - self._centre) ** 2).mean()
        self._scale = float(square**0.5) or 1.0

    def _scaled(self, X: Any) -> Any:
        X = comparable(X, self.X_, self.metric)
        if issparse(X):
            return X / self._scale
        return (X - self._centre) / self._scale

    def _check_options(self) -> None:
        """Validate options, in fit and not in the constructor, as scikit-learn requires."""
        for name in ("n_neighbors", "rounds", "hidden_channels", "max_iter"):
            check_counts(**{name: as_whole(getattr(self, name), name)})
        if not isinstance(self.verbose, (bool, np.bool_)):
            check_counts(0, verbose=as_whole(self.verbose, "verbose"))
        check_choice(self.metric, "metric", ["euclidean", "cosine"])
        check_flags(approximate=self.approximate)
        for name in ("sharpness", "mu", "learning_rate", "weight_decay"):
            check_positive(
                python_number(getattr(self, name)),
                name,
                allow_zero=name == "weight_decay",
            )
        if self.dropout is not None:
            check_probability(python_number(self.dropout), "dropout")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _batches(num_rows: int) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(num_rows).split(_BATCH)


def _at_rest(conv: CertifiedConv, graph: Graph, source: Tensor) -> Tensor:
    """Return the steady state, clamped at zero."""
    # It is a mean of distributions, in which rounding leaves entries slightly below zero.
    return cast("Tensor", conv(source, graph)).clamp(min=0)


def _tensor(X: Any) -> Tensor:
    # Rows of texts stay sparse as far as the first linear map; a matrix of torch is made from the parts without a copy.
    if not issparse(X):
        return torch.from_numpy(X)
    ptr, columns, values = (
        torch.from_numpy(part) for part in (X.indptr, X.indices, X.data)
    )
    return matrix(ptr, columns, values, X.shape[1])


def _check_known(y: Any, expected: str) -> None:
    """Raise for None and NaN, which other libraries write where a label is unknown."""
    if y is None:
        raise ValueError(
            f"DiffusionClassifier requires y to be passed, but the target y is None: pass {expected}."
        )
    for row, label in enumerate(np.ravel(np.asarray(y, dtype=object))):
        if not isinstance(label, str) and str(label) in ("None", "nan", "NaT", "<NA>"):
            raise ValueError(f"y must hold {expected}; got {label} in row {row}.")


def _labels(y: Any) -> tuple[Any, Any, Any]:
    """Return a mask of the R labelled rows, the classes, and the distributions [R, n_classes] of these rows."""
    strings = y.dtype.kind in "US"  # an array of strings holds no number -1
    if y.dtype.kind in "USO" and "-1" in y.tolist():
        # NumPy turns -1 into a string in an array of names.
        raise ValueError(
            "y holds the string '-1' beside other strings, so it would be one more class. Where no label is meant, "
            "pass np.array([...], dtype=object) with the number -1."
        )
    labelled = np.ones(len(y), dtype=bool) if strings else y != -1
    if not labelled.any():
        raise ValueError(
            "y must hold the label of some row at least; every entry is -1, which stands for no label."
        )
    if not labelled.all() and all(label == 1 for label in y[labelled]):
        # One class would be degenerate; -1 and 1 are scikit-learn's traditional binary labels.
        warnings.warn(
            "y holds -1 and 1 alone, which are taken for two classes here, and no row for unlabelled. Name the classes "
            "0 and 1 to leave no doubt.",
            stacklevel=3,
        )
        labelled = np.ones(len(y), dtype=bool)
    labels = y[labelled]
    if y.dtype == object and all(
        isinstance(label, (int, float, np.number, np.bool_)) for label in labels
    ):
        labels = np.asarray(labels.tolist())  # they are objects only because of -1
    check_classification_targets(labels)
    classes, targets = np.unique(labels, return_inverse=True)
    return labelled, classes, np.eye(len(classes))[targets]


def _distributions(y: Any) -> tuple[Any, Any, Any]:
    """Return a mask, the classes and distributions as `_labels` does, for y [N, n_classes].

    Every row of y is a distribution, or zeros for a row without a label.
    """
    shares = np.asarray(y, dtype=np.float64)
    total = shares.sum(1)
    wrong = (shares < 0).any(1) | (np.abs(total - 1) > 1e-6) & (total != 0)
    if wrong.any():
        row = wrong.argmax()
        raise ValueError(
            f"y [N, n_classes] must hold shares of the classes >= 0 that sum to one in a row, or to zero where nothing "
            f"is known; row {row} is {shares[row]}. Of candidates c, these are c / c.sum(1)."
        )
    if not (shares > 0).any(0).all():
        raise ValueError(
            "y [N, n_classes] must hold a share of every class; one has none at all."
        )
    return total > 0, np.arange(shares.shape[1]), shares[total > 0]
