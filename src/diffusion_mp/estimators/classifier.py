"""``DiffusionClassifier``: semi-supervised classification of rows of features, as an estimator of scikit-learn."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy.stats import hypergeom
from sklearn.base import ClassifierMixin
from sklearn.dummy import DummyClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from diffusion_mp.checks import as_whole, check_counts
from diffusion_mp.estimators.base import Labelled, RowEstimator, rows_tensor
from diffusion_mp.estimators.model_selection import (
    check_known,
    has_label,
    labelled_rows,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers import CertifiedConv

_FARTHER = 10  # factor of μ while labels are the only sources
_CHANCE = 0.01  # of a warning on shares of the classes, if they differ by chance only


class _Spread(NamedTuple):
    """A network, the sources h [N, C], and the states P [N, C]."""

    network: nn.Sequential
    sources: Tensor
    states: Tensor


@dataclass(eq=False, repr=False, kw_only=True)
class DiffusionClassifier(ClassifierMixin, RowEstimator):
    r"""Spread few labels over the graph of nearest neighbours, beside a logistic regression of the labelled rows.

        P = argmin_Z Σ_i ‖z_i − h_i‖² + (μ/2) Σ_ij a_ij ‖z_i − z_j‖²

        p(c | x_i) ∝ w_c ((1 − ω) P_ic + ω L_ic)

    As in scikit-learn's ``LabelSpreading`` (Zhou et al., 2004), -1 in y marks a row without a label. At first the
    sources h are the labels. They spread over the weighted edges of `KNNGraph`, with 10 μ in place of μ since they are
    few. Then, in every round, a network f of one hidden layer is trained on the likeliest class of every row, and h_i
    is f(x_i), or the label where it is known. This follows Iscen, Tolias, Avrithis & Chum (2019), but with a new
    network in every round. In training, the rows of a class count as much as the labels of the class.

    L is a logistic regression of the labelled rows. Where rows of a class are not neighbours of each other, or where
    most rows are labelled, it can be the better model. Its weight ω maximises the likelihood of labels that were held
    out in cross-validation (stacking; Wolpert, 1992).

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
        class_weight ({"balanced", dict, None}): w. None is w = 1: classes are as frequent as they are among the labels.
            A dict has w_c for every class c: if rows were labelled class by class, the true frequency of the class over
            its share of the labels. "balanced" is w_c ∝ 1 / (labels of class c), so that all classes are equally likely
            beforehand. Choose it if rare classes matter as much as frequent ones.
        cv: Number of folds of the cross-validation that finds ω. None is ω = 0, without a logistic regression and in
            about half the time.
        rounds: Number of rounds of training and spreading. More than two change little.
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
        transduction_: The likeliest label of every row of fit [N].
        label_distributions_: p of every row of fit [N, n_classes].
        states_: P of the last round [N, n_classes].
        sources_: h of the last round [N, n_classes].
        network_: f of the last round, from scaled rows to logits.
        linear_: The logistic regression, from scaled rows; None without ``cv``.
        linear_share_: ω.
        conv_: The spreading, for `certify`; ``conv_(h, graph)`` is P.
        edge_index_: The edges of the graph [2, E].
        edge_weight_: The weights of the edges [E].

    Shapes:
        X: [N, n_features], an array, a sparse matrix or a DataFrame.
        y: [N]. If y has only -1 and 1, these are classes. Or [N, n_classes], where labels are known in part: every row
            is a distribution over classes (uniform over its candidates, for example), or zeros. The distributions are
            sources in place of labels, and networks learn the likeliest class.

    Warns:
        UserWarning: A class has another share of the predicted labels of rows without a label than of the labels: less
            than half or more than twice as large, or ten points apart, and by more than chance explains (Fisher's exact
            test, 1 % for all classes together). Only with ``class_weight=None`` and whole labels.

    Examples:
        >>> import numpy as np
        >>> X = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> y = np.array(["low", -1, -1, "high", -1, -1], dtype=object)  # an array of objects holds names and -1
        >>> classifier = DiffusionClassifier(n_neighbors=2, random_state=0).fit(X, y)
        >>> print(*classifier.transduction_, *classifier.predict([[0.3], [4.0]]))
        low low low high high high low high
    """

    class_weight: Any = None
    rounds: int = 2
    dropout: float | None = None
    weight_decay: float = 1e-4

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DiffusionClassifier:
        """Learn from all rows of X and the labels of some of them.

        Args:
            X: Rows of features [N, n_features].
            y: Labels [N] with -1 where they are unknown, or distributions over classes [N, n_classes].
            sample_weight: Weights of the labels [N]; equal weights by default. A label of weight 0 is not used. The
                weights of rows without a label have no effect.
        """
        self._check_options()
        check_counts(rounds=as_whole(self.rounds, "rounds"))
        shape = np.asarray(y, dtype=object).shape
        soft = len(shape) == 2 and shape[1] > 1
        if not soft:
            if y is None:
                raise ValueError(
                    "DiffusionClassifier requires y to be passed, but the target y is None: pass a label for every "
                    "row, and the number -1 where it is unknown."
                )
            check_known(y)
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
        weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        known, self.classes_, targets = _distributions(y) if soft else _labels(y)
        labelled = Labelled(np.flatnonzero(known), targets, weights[known])
        labelled = labelled.some(labelled.weights > 0)
        shares = labelled.weights @ labelled.targets
        if not (shares > 0).all():
            raise ValueError(
                "sample_weight must be above 0 for a label of every class; all labels of "
                f"{self.classes_[shares == 0].tolist()} have the weight 0."
            )
        self._class_weight = self._weights_of_classes(shares)
        with self._fitting(self.rounds) as bar:
            with torch.device("cpu"):  # the rows are there, whatever the default is
                rows = self._join(X)
                self.conv_ = self._spreading(float(self.mu))
            self._weigh(rows, labelled, bar)
            spread = self._alternate(rows, labelled, self.rounds, bar)
        self.network_ = spread.network
        self.sources_ = spread.sources.numpy()
        self.states_ = spread.states.numpy()
        self.label_distributions_ = self._mixed(self.states_, rows)
        self.transduction_ = self.classes_[self.label_distributions_.argmax(1)]
        self.n_iter_ = self.max_iter
        self._compare_shares(labelled)
        return self

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the share of rows whose predicted label is correct, among the rows with a label.

        Args:
            X: Rows of features [M, n_features].
            y: The label of every row [M], or -1 where it is unknown: such rows do not count.
            sample_weight: Weights of the rows [M]; equal weights by default.
        """
        if y is None:
            raise ValueError(
                "DiffusionClassifier.score requires y to be passed, but y is None: pass the label of every row, and "
                "the number -1 where it is unknown."
            )
        check_known(y)
        known = has_label(y)
        if -1 in self.classes_.tolist():  # a class, as in fit
            known = np.ones(len(known), dtype=bool)
        return super().score(*labelled_rows(X, y, sample_weight, known))

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
        X = self._checked_rows(X)
        weights = self._edges_to(X)
        # The minimiser of the energy of one row given its neighbours is a weighted mean.
        beta = self.conv_.beta().item()
        mu = self.conv_.mu().item()
        # The total pull of the neighbours; a row without neighbours keeps its source.
        pull = weights.sum(1)[:, None]
        rows = self._scaled(X)
        source = _probabilities(self.network_, rows).numpy()
        state = (beta * source + mu * (weights @ self.states_)) / (beta + mu * pull)
        return self._mixed(state, rows)

    def _mixed(self, states: Any, rows: Any) -> Any:
        """Return the probabilities of rows from their states P."""
        mixed = states / states.sum(1, keepdims=True)
        if self.linear_ is not None:
            linear = self._linear_probabilities(self.linear_, rows)
            mixed = (1 - self.linear_share_) * mixed + self.linear_share_ * linear
        weighted = mixed * self._class_weight
        return weighted / weighted.sum(1, keepdims=True)

    def _weigh(self, rows: Any, labelled: Labelled, bar: Any) -> None:
        """Fit the logistic regression and find its share ω."""
        self.linear_ = None
        self.linear_share_ = 0.0
        if self.cv is None:
            return
        kinds = labelled.targets.argmax(1)
        likelihoods = np.ones((len(kinds), 2))
        for learn, predict in self._folds(kinds, stratified=True):
            some = labelled.some(learn)
            held = labelled.rows[predict]
            states = self._alternate(rows, some, 1, bar).states.numpy()[held]
            linear = self._linear_probabilities(self._linear(rows, some), rows[held])
            for column, found in enumerate((states, linear)):
                found = found / found.sum(1, keepdims=True)
                right = (labelled.targets[predict] * found).sum(1)
                likelihoods[predict, column] = right
        self.linear_ = self._linear(rows, labelled)
        self.linear_share_ = _share_of_second(likelihoods, labelled.weights)

    def _linear(self, rows: Any, labelled: Labelled) -> Any:
        """Fit a logistic regression to the likeliest classes of labelled rows."""
        kinds = labelled.targets.argmax(1)
        model = LogisticRegression(max_iter=1000)
        if len(np.unique(kinds)) == 1:
            model = DummyClassifier(strategy="prior")
        with warnings.catch_warnings():
            # A regression that is not fitted to the last digit is still weighed by what it predicts.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(rows[labelled.rows], kinds, labelled.weights)

    def _linear_probabilities(self, model: Any, rows: Any) -> Any:
        # A class without a label in some fold has probability zero there.
        found = np.zeros((rows.shape[0], len(self.classes_)))
        found[:, model.classes_] = model.predict_proba(rows)
        return found

    def _alternate(
        self, rows: Any, labelled: Labelled, rounds: int, bar: Any
    ) -> _Spread:
        """Spread the labels; then train and spread a new network in every round."""
        graph = Graph(rows.shape[0], self.edge_index_, self.edge_weight_)
        at = torch.from_numpy(labelled.rows)
        targets = torch.from_numpy(labelled.targets)
        weights = torch.from_numpy(labelled.weights)
        shares = weights @ targets
        source = targets.new_zeros(graph.num_nodes, targets.size(1))
        source[at] = weights[:, None] * targets
        bar.set_description("labels spread")
        with torch.device("cpu"):
            farther = self._spreading(_FARTHER * float(self.mu))
        states = _at_rest(farther, graph, source)
        for _ in range(rounds):
            likely = states.clone()
            likely[at] *= targets  # of a label, only its class is left
            taught = likely.argmax(1)
            # In the first round, rows that no label reaches are left out.
            # Their argmax would be the first class, for no reason.
            reached = states.sum(1) > 0
            reached[at] = True
            learning = reached.nonzero().squeeze(1)
            bar.set_description("a network learns")
            network = self._learned(rows, learning, taught[learning], shares)
            source = _probabilities(network, rows)
            source[at] = targets
            bar.set_description("what it says spreads")
            states = _at_rest(self.conv_, graph, source)
            bar.update(rounds == self.rounds)
        return _Spread(network, source, states)

    def _learned(
        self, rows: Any, learning: Tensor, classes: Tensor, shares: Tensor
    ) -> nn.Sequential:
        """Train a network on classes of rows, in which each class counts as much as its share."""
        count = classes.bincount(minlength=len(shares)).clamp(min=1)
        weight = (shares / shares.sum() / count).float()

        def loss(out: Tensor, batch: Tensor) -> Tensor:
            return cross_entropy(out, classes[batch], weight)

        return self._network(rows, learning, len(shares), loss)

    def _weights_of_classes(self, shares: Any) -> Any:
        """Return w [n_classes], of mean one."""
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            weights = 1 / shares
        else:
            weights = compute_class_weight(
                self.class_weight, classes=self.classes_, y=self.classes_
            )
        if not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(
                f"class_weight must have finite weights > 0; got {self.class_weight}."
            )
        return weights / weights.mean()

    def _compare_shares(self, labelled: Labelled) -> None:
        """Warn if rows without a label are predicted to be of other classes than the labels are."""
        # Weights of classes are meant to change the shares, and shares of candidates are not those of classes.
        if self.class_weight is not None or (labelled.targets.max(1) < 1).any():
            return
        kinds = np.delete(self.transduction_, labelled.rows)
        rows = len(kinds)
        predicted = np.array([(kinds == name).sum() for name in self.classes_])
        # Weighted labels count as Kish's effective number of equal ones, (Σw)² / Σw², so that chance is not underrated.
        weights = (
            labelled.weights * labelled.weights.sum() / (labelled.weights**2).sum()
        )
        labels = weights @ labelled.targets
        differ = _differ(labels, predicted)
        if not differ.any():
            return
        shares = labels / labels.sum()
        listed = ", ".join(
            f"{self.classes_[c]}: {shares[c]:.1%} and {predicted[c] / rows:.1%}"
            for c in np.flatnonzero(differ)
        )
        if labels.max() < 1.5 * labels.min():
            advice = (
                "If rows were labelled class by class, pass the true frequencies of the classes, class_weight={class: "
                "frequency}; 'balanced' changes little or nothing where classes have about as many labels. If rows "
                "were drawn at random, compare with a logistic regression in cross-validation."
            )
        else:
            advice = (
                "If rows were labelled class by class, pass class_weight={class: true frequency / share of the "
                "labels}. If they were drawn at random, a rare class that overlaps with others is seldom the "
                "likeliest: pass class_weight='balanced' if all classes matter as much."
            )
        warnings.warn(
            "The labels, and the predicted labels of the rows without one (in transduction_), have different shares of "
            f"some classes, by more than chance explains ({listed}). {advice}",
            stacklevel=3,
        )

    def _spreading(self, mu: float) -> CertifiedConv:
        conv = CertifiedConv(
            len(self.classes_), penalty=None, constraint=None, mu=mu, num_layers=None
        )
        return conv.double().requires_grad_(False)


def _differ(labels: Any, predicted: Any) -> Any:
    """Return a mask of the classes whose shares differ much, and by more than chance explains.

    Fisher's exact test: so many of the labels would be of a class, if the predictions were right and the labelled rows
    drawn at random from all. Of the same level for all classes together.
    """
    labels = np.rint(labels)
    share = labels / labels.sum()
    predicted_share = predicted / max(predicted.sum(), 1)
    # In many rows a difference that matters to nobody is not chance either.
    both = np.stack([share, predicted_share])
    much = (2 * both.min(0) < both.max(0)) | (np.ptp(both, axis=0) > 0.1)
    drawn = hypergeom(labels.sum() + predicted.sum(), labels + predicted, labels.sum())
    chance = 2 * np.minimum(drawn.cdf(labels), drawn.sf(labels - 1))
    return much & (chance < _CHANCE / len(labels))


def _share_of_second(likelihoods: Any, weights: Any) -> float:
    """Return the ω that maximises Σ_i w_i log((1 − ω) a_i + ω b_i) for columns a and b of ``likelihoods``.

    Two rows are added, one for which only a is right and one for which only b is right.
    """
    # No label is quite impossible, also where neither has learned its class.
    rows = np.concatenate([likelihoods.clip(1e-3), np.eye(2)])
    weights = np.append(weights / weights.mean(), [1.0, 1.0])
    share = 0.5
    # Expectation–maximisation: the likelihood is concave in ω, and every iteration raises it.
    for _ in range(500):
        second = share * rows[:, 1]
        whole = (1 - share) * rows[:, 0] + second
        share = float((weights * second / whole).sum() / weights.sum())
    return share


def _at_rest(conv: CertifiedConv, graph: Graph, source: Tensor) -> Tensor:
    """Return the steady state, clamped at zero."""
    # It is a mean of distributions, in which rounding leaves entries slightly below zero.
    with torch.device("cpu"):
        return cast("Tensor", conv(source, graph)).clamp(min=0)


def _probabilities(network: nn.Sequential, rows: Any) -> Tensor:
    return network(rows_tensor(rows)).softmax(1)


def _labels(y: Any) -> tuple[Any, Any, Any]:
    """Return a mask of the R labelled rows, the classes, and the distributions [R, n_classes] of these rows."""
    if y.dtype.kind in "USO" and "-1" in y.tolist():
        # NumPy turns -1 into a string in an array of names.
        raise ValueError(
            "y holds the string '-1' beside other strings, so it would be one more class. Where no label is meant, "
            "pass np.array([...], dtype=object) with the number -1."
        )
    labelled = has_label(y)
    if not labelled.any():
        raise ValueError(
            "y must hold the label of some row at least; every entry is -1, which stands for no label."
        )
    if labelled.all() and y.dtype.kind not in "US" and (y == -1).any():
        # One class would be degenerate; -1 and 1 are scikit-learn's traditional binary labels.
        warnings.warn(
            "y holds -1 and 1 alone, which are taken for two classes here, and no row for unlabelled. Name the classes "
            "0 and 1 to leave no doubt.",
            stacklevel=3,
        )
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
