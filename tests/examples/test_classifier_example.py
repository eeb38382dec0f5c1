"""The estimator's example, as a user starts it."""

import re

import pytest

pytestmark = pytest.mark.unwatched


def test_more_images_are_right_than_where_labels_spread_alone(classifier, capsys):
    classifier.main(["--quick"])
    *accuracies, last = capsys.readouterr().out.splitlines()
    spread, ours = (float(re.search(r"([\d.]+) %", line)[1]) for line in accuracies)
    assert ours > spread > 50
    assert last == "A new image, a noisy 0, is read as 0."
