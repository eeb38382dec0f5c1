"""What the estimators of rows share: the graph of nearest neighbours, a network on the features, and folds."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from sklearn.base import BaseEstimator
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from tqdm import tqdm

from diffusion_mp.checks import (
    as_whole,
    check_counts,
    check_positive,
    check_probability,
    python_number,
)
from diffusion_mp.data.knn import KNNGraph, Metric, comparable
from diffusion_mp.kernels.spmm import matrix
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.runtime.precision import inverse_root
from diffusion_mp.runtime.progress import progress_bar, show_progress

#: Places of labelled rows to learn from, and to predict, for every fold.
Folds = list[tuple[Any, Any]]
_BATCH = 256  # rows per step of Adam
_COLUMNS = 10  # with fewer, dropout removes what distinguishes the rows
# Held while a fit draws from torch's generator: dropout and initialisation know no other, and all threads share it.
_DRAWING = threading.Lock()


class Labelled(NamedTuple):
    """The labelled rows: their numbers [R], what is known of them [R, …], and weights [R]."""

    rows: Any
    targets: Any
    weights: Any

    def some(self, places: Any) -> Labelled:
        return Labelled(self.rows[places], self.targets[places], self.weights[places])


# A dataclass has the constructor that scikit-learn asks for: every option is an argument and an attribute of that name.
@dataclass(eq=False, repr=False)
class RowEstimator(BaseEstimator):
    """Base class of estimators of rows: options, the graph of the rows of fit, and what training needs."""

    n_neighbors: int = 10
    metric: Metric = "euclidean"
    _: KW_ONLY
    approximate: bool = False
    sharpness: float = 8.0
    mu: float = 10.0
    cv: int | None = 3
    hidden_channels: int = 256
    dropout: float | None = 0.0
    learning_rate: float = 0.002
    weight_decay: float = 1e-2
    max_iter: int = 300
    random_state: Any = None
    verbose: int = 0

    def _check_options(self) -> None:
        """Validate options, in fit and not in the constructor, as scikit-learn requires."""
        for name in ("n_neighbors", "hidden_channels", "max_iter"):
            check_counts(**{name: as_whole(getattr(self, name), name)})
        if self.cv is not None:
            check_counts(2, cv=as_whole(self.cv, "cv"))
        if not isinstance(self.verbose, (bool, np.bool_)):
            check_counts(0, verbose=as_whole(self.verbose, "verbose"))
        for name in ("mu", "learning_rate"):
            check_positive(python_number(getattr(self, name)), name)
        check_positive(
            python_number(self.weight_decay), "weight_decay", allow_zero=True
        )
        if self.dropout is not None:
            check_probability(python_number(self.dropout), "dropout")
        # Which checks the options of the graph.
        self._knn = KNNGraph(
            self.n_neighbors,
            self.metric,
            sharpness=python_number(self.sharpness),
            approximate=self.approximate,
        )

    @contextmanager
    def _fitting(self, steps: int) -> Iterator[tqdm[Any]]:
        """Show progress, and draw random numbers from ``random_state`` alone."""
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        with (
            show_progress(bool(self.verbose)),
            progress_bar("neighbours", "round", steps, delay=0, leave=True) as bar,
            torch.inference_mode(False),  # a network is trained
            _DRAWING,
            torch.random.fork_rng(devices=[]),
        ):
            torch.default_generator.manual_seed(seed)
            yield bar

    def _join(self, X: Any) -> Any:
        """Keep rows and their graph, and return the rows scaled: their mean is 0 and their mean square 1."""
        self.X_ = X
        self.edge_index_, self.edge_weight_, self._reach = self._knn._graph(X)
        rows = comparable(X, X, self.metric)
        # One scale for all columns, so that the network sees the distances that the neighbours are found by.
        if issparse(rows):
            self._centre = 0.0  # to subtract a mean would fill in the zeros
            square = (rows.data**2).sum() / np.prod(rows.shape)
        else:
            self._centre = rows.mean(0)
            square = ((rows - self._centre) ** 2).mean()
        self._scale = float(square**0.5) or 1.0
        return self._scaled(X)

    def _scaled(self, X: Any) -> Any:
        X = comparable(X, self.X_, self.metric)
        if issparse(X):
            return X / self._scale
        return (X - self._centre) / self._scale

    def _checked_rows(self, X: Any) -> Any:
        """Return new rows as an array of the kind of the rows of fit."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        # Neighbours are found among rows of one kind; sparse rows of fit are never filled in, they may not fit.
        if issparse(X) != issparse(self.X_):
            X = csr_array(X) if issparse(self.X_) else X.toarray()
        return X

    def _edges_to(self, X: Any) -> csr_array:
        """Return the normalised weights [M, N] of the edges from the rows of fit to new rows."""
        near, _ = self._knn._weights(self.X_, X, self._reach)
        near = near.tocsr()
        degree = np.bincount(self.edge_index_[1], self.edge_weight_, self.X_.shape[0])
        # D^-½AD^-½ with the degrees of fit: a new row must not change the weights of the old ones, nor of each other.
        rows = inverse_root(torch.from_numpy(near.sum(1))).numpy()
        columns = inverse_root(torch.from_numpy(degree)).numpy()
        return near.multiply(rows[:, None]).multiply(columns).tocsr()

    def _network(
        self,
        X: Any,
        rows: Tensor,
        outputs: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> nn.Sequential:
        """Train a network of one hidden layer on some rows of X; ``loss`` takes its outputs and places in ``rows``."""
        width = int(self.hidden_channels)  # torch takes no integers of NumPy
        with torch.device("cpu"):
            network = nn.Sequential(
                FeatureLinear(X.shape[1], width),
                nn.ReLU(),
                nn.Linear(width, outputs),
            ).float()
        rate = self.dropout
        if rate is None:
            rate = 0.5 * (X.shape[1] >= _COLUMNS)
        optimizer = torch.optim.Adam(
            network.parameters(),
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            fused=True,  # half the time for 80 000 columns
        )
        X = X[rows.numpy()].astype(np.float32)
        with torch.enable_grad():
            for batch in islice(_batches(len(rows)), self.max_iter):
                optimizer.zero_grad()
                features = dropout(rows_tensor(X[batch.numpy()]), rate)
                loss(network(features), batch).backward()
                optimizer.step()
        # Evaluated in double precision: in single precision the rounding of a row depends on the rows beside it.
        return network.double().requires_grad_(False)

    def _folds(self, kinds: Any, stratified: bool) -> Folds:
        """Return the places [R] of labelled rows to learn from and to predict, for every fold; none without ``cv``."""
        if self.cv is None or len(kinds) < 2:
            return []
        splitter = KFold
        splits = min(self.cv, len(kinds))
        if stratified:
            splitter = StratifiedKFold
            splits = min(splits, int(np.bincount(kinds).max()))
            # Without a class of two labels no fold can learn a class and predict it.
            if splits < 2:
                return []
        seed = int(torch.randint(2**31 - 1, (), device="cpu"))
        folds = splitter(splits, shuffle=True, random_state=seed)
        with warnings.catch_warnings():
            # A class with fewer labels than folds is not in all of them, which does no harm.
            warnings.filterwarnings("ignore", message="The least populated class")
            return list(folds.split(np.zeros((len(kinds), 1)), kinds))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _batches(num_rows: int) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(num_rows, device="cpu").split(_BATCH)


def rows_tensor(X: Any) -> Tensor:
    """Return rows as a tensor, sparse where they are sparse."""
    # Rows of texts stay sparse as far as the first linear map; a matrix of torch is made from the parts without a copy.
    if not issparse(X):
        return torch.from_numpy(X)
    ptr, columns, values = (
        torch.from_numpy(part) for part in (X.indptr, X.indices, X.data)
    )
    return matrix(ptr, columns, values, X.shape[1])
