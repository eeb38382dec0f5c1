"""``DiffusionRegressor``: semi-supervised regression of rows of features, as an estimator of scikit-learn."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from scipy.optimize import nnls
from sklearn.base import RegressorMixin
from sklearn.linear_model import RidgeCV
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.energies import CouplingTerm, Energy, SourceTerm
from diffusion_mp.estimators.base import Folds, Labelled, RowEstimator, rows_tensor
from diffusion_mp.estimators.model_selection import labelled_rows
from diffusion_mp.graph import Graph
from diffusion_mp.updates.minimiser import quadratic_minimiser

_PENALTIES = np.logspace(-3, 4, 15)  # of the ridge regression
_PRECISIONS = (0.03, 0.3, 3.0)  # tried for the residual, relative to the noise
_COLUMNS = 64  # new rows whose variances are computed at a time


class DiffusionRegressor(RegressorMixin, RowEstimator):
    r"""Predict a number for every row: a function of the features, and a residual that spreads over neighbours.

        y_i = f(x_i) + r_i + ε_i

        r̂ = argmin_r Σ_i s_i (y_i − f(x_i) − r_i)² + λ (Σ_i r_i² + (μ/2) Σ_ij a_ij (r_i − r_j)²)

    NaN in y marks a row without a label, whose s_i is zero. f is a mean of a ridge regression and a network of one
    hidden layer, trained on the labelled rows. The weights of the two are found by cross-validation (stacked
    regressions; Breiman, 1996). r̂ is the equilibrium of the diffusion of the residuals over the weighted edges of
    `KNNGraph`. It tends to the harmonic extension of the residuals (Zhu, Ghahramani & Lafferty, 2003) for small λ and
    large μ. The residuals that it starts from are those of the cross-validation, since a network has nearly none on its
    own training rows.

    r̂ is the posterior mean of a Gaussian Markov random field with the precision matrix λ (I + μ L) / σ² and noise of
    variance σ² (Rue & Held, 2005, Section 2.2). :meth:`predict` with ``return_std=True`` adds its standard deviations;
    see also `posterior_variance`. λ is chosen by cross-validation, including λ = ∞ (no residual), and σ² by maximum
    likelihood.

    Args:
        n_neighbors: Number of neighbours of a row in the graph; see `KNNGraph`.
        metric ({"euclidean", "cosine"}): Metric of the graph. "cosine" suits texts, and often images.
        approximate: Search neighbours approximately; see `knn_graph`. Sparse rows are always searched exactly.
        sharpness: Sharpness of the weights of the edges; see `KNNGraph`.
        mu: μ, the weight of neighbours.
        cv: Number of folds of the cross-validation. None takes the mean of both regressions, and no residual.
        hidden_channels: Number of hidden units of the network.
        dropout: Dropout rate on the features in training. None is 0.5, or 0 for fewer than ten columns, as in
            `DiffusionClassifier`. The default 0 and the default weight decay were chosen on two tables of ten columns.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        max_iter: Number of steps of Adam, with 256 rows each.
        random_state (int, RandomState or None): A seed. None trains other networks in every fit.
        verbose: 1 shows a progress bar.

    Attributes:
        transduction_: The prediction for every row of fit [N].
        residual_: r̂ of every row of fit [N].
        shares_: The weights of the ridge regression and of the network [2].
        precision_: λ.
        noise_: σ, in the unit of y.
        linear_: The ridge regression, from scaled rows to scaled y.
        network_: The network, from scaled rows to scaled y.
        edge_index_: The edges of the graph [2, E].
        edge_weight_: The weights of the edges [E].

    Shapes:
        X: [N, n_features], an array, a sparse matrix or a DataFrame.
        y: [N], NaN where it is unknown.

    Examples:
        >>> import numpy as np
        >>> X = np.linspace(0, 1, 50)[:, None]
        >>> y = np.where(np.arange(50) % 5, np.nan, 3 * X[:, 0])
        >>> mean, std = DiffusionRegressor(random_state=0).fit(X, y).predict([[0.5]], return_std=True)
        >>> bool(abs(mean[0] - 1.5) < 0.1)
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DiffusionRegressor:
        """Learn from all rows of X and the numbers of some of them.

        Args:
            X: Rows of features [N, n_features].
            y: Numbers [N], NaN where they are unknown.
            sample_weight: Weights s of the numbers [N]; equal weights by default. A number of weight 0 is not used.
        """
        self._check_options()
        if y is None:
            raise ValueError(
                "DiffusionRegressor requires y to be passed, but the target y is None: pass a number for every row, "
                "and NaN where it is unknown."
            )
        X = validate_data(
            self, X, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2
        )
        y = check_array(
            y,
            dtype=np.float64,
            ensure_2d=False,
            ensure_all_finite="allow-nan",
            input_name="y",
        )
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        # A number of weight zero says as little as NaN.
        known = np.flatnonzero(~np.isnan(y) & (weights > 0))
        if not len(known):
            raise ValueError(
                "y must hold the number of some row at least; every entry is NaN, or has the weight 0."
            )
        numbers = y[known]
        weights = weights[known] / weights[known].mean()
        self._mean = float(np.average(numbers, weights=weights))
        # Equal numbers have no spread to be divided by.
        self._spread = float(numbers.std()) or 1.0
        labelled = Labelled(known, (numbers - self._mean) / self._spread, weights)
        with self._fitting(1) as bar:
            with torch.device("cpu"):
                rows = self._join(X)
            bar.set_description("regressions learn")
            folds = self._folds(labelled.targets, stratified=False)
            residual = self._regress(rows, labelled, folds)
            bar.set_description("residuals spread")
            self._spread_residual(labelled, residual, folds)
            bar.update()
        self.transduction_ = self._in_unit(self._function(rows) + self._residual)
        self.residual_ = self._spread * self._residual
        self.noise_ = self._spread * self._noise
        self.n_iter_ = self.max_iter
        return self

    @torch.no_grad()
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictions [M] of new rows, and with ``return_std`` their standard deviations [M].

        The standard deviation includes the noise: about two of three new numbers lie within it. It is the same for all
        rows, ``noise_``, if λ = ∞ was chosen (``precision_``): then no residual spreads.

        Args:
            X: Rows of features [M, n_features].
            return_std: Whether to return standard deviations too.
        """
        X = self._checked_rows(X)
        weights = self._edges_to(X)
        # A new row moves no old one, so its residual is one equation with one unknown.
        pull = self.mu * weights.sum(1)
        residual = self.mu * (weights @ self._residual) / (1 + pull)
        mean = self._in_unit(self._function(self._scaled(X)) + residual)
        if not return_std:
            return mean
        if np.isinf(self.precision_):
            return mean, np.full(len(mean), self.noise_)
        # Given its neighbours a new row has the variance 1/(λ(1 + pull)); the neighbours are uncertain too.
        variance = 1 + 1 / (self.precision_ * (1 + pull))
        scale = 1 / (1 + pull)
        share = (self.mu * weights.multiply(scale[:, None])).tocsr()
        for first in range(0, len(mean), _COLUMNS):
            rows = slice(first, first + _COLUMNS)
            some = share[rows].toarray().T
            solved = self._solve(self._metric, some, self.precision_)
            variance[rows] += (some * solved).sum(0)
        return mean, self.noise_ * np.sqrt(variance)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R² of the predictions, among the rows with a number.

        Args:
            X: Rows of features [M, n_features].
            y: The number of every row [M], or NaN where it is unknown: such rows do not count.
            sample_weight: Weights of the rows [M]; equal weights by default.
        """
        # Whole numbers are numbers here, and -1 is one of them.
        known = ~np.isnan(np.asarray(y, dtype=np.float64))
        return super().score(*labelled_rows(X, y, sample_weight, known))

    def _regress(self, rows: Any, labelled: Labelled, folds: Folds) -> Any:
        """Fit the regressions and their weights, and return the residuals [R] of rows that were held out."""
        numbers = labelled.targets
        held_out = np.zeros((len(numbers), 2))
        for learn, predict in folds:
            models = self._learned(rows, labelled.some(learn))
            held_out[predict] = _both(models, rows[labelled.rows[predict]])
        self.linear_, self.network_ = self._learned(rows, labelled)
        # With too few numbers to hold any out, nothing tells the two apart.
        self.shares_ = np.array([0.5, 0.5])
        if not folds:
            return np.zeros(len(numbers))
        # Positive weights that sum to one, the latter by a row that outweighs the others.
        root = np.sqrt(labelled.weights)
        system = np.vstack([held_out * root[:, None], np.full((1, 2), 1e3)])
        shares, _ = nnls(system, np.append(numbers * root, 1e3))
        self.shares_ = shares / shares.sum()
        return numbers - held_out @ self.shares_

    def _learned(self, rows: Any, labelled: Labelled) -> Any:
        known, numbers, weights = labelled
        # RidgeCV leaves out one row after the other, and of a single row nothing is left.
        with np.errstate(invalid="ignore"):
            linear = RidgeCV(_PENALTIES).fit(rows[known], numbers, weights)
        targets = torch.from_numpy(numbers).float()
        weight = torch.from_numpy(weights).float()

        def loss(out: Tensor, batch: Tensor) -> Tensor:
            error = out[:, 0] - targets[batch]
            return (weight[batch] * error.square()).mean()

        return linear, self._network(rows, torch.from_numpy(known), 1, loss)

    def _function(self, rows: Any) -> Any:
        return _both((self.linear_, self.network_), rows) @ self.shares_

    def _spread_residual(self, labelled: Labelled, residual: Any, folds: Folds) -> None:
        """Choose λ, and compute the residual of every row and the noise, in the unit of scaled numbers."""
        known, _, weights = labelled
        count = self.X_.shape[0]
        self._residual = np.zeros(count)
        self._metric = np.zeros(count)
        self._metric[known] = weights
        self.precision_ = np.inf
        target = np.zeros((count, 1))
        target[known, 0] = weights * residual
        # λ = ∞, with which no residual spreads, is what others have to beat.
        least = float(weights @ residual**2)
        for precision in _PRECISIONS:
            error = 0.0
            for _, predict in folds:
                held = known[predict]
                # What is held out is unknown to the solve, like a row without a number.
                metric = self._metric.copy()
                metric[held] = 0
                some = target.copy()
                some[held] = 0
                found = self._solve(metric, some, precision)[held, 0]
                left = residual[predict] - found
                error += float(weights[predict] @ left**2)
            if error and error < least:
                least = error
                self.precision_ = precision
        if np.isfinite(self.precision_):
            found = self._solve(self._metric, target, self.precision_)
            self._residual = found[:, 0]
        # The maximum-likelihood variance: rᵀ (K/λ + I)⁻¹ r / n, whose matrix leaves what the field does not explain.
        left = residual - self._residual[known]
        square = weights @ (residual * left)
        self._noise = float(np.sqrt(max(square, 0.0) / len(left)))

    def _solve(self, metric: Any, columns: Any, precision: float) -> Any:
        """Return (diag(metric) + λ (I + μ L))⁻¹ times columns [N, K]."""
        graph = Graph(len(metric), self.edge_index_, self.edge_weight_)
        weights = torch.from_numpy(metric + precision)
        right = torch.from_numpy(columns) / weights[:, None]
        with torch.device("cpu"), torch.no_grad():
            coupling = AdjacencyDiffusivity("sym")(right, graph)
            terms = [
                SourceTerm(right, weights),
                precision * self.mu * CouplingTerm(coupling),
            ]
            energy = Energy(terms, graph=graph)
            least = torch.tensor(precision, dtype=torch.float64)
            found = quadratic_minimiser(energy, right[:, None], least)
        return cast("Tensor", found)[:, 0].numpy()

    def _in_unit(self, numbers: Any) -> Any:
        return self._mean + self._spread * numbers


def _both(models: tuple[Any, Any], rows: Any) -> Any:
    """Return the predictions [M, 2] of the ridge regression and the network."""
    linear, network = models
    of_network = network(rows_tensor(rows))[:, 0].numpy()
    return np.stack([linear.predict(rows), of_network], axis=1)
