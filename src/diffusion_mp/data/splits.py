"""Which nodes train, validate and test."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch_geometric.data import Data


class Split(NamedTuple):
    """Three boolean masks [N], disjoint; nodes in none of them are unlabelled or left over."""

    train: Bool[Tensor, " N"]
    val: Bool[Tensor, " N"]
    test: Bool[Tensor, " N"]

    @classmethod
    def of(cls, data: Data, column: int = 0) -> Split:
        """The masks stored in `data`; where they hold several splits [N, S], the split number `column`.

        Errors: ValueError when a mask is absent or has no such column.
        """
        masks = []
        for name in ("train_mask", "val_mask", "test_mask"):
            mask = getattr(data, name, None)
            if mask is None:
                raise ValueError(f"The data has no {name}; draw a split with random_split_per_class(data.y, ...).")
            if mask.dim() == 2:
                if not 0 <= column < mask.size(1):
                    raise ValueError(f"column must be between 0 and {mask.size(1) - 1} for this {name}, got {column}.")
                mask = mask[:, column]
            masks.append(mask.bool() & label_mask(data.y))
        return cls(*masks)

    def apply_to(self, data: Data) -> Data:
        """A shallow copy of `data` that carries these masks as train_mask, val_mask and test_mask."""
        data = copy(data)
        data.train_mask, data.val_mask, data.test_mask = self
        return data


def label_mask(y: Int[Tensor, " N"]) -> Bool[Tensor, " N"]:
    """True where a node has a label; −1 (any negative number) says that it has none."""
    return y >= 0


def random_split_per_class(
    y: Int[Tensor, " N"],
    per_class: int,
    num_val: int,
    num_test: int | None,
    generator: torch.Generator,
) -> Split:
    """The split of Kipf & Welling (2017), drawn anew: `per_class` nodes of each class train, then the others.

    Validation and test nodes are drawn from all labelled nodes that are left, whatever their class; `num_test=None`
    takes all that remain. Negative labels never enter. Drawn on the CPU, so a seed gives one split on every device.

    Shapes: y [N] → three masks [N].
    Errors: TypeError without a generator; ValueError when a class, or what is left of all of them, has too few nodes.
    """
    _check_generator(generator)
    if per_class < 1 or num_val < 0 or (num_test is not None and num_test < 0):
        raise ValueError(
            f"per_class must be at least 1 and num_val, num_test at least 0, got {per_class}, {num_val}, {num_test}."
        )
    labels = y.detach().cpu()
    labelled = label_mask(labels).nonzero().flatten()
    if len(labelled) == 0:
        raise ValueError("y has no labelled node (every entry is negative), so there is nothing to split.")

    shuffled = labelled[torch.randperm(len(labelled), generator=generator)]
    train = torch.zeros(len(labels), dtype=torch.bool)
    for c in labels[labelled].unique().tolist():
        members = shuffled[labels[shuffled] == c]
        if len(members) < per_class:
            raise ValueError(
                f"Class {c} has {len(members)} labelled nodes, fewer than per_class={per_class}; lower per_class."
            )
        train[members[:per_class]] = True

    rest = shuffled[~train[shuffled]]
    wanted = num_val + (num_test or 0)
    if len(rest) < wanted:
        raise ValueError(
            f"num_val + num_test = {wanted}, but only {len(rest)} labelled nodes are left after {int(train.sum())} "
            "for training; lower num_val or num_test (num_test=None takes what remains)."
        )
    val, test = torch.zeros_like(train), torch.zeros_like(train)
    val[rest[:num_val]] = True
    test[rest[num_val:] if num_test is None else rest[num_val:wanted]] = True
    return Split(*(mask.to(y.device) for mask in (train, val, test)))


def random_split(y: Int[Tensor, " N"], train: float, val: float, generator: torch.Generator) -> Split:
    """A share `train` of the labelled nodes trains, a share `val` validates and the others test, whatever their class.

    Pokec in Wu, Wipf & Yan (2025) is 0.1, 0.1 in the text and 0.5, 0.25 in the released command (ERRATA D13). Negative
    labels never enter. Drawn on the CPU, so a seed gives one split on every device.

    Shapes: y [N] → three masks [N], of ⌊train · n⌋, ⌊val · n⌋ and the other of n labelled nodes.
    Errors: TypeError without a generator; ValueError where the shares are negative or exceed 1, or leave no node to
    train.
    """
    _check_generator(generator)
    if not (train > 0 and val >= 0 and train + val <= 1):
        raise ValueError(f"train must be above 0, val at least 0 and their sum at most 1; got {train} and {val}.")
    labelled = label_mask(y.detach().cpu()).nonzero().flatten()
    num_train, num_val = int(train * len(labelled)), int(val * len(labelled))
    if num_train == 0:
        raise ValueError(f"train={train} of {len(labelled)} labelled nodes is none; raise train.")
    shuffled = labelled[torch.randperm(len(labelled), generator=generator)]
    masks = torch.zeros(3, len(y), dtype=torch.bool)
    for mask, nodes in zip(masks, shuffled.tensor_split([num_train, num_train + num_val]), strict=True):
        mask[nodes] = True
    return Split(*(mask.to(y.device) for mask in masks))


def _check_generator(generator: object) -> None:
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}; "
            "torch.Generator().manual_seed(0) makes one."
        )
