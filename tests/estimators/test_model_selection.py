"""Cross-validation with rows that have no label: what is trained on, and what is scored."""

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from diffusion_mp.estimators import (
    DiffusionClassifier,
    DiffusionRegressor,
    LabelledKFold,
    labelled_scorer,
)
from helpers import refuses

RNG = np.random.default_rng(0)
TRUTH = np.arange(60) % 3
X = RNG.normal(size=(60, 4)) + 5 * np.eye(4)[TRUTH]
Y = np.where(np.arange(60) % 2, TRUTH, -1)
NAMES = np.where(Y == -1, -1, np.array(["ant", "bee", "cat"], dtype=object)[TRUTH])
NUMBERS = np.where(Y == -1, np.nan, X[:, 0])


@pytest.mark.parametrize("y", [Y, NAMES, NUMBERS], ids=["numbers", "names", "floats"])
def test_rows_without_a_label_are_always_trained_on(y: Any) -> None:
    tested = []
    for train, test in LabelledKFold(5, random_state=0).split(X, y):
        np.testing.assert_array_equal(np.sort([*train, *test]), np.arange(60))
        assert np.isin(np.flatnonzero(Y == -1), train).all()
        tested += test.tolist()
    np.testing.assert_array_equal(np.sort(tested), np.flatnonzero(Y >= 0))


def test_folds_have_the_classes_of_all_labels() -> None:
    for _, test in LabelledKFold(5, random_state=0).split(X, NAMES):
        assert sorted(NAMES[test]) == ["ant", "ant", "bee", "bee", "cat", "cat"]


@pytest.mark.parametrize("y", [Y, NAMES], ids=["numbers", "names"])
def test_cross_validation_gives_the_score_of_held_out_labels(y: Any) -> None:
    classifier = DiffusionClassifier(
        n_neighbors=4, max_iter=20, cv=None, random_state=0
    )
    folds = LabelledKFold(3, random_state=0)
    scores = cross_val_score(classifier, X, y, cv=folds)
    assert scores.min() > 0.8
    search = GridSearchCV(classifier, {"mu": [1.0, 10.0]}, cv=folds).fit(X, y)
    assert search.best_score_ > 0.8


def test_a_regression_is_cross_validated_alike() -> None:
    regressor = DiffusionRegressor(n_neighbors=4, max_iter=20, random_state=0)
    folds = LabelledKFold(3, random_state=0)
    assert cross_val_score(regressor, X, NUMBERS, cv=folds).min() > 0.5


def test_a_scorer_leaves_out_rows_without_a_label() -> None:
    classifier = KNeighborsClassifier(1).fit(X, np.roll(TRUTH, 1))
    predicted = classifier.predict(X)
    expected = balanced_accuracy_score(Y[Y >= 0], predicted[Y >= 0])
    assert labelled_scorer("balanced_accuracy")(classifier, X, Y) == expected
    weights = RNG.random(60)
    expected = balanced_accuracy_score(
        Y[Y >= 0], predicted[Y >= 0], sample_weight=weights[Y >= 0]
    )
    scorer = labelled_scorer("balanced_accuracy")
    assert scorer(classifier, X, Y, sample_weight=weights) == expected


def test_numbers_in_an_array_of_objects_are_numbers() -> None:
    folds = LabelledKFold(5, random_state=0)
    expected = [test.tolist() for _, test in folds.split(X, NUMBERS)]
    found = [test.tolist() for _, test in folds.split(X, NUMBERS.astype(object))]
    assert found == expected


MISSING = np.array([np.nan, "ant", "bee", -1] * 15, dtype=object)


def test_numbers_beside_minus_one_are_scored_as_numbers_where_they_are_objects() -> (
    None
):
    classifier = KNeighborsClassifier(1).fit(X, np.roll(TRUTH, 1))
    scorer = labelled_scorer("accuracy")
    assert scorer(classifier, X, Y.astype(object)) == scorer(classifier, X, Y)


test_folds = refuses(
    (lambda: LabelledKFold(1), "n_splits must"),
    (lambda: next(LabelledKFold().split(X)), "needs y"),
    *(
        (call, "the number -1 where it is unknown; got nan in row 0")
        for call in (
            lambda: next(LabelledKFold().split(X, MISSING)),
            lambda: next(LabelledKFold().split(X, MISSING.tolist())),
            lambda: DiffusionClassifier().fit(X, MISSING),
        )
    ),
    (lambda: labelled_scorer("accurate"), "accurate"),
    error=ValueError,
)
