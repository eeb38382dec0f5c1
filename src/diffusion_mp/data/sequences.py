"""Data sets of sequences of tokens, and the collate function that pads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from diffusion_mp.data.arguments import as_whole
from diffusion_mp.errors import check_counts, check_kind, describe

Item = tuple[Any, ...]  # one sequence of tokens [L] or two, then the label, an int


class SequenceDataset(Dataset[Item]):
    """Items (tokens [L] long, label), or (tokens, other tokens, label) where two texts are compared.

    A subclass says how many tokens and classes there are, how many items, and what item i is. Items are made when they
    are asked for; `list(dataset)` keeps them, which is worth its memory where one is trained on for many epochs.
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


def pad(batch: Sequence[Item], max_length: int | None = None) -> tuple[Tensor, ...]:
    """Stacks items of different lengths, for `DataLoader(..., collate_fn=pad)`; `*inputs, labels = pad(batch)`.

    Sequences are cut after `max_length` tokens, if given, and filled with 0 to the longest that is left; the mask says
    what is a token. An item with two sequences gives two pairs of tokens and mask.

    Shapes: tokens [B, L] long, mask [B, L] bool (True = token), labels [B] long.
    Errors: ValueError for an empty batch or a `max_length` below 1; TypeError for items of different kinds, tokens or
    labels that are no whole numbers.
    """
    check_kind(batch, "batch", (list, tuple), "a list of items")
    if not batch:
        raise ValueError("batch must hold at least one item; got none.")
    if max_length is not None:
        check_counts(max_length=max_length)
    for item in batch:
        _check_item(item, batch[0])
    *texts, labels = zip(*batch, strict=True)
    padded: list[Tensor] = []
    for sequences in texts:
        cut = [sequence[:max_length].long() for sequence in sequences]
        length = torch.tensor([len(sequence) for sequence in cut])
        tokens = pad_sequence(cut, batch_first=True)
        padded += [tokens, torch.arange(tokens.size(1)) < length[:, None]]
    return (*padded, torch.tensor(labels))


def _check_item(item: object, first: Item) -> None:
    if not isinstance(item, list | tuple) or not 2 <= len(item) == len(first):
        raise TypeError("every item of batch must be tokens and a label, or tokens twice and a label, like the first.")
    for tokens in item[:-1]:
        if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise TypeError(f"the tokens of an item of batch must be whole numbers [L]; got {describe(tokens)}.")
    as_whole(item[-1], "the label of an item of batch")
