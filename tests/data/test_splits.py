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


def test_every_labelled_node_may_be_used_and_shares_are_rounded_down():
    y, generator = torch.arange(7) % 2, torch.Generator().manual_seed(0)
    splits = [random_split_per_class(y, *counts, generator) for counts in ((2, 2, 1), (3, 0, None))]
    splits += [random_split(y, *shares, generator) for shares in ((0.5, 0.5), (0.5, 0.3))]
    assert [[int(mask.sum()) for mask in split] for split in splits] == [[4, 2, 1], [6, 0, 1], [3, 3, 1], [3, 2, 2]]


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


BAD_LABELS = {
    "floats": torch.arange(4.0),
    "NaN": torch.tensor([float("nan"), 1.0]),
    "bools": torch.tensor([True, False]),
    "complex": torch.zeros(4, dtype=torch.complex64),
    "two dimensions": torch.zeros(4, 1).long(),
    "a number": torch.tensor(1),
    "sparse": torch.arange(4).to_sparse(),
    "meta": torch.zeros(4, dtype=torch.long, device="meta"),
    "words": ["a", "b"],
    "a word": "ab",
    "none": None,
}


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("kind", BAD_LABELS)
def test_labels_that_are_none(kind):
    y, generator = BAD_LABELS[kind], torch.Generator()
    calls = (
        lambda: random_split(y, 0.5, 0.25, generator),
        lambda: random_split_per_class(y, 1, 1, 1, generator),
        lambda: label_mask(y),
    )
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=r"^y must"):
            call()


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("form", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.int, torch.Tensor.byte])
def test_labels_in_another_form_give_the_same_split(y, form):
    generators = [torch.Generator().manual_seed(0) for _ in range(4)]
    assert torch.equal(label_mask(form(y)), label_mask(y))
    for split in (lambda y, g: random_split(y, 0.5, 0.2, g), lambda y, g: random_split_per_class(y, 5, 10, 10, g)):
        for mask, same in zip(split(y, generators[0]), split(form(y), generators[1]), strict=True):
            assert torch.equal(mask, same)


def test_empty_labels():
    for call in (lambda y, g: random_split(y, 0.5, 0.2, g), lambda y, g: random_split_per_class(y, 5, 10, 10, g)):
        with pytest.raises(ValueError, match=r"y has no labelled node \(it is empty\)"):
            call(torch.empty(0, dtype=torch.long), torch.Generator())


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("share", ["0.5", None, True, [0.5], torch.tensor([0.5, 0.5])])
def test_shares_are_numbers(y, share):
    with pytest.raises(TypeError, match="train must be a number"):
        random_split(y, share, 0.1, torch.Generator())
    with pytest.raises(TypeError, match="val must be a number"):
        random_split(y, 0.1, share, torch.Generator())


def test_shares_are_finite(y):
    for share in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="train must be a finite number"):
            random_split(y, share, 0.1, torch.Generator())


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("count", [2.5, "2", True, [2], float("nan")])
def test_counts_are_whole_numbers(y, count):
    for name in ("per_class", "num_val", "num_test"):
        options = {"per_class": 2, "num_val": 2, "num_test": 2} | {name: count}
        with pytest.raises(TypeError, match=f"{name} must be a whole number"):
            random_split_per_class(y, **options, generator=torch.Generator())


def test_more_per_class_than_there_are(y):
    with pytest.raises(ValueError, match="Class 0 has 25 labelled nodes, fewer than per_class=5000"):
        draw(y, per_class=5000)


@pytest.mark.usefixtures("no_typecheck")
def test_masks_that_are_none(y):
    mask = torch.zeros(100, dtype=torch.bool)
    masks = {"y": y, "val_mask": mask, "test_mask": mask}
    for bad in (mask.float(), torch.arange(100), mask.tolist()):
        with pytest.raises(TypeError, match=r"train_mask must be a bool tensor \[N\]"):
            Split.of(Data(train_mask=bad, **masks))
    for bad in (mask[:5], mask[:, None, None]):
        with pytest.raises(ValueError, match="train_mask must have a row for each of 100 nodes"):
            Split.of(Data(train_mask=bad, **masks))
    for column in (0.5, "a", None, True):
        with pytest.raises(TypeError, match="column must be a whole number"):
            Split.of(Data(train_mask=mask[:, None], **masks), column)
    for data in (None, Data(train_mask=mask)):
        with pytest.raises(TypeError, match="data must have y"):
            Split.of(data)
    with pytest.raises(TypeError, match="data must be a torch_geometric Data"):
        draw(y).apply_to(None)
    with pytest.raises(ValueError, match="data must have 100 labels, as the masks have rows; got 5"):
        draw(y).apply_to(Data(y=y[:5]))
