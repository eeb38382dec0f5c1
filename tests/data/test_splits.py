"""Random splits: sizes, disjointness, seeds, unlabelled nodes; masks of data."""

import pytest
import torch
from torch_geometric.data import Data

from diffusion_mp.data import Split, label_mask, random_split, random_split_per_class
from helpers import refuses


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(y, seed=0, per_class=5, num_val=20, num_test=None):
    return random_split_per_class(y, per_class, num_val, num_test, seeded(seed))


SPLITS = {
    "per class": draw,
    "shares": lambda y, seed=0: random_split(y, 0.1, 0.25, seeded(seed)),
}


@pytest.fixture
def y():
    return torch.arange(100) % 4


def sizes(split):
    return [int(mask.sum()) for mask in split]


def test_sizes_per_class_and_shares_of_labelled_nodes(y):
    split = draw(y, num_test=30)
    assert torch.bincount(y[split.train]).tolist() == [5, 5, 5, 5]
    assert sizes(split) == [20, 20, 30]
    assert sum(mask.int() for mask in split).max() == 1
    y[:10] = -1
    assert sizes(SPLITS["shares"](y)) == [9, 22, 59]
    _, val, _ = draw(torch.arange(1000) // 500, num_val=400)
    assert 150 < int(val[:500].sum()) < 250


def test_every_labelled_node_may_be_used_and_shares_are_rounded_down():
    y = torch.arange(7) % 2
    generator = seeded()
    assert sizes(random_split_per_class(y, 2, 2, 1, generator)) == [4, 2, 1]
    assert sizes(random_split_per_class(y, 3, 0, None, generator)) == [6, 0, 1]
    assert sizes(random_split(y, 0.5, 0.5, generator)) == [3, 3, 1]
    assert sizes(random_split(y, 0.5, 0.3, generator)) == [3, 2, 2]
    assert sizes(random_split(y, 0.5, 0, generator)) == [3, 0, 4]
    assert sizes(random_split(torch.zeros(100).long(), 0.57, 0.29, generator)) == [
        57,
        29,
        14,
    ]


@pytest.mark.parametrize("kind", SPLITS)
def test_a_split_is_that_of_its_seed_and_of_the_labelled_nodes(y, kind):
    split = SPLITS[kind]
    before = torch.get_rng_state()
    for first, again, other in zip(split(y, 0), split(y, 0), split(y, 1), strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    y[::3] = -1
    assert torch.equal(sum(mask.int() for mask in split(y)), label_mask(y).int()), (
        "the rest is test"
    )
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize(
    "form",
    [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.int, torch.Tensor.byte],
)
def test_labels_in_another_form_give_the_same_split(y, form, kind):
    assert torch.equal(label_mask(form(y)), label_mask(y))
    for mask, same in zip(SPLITS[kind](y), SPLITS[kind](form(y)), strict=True):
        assert torch.equal(mask, same)


def test_masks_from_data_and_to_a_copy_of_it(y):
    y[0] = -1
    masks = torch.zeros(100, 3, dtype=torch.bool)
    masks[:10, 1] = True
    split = Split.of(
        Data(y=y, train_mask=masks, val_mask=masks, test_mask=masks[:, 1]), column=1
    )
    assert split.train.nonzero().flatten().tolist() == list(range(1, 10))
    assert torch.equal(split.test, split.val)
    data = Data(y=y)
    split = draw(y)
    for name, mask in split._asdict().items():
        assert torch.equal(split.apply_to(data)[f"{name}_mask"], mask)
    assert "val_mask" not in data


Y = torch.arange(100) % 4
MASK = torch.zeros(100, dtype=torch.bool)


def of(mask, column=0):
    return lambda: Split.of(
        Data(y=Y, train_mask=mask, val_mask=MASK, test_mask=MASK), column
    )


test_what_does_not_fit_is_refused = refuses(
    (lambda: draw(Y, per_class=26), ValueError, "per_class"),
    (lambda: draw(Y, num_val=90), ValueError, "num_val"),
    (lambda: draw(Y, num_val=60, num_test=21), ValueError, r"num_val \+ num_test = 81"),
    (lambda: random_split(Y, 0.6, 0.5, seeded()), ValueError, "train"),
    (lambda: random_split(Y, 0.001, 0.5, seeded()), ValueError, "train"),
    (lambda: random_split(Y[:0], 0.5, 0.25, seeded()), ValueError, "y"),
    (of(MASK.long()), ValueError, "train_mask"),
    (of(MASK[:5, None].expand(-1, 2)), ValueError, "train_mask"),
    (lambda: Split.of(Data(train_mask=MASK)), TypeError, "data"),
    (lambda: draw(Y).apply_to(Data(y=Y[:5])), ValueError, "data"),
)
