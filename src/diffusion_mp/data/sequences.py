"""Sequences of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffusion_mp.errors import as_whole, check_counts, check_kind, describe

Item = tuple[Any, ...]  # one sequence of tokens [L] or two, then the label, an int


def pad(batch: Sequence[Item], max_length: int | None = None) -> tuple[Tensor, ...]:
    """Stacks items of different lengths, for `DataLoader(..., collate_fn=pad)`; `*inputs, labels = pad(batch)`.

    An item is (tokens, label), or (tokens, other tokens, label) where two texts are compared. Sequences are filled with
    0 to the longest of the batch; the mask says what is a token. Two sequences give two pairs of tokens and mask.

    Args:
        batch: the items.
        max_length: sequences are cut after so many tokens, if given.

    Shapes: tokens [B, L] long, mask [B, L] bool (True = token), labels [B] long.

    Raises:
        ValueError: an empty batch, or a `max_length` below 1.
        TypeError: items of different kinds, tokens or labels that are no whole numbers.

    Examples:
        >>> tokens, mask, labels = pad([(torch.tensor([5, 6, 7]), 0), (torch.tensor([8]), 1)])
        >>> tokens.shape, mask.sum(1).tolist()
        (torch.Size([2, 3]), [3, 1])
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
