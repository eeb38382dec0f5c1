"""Items of sequence data sets: by any whole number, from a seed of their own."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diffusion_mp.data import pad
from diffusion_mp_experiments.sequences import ListOps, SequenceDataset
from diffusion_mp_experiments.sequences.dataset import item_random


class Counting(SequenceDataset):
    """Item i is i + 1 times the token i."""

    vocabulary = 5
    classes = 2

    def __len__(self) -> int:
        return 5

    def item(self, index: int):
        return torch.full((index + 1,), index), index % 2


LIST_OPS = ListOps(num=5, min_length=10, max_length=30)


@pytest.mark.usefixtures("no_typecheck")
def test_sequences_in_a_loader_by_any_whole_number() -> None:
    shapes = [
        (tokens.shape, mask.shape, len(labels))
        for tokens, mask, labels in DataLoader(LIST_OPS, 2, collate_fn=pad)
    ]
    assert [count for *_, count in shapes] == [2, 2, 1]
    assert all(tokens == mask and 10 <= tokens[1] <= 30 for tokens, mask, _ in shapes)
    assert [label for _, label in Counting()] == [0, 1, 0, 1, 0]
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), -2, np.int8(-2)):
        assert Counting()[index][0].tolist() == [3] * 4
    for index in (5, -6):
        with pytest.raises(IndexError, match=rf"-5 \.\. 4; got {index}"):
            Counting()[index]
    for index in (-1, 5, 10**20):
        with pytest.raises(
            IndexError, match=rf"index must lie in 0 \.\. 4; got {index}"
        ):
            LIST_OPS.item(index)


def test_neighbouring_keys_give_unrelated_numbers() -> None:
    first = torch.tensor(
        [
            item_random("task", seed, i).random()
            for seed in range(20)
            for i in range(200)
        ]
    )
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.05
    assert item_random("a", 1, 23).random() != item_random("a", 12, 3).random()
    assert item_random("a", 1).random() == item_random("a", 1).random()
