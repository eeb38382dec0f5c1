"""``DiffusionClassifier``: few labels, many rows without one, and no graph, as an estimator of scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from tqdm import tqdm

from diffusion_mp.data.knn import Metric, comparable, farthest, joined, nearest, similar
from diffusion_mp.errors import as_whole, check_choice, check_positive, check_probability
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.noise import dropout
from diffusion_mp.kernels.spmm import matrix
from diffusion_mp.layers import CertifiedConv
from diffusion_mp.layers.features import input_linear

_BATCH = 256  # rows that a step of Adam learns from
_FARTHER = 10  # times μ where labels are the only sources


class DiffusionClassifier(ClassifierMixin, BaseEstimator):
    r"""Few labels spread over the graph of nearest neighbours of the rows, and a network learns from all rows.

        P = argmin_Z Σ_i ‖z_i − h_i‖² + (μ/2) Σ_ij a_ij ‖z_i − z_j‖²,   ŷ_i = argmax_c P_ic

    Rows and labels are those of scikit-learn's ``LabelSpreading`` (Zhou et al., 2004): -1 in y marks a row without a
    label. First the sources h are the labels alone, as there, but on the weighted edges of `KNNGraph`; few rows have a
    source then, so they spread with 10 μ. Then, round by round, a network f of one hidden layer learns ŷ from the
    features of all rows, and h_i = f(x_i) spreads, a distribution over the classes, or the label of the row where that
    is known (Iscen, Tolias, Avrithis & Chum, 2019, whose network learns on, where ours begins anew in every round). The
    graph corrects the network where neighbours agree, and the network the graph where features say more.

    All classes weigh the same: where labels alone spread, those of a class share one unit, and while a network learns,
    a row weighs 1/(rows of its class), as in the loss of Iscen et al. Else a class of many labels takes over others.

    The spreading is a `CertifiedConv` at rest, with D^-½AD^-½ for A and no attention (Theorem T1 of docs/certified.md).

    Of n rows of 50 columns with 100 labels in ten classes, on one core, the neighbours take 0.1, 0.1 and 1.3 s for
    n = 1 000, 5 000 and 20 000 and grow with n², up to 15 columns only with n log n; the spreading 0.04, 0.2 and 1.0 s,
    which grows with the edges; and the networks one second, whatever n is, in proportion to columns and ``max_iter``.

    A row that :meth:`predict` sees for the first time takes the state at which the same energy is least while the rows
    of :meth:`fit` keep theirs: so every new row is predicted by itself.

    Args:
        n_neighbors: neighbours of a row in the graph; fewer where there are fewer rows.
        metric: "euclidean", or "cosine" for texts and often for images, see `knn_graph`; by "cosine" the network reads
            rows of length one, too. Columns in different units are scaled first (``StandardScaler``): the largest
            numbers decide who is near. One unit for all columns may be any, from 1e-300 to 1e300.
        sharpness: of the weights of the edges, see `KNNGraph`.
        mu: μ, how much a row hears of its neighbours, and so how far what it says is heard; 1 to 3 suits texts.
        rounds: how often a network learns what has spread, and what it says spreads in turn.
        hidden_channels: width of the network.
        dropout: rate, of the features while the network learns; a high one keeps it from learning errors by heart. 0.8
            suits texts.
        learning_rate, weight_decay: of Adam.
        max_iter: steps of Adam in a round, of 256 rows each.
        random_state: a seed, or ``None`` for other networks in every fit. PyTorch's own randomness stays untouched.
        verbose: 1 shows a bar of the rounds while fit runs, and what is being done; 0 nothing.

    Attributes:
        classes_: the labels, sorted.
        transduction_: [N], the label of every row of fit.
        label_distributions_: [N, n_classes], P of the last round.
        network_: f of the last round, from scaled rows to logits.
        conv_: the spreading, for `certify`; its ``at_rest(graph, h)`` is P.
        sources_: [N, n_classes], h of the last round.
        edge_index_, edge_weight_: the graph.
        X_, n_features_in_, feature_names_in_, n_iter_: as everywhere in scikit-learn.

    Shapes:
        X: [N, n_features], an array, a sparse matrix or a DataFrame; y: [N], -1 where there is no label;
        where there are just -1 and 1 they are two classes, with a warning.

    Raises:
        TypeError, ValueError: an option or the data do not fit.
        ModuleNotFoundError: scikit-learn is not installed (when the class is imported).

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
        sharpness: float = 8.0,
        mu: float = 10.0,
        rounds: int = 4,
        hidden_channels: int = 256,
        dropout: float = 0.5,
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
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> DiffusionClassifier:
        """Learn from all rows of X and the labels of some of them."""
        self._check_options()
        # Rounding must not make a row depend on its companions in predict: all is double.
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        labelled, self.classes_, targets = _labels(y)
        self.X_ = X
        k = min(int(self.n_neighbors), len(y) - 1)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        bar = tqdm(total=int(self.rounds), desc="neighbours", unit="round", disable=not self.verbose)
        with bar, torch.random.fork_rng(devices=[]):
            self.edge_index_, self.edge_weight_, self._reach = joined(X, k, self.metric, float(self.sharpness))
            self.conv_ = self._spreading(float(self.mu))
            self._fit_scale(X)
            torch.default_generator.manual_seed(int(seed))
            self._alternate(torch.from_numpy(labelled), torch.from_numpy(targets), bar)
        self.transduction_ = self.classes_[self.label_distributions_.argmax(1)]
        self.n_iter_ = self.max_iter
        return self

    def predict(self, X: Any) -> Any:
        """The labels [M] of new rows X [M, n_features]."""
        numbers = self.predict_proba(X).argmax(1)
        return self.classes_[numbers]

    @torch.no_grad()
    def predict_proba(self, X: Any) -> Any:
        """Their probabilities [M, n_classes], in the order of ``classes_``."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        if issparse(X) != issparse(self.X_):
            X = csr_array(X) if issparse(self.X_) else X.toarray()
        states = self.label_distributions_
        row, column, square = nearest(self.X_, min(int(self.n_neighbors), len(states)), self.metric, X)
        reach = farthest(row, square, X.shape[0])
        near = similar(row, column, square, reach, self._reach, float(self.sharpness))
        degree = np.bincount(self.edge_index_[1], self.edge_weight_, len(states))
        weights = near.multiply(_inverse_root(near.sum(1))[:, None]).multiply(_inverse_root(degree)).tocsr()
        # Of all that the energy says of a row, given the rows that it is joined to: a weighted mean.
        beta, mu = self.conv_.beta().item(), self.conv_.mu().item()
        pull = weights.sum(1)[:, None]
        return (beta * self._said(self._scaled(X)).numpy() + mu * (weights @ states)) / (beta + mu * pull)

    def _alternate(self, labelled: Tensor, targets: Tensor, bar: tqdm[Any]) -> None:
        """Spread the labels [R] of some rows; then let networks learn and spread, a new one every round."""
        graph, X = Graph(len(labelled), self.edge_index_, self.edge_weight_), self._scaled(self.X_)
        known = one_hot(targets, len(self.classes_)).double()
        source = known.new_zeros(len(labelled), known.size(1))
        source[labelled] = known / known.sum(0)
        bar.set_description("labels spread")
        spread = _at_rest(self._spreading(_FARTHER * float(self.mu)), graph, source)
        for _ in range(self.rounds):
            taught = spread.argmax(1)
            taught[labelled] = targets
            # Where no label has come yet, there is nothing to learn: that is so in the first round only.
            rows = (labelled | (spread.sum(1) > 0)).nonzero().squeeze(1)
            bar.set_description("a network learns")
            self.network_ = self._learned(X, rows, taught[rows])
            source = self._said(X)
            source[labelled] = known
            bar.set_description("what it says spreads")
            spread = _at_rest(self.conv_, graph, source)
            bar.update()
        self.sources_, self.label_distributions_ = source.numpy(), spread.numpy()

    def _spreading(self, mu: float) -> CertifiedConv:
        conv = CertifiedConv(len(self.classes_), penalty=None, constraint=None, mu=mu)
        return conv.double().requires_grad_(False)

    def _learned(self, X: Any, rows: Tensor, targets: Tensor) -> nn.Sequential:
        """A network that says the targets [R] of some of the scaled rows."""
        width, classes = int(self.hidden_channels), len(self.classes_)
        weight = 1 / targets.bincount(minlength=classes).double()
        network = nn.Sequential(input_linear(X.shape[1], width), nn.ReLU(), nn.Linear(width, classes)).double()
        optimizer = torch.optim.Adam(
            network.parameters(),
            lr=float(self.learning_rate),
            weight_decay=float(self.weight_decay),
            fused=True,  # one pass over the weights: of 80 000 columns a step takes little more than half the time
        )
        with torch.enable_grad():
            for batch in islice(_batches(len(rows)), self.max_iter):
                optimizer.zero_grad()
                features = dropout(_tensor(X[rows[batch].numpy()]), float(self.dropout))
                cross_entropy(network(features), targets[batch], weight).backward()
                optimizer.step()
        return network.requires_grad_(False)

    def _said(self, X: Any) -> Tensor:
        """f(x), the distributions [M, n_classes], of scaled rows."""
        return self.network_(_tensor(X)).softmax(1)

    def _fit_scale(self, X: Any) -> None:
        """What the network reads: rows around zero, of one as their mean square. Sparse rows are scaled only."""
        X = comparable(X, self.X_, self.metric)
        self._centre = 0.0 if issparse(X) else X.mean(0)
        self._scale = _root_mean_square(X, self._centre)

    def _scaled(self, X: Any) -> Any:
        """Rows as the network reads them."""
        X = comparable(X, self.X_, self.metric)
        return X / self._scale if issparse(X) else (X - self._centre) / self._scale

    def _check_options(self) -> None:
        """Say what does not fit; scikit-learn wants that said by fit, and not before."""
        for name in ("n_neighbors", "rounds", "hidden_channels", "max_iter"):
            if as_whole(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not isinstance(self.verbose, (bool, np.bool_)) and as_whole(self.verbose, "verbose") < 0:
            raise ValueError(f"verbose must be at least 0; got {self.verbose}.")
        check_choice(self.metric, "metric", ["euclidean", "cosine"])
        numbers = {
            name: getattr(self, name) for name in ("sharpness", "mu", "learning_rate", "weight_decay", "dropout")
        }
        # A search over an array hands on NumPy's numbers.
        numbers = {name: value.item() if isinstance(value, np.generic) else value for name, value in numbers.items()}
        for name in ("sharpness", "mu", "learning_rate"):
            check_positive(numbers[name], name)
        check_positive(numbers["weight_decay"], "weight_decay", allow_zero=True)
        check_probability(numbers["dropout"], "dropout")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _batches(num_rows: int) -> Iterator[Tensor]:
    """Rows in random order, over and over, cut into batches."""
    while True:
        yield from torch.randperm(num_rows).split(_BATCH)


def _at_rest(conv: CertifiedConv, graph: Graph, source: Tensor) -> Tensor:
    """Where the rows come to rest, in shares of classes again: a mean whose weights are not negative."""
    return cast("Tensor", conv.at_rest(graph, source)).clamp(min=0)


def _tensor(X: Any) -> Tensor:
    """An array or compressed rows for torch."""
    if not issparse(X):
        return torch.from_numpy(X)
    ptr, columns, values = (torch.from_numpy(part) for part in (X.indptr, X.indices, X.data))
    return matrix(ptr, columns, values, X.shape[1])


def _labels(y: Any) -> tuple[Any, Any, Any]:
    """Which rows have a label, the classes, and the class of every labelled row by its number."""
    if y.dtype.kind in "US":
        if "-1" in y.tolist():
            raise ValueError(
                "y holds the string '-1' beside other strings, so it would be one more class. Where rows without a "
                "label are meant, pass an array of objects, np.array([...], dtype=object), with the number -1 for them."
            )
        labelled = np.ones(len(y), dtype=bool)
    else:
        labelled = y != -1
    if not labelled.any():
        raise ValueError(
            "y must hold the label of some row at least; every entry is -1, which stands for no label at all."
        )
    check_classification_targets(y[labelled])
    classes, targets = np.unique(y[labelled], return_inverse=True)
    if not labelled.all() and classes.tolist() == [1]:
        # With one class there is nothing to tell apart: these are the two classes of scikit-learn's oldest convention.
        warnings.warn(
            "y holds -1 and 1 alone, which are taken for two classes here, and no row for unlabelled. Name the classes "
            "0 and 1 to leave no doubt.",
            stacklevel=3,
        )
        classes, targets = np.unique(y, return_inverse=True)
        labelled = np.ones(len(y), dtype=bool)
    return labelled, classes, targets


def _root_mean_square(X: Any, centre: Any) -> float:
    """Of the entries of X around their means; one where all are equal."""
    square = (X.data**2).sum() / np.prod(X.shape) if issparse(X) else ((X - centre) ** 2).mean()
    return float(square**0.5) or 1.0


def _inverse_root(degree: Any) -> Any:
    """1/√d, and 0 for nobody's neighbour."""
    return np.divide(1.0, np.sqrt(degree), out=np.zeros(len(degree)), where=degree > 0)
