"""What a report points out about the data."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from diffusion_mp_experiments.compare import findings
from diffusion_mp_experiments.compare.comparison import table_of
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.compare.report import verdict
from diffusion_mp_experiments.reproduce.report import Line


def line(row: str, validation: float, seconds: float = 1.0) -> Line:
    return Line(row, row, (80.0, 1.0), validation, {}, {}, {}, 3, 2, seconds)


def sentences(x: torch.Tensor, y: torch.Tensor, edge_index: torch.Tensor) -> str:
    names = tuple(map(str, range(len(x))))
    classes = tuple(f"class {c}" for c in range(int(y.max()) + 1))
    problem = Problem("node", classes, [Data(x=x, edge_index=edge_index, y=y)], names)
    table = table_of(problem, Path(), None, 0, [])
    return " ".join(findings.warnings(problem, table))


def drawn(classes: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=generator)
    y = torch.randint(classes, (300,), generator=generator)
    return x, y, torch.randint(300, (2, 900), generator=generator)


def test_nothing_is_said_of_usual_data() -> None:
    assert sentences(*drawn()) == ""


def test_a_feature_that_is_the_label() -> None:
    x, y, edge_index = drawn()
    x[:, 3] = y.float().roll(0) * 2 - 1
    assert "Feature 3 alone tells the classes" in sentences(x, y, edge_index)


def test_edges_made_from_labels() -> None:
    x, y, edge_index = drawn()
    edge_index = edge_index[:, y[edge_index[0]] == y[edge_index[1]]]
    assert "Every edge joins two nodes of one class" in sentences(x, y, edge_index)


def test_duplicate_rows() -> None:
    x, y, edge_index = drawn()
    x[1::2] = x[::2]
    assert "test rows have the same features as a training row" in sentences(
        x, y, edge_index
    )


def test_a_few_coarse_columns_are_no_duplicates() -> None:
    x, y, edge_index = drawn()
    assert sentences(x.sign(), y, edge_index) == ""


def test_imbalance_and_rare_classes() -> None:
    x, y, edge_index = drawn()
    y[:] = 0
    y[:5] = 1
    said = sentences(x, y, edge_index)
    assert "98.3 % of the labels are class 0" in said
    assert "fewer than ten labels of class 1" in said


def test_rows_that_are_no_worse_are_named_cheapest_first() -> None:
    rows = [line("slow", 82.0, 9.0), line("fast", 81.0, 1.0), line("bad", 70.0, 0.1)]
    behind = {"slow": None, "fast": (-0.4, 0.3), "bad": (-12.0, 1.0)}
    assert [each.row for each in findings.equals(rows[0], rows, behind)] == [
        "fast",
        "slow",
    ]


@pytest.mark.parametrize(
    ("mean", "error", "same"), [(-1.0, 0.4, 1), (-1.0, 0.6, 2), (-1.0, math.nan, 1)]
)
def test_two_standard_errors_are_a_difference(
    mean: float, error: float, same: int
) -> None:
    rows = [line("best", 82.0), line("other", 81.0)]
    behind = {"best": None, "other": (mean, error)}
    assert len(findings.equals(rows[0], rows, behind)) == same


@pytest.mark.parametrize(
    ("tested", "common"),
    [
        ([20, 20, 20], {0, 1, 2}),
        ([20, 20, 7], {0, 1}),
        # One slow row alone does not take splits from all others.
        ([20, 19, 19], {0, 1, 2}),
        ([3], {0}),
        ([], set()),
    ],
)
def test_a_split_counts_if_nearly_all_rows_were_tested_on_it(
    tested: list[int], common: set[int]
) -> None:
    runs = [
        {"split": split, "row": row}
        for split, rows in enumerate(tested)
        for row in range(rows)
    ]
    assert findings.common_splits(runs) == common


def test_the_error_of_accuracies_is_that_of_drawn_test_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.7, 0.9])
    right = torch.rand(4000, 500, 2, generator=generator) < shares
    accuracies = 100 * right.double().mean(1)
    deviation = float(accuracies.diff(dim=1).std())
    assert findings.accuracy_error(70.0, 90.0, 500) == pytest.approx(deviation, 0.05)


def judged(best: Line, *others: Line, **known: Any) -> str:
    """Return the verdict on rows, of which `same` are no worse, or nothing is known if it is missing."""
    metric = SimpleNamespace(digits=1)
    comparison = SimpleNamespace(
        table=SimpleNamespace(metric=metric, epochs=100),
        lines=[best, *others],
        hardly_trained=False,
        judged="same" in known,
        ahead=lambda line: False,
        **known,
    )
    return verdict(comparison)


def test_the_verdict_says_what_a_constant_reaches() -> None:
    rows = [line("slow", 82.0, 9.0), line("constant", 81.0, 1.0), line("bad", 7.0, 2.0)]
    said = judged(*rows, same=["constant", "slow"])
    assert "are 1 of 2 other rows" in said
    assert "no model is known to be better than a constant" in said
    assert "constant" not in judged(*rows, same=["slow", "bad"])


def test_of_a_single_split_higher_scores_are_named() -> None:
    rows = [
        replace(line(name, 0.0), score=(score, math.nan))
        for name, score in (("best", 3.6), ("other", 25.8), ("bad", 2.0))
    ]
    said = judged(*rows)
    assert "**Higher on its test rows**: other (25.8)." in said
    assert "Higher" not in judged(rows[1], rows[0])
