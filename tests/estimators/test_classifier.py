"""``DiffusionClassifier`` against scikit-learn's own checks, formulas, and the network that is inside."""

import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_moons
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading
from sklearn.utils.estimator_checks import check_estimator
from torch.autograd import grad
from torch_geometric.data import Data

from diffusion_mp import certify
from diffusion_mp.data import knn_graph
from diffusion_mp.estimators import DiffusionClassifier
from diffusion_mp.estimators import classifier as classifier_module
from helpers import refuses

RNG = np.random.default_rng(0)
TRUTH = np.arange(41) % 3
X = RNG.normal(size=(41, 5)) + 3 * np.eye(5)[TRUTH]
Y = np.where(np.arange(41) < 9, TRUTH, -1)


def fitted(
    x: Any = X, y: Any = Y, sample_weight: Any = None, **options: Any
) -> DiffusionClassifier:
    # The diffusion by itself, unless a test asks for the logistic regression.
    defaults = {"n_neighbors": 4, "max_iter": 20, "random_state": 0, "cv": None}
    options = defaults | options
    return DiffusionClassifier(**options).fit(x, y, sample_weight)


equal = np.testing.assert_array_equal


def same(got: Any, expected: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def some(labels: np.ndarray, labelled: Any) -> np.ndarray:
    """Labels, and -1 where none is known."""
    return np.where(labelled, labels, -1)


# A row of weight two is one row of the graph, and two copies of it are two rows.
NO_COPIES = {
    f"check_sample_weight_equivalence_on_{kind}_data": "a copy of a row is its neighbour"
    for kind in ("dense", "sparse")
}


# It constructs with nonsense, which is for fit to refuse.
@pytest.mark.unwatched
@pytest.mark.usefixtures("no_typecheck")
# 300 is the default.
@pytest.mark.parametrize("max_iter", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_scikit_learn_finds_nothing(max_iter: int) -> None:
    results = check_estimator(
        DiffusionClassifier(max_iter=max_iter),
        on_skip=None,
        expected_failed_checks=NO_COPIES,
    )
    skipped = {each["check_name"] for each in results if each["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}
    assert len(results) > 40


@pytest.mark.parametrize(("metric", "sharpness"), [("euclidean", 8), ("cosine", 4.5)])
def test_what_network_and_labels_say_is_spread_to_rest(
    metric: Any, sharpness: float
) -> None:
    classifier = fitted(metric=metric, sharpness=sharpness, mu=30.0)
    assert torch.equal(
        classifier.edge_index_, knn_graph(torch.from_numpy(X), 4, metric)
    )
    rows = torch.from_numpy(X)
    if metric == "cosine":
        rows = rows / rows.norm(dim=1, keepdim=True)
    square = (rows[:, None] - rows).square().sum(2)
    # The first of the five is the row itself.
    reach = square.kthvalue(5, dim=1).values.sqrt()
    near = torch.zeros(41, 41)
    near[tuple(classifier.edge_index_)] = 1
    adjacency = near * (-sharpness * square / reach.outer(reach)).exp()
    weights = adjacency / adjacency.sum(0).outer(adjacency.sum(1)).sqrt()
    system = torch.eye(41) + 30 * (weights.sum(1).diag() - weights)
    centred = rows - rows.mean(0)
    source = classifier.network_(centred / centred.std(correction=0)).softmax(1)
    source[Y >= 0] = torch.eye(3, dtype=torch.float64)[TRUTH[Y >= 0]]
    same(source, classifier.sources_, atol=1e-12)
    same(torch.linalg.solve(system, source), classifier.states_)
    graph = Data(
        x=source, edge_index=classifier.edge_index_, edge_weight=classifier.edge_weight_
    )
    assert certify(classifier.conv_, graph)


Lessons = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> Lessons:
    """Rows and targets that every network learns from."""
    lessons = []
    learned = DiffusionClassifier._learned

    def recorded(self: Any, scaled: Any, rows: torch.Tensor, *others: Any) -> Any:
        lessons.append((rows, others[0]))
        return learned(self, scaled, rows, *others)

    monkeypatch.setattr(DiffusionClassifier, "_learned", recorded)
    return lessons


def test_the_first_network_learns_what_labels_alone_say(taught: Lessons) -> None:
    # A wrong label, so that the majority is not always a row's own.
    y = np.where(np.arange(41) == 0, 1, Y)
    classifier = fitted(y=y, mu=100.0, rounds=2)
    weights = np.zeros((41, 41))
    weights[tuple(classifier.edge_index_)] = classifier.edge_weight_
    degree = weights.sum(0)
    weights /= np.sqrt(degree[:, None] * degree)
    labelled = y >= 0
    # Ten times μ.
    system = np.eye(41) + 1000 * (np.diag(weights.sum(1)) - weights)
    spread = np.linalg.solve(system, np.eye(3)[y] * labelled[:, None])
    reached = np.flatnonzero(spread.sum(1) > 1e-12)
    expected = np.where(labelled, y, spread.argmax(1))
    assert (expected != spread.argmax(1)).any()
    (first, targets), (second, _) = taught
    equal(first, reached)
    equal(targets, expected[reached])
    equal(second, np.arange(41))


def test_a_row_that_no_label_reaches_is_left_to_the_network(taught: Lessons) -> None:
    apart = X + 100 * (np.arange(41) >= 30)[:, None]
    classifier = fitted(apart, max_iter=100)
    source, target = classifier.edge_index_
    assert (source[target >= 30] >= 30).all()
    same(classifier.states_.sum(1), 1)
    (first, _), (second, _) = taught
    equal(first, np.arange(30))
    equal(second, np.arange(41))


def test_classes_are_as_frequent_as_among_the_labels_or_equally_frequent() -> None:
    """Bayes decides at 2.23 between classes of 90 and 10 %, and at 1.5 between equal ones."""
    generator = np.random.default_rng(0)
    y = (generator.random(2000) < 0.1).astype(int)
    x = (generator.normal(size=2000) + 3 * y)[:, None]
    grid = np.linspace(-1, 5, 601)[:, None]
    for class_weight, bayes in ((None, 2.23), ("balanced", 1.5)):
        classifier = DiffusionClassifier(
            class_weight=class_weight, max_iter=100, random_state=0
        )
        predicted = classifier.fit(x, y).predict(grid)
        # Neighbours are few, so there may be islands beside the boundary.
        boundary = -1 + 6 * (predicted == 0).mean()
        assert abs(boundary - bayes) < 0.25


def test_every_class_counts_as_its_labels_in_training() -> None:
    """From one constant column a network learns how frequent the classes are."""
    classifier = fitted(max_iter=1)
    classifier.set_params(
        max_iter=300, learning_rate=0.05, dropout=0.0, weight_decay=0.0
    )
    classes = torch.tensor([0] * 30 + [1] * 9 + [2] * 2)
    shares = torch.tensor([1.0, 1.0, 2.0])
    network = classifier._learned(np.ones((41, 1)), torch.arange(41), classes, shares)
    found = network(torch.ones(1, 1, dtype=torch.float64)).softmax(1)
    same(found, [[0.25, 0.25, 0.5]], atol=1e-3)


def test_a_weight_of_a_class_multiplies_its_probability() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2] * 6 + [0] * 5)  # 23, 12 and 6 of them
    alike = fitted(y=labels)
    new = X + 0.3
    for class_weight, expected in (
        ("balanced", [1 / 23, 1 / 12, 1 / 6]),
        ({0: 1, 1: 9, 2: 0.5}, [1, 9, 0.5]),
    ):
        classifier = fitted(y=labels, class_weight=class_weight)
        weighted = alike.predict_proba(new) * expected
        same(classifier.predict_proba(new), weighted / weighted.sum(1, keepdims=True))
        weighted = alike.label_distributions_ * expected
        equal(classifier.transduction_, weighted.argmax(1))


def test_the_share_of_the_logistic_regression_is_the_likeliest() -> None:
    generator = np.random.default_rng(0)
    likelihoods = generator.random((50, 2))
    weights = generator.random(50) + 0.5
    found = classifier_module._share_of_second(likelihoods, weights)
    rows = np.vstack([likelihoods, np.eye(2)])
    all_weights = np.append(weights / weights.mean(), [1, 1])
    tried = np.linspace(0.001, 0.999, 999)
    mixed = np.outer(1 - tried, rows[:, 0]) + np.outer(tried, rows[:, 1])
    assert abs(found - tried[(np.log(mixed) @ all_weights).argmax()]) < 2e-3


def test_probabilities_are_mixed_with_those_of_the_logistic_regression() -> None:
    classifier = fitted(cv=3)
    assert 0 < classifier.linear_share_ < 1
    alone = fitted(cv=3)
    new = X + 0.2
    alone.linear_share_ = 0.0
    diffused = alone.predict_proba(new)
    linear = LogisticRegression(max_iter=1000).fit(
        classifier._scaled(X)[Y >= 0], Y[Y >= 0]
    )
    expected = linear.predict_proba(classifier._scaled(new))
    share = classifier.linear_share_
    expected = share * expected + (1 - share) * diffused
    same(classifier.predict_proba(new), expected)
    # A held-out label is a row without a label: the share does not depend on how y is given.
    equal(fitted(cv=3).linear_share_, share)
    assert DiffusionClassifier().cv == 3


def test_a_logistic_regression_takes_over_where_neighbours_say_nothing() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(400, 30))
    rows[:, 1:] *= 3
    truth = (rows[:, 0] > 0).astype(int)
    y = some(truth, np.arange(400) < 200)
    # The network hardly learns, or it would find the column as well.
    classifier = fitted(rows, y, max_iter=1, cv=3)
    assert classifier.linear_share_ > 0.8
    test = y == -1
    both, diffused = (
        (found[test].argmax(1) == truth[test]).mean()
        for found in (classifier.label_distributions_, classifier.states_)
    )
    assert both > 0.8
    assert diffused < 0.7


def test_a_label_of_weight_zero_is_no_label(taught: Lessons) -> None:
    weights = np.where(np.arange(41) < 6, 1.0, 0.0)
    labels = np.where(np.arange(41) < 6, Y, -1)
    names = np.array(["ant", "bee", "cat"])[TRUTH]
    expected = fitted(y=labels).label_distributions_
    for y in (Y, TRUTH, names):
        found = fitted(y=y, sample_weight=weights).label_distributions_
        equal(found, expected)


def test_a_weight_of_two_is_two_labels() -> None:
    """Of two labelled rows at one place the heavier decides."""
    rows = np.zeros((12, 2))
    rows[6:] = 5.0
    y = np.array([0, 1, *[-1] * 4, 2, *[-1] * 5])
    for heavy in (0, 1):
        weights = np.ones(12)
        weights[heavy] = 5
        classifier = fitted(rows, y, sample_weight=weights, cv=2)
        assert (classifier.transduction_[2:6] == heavy).all()


def quiet(*arguments: Any, **options: Any) -> DiffusionClassifier:
    """Fit without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fitted(*arguments, **options)


def test_it_warns_if_predictions_have_other_shares_than_labels() -> None:
    generator = np.random.default_rng(0)
    truth = (np.arange(600) % 10 == 0).astype(int)
    rows = generator.normal(size=(600, 4)) + 6 * truth[:, None]
    # Thirty labels of each class, and one row in ten is of the second.
    by_class = np.isin(np.arange(600), np.r_[301:331, 0:300:10])
    by_class &= (np.arange(600) < 300) | (truth == 0)
    y = some(truth, by_class)
    with pytest.warns(UserWarning, match="frequency}; 'balanced' changes") as caught:
        classifier = fitted(rows, y, max_iter=100)
    share = (classifier.transduction_[y == -1] == 0).mean()
    assert (
        f"(0: {by_class[truth == 0].sum() / by_class.sum():.1%} and {share:.1%}, 1:"
        in str(caught[0].message)
    )
    # With the true frequencies of the classes there is nothing to say.
    known = quiet(rows, y, max_iter=100, class_weight={0: 0.9, 1: 0.1})
    assert (known.transduction_ == truth).mean() > 0.99
    quiet(rows, some(truth, np.arange(600) < 60))
    quiet(rows, y, class_weight="balanced")
    quiet(rows, np.eye(2)[truth] * 0.8 + 0.1)  # known in part


def test_it_warns_if_a_rare_class_is_seldom_predicted() -> None:
    """Few labels of it are enough, where so many are no chance."""
    generator = np.random.default_rng(0)
    truth = (generator.random(1000) < 0.05).astype(int)
    rows = generator.normal(size=(1000, 4)) + 1.2 * truth[:, None] * np.eye(4)[0]
    y = some(truth, np.arange(1000) < 200)
    with pytest.warns(UserWarning, match=r"\(1: .*'balanced' if all classes"):
        fitted(rows, y, max_iter=100)
    quiet(rows, y, max_iter=100, class_weight="balanced")
    quiet(rows + 6 * truth[:, None], y, max_iter=100)
    # A few labels of equal weight are as many labels, however large the weight.
    few = some(truth, np.arange(1000) < 60)
    quiet(rows, few, max_iter=100, sample_weight=np.full(1000, 10.0))


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        ([192, 8], [1786, 14], True),
        ([192, 8], [1736, 64], False),  # within a factor of two
        ([48, 2], [450, 0], False),  # by chance
        ([192, 8], [5, 0], False),  # too few rows to tell
        ([500, 500], [4000, 6000], False),  # ten points
        ([500, 500], [3800, 6200], True),
        ([3, 3], [0, 0], False),
    ],
)
def test_shares_differ_much_and_not_by_chance(
    labels: list[int], predicted: list[int], expected: bool
) -> None:
    found = classifier_module._differ(np.array(labels), np.array(predicted))
    assert found.any() == expected


def test_only_rows_with_a_label_are_scored() -> None:
    classifier = fitted()
    right = classifier.predict(X) == TRUTH
    assert classifier.score(X, Y) == right[Y >= 0].mean()
    weights = np.arange(41.0)
    expected = np.average(right[Y >= 0], weights=weights[Y >= 0])
    same(classifier.score(X, Y, weights), expected)


def test_rounds_get_better_where_features_say_more_than_neighbours() -> None:
    """Two of fifty columns tell the classes apart, which neighbours hardly show, and a network finds out."""
    generator = np.random.default_rng(0)
    truth = np.arange(600) % 2
    rows = generator.normal(size=(600, 50)) + 2.5 * np.eye(50)[truth]
    y = some(truth, np.arange(600) < 40)
    models = (
        DiffusionClassifier(rounds=4, cv=None, random_state=0),
        DiffusionClassifier(rounds=1, cv=None, random_state=0),
        LabelSpreading(kernel="knn", n_neighbors=10),
    )
    often, once, plain = (
        (model.fit(rows, y).transduction_ == truth)[y == -1].mean() for model in models
    )
    assert often > once > plain


def test_a_new_row_goes_where_its_energy_is_least() -> None:
    classifier = fitted(mu=20.0)
    degree = np.bincount(classifier.edge_index_[1], classifier.edge_weight_, 41)
    centred = X - X.mean(0)
    new = RNG.normal(size=(7, 5)) + 1
    for row, probabilities in zip(new, classifier.predict_proba(new), strict=True):
        distance = np.linalg.norm(X - row, axis=1)
        near = distance.argsort()[:4]
        reach = np.sort(np.linalg.norm(X[near][:, None] - X, axis=2), axis=1)[:, 4]
        alike = np.exp(-8 * distance[near] ** 2 / (distance[near].max() * reach))
        pull = torch.from_numpy(alike / np.sqrt(alike.sum() * degree[near]))
        scaled = torch.from_numpy((row - X.mean(0)) / centred.std())
        source = classifier.network_(scaled).softmax(0)
        heard = torch.from_numpy(classifier.states_[near])
        z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        apart = 20 * (pull.unsqueeze(1) * (z - heard).square()).sum()
        (slope,) = grad((z - source).square().sum() + apart, z)
        # A step of Newton's, of a quadratic function.
        same(probabilities, -slope / (2 * (1 + 20 * pull.sum())))


def test_two_moons_of_two_columns() -> None:
    """Dropout of one of two columns would leave nothing that tells the moons apart."""
    x, y = make_moons(300, noise=0.1, random_state=0)
    order = np.argsort(y, kind="stable")
    labelled = np.isin(np.arange(300), order[[*range(5), *range(150, 155)]])
    classifier, plain = (
        DiffusionClassifier(random_state=0, **options).fit(x, some(y, labelled))
        for options in ({}, {"dropout": 0.0})
    )
    assert (classifier.transduction_ == y).mean() > 0.95
    equal(classifier.transduction_, plain.transduction_)


def test_a_text_without_any_known_word_is_predicted_all_the_same() -> None:
    empty = np.abs(X) * (np.arange(41) != 40)[:, None]
    classifier = fitted(empty, metric="cosine")
    assert 40 not in classifier.edge_index_  # nobody is near
    assert np.isfinite(classifier.label_distributions_).all()
    assert np.isfinite(classifier.predict_proba(np.zeros((1, 5)))).all()


def test_sparse_and_dense_rows_are_the_same_rows() -> None:
    centred = X - X.mean(0)  # sparse rows are not centred
    # Of sparse rows only what is stored can be dropped.
    dense = fitted(centred, dropout=0.0)
    expected = dense.predict_proba(centred)
    for rows in (sp.csr_matrix(centred), sp.coo_array(centred)):
        sparse = fitted(rows, dropout=0.0)
        same(sparse.label_distributions_, dense.label_distributions_, atol=1e-8)
        for model, new in product((sparse, dense), (rows, centred)):
            same(model.predict_proba(new), expected, atol=1e-8)


def test_approximate_neighbours_are_exact_where_all_clusters_are_visited() -> None:
    rows = RNG.normal(size=(400, 5))
    labels = some(np.arange(400) % 2, np.arange(400) < 20)
    classifier, exact = (
        fitted(rows, labels, approximate=approximate) for approximate in (True, False)
    )
    assert torch.equal(classifier.edge_index_, exact.edge_index_)
    same(classifier.predict_proba(rows + 0.1), exact.predict_proba(rows + 0.1))


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_no_unit_is_too_large_or_too_small(metric: Any, kind: Any) -> None:
    classifier = fitted(kind(X), metric=metric)
    expected = classifier.predict_proba(kind(X[:9] + 0.1))
    for scale in (1e-200, 1e-20, 1e20, 1e200):
        scaled = fitted(kind(scale * X), metric=metric)
        same(scaled.label_distributions_, classifier.label_distributions_)
        same(scaled.predict_proba(kind(scale * (X[:9] + 0.1))), expected)


EXTREME: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda rows: rows,
    "huge": lambda rows: 1e200 * rows,
    # Of one sign: scikit-learn itself warns where the sum of all entries is infinity less infinity.
    "the largest": lambda rows: np.where(rows > 0, np.finfo(float).max, rows),
    "tiny": lambda rows: 1e-200 * rows,
    "subnormal": lambda rows: np.sign(rows) * 5e-324,
    "far from the origin": lambda rows: rows + 1e15,
    "constant": np.ones_like,
    "zero": np.zeros_like,
    "units apart": lambda rows: rows * np.array([1e300, 1e-300, 1.0, 1.0, 0.0]),
    "copies": lambda rows: rows[np.arange(len(rows)) % 3],
}


# Rows that are all alike are all of one class.
@pytest.mark.filterwarnings("ignore:The labels, and the predicted:UserWarning")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
@pytest.mark.parametrize("name", EXTREME)
def test_rows_of_any_size_have_probabilities_without_a_warning(
    name: str, kind: Any, metric: Any
) -> None:
    classifier = fitted(kind(EXTREME[name](X)), metric=metric, max_iter=2, rounds=1)
    for new in EXTREME.values():
        probabilities = classifier.predict_proba(kind(new(X[:5])))
        assert (probabilities >= 0).all()
        np.testing.assert_allclose(probabilities.sum(1), 1.0)


def test_labels_are_names_in_a_frame() -> None:
    frame = pd.DataFrame(X, columns=list("abcde"))
    names = np.array(["ant", "bee", "cat"], dtype=object)[TRUTH]
    some = pd.Series(np.where(Y == -1, -1, names), dtype=object)
    classifier = fitted(frame, some)
    assert classifier.classes_.tolist() == ["ant", "bee", "cat"]
    assert classifier.feature_names_in_.tolist() == list("abcde")
    equal(classifier.transduction_, names[fitted().transduction_])
    equal(classifier.predict(frame), names[fitted().predict(X)])


def test_a_distribution_may_stand_for_a_label() -> None:
    sure = np.eye(3)[TRUTH] * (Y >= 0)[:, None]
    equal(fitted(y=sure).label_distributions_, fitted().label_distributions_)
    # Two candidates of equal probability, one of which is right.
    wrong = (TRUTH + RNG.integers(1, 3, size=41)) % 3
    halves = 0.5 - 0.5 * np.eye(3)[wrong]
    y = pd.DataFrame(halves) * (np.arange(41) < 30)[:, None]
    classifier = fitted(y=y, rounds=4, max_iter=100)
    equal(classifier.sources_[:30], halves[:30])
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert (classifier.transduction_ == TRUTH).mean() > 0.9


def test_a_network_learns_the_likeliest_candidate(taught: Lessons) -> None:
    y = np.eye(3)[TRUTH] * (Y >= 0)[:, None]
    # Neighbours of the first are of class 0, which it excludes.
    y[:2] = [[0, 0.1, 0.9], [0.5, 0.5, 0]]
    fitted(y=y, rounds=1)
    assert taught[0][1][:2].tolist() == [2, 1]


def test_minus_one_beside_one_is_a_class() -> None:
    signs = np.where(TRUTH > 0, 1, -1)
    with pytest.warns(UserWarning, match="y holds -1 and 1 alone"):
        classifier = fitted(y=signs)
    numbers = fitted(y=(signs > 0).astype(int))
    equal(classifier.predict_proba(X), numbers.predict_proba(X))
    negative = signs == -1
    expected = (classifier.predict(X[negative]) == -1).mean()
    assert classifier.score(X[negative], signs[negative]) == expected
    assert fitted(y=np.where(TRUTH > 0, 2, -1)).classes_.tolist() == [2]


def test_a_seed_is_a_network_and_nobody_elses_randomness() -> None:
    before = torch.get_rng_state()
    first = fitted().label_distributions_
    other = fitted(random_state=1).label_distributions_
    with torch.no_grad():
        equal(fitted().label_distributions_, first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not np.array_equal(first, other)


def test_threads_modes_and_devices_change_no_number() -> None:
    expected = fitted().label_distributions_
    with ThreadPoolExecutor(4) as threads:
        classifier = list(threads.map(lambda _: fitted(), range(6)))
    with torch.inference_mode(), torch.device("meta"):
        classifier.append(fitted())
    for each in classifier:
        equal(each.label_distributions_, expected)


@pytest.mark.parametrize("kind", [bool, int])
def test_flags_and_numbers_beside_minus_one_may_be_objects(kind: type) -> None:
    labels = [kind(label > 0) if label >= 0 else -1 for label in Y]
    classifier = fitted(y=np.array(labels, dtype=object))
    assert classifier.classes_.tolist() == [kind(0), kind(1)]
    equal(classifier.predict_proba(X), fitted(y=np.minimum(Y, 1)).predict_proba(X))


@pytest.mark.parametrize("verbose", [0, False, 1, True])
def test_it_shows_how_far_it_is(
    verbose: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(rounds=3, verbose=verbose)
    out, err = capsys.readouterr()
    assert not out
    for words in ("neighbours", "a network learns", "3/3"):
        assert (words in err) == bool(verbose)


# Arrays, whose numbers are NumPy's.
SEARCHED = {
    "n_neighbors": np.arange(3, 5),
    "mu": np.array([10, 100]),
    "hidden_channels": np.array([8]),
}


@pytest.mark.usefixtures("no_typecheck")
def test_it_is_searched_in_a_pipeline_and_pickled() -> None:
    steps = StandardScaler(), DiffusionClassifier(max_iter=5, random_state=0)
    options = {f"diffusionclassifier__{name}": SEARCHED[name] for name in SEARCHED}
    search = GridSearchCV(make_pipeline(*steps), options, cv=2).fit(X, TRUTH)
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    equal(again.predict_proba(X), search.predict_proba(X))
    assert clone(again[-1]).get_params() == again[-1].get_params()


OPTIONS: list[tuple[str, Any]] = [
    ("n_neighbors", 0),
    ("n_neighbors", 2.5),
    ("metric", "manhattan"),
    ("approximate", 1),
    ("sharpness", 0.0),
    ("mu", 0.0),
    ("learning_rate", -1.0),
    ("weight_decay", -1.0),
    ("cv", 1),
    ("cv", 2.5),
    ("rounds", 0),
    ("class_weight", {0: 1, 1: 1, 2: -1}),
    ("class_weight", {0: 1, 1: 1, 2: np.inf}),
    ("verbose", -1),
    ("verbose", "loud"),
    ("dropout", 1.0),
]
test_options = refuses(
    *(
        (lambda name=name, value=value: fitted(**{name: value}), f"^{name} must")
        for name, value in OPTIONS
    )
)
test_labels = refuses(
    (lambda: fitted(y=None), "pass a label for every row"),
    (lambda: fitted(y=[0, 1, *[None] * 39]), "got None in row 2"),
    (lambda: fitted(y=pd.Series([0, pd.NA, *[1] * 39])), "got <NA> in row 1"),
    (lambda: fitted(y=np.ones((41, 3))), r"row 0 is \[1\. 1\. 1\.\]"),
    (lambda: fitted(y=np.tile([1.5, -0.5], (41, 1))), "row 0 is"),
    (lambda: fitted(y=np.tile([1.0, 0.0], (41, 1))), "share of every class"),
    (lambda: fitted(max_iter=1).score(X, None), "pass the label of every row"),
    (lambda: fitted(y=np.full(41, -1)), "label of some row"),
    (lambda: fitted(max_iter=1).score(X, np.full(41, -1)), "label of some row"),
    (lambda: fitted(sample_weight=(Y != 2) * 1.0), r"labels of \[2\]"),
    (lambda: fitted(sample_weight=-np.ones(41)), "Negative values"),
    (lambda: fitted(y=["a", -1, *"ab" * 19, "b"]), "the string '-1'"),
    (lambda: fitted(y=pd.Series(["a", "-1", *"ab" * 19, "b"])), "the string '-1'"),
    (
        lambda: fitted(y=np.where(Y == -1, -1, Y + 0.5)),
        "Unknown label type: continuous",
    ),
    error=ValueError,
)


DIGITS, WRITTEN = load_digits(return_X_y=True)
GRAPHS = [
    *({"kernel": "knn", "n_neighbors": number} for number in (5, 10, 15)),
    *({"gamma": gamma} for gamma in (0.01, 0.03)),
]
SPREADINGS = [
    LabelSpreading(max_iter=100, **graph, alpha=alpha)
    for graph, alpha in product(GRAPHS, [0.2, 0.5, 0.8, 0.95, 0.99])
]
OURS = [
    DiffusionClassifier(k, mu=mu, random_state=0)
    for k, mu in product([7, 10], [10.0, 30.0])
]


def accuracy(predicted: np.ndarray, rows: np.ndarray) -> float:
    return 100 * float((predicted[rows] == WRITTEN[rows]).mean())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::sklearn.exceptions.ConvergenceWarning",
)
def test_as_good_as_label_spreading_tuned_on_the_same_validation_labels() -> None:
    """Ten splits with five labels per class, paired; of equally good ones the first is taken. Printed: test rows."""
    classifier = []
    for seed in range(100, 110):
        order = np.random.default_rng(seed).permutation(len(WRITTEN))
        labelled = np.concatenate(
            [order[WRITTEN[order] == digit][:5] for digit in range(10)]
        )
        labels = some(WRITTEN, np.isin(np.arange(len(WRITTEN)), labelled))
        val, test = np.split(order[~np.isin(order, labelled)], [500])
        row = []
        for models in (SPREADINGS, OURS):
            tried = [model.fit(DIGITS, labels).transduction_ for model in models]
            best = max(tried, key=lambda predicted: accuracy(predicted, val))
            row.append(accuracy(best, test))
        untuned = accuracy(tried[2], test)
        print(f"split {seed}: {row[0]:.2f}, {row[1]:.2f}, untuned {untuned:.2f}")
        classifier.append(row)
    theirs, ours = np.transpose(classifier)
    difference = ours - theirs
    error = difference.std(ddof=1) / len(difference) ** 0.5
    print(f"{difference.mean():+.2f} ± {error:.2f}")
    assert difference.mean() >= 0
