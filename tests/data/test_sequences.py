"""`pad`: what is a token, what is filling, one sequence or two; indices of a data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diffusion_mp.data import pad
from diffusion_mp_experiments.sequences import ListOps, Pathfinder, SequenceDataset
from diffusion_mp_experiments.sequences.dataset import byte_tokens, item_random


class Counting(SequenceDataset):
    """Item i is i + 1 times the token i."""

    vocabulary, classes = 5, 2

    def __len__(self) -> int:
        return 5

    def item(self, index: int):
        return torch.full((index + 1,), index), index % 2


def test_pad():
    tokens, mask, labels = pad([Counting()[i] for i in (1, 3, 0)])
    assert tokens.tolist() == [[1, 1, 0, 0], [3, 3, 3, 3], [0, 0, 0, 0]]
    assert mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert labels.tolist() == [1, 1, 0]
    assert (tokens.dtype, mask.dtype, labels.dtype) == (torch.long, torch.bool, torch.long)


def test_pad_cuts():
    tokens, mask, _ = pad([Counting()[i] for i in (1, 3)], max_length=3)
    assert tokens.tolist() == [[1, 1, 0], [3, 3, 3]]
    assert mask.tolist() == [[True, True, False], [True] * 3]
    assert pad([Counting()[1]], max_length=3)[0].shape == (1, 2)  # never longer than needed


def test_two_texts():
    batch = [(byte_tokens(b"ab", 9), byte_tokens(b"abcd", 3), 1), (byte_tokens(b"", 9), byte_tokens(b"\0\xff", 9), 0)]
    tokens, mask, other, other_mask, labels = pad(batch)
    assert tokens.tolist() == [[98, 99], [0, 0]]
    assert mask.tolist() == [[True, True], [False, False]]
    assert other.tolist() == [[98, 99, 100], [1, 256, 0]]
    assert other_mask.sum(dim=1).tolist() == [3, 2]
    assert labels.tolist() == [1, 0]


def test_in_a_loader():
    loader = DataLoader(ListOps(num=5, min_length=10, max_length=30), batch_size=2, collate_fn=pad)
    shapes = [(tokens.shape, mask.shape, len(labels)) for tokens, mask, labels in loader]
    assert [count for *_, count in shapes] == [2, 2, 1]
    assert all(tokens == mask and 10 <= tokens[1] <= 30 for tokens, mask, _ in shapes)


def test_indices():
    dataset = Counting()
    assert [label for _, label in dataset] == [0, 1, 0, 1, 0]
    assert len(dataset[-1][0]) == 5
    for index in (5, -6):
        with pytest.raises(IndexError, match=rf"-5 \.\. 4; got {index}"):
            dataset[index]


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("index", [1.5, "a", None, True, slice(0, 2), [0, 1], torch.tensor([0, 1]), torch.tensor(0.5)])
def test_indices_that_are_none(index):
    options = {"num": 4, "min_length": 5, "max_length": 20}
    for read in (
        Counting().__getitem__,
        Pathfinder(num=4).__getitem__,
        Pathfinder(num=4).scene,
        ListOps(**options).item,
    ):
        with pytest.raises(TypeError, match="index must be a whole number; got"):
            read(index)


@pytest.mark.usefixtures("no_typecheck")
def test_any_whole_number_is_an_index():
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), -2, np.int8(-2)):
        assert Counting()[index][0].tolist() == [3] * 4
    for index in (-1, 4, 10**20):
        with pytest.raises(IndexError, match=rf"index must lie in 0 \.\. 3; got {index}"):
            ListOps(num=4, min_length=5, max_length=20).item(index)


def test_refusals():
    with pytest.raises(ValueError, match="batch must hold at least one item"):
        pad([])
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        pad([Counting()[0]], max_length=0)


def test_neighbouring_keys_give_unrelated_numbers():
    first = torch.tensor([item_random("task", seed, i).random() for seed in range(20) for i in range(200)])
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.05
    assert item_random("a", 1, 23).random() != item_random("a", 12, 3).random()
    assert item_random("a", 1).random() == item_random("a", 1).random()


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "batch must be a list of items; got None"),
        (torch.zeros(2, 3), "batch must be a list of items; got a float32 tensor"),
        ([3, 4], "every item of batch must be tokens and a label"),
        ([(torch.tensor([1]), 0), (torch.tensor([1]), torch.tensor([2]), 0)], "every item of batch .* like the first"),
        ([(torch.tensor([1.5]), 0)], r"tokens of an item of batch must be whole numbers \[L\]; got a float32 tensor"),
        ([(torch.tensor([[1]]), 0)], r"whole numbers \[L\]; got a int64 tensor of shape \[1, 1\]"),
        ([([1, 2], 0)], r"whole numbers \[L\]; got \[1, 2\]"),
        ([(torch.tensor([1]), 0.5)], "the label of an item of batch must be a whole number; got 0.5"),
    ],
)
def test_batches_that_are_none(batch, message):
    with pytest.raises(TypeError, match=message):
        pad(batch)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("seed", ["a", 1.5, None, True, [1]])
def test_seeds_are_whole_numbers(seed):
    for task in (ListOps, Pathfinder):
        with pytest.raises(TypeError, match="seed must be a whole number"):
            task(seed=seed)
