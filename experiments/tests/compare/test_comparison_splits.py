"""Splits of a comparison: strata, labels for the search, and splits that come with the data."""

import pytest
import torch
from torch_geometric.data import Data

from diffusion_mp_experiments.compare.data import (
    has_label,
    kept_split,
    split_of,
    stratified,
)
from diffusion_mp_experiments.compare.problem import Problem


def problem(y: torch.Tensor, **others: object) -> Problem:
    x = torch.ones(len(y), 1)
    classes = () if y.is_floating_point() else tuple("abc")
    names = tuple(map(str, range(len(y))))
    return Problem("node", classes, [Data(x=x, y=y)], names, **others)


Y = torch.tensor([0] * 700 + [1] * 250 + [2] * 50 + [-1] * 100)


def test_every_class_has_the_same_shares() -> None:
    split = stratified(Y, Y >= 0, (0.6, 0.2), torch.Generator().manual_seed(0))
    for part, share in zip(split, (0.6, 0.2, 0.2), strict=True):
        counts = Y[part].bincount(minlength=3)
        assert torch.allclose(
            counts / torch.tensor([700, 250, 50]), torch.tensor(share), atol=0.02
        )
    assert torch.equal(torch.stack(split).sum(0) == 1, Y >= 0)


def test_a_class_with_one_node_falls_into_every_part_at_times() -> None:
    y = torch.tensor([0] * 9 + [1])
    parts = set()
    for seed in range(30):
        split = stratified(y, y >= 0, (0.6, 0.2), torch.Generator().manual_seed(seed))
        parts.add(int(torch.stack(split)[:, 9].nonzero()))
    assert parts == {0, 1, 2}


@pytest.mark.parametrize("number", range(3))
def test_the_search_sees_no_label_of_a_reported_split(number: int) -> None:
    reported = split_of(problem(Y), number, 0, tuning=False, pooled=True)
    for other in range(3):
        tuning = split_of(problem(Y), other, 0, tuning=True, pooled=True)
        assert not (torch.stack(tuning).any(0) & torch.stack(reported).any(0)).any()


def test_without_a_reserve_settings_are_scored_on_validation_rows_that_chose_no_epoch() -> (
    None
):
    tuning = split_of(problem(Y), 2, 0, tuning=True, pooled=False)
    reported = split_of(problem(Y), 2, 0, tuning=False, pooled=False)
    assert torch.equal(tuning.test, reported.val)
    assert torch.equal(tuning.train | tuning.val, reported.train)
    assert not (tuning.train & tuning.val).any()
    assert int(tuning.val.sum()) == int(0.2 * reported.train.sum())
    # Where few rows train, as in published splits, a half of the many that validate is spared.
    masks = torch.zeros(3, len(Y), dtype=torch.bool)
    masks[0, :100], masks[1, 100:400], masks[2, 400:] = True, True, True
    tuning = split_of(problem(Y, split=tuple(masks)), 0, 0, tuning=True, pooled=False)
    assert torch.equal(tuning.train, masks[0])
    assert torch.equal(tuning.val | tuning.test, masks[1])
    assert [int(part.sum()) for part in tuning] == [100, 150, 150]
    # Of three rows nothing can be spared.
    masks = torch.eye(3, len(Y), dtype=torch.bool)
    tuning = split_of(problem(Y, split=tuple(masks)), 0, 0, tuning=True, pooled=False)
    assert torch.equal(tuning.val, tuning.test)


def test_splits_of_the_data_are_used() -> None:
    masks = torch.zeros(3, 1100, 2, dtype=torch.bool)
    masks[0, :400], masks[1, 400:600], masks[2, 600:] = True, True, True
    masks[0, 0, 1] = False
    made = problem(Y, split=tuple(masks))
    split = split_of(made, 1, 0, tuning=False, pooled=False)
    assert int(split.train.sum()) == 399
    # Rows without a label are in no part.
    assert int(split.test.sum()) == 400


def test_numbers_and_unknown_numbers() -> None:
    y = torch.randn(100)
    y[:20] = torch.nan
    split = split_of(problem(y), 0, 0, tuning=False, pooled=False)
    assert [int(part.sum()) for part in split] == [48, 16, 16]
    assert not (torch.stack(split).any(0) & ~has_label(y)).any()


def test_the_kept_model_trains_on_all_labels_but_its_validation_part() -> None:
    split = kept_split(problem(Y), validated=True)
    assert [int(part.sum()) for part in split] == [800, 200, 0]
    # What is fitted at once has no epoch to choose.
    whole = kept_split(problem(Y), validated=False)
    assert [int(part.sum()) for part in whole] == [1000, 200, 0]
