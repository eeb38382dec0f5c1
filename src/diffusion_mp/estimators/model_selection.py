"""Cross-validation of estimators that also learn from rows without a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.metrics import get_scorer
from sklearn.model_selection import BaseCrossValidator, KFold, StratifiedKFold
from sklearn.utils import _safe_indexing

from diffusion_mp.checks import as_whole, check_counts, check_flags


def check_known(y: Any) -> None:
    """Raise for None and NaN among classes, which other libraries write where a label is unknown."""
    for row, label in enumerate(np.ravel(np.asarray(y, dtype=object))):
        if not isinstance(label, str) and str(label) in ("None", "nan", "NaT", "<NA>"):
            raise ValueError(
                f"y must hold a label for every row, and the number -1 where it is unknown; got {label} in row {row}."
            )


def _array(y: Any) -> np.ndarray:
    """Return y as an array, of numbers if it has nothing but numbers."""
    # NumPy makes strings of all that a list with names holds.
    kind = object if isinstance(y, (list, tuple)) else None
    y = np.asarray(y, dtype=kind)
    if y.dtype != object:
        return y
    if all(isinstance(label, (int, float, np.number)) for label in y.ravel()):
        # Numbers only, which NumPy compares at once.
        return np.asarray(y.tolist())
    check_known(y)
    return y


def has_label(y: Any) -> np.ndarray:
    """Return a mask of the rows with a label: not -1, or not NaN where y is continuous.

    As in `DiffusionClassifier.fit`, -1 is a class if y has only -1 and 1.
    """
    y = _array(y)
    if y.dtype.kind in "US":  # an array of strings holds no number -1
        return np.ones(len(y), dtype=bool)
    if y.dtype.kind == "f":
        number = ~np.isnan(y)
        # Fractions or NaN: the numbers of a regression, where -1 is a number like any other.
        if (y[number] % 1 != 0).any() or not number.all():
            return number
    known = np.array(y != -1, dtype=bool)
    # Labels 1 and -1 alone are the two classes of scikit-learn, all of them known.
    if known.any() and all(label == 1 for label in y[known]):
        return np.ones(len(y), dtype=bool)
    return known


class LabelledKFold(BaseCrossValidator):
    """Divide the labelled rows into folds; rows without a label are in every training set and in no test set.

    So `cross_val_score` and `GridSearchCV` train with all rows and score labels that were held out::

        cross_val_score(DiffusionClassifier(), X, y, cv=LabelledKFold())

    The folds have equal shares of the classes, as in scikit-learn's ``StratifiedKFold``. Those of a continuous y are
    scikit-learn's ``KFold``.

    Args:
        n_splits: Number of folds.
        shuffle: Shuffle the labelled rows first. The default is True, since rows are often sorted by label.
        random_state: A seed of the shuffling.

    Examples:
        >>> y = [0, 1, -1, 0, 1, -1]
        >>> [(len(train), len(test)) for train, test in LabelledKFold(2).split(y, y)]
        [(4, 2), (4, 2)]
    """

    def __init__(
        self, n_splits: int = 5, *, shuffle: bool = True, random_state: Any = None
    ) -> None:
        check_counts(2, n_splits=as_whole(n_splits, "n_splits"))
        check_flags(shuffle=shuffle)
        self.n_splits = n_splits
        self.shuffle = shuffle
        self.random_state = random_state

    def split(
        self, X: Any, y: Any = None, groups: Any = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of the training set and of the test set, for every fold.

        Args:
            X: Rows of features [N, n_features].
            y: Labels [N], -1 or NaN where they are unknown.
            groups: Not used.
        """
        if y is None:
            raise ValueError(
                "LabelledKFold.split needs y, which says which rows have a label; got None."
            )
        y = _array(y)
        known = np.flatnonzero(has_label(y))
        labels = y[known]
        kind = KFold
        if labels.dtype.kind != "f" or not (labels % 1).any():
            kind = StratifiedKFold
            # An array of objects, which holds names and -1, is no array of labels for scikit-learn.
            _, labels = np.unique(labels, return_inverse=True)
        seed = self.random_state if self.shuffle else None
        folds = kind(self.n_splits, shuffle=self.shuffle, random_state=seed)
        for _, places in folds.split(labels[:, None], labels):
            test = known[places]
            # Rows without a label are in every training set: their places in the graph are known.
            yield np.setdiff1d(np.arange(len(y)), test), test

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Return the number of folds."""
        return int(self.n_splits)


def labelled_scorer(scoring: str | Callable[..., float]) -> Callable[..., float]:
    """Return a scorer that scores the rows with a label.

    scikit-learn's scorers take -1 for one more class.

    Args:
        scoring: The name of a scorer of scikit-learn, such as ``"neg_log_loss"``, or a scorer.

    Examples:
        >>> scorer = labelled_scorer("accuracy")
        >>> classifier = DiffusionClassifier(n_neighbors=2, random_state=0).fit([[0.0], [0.1], [5.0]], [0, 1, 0])
        >>> float(scorer(classifier, [[0.0], [5.0]], [-1, 0]))
        1.0
    """
    scorer = get_scorer(scoring)

    def score(estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
        X, y, sample_weight = labelled_rows(X, y, sample_weight, has_label(y))
        # A function of the user need not take weights.
        if sample_weight is None:
            return float(scorer(estimator, X, y))
        return float(scorer(estimator, X, y, sample_weight=sample_weight))

    return score


def labelled_rows(
    X: Any,
    y: Any,
    sample_weight: Any,
    mask: Any,
) -> tuple[Any, Any, Any]:
    """Return X, y and weights of the rows that have a label, those of the mask."""
    known = np.flatnonzero(mask)
    if not len(known):
        raise ValueError("y must hold the label of some row at least; it has none.")
    labels = np.asarray(y)[known]
    if labels.dtype == object:
        labels = np.array(labels.tolist())  # they are objects only because of -1
    if sample_weight is not None:
        sample_weight = np.asarray(sample_weight)[known]
    return _safe_indexing(X, known), labels, sample_weight
