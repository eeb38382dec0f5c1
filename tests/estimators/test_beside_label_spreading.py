"""Five labels per class of the digits: the classifier as it comes, beside scikit-learn's tuned ``LabelSpreading``."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.semi_supervised import LabelSpreading

from diffusion_mp.estimators import DiffusionClassifier

X, Y = load_digits(return_X_y=True)
SPREADINGS = [
    *({"kernel": "knn", "n_neighbors": k, "alpha": a} for k, a in product([5, 7, 10, 15], [0.05, 0.2, 0.5, 0.8, 0.95])),
    *({"kernel": "rbf", "gamma": g, "alpha": a} for g, a in product([0.001, 0.003, 0.01, 0.03], [0.2, 0.5, 0.8, 0.95])),
    *({"kernel": "rbf", "gamma": g, "alpha": 0.99} for g in (0.01, 0.03)),
]


def split(seed: int, num_val: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels with -1 for all but five of every class, validation rows, and test rows."""
    order = np.random.default_rng(seed).permutation(len(Y))
    known = np.concatenate([order[Y[order] == digit][:5] for digit in range(10)])
    rest = order[~np.isin(order, known)]
    labels = np.full(len(Y), -1)
    labels[known] = Y[known]
    return labels, rest[:num_val], rest[num_val:]


def accuracy(predicted: np.ndarray, rows: np.ndarray) -> float:
    return 100 * float((predicted[rows] == Y[rows]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("num_val", [100, 500])
def test_as_good_as_label_spreading_tuned_on_validation_labels(num_val: int) -> None:
    """Ten splits, paired: ours never sees a validation label, theirs is the best of all on these."""
    spread, ours = [], []
    for seed in range(100, 110):
        labels, val, test = split(seed, num_val)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            tried = [LabelSpreading(max_iter=100, **options).fit(X, labels).transduction_ for options in SPREADINGS]
        spread.append(accuracy(max(tried, key=lambda predicted: accuracy(predicted, val)), test))
        ours.append(accuracy(DiffusionClassifier(random_state=seed).fit(X, labels).transduction_, test))
        print(f"split {seed}: LabelSpreading {spread[-1]:.2f}, DiffusionClassifier {ours[-1]:.2f}", flush=True)
    difference = np.subtract(ours, spread)
    error = difference.std(ddof=1) / len(difference) ** 0.5
    print(
        f"{num_val} validation labels: {np.mean(spread):.2f}, {np.mean(ours):.2f}; {difference.mean():+.2f} ± {error:.2f}"
    )
    assert difference.mean() >= 0


def test_a_split_of_the_digits() -> None:
    labels, _, test = split(0, 0)
    rows = np.concatenate([np.flatnonzero(labels >= 0), test[:700]])
    classifier = DiffusionClassifier(random_state=0).fit(X[rows], labels[rows])
    transduced = np.full(len(Y), -1)
    transduced[rows] = classifier.transduction_
    plain = LabelSpreading(kernel="knn").fit(X[rows], labels[rows])
    spread = np.full(len(Y), -1)
    spread[rows] = plain.transduction_
    new = test[700:]
    assert accuracy(transduced, test[:700]) > accuracy(spread, test[:700]) > 80
    assert (classifier.predict(X[new]) == Y[new]).mean() > (plain.predict(X[new]) == Y[new]).mean() > 0.8
