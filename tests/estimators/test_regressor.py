"""``DiffusionRegressor`` against scikit-learn's own checks, dense solves, and Gaussian processes."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from sklearn.datasets import make_friedman1
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score
from sklearn.utils.estimator_checks import check_estimator
from torch_geometric.utils import to_dense_adj

from diffusion_mp.estimators import DiffusionRegressor
from diffusion_mp.estimators.base import Labelled
from diffusion_mp.estimators.regressor import _PRECISIONS
from helpers import refuses

RNG = np.random.default_rng(0)
X = RNG.normal(size=(43, 4))
TRUTH = X[:, 0] + np.sin(3 * X[:, 1]) + 0.1 * RNG.normal(size=43)
Y = np.where(np.arange(43) < 25, TRUTH, np.nan)
NEW = X[:7] + 0.2

# A row of weight two is one row of the graph, and two copies of it are two rows.
NO_COPIES = {
    f"check_sample_weight_equivalence_on_{kind}_data": "a copy of a row is its neighbour"
    for kind in ("dense", "sparse")
}


def fitted(
    x: Any = X, y: Any = Y, sample_weight: Any = None, **options: Any
) -> DiffusionRegressor:
    options = {"n_neighbors": 4, "max_iter": 20, "random_state": 0} | options
    return DiffusionRegressor(**options).fit(x, y, sample_weight)


def same(got: Any, expected: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def laplacian(regressor: DiffusionRegressor) -> np.ndarray:
    """D − W for the weights D^-½AD^-½ of the graph."""
    edges = regressor.edge_index_
    weights = to_dense_adj(edges, edge_attr=regressor.edge_weight_)[0].numpy()
    degree = weights.sum(0)
    weights /= np.sqrt(degree[:, None] * degree)
    return np.diag(weights.sum(1)) - weights


# It constructs with nonsense, which is for fit to refuse.
@pytest.mark.unwatched
@pytest.mark.usefixtures("no_typecheck")
# 300 is the default.
@pytest.mark.parametrize("max_iter", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_scikit_learn_finds_nothing(max_iter: int) -> None:
    results = check_estimator(
        DiffusionRegressor(max_iter=max_iter),
        on_skip=None,
        expected_failed_checks=NO_COPIES,
    )
    skipped = {each["check_name"] for each in results if each["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}
    assert len(results) > 40


def spread(regressor: DiffusionRegressor, precision: float) -> Any:
    """Spread given residuals with a given λ, and return them with the weights of the rows."""
    labelled = np.flatnonzero(~np.isnan(Y))
    residual = RNG.normal(size=len(labelled))
    weights = RNG.random(len(labelled)) + 0.5
    metric = np.zeros(43)
    metric[labelled] = weights
    right = np.zeros(43)
    right[labelled] = weights * residual
    found = regressor._solve(metric, right[:, None], precision)[:, 0]
    return found, metric, right


@pytest.mark.parametrize("precision", [0.03, 3.0])
def test_residuals_spread_to_the_minimiser_of_their_energy(precision: float) -> None:
    regressor = fitted(mu=20.0)
    found, metric, right = spread(regressor, precision)
    field = precision * (np.eye(43) + 20 * laplacian(regressor))
    same(found, np.linalg.solve(np.diag(metric) + field, right))


def test_the_chosen_precision_predicts_held_out_residuals_best() -> None:
    regressor = fitted(mu=20.0, max_iter=1)
    labelled = np.flatnonzero(~np.isnan(Y))
    weights = RNG.random(25) + 0.5
    residual = 3 + X[labelled, 0] + 0.1 * RNG.normal(size=25)
    folds = [(np.empty(0), np.arange(start, 25, 5)) for start in range(5)]
    regressor._spread_residual(Labelled(labelled, residual, weights), residual, folds)
    field = np.eye(43) + 20 * laplacian(regressor)
    errors = {np.inf: weights @ residual**2}
    for precision in _PRECISIONS:
        errors[precision] = 0.0
        for _, predict in folds:
            metric = np.zeros(43)
            metric[labelled] = weights
            metric[labelled[predict]] = 0.0
            right = np.zeros(43)
            right[labelled] = metric[labelled] * residual
            found = np.linalg.solve(np.diag(metric) + precision * field, right)
            left = residual[predict] - found[labelled[predict]]
            errors[precision] += weights[predict] @ left**2
    assert regressor.precision_ == min(errors, key=errors.__getitem__) < np.inf


def test_means_and_deviations_are_those_of_a_gaussian_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The field on the rows and a new row, conditioned on the labelled rows densely."""
    # λ = 0.3 whatever cross-validation would say.
    monkeypatch.setattr("diffusion_mp.estimators.regressor._PRECISIONS", (0.3,))
    smooth = 3 * np.sin(X[:, 0])
    regressor = fitted(y=np.where(np.isnan(Y), np.nan, smooth), max_iter=1)
    assert regressor.precision_ == 0.3
    mean, deviation = regressor.predict(NEW, return_std=True)
    labelled = np.flatnonzero(~np.isnan(Y))
    field = np.eye(43) + 10 * laplacian(regressor)
    pulls = 10 * regressor._edges_to(NEW).toarray()
    posterior = np.diag(~np.isnan(Y) * 1.0) + 0.3 * field
    covariance = np.linalg.inv(posterior)
    residual = regressor.residual_
    # The residuals before they spread: r̂ = K (K + I)⁻¹ e on the labelled rows.
    prior = np.linalg.inv(0.3 * field)[np.ix_(labelled, labelled)]
    start = residual[labelled] + np.linalg.solve(prior, residual[labelled])
    same(residual, covariance[:, labelled] @ start)
    # The maximum of the likelihood over σ², with the covariance σ² (K + I).
    likeliest = start @ np.linalg.solve(prior + np.eye(25), start) / 25
    same(regressor.noise_**2, likeliest)
    function = regressor._in_unit(regressor._function(regressor._scaled(NEW)))
    for row, pull in enumerate(pulls):
        weight = pull / (1 + pull.sum())
        same(mean[row], function[row] + weight @ residual)
        variance = 1 + 1 / (0.3 * (1 + pull.sum())) + weight @ covariance @ weight
        same(deviation[row], regressor.noise_ * np.sqrt(variance))


def test_the_function_is_a_mean_of_ridge_regression_and_network() -> None:
    regressor = fitted(cv=None)
    same(regressor.shares_, [0.5, 0.5])
    same(regressor.residual_, 0)
    labelled = ~np.isnan(Y)
    ridge = RidgeCV(np.logspace(-3, 4, 15)).fit(X[labelled], TRUTH[labelled])
    rows = torch.from_numpy((NEW - X.mean(0)) / (X - X.mean(0)).std())
    network = regressor.network_(rows)[:, 0].numpy()
    of_network = TRUTH[labelled].mean() + TRUTH[labelled].std() * network
    same(regressor.predict(NEW), (ridge.predict(NEW) + of_network) / 2, atol=0.05)
    linear = fitted(y=np.where(np.isnan(Y), np.nan, X @ np.arange(4)), max_iter=1)
    assert linear.shares_[0] > 0.99
    # Rows of hardly any weight count as little, whatever their numbers.
    weights = np.where(np.arange(43) % 5 == 0, 1e-8, 1.0)
    y = np.where(weights < 1, 100 * Y, np.where(np.isnan(Y), np.nan, X @ np.arange(4)))
    assert fitted(y=y, sample_weight=weights, max_iter=1).shares_[0] > 0.99


def test_neighbours_help_where_columns_do_not_explain_the_number() -> None:
    """A number that jumps between many small groups of rows."""
    generator = np.random.default_rng(0)
    group = np.arange(600) % 60
    rows = generator.normal(size=(60, 8))[group] + 0.05 * generator.normal(
        size=(600, 8)
    )
    truth = generator.normal(size=60)[group]
    y = np.where(generator.random(600) < 0.5, truth, np.nan)
    regressor = fitted(rows, y, max_iter=50)
    test = np.isnan(y)
    assert np.isfinite(regressor.precision_)
    residual = regressor.residual_
    with_neighbours, without = (
        np.mean((found - truth)[test] ** 2)
        for found in (regressor.transduction_, regressor.transduction_ - residual)
    )
    assert with_neighbours < 0.5 * without


def test_two_of_three_numbers_lie_within_a_standard_deviation() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(500, 3))
    truth = rows @ [1.0, -2.0, 0.5] + generator.normal(size=500)
    y = np.where(np.arange(500) < 250, truth, np.nan)
    regressor = fitted(rows, y, n_neighbors=10, max_iter=100)
    mean, deviation = regressor.predict(rows[250:], return_std=True)
    inside = np.mean(np.abs(mean - truth[250:]) < deviation)
    assert 0.6 < inside < 0.76
    assert 0.9 < regressor.noise_ < 1.2


def test_only_rows_with_a_number_are_scored() -> None:
    regressor = fitted()
    labelled = ~np.isnan(Y)
    same(regressor.score(X, Y), regressor.score(X[labelled], Y[labelled]))


@pytest.mark.parametrize("kind", [int, float])
def test_minus_one_is_a_number(kind: type) -> None:
    whole = np.round(TRUTH).astype(kind)
    assert (whole == -1).any()
    regressor = fitted(y=whole)
    assert regressor.score(X, whole) == r2_score(whole, regressor.predict(X))


def test_a_number_of_weight_zero_is_no_number() -> None:
    weights = np.where(np.isnan(Y), 0.0, 1.0)
    same(fitted(y=TRUTH, sample_weight=weights).transduction_, fitted().transduction_)


@pytest.mark.parametrize("kind", [pd.DataFrame, sp.csr_array])
def test_rows_may_be_a_frame_or_sparse(kind: Any) -> None:
    centred = X - X.mean(0)  # sparse rows are not centred
    regressor = fitted(kind(centred))
    expected = fitted(centred).predict(centred)
    same(regressor.predict(kind(centred)), expected, atol=1e-6)


def test_one_number_for_all_is_the_prediction() -> None:
    regressor = fitted(y=np.where(np.isnan(Y), np.nan, 7.0), max_iter=300)
    same(regressor.predict(NEW), 7.0, atol=0.2)
    same(fitted(y=np.where(np.arange(43) == 3, 7.0, np.nan), cv=None).noise_, 0)


def test_a_seed_is_a_network() -> None:
    same(fitted().predict(NEW), fitted().predict(NEW), atol=0)
    assert not np.array_equal(
        fitted(random_state=1).predict(NEW), fitted().predict(NEW)
    )


def test_it_is_ahead_of_a_ridge_regression_on_a_curved_function() -> None:
    rows, truth = make_friedman1(400, 10, noise=1.0, random_state=0)
    y = np.where(np.arange(400) % 2, truth, np.nan)
    test = np.isnan(y)
    score = fitted(rows, y, n_neighbors=10, max_iter=300).score(rows[test], truth[test])
    ridge = RidgeCV(np.logspace(-3, 4, 15)).fit(rows[~test], truth[~test])
    assert score > ridge.score(rows[test], truth[test]) + 0.05


test_numbers = refuses(
    (lambda: fitted(y=None), "pass a number for every row"),
    (lambda: fitted(y=np.full(43, np.nan)), "number of some row"),
    (lambda: fitted(y=np.full(43, np.inf)), "y contains infinity"),
    (lambda: fitted(y=np.ones((43, 2))), "y should be a 1d array"),
    (lambda: fitted(y=Y[:-1]), "inconsistent numbers of samples"),
    (lambda: fitted(sample_weight=-np.ones(43)), "Negative values"),
    (lambda: fitted().score(X, np.full(43, np.nan)), "label of some row"),
    (lambda: fitted(mu=-1.0), "mu must"),
    error=ValueError,
)
