"""Data sets of sequences whose items are made when they are asked for."""

from __future__ import annotations

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

    A subclass says how many tokens and classes there are, how many items, and what item i is. Items are made when they
    are asked for; `list(dataset)` keeps them, which is worth its memory where one is trained on for many epochs.

    Examples:
        >>> isinstance(ListOps(num=2), SequenceDataset)
        True
    """

    vocabulary: ClassVar[int]
    """Tokens are 0 .. vocabulary − 1."""
    classes: ClassVar[int]
    """Labels are 0 .. classes − 1."""

    @abstractmethod
    def __len__(self) -> int:
        """How many items there are."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Item `index`, with 0 <= index < len(self)."""

    def __getitem__(self, index: int) -> Item:
        """Item `index`, counted from the end if negative; IndexError outside, TypeError for what is no whole number."""
        return self.item(check_index(index, -len(self), len(self)) % len(self))


def check_index(index: object, low: int, high: int) -> int:
    """The index as an int, low .. high − 1; any whole number will do, numpy's and PyTorch's too."""
    number = as_whole(index, "index", "torch.utils.data.Subset takes several items.")
    if not low <= number < high:
        raise IndexError(f"index must lie in {low} .. {high - 1}; got {number}.")
    return number


def byte_tokens(text: bytes, max_length: int) -> Int[Tensor, " L"]:
    """The first `max_length` bytes of a text as tokens 1–256, which leaves 0 for padding."""
    return torch.tensor(list(text[:max_length]), dtype=torch.long) + 1


def item_random(*key: str | int) -> Random:
    """A source of uniform numbers that depends on `key` alone, say task, seed, split and index.

    Item i is then the same whether the items before it were drawn or not, in any worker and in any order. Callers use
    `random()` only: Python promises its sequence for a seed across versions and machines, and promises it for no other
    method. The key is hashed, so that neighbouring keys give unrelated sequences.
    """
    return Random("/".join(map(str, key)))
