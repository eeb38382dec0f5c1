"""``DiffusionClassifier``: few labels, many rows without one, and no graph, as an estimator of scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffusion_mp.data.arguments import as_whole
from diffusion_mp.data.knn import Metric, farthest, mutual, nearest, similar
from diffusion_mp.errors import check_choice, check_positive, check_probability
from diffusion_mp.estimators.rest import at_rest, rows_at_rest
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.spmm.compressed import matrix
from diffusion_mp.models import CertifiedDIFFormer


class DiffusionClassifier(ClassifierMixin, BaseEstimator):
    r"""A certified network on the graph of nearest neighbours of the rows, most of which have no label.

        Z = argmin_Z ‖Z − H‖² + (μ/2) Σ_ij a_ij ‖z_i − z_j‖²,
        H = ReLU(XV + u),   P(y_i = c) = softmax(W z_i + b)_c

    Rows and labels are those of scikit-learn's ``LabelSpreading`` (Zhou et al., 2004): -1 in y marks a row without a
    label, which takes part nevertheless, as a neighbour. What spreads here are not the labels, but what a layer makes
    of the features; the layer is trained through the spreading. The network is a `CertifiedDIFFormer` at rest with
    D^-½AD^-½ for A, on the weighted edges of `KNNGraph`, and no attention (Theorem T1 of docs/certified.md); H is
    centred.

    A row that :meth:`predict` sees for the first time takes the state at which the same energy is least while the rows
    of :meth:`fit` keep theirs: so every new row is predicted by itself.

    Args:
        n_neighbors: neighbours of a row in the graph; fewer where there are fewer rows.
        metric: "euclidean", or "cosine" for texts and often for images, see `knn_graph`. Columns in different units are
            scaled first (``StandardScaler``): the largest numbers decide who is near.
        sharpness: of the weights of the edges, see `KNNGraph`; 4 suits texts.
        hidden_channels: width of the state.
        mu: μ, how much a row hears of its neighbours; the larger, the further a label reaches.
        dropout: rate, of H while it is trained.
        learning_rate, weight_decay, max_iter: of Adam, and how many steps it takes over all rows.
        random_state: a seed, or ``None`` for another network in every fit. PyTorch's own randomness stays untouched.

    Attributes:
        classes_: the labels, sorted.
        transduction_: [N], the label of every row of fit.
        label_distributions_: [N, n_classes], the probabilities of these.
        model_: the network, for `certify` and `EnergyTrace`.
        edge_index_, edge_weight_: its graph.
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
        hidden_channels: int = 64,
        sharpness: float = 8.0,
        mu: float = 1000.0,
        dropout: float = 0.2,
        learning_rate: float = 0.01,
        weight_decay: float = 5e-4,
        max_iter: int = 100,
        random_state: Any = None,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.hidden_channels = hidden_channels
        self.sharpness = sharpness
        self.mu = mu
        self.dropout = dropout
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> DiffusionClassifier:
        """Learn from all rows of X and the labels of some of them."""
        self._check_options()
        # Rounding must not make a row depend on its companions in predict: all is double.
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        labelled, self.classes_, targets = _labels(y)
        self.X_ = X
        self._centre = 0.0 if issparse(X) else X.mean(0)
        self._scale = _root_mean_square(X, self._centre)
        row, column, square = nearest(X, min(int(self.n_neighbors), len(y) - 1), self.metric)
        self._reach = farthest(row, square, len(y))
        near = similar(row, column, square, self._reach, self._reach, float(self.sharpness))
        self.edge_index_, self.edge_weight_ = mutual(near)
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed))
            graph = Graph(len(y), self.edge_index_, self.edge_weight_)
            self._train(graph, torch.from_numpy(labelled), torch.from_numpy(targets))
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
        row, column, square = nearest(self.X_, min(int(self.n_neighbors), len(self._states)), self.metric, X)
        reach = farthest(row, square, X.shape[0])
        near = similar(row, column, square, reach, self._reach, float(self.sharpness))
        degree = np.bincount(self.edge_index_[1], self.edge_weight_, len(self._states))
        weights = near.multiply(_inverse_root(near.sum(1))[:, None]).multiply(_inverse_root(degree)).tocsr()
        source = self.model_.encoder(self._features(X)) - self._mean
        # Of all that the energy says of a row, given the rows that it is joined to: a weighted mean.
        beta, mu = self.model_.conv.beta(), self.model_.conv.mu()
        heard, pull = torch.from_numpy(weights @ self._states), torch.from_numpy(weights.sum(1)).unsqueeze(1)
        return self._probabilities((beta * source + mu * heard) / (beta + mu * pull))

    def _train(self, graph: Graph, labelled: Tensor, targets: Tensor) -> None:
        """Make the network, fit it to the labels, and keep where the rows come to rest."""
        model = CertifiedDIFFormer(
            self.X_.shape[1],
            int(self.hidden_channels),
            len(self.classes_),
            num_layers=None,
            penalty=None,
            constraint=None,
            mu=float(self.mu),
            encoder_layers=1,
            centre=True,
            dropout=float(self.dropout),
        ).double()
        model.conv.requires_grad_(False)
        rest, features = at_rest(model.conv, graph), self._features(self.X_)
        labelled_at_rest = rows_at_rest(model.conv, graph, rest, labelled.nonzero().squeeze(1))
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(learned, lr=float(self.learning_rate), weight_decay=float(self.weight_decay))
        with torch.enable_grad():
            for _ in range(self.max_iter):
                optimizer.zero_grad()
                source = model.encoder(features)
                # Constants are at rest, so the decoder may come first: there are fewer classes than channels.
                logits = labelled_at_rest(model.decoder(source - source.mean(0)))
                cross_entropy(logits, targets).backward()
                optimizer.step()
        self.model_ = model.eval()
        with torch.no_grad():
            source = model.encoder(features)
            self._mean = source.mean(0)
            states = rest(source - self._mean)
            self.label_distributions_ = self._probabilities(states)
        self._states = states.numpy()

    def _features(self, X: Any) -> Tensor:
        """What the network reads: rows around zero, of one as their mean square. Sparse rows are scaled only."""
        if not issparse(X):
            return torch.from_numpy((X - self._centre) / self._scale)
        ptr, columns, values = (torch.from_numpy(part) for part in (X.indptr, X.indices, X.data / self._scale))
        return matrix(ptr, columns, values, X.shape[1])

    def _probabilities(self, states: Tensor) -> Any:
        return self.model_.decoder(states).softmax(1).numpy()

    def _check_options(self) -> None:
        """Say what does not fit; scikit-learn wants that said by fit, and not before."""
        for name in ("n_neighbors", "hidden_channels", "max_iter"):
            if as_whole(getattr(self, name), name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
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
