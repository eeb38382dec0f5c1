"""Data sets of sequences whose items are made on access."""

from abc import abstractmethod
from random import Random
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from diffusion_mp.errors import as_whole

Item = tuple[Any, ...]  # the tokens [L] of a sequence, then the label, an int


class SequenceDataset(Dataset[Item]):
    """Items (tokens [L] long, label), for `DataLoader(..., collate_fn=diffusion_mp.data.pad)`.

    Items are made on access; `list(dataset)` keeps them, which pays for many epochs. A subclass defines `vocabulary`
    (tokens are 0 .. vocabulary − 1), `classes` (labels are 0 .. classes − 1), `__len__` and `item`.

    Examples:
        >>> isinstance(ListOps(num=2), SequenceDataset)
        True
    """

    vocabulary: ClassVar[int]
    classes: ClassVar[int]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Return item `index`, with 0 <= index < len(self)."""

    def __getitem__(self, index: int) -> Item:
        """Return item `index`, counted from the end if negative."""
        return self.item(check_index(index, -len(self), len(self)) % len(self))


def check_index(index: object, low: int, high: int) -> int:
    """Return the index as an int; IndexError unless it lies in low .. high − 1, TypeError for no whole number."""
    number = as_whole(index, "index", "torch.utils.data.Subset takes several items.")
    if not low <= number < high:
        raise IndexError(f"index must lie in {low} .. {high - 1}; got {number}.")
    return number


def byte_tokens(text: bytes, max_length: int) -> Int[Tensor, " L"]:
    """Return the first `max_length` bytes of a text as tokens 1–256, which leaves 0 for padding."""
    return torch.tensor(list(text[:max_length]), dtype=torch.long) + 1


def item_random(*key: str | int) -> Random:
    """Return a generator that depends on `key` alone, such as task, seed, split and index, in any worker and order.

    Call `random()` only: Python promises its sequence across versions and machines. The key is hashed.
    """
    return Random("/".join(map(str, key)))
