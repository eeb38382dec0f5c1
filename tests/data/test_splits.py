"""Random splits per class: sizes, disjointness, seeds, unlabelled nodes, refusals."""

import pytest
import torch
from torch_geometric.data import Data

from diffusion_mp.data import Split, label_mask, random_split, random_split_per_class


def draw(y, seed=0, per_class=5, num_val=20, num_test=None):
    return random_split_per_class(y, per_class, num_val, num_test, torch.Generator().manual_seed(seed))


@pytest.fixture
def y():
    return torch.arange(100) % 4


def test_sizes_per_class_and_disjoint(y):
    train, val, test = draw(y, num_test=30)
    assert torch.bincount(y[train]).tolist() == [5, 5, 5, 5]
    assert int(val.sum()) == 20
    assert int(test.sum()) == 30
    assert not (train & val).any()
    assert not (train & test).any()
    assert not (val & test).any()


def test_rest_is_test(y):
    split = draw(y)
    assert (split.train | split.val | split.test).all()


def test_seeds_differ_and_one_seed_repeats(y):
    for first, again, other in zip(draw(y, 0), draw(y, 0), draw(y, 1), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_global_generator_is_untouched(y):
    before = torch.get_rng_state()
    draw(y)
    assert torch.equal(before, torch.get_rng_state())


def test_validation_follows_the_labelled_nodes_not_their_order():
    y = torch.cat([torch.zeros(500), torch.ones(500)]).long()
    _, val, _ = draw(y, num_val=400)
    assert 150 < int(val[:500].sum()) < 250


def test_unlabelled_nodes_stay_out(y):
    y[::3] = -1
    split = draw(y, num_val=10)
    assert not ((split.train | split.val | split.test) & ~label_mask(y)).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_class": 26}, "Class 0 has 25 labelled nodes"),
        ({"num_val": 90}, "only 80 labelled nodes are left"),
        ({"num_val": 60, "num_test": 21}, "num_val \\+ num_test = 81"),
        ({"per_class": 0}, "per_class must be at least 1"),
        ({"num_val": -1}, "num_val, num_test at least 0"),
    ],
)
def test_refusals(y, options, message):
    with pytest.raises(ValueError, match=message):
        draw(y, **options)


def test_nothing_labelled_is_refused():
    with pytest.raises(ValueError, match="no labelled node"):
        draw(torch.full((10,), -1))


@pytest.mark.usefixtures("no_typecheck")
def test_a_seed_is_not_a_generator(y):
    with pytest.raises(TypeError, match=r"torch\.Generator\(\)\.manual_seed"):
        random_split_per_class(y, 5, 20, None, 0)


def test_masks_of_data_by_column_and_without_unlabelled(y):
    y[0] = -1
    masks = torch.zeros(100, 3, dtype=torch.bool)
    masks[:10, 1] = True
    data = Data(y=y, train_mask=masks, val_mask=masks, test_mask=masks[:, 1])
    split = Split.of(data, column=1)
    assert split.train.nonzero().flatten().tolist() == list(range(1, 10))
    assert torch.equal(split.test, split.val)
    with pytest.raises(ValueError, match="between 0 and 2"):
        Split.of(data, column=3)
    with pytest.raises(ValueError, match="has no train_mask"):
        Split.of(Data(y=y))


def test_apply_to_leaves_the_data_alone(y):
    data = Data(y=y)
    split = draw(y)
    masked = split.apply_to(data)
    assert torch.equal(masked.val_mask, split.val)
    assert "val_mask" not in data


def test_shares_of_the_labelled_nodes(y):
    y[:10] = -1
    split = random_split(y, 0.1, 0.25, torch.Generator().manual_seed(0))
    assert [int(mask.sum()) for mask in split] == [9, 22, 59]
    assert bool((sum(mask.int() for mask in split) == label_mask(y)).all())
    again = random_split(y, 0.1, 0.25, torch.Generator().manual_seed(0))
    other = random_split(y, 0.1, 0.25, torch.Generator().manual_seed(1))
    assert torch.equal(split.train, again.train)
    assert not torch.equal(split.train, other.train)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.6, 0.5), r"their sum at most 1; got 0\.6 and 0\.5"),
        ((0.0, 0.5), "train must be above 0"),
        ((0.1, -0.1), "val at least 0"),
        ((0.001, 0.5), "of 100 labelled nodes is none; raise train"),
    ],
)
def test_shares_that_are_refused(y, shares, message):
    with pytest.raises(ValueError, match=message):
        random_split(y, *shares, torch.Generator())


@pytest.mark.usefixtures("no_typecheck")
def test_shares_need_a_generator_too(y):
    with pytest.raises(TypeError, match=r"torch\.Generator\(\)\.manual_seed"):
        random_split(y, 0.1, 0.1, 0)
