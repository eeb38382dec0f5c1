"""Splits of nodes into training, validation and test sets."""

from __future__ import annotations

import math
from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from diffusion_mp.checks import (
    as_node_mask,
    as_whole,
    check_index,
    check_kind,
    check_number,
    describe,
    label_vector,
)


class Split(NamedTuple):
    """Three disjoint boolean masks of the nodes, for training, validation and test.

    A node in none of the three masks is unlabelled or unused.

    Attributes:
        train: the training nodes, [N].
        val: the validation nodes, [N].
        test: the test nodes, [N].

    Examples:
        >>> isinstance(random_split(torch.arange(10) % 2, 0.5, 0.2, torch.Generator().manual_seed(0)), Split)
        True
    """

    train: Bool[Tensor, " N"]
    val: Bool[Tensor, " N"]
    test: Bool[Tensor, " N"]

    @classmethod
    def of(cls, data: Data, column: int = 0) -> Split:
        """Return the split that is stored in `data` as train_mask, val_mask and test_mask.

        A mask may also be the indices of its nodes. Unlabelled nodes are in no mask.

        Args:
            data: a graph with the three masks.
            column: number of the split if the masks hold several, [N, S]. The default is the first.
        """
        if getattr(data, "y", None) is None:
            raise TypeError(
                f"data must have y, a label for every node; got {describe(data)}."
            )
        labelled = label_mask(data.y)
        masks = []
        for name in ("train_mask", "val_mask", "test_mask"):
            mask = getattr(data, name, None)
            if mask is None:
                raise ValueError(
                    f"The data has no {name}; draw a split with random_split_per_class(data.y, ...)."
                )
            if isinstance(mask, Tensor):
                # Older data sets have masks of bytes.
                mask = mask.bool() if mask.dtype == torch.uint8 else mask
                if mask.dim() == 2 and mask.dtype == torch.bool:
                    number = 0
                    # A single column is the split for any number.
                    if mask.size(1) > 1:
                        number = as_whole(column, "column")
                    check_index(number, "column", mask.size(1))
                    mask = mask[:, number]
            # An unlabelled node can be neither trained on nor tested.
            mask = as_node_mask(mask, name, len(labelled), labelled.device)
            masks.append(mask & labelled)
        return cls(*masks)

    def apply_to(self, data: Data) -> Data:
        """Return a shallow copy of `data` with these masks as train_mask, val_mask and test_mask."""
        check_kind(data, "data", Data, "a torch_geometric Data")
        if data.y is not None and len(data.y) != len(self.train):
            raise ValueError(
                f"data must have {len(self.train)} labels, as the masks have rows; got {len(data.y)}."
            )
        # Shallow, as PyG's transforms have it: the caller's data keep their masks.
        data = copy(data)
        data.train_mask, data.val_mask, data.test_mask = self
        return data


Labels = Integer[Tensor, " N"] | Integer[Tensor, "N 1"]
"""Class numbers [N], or [N, 1] as in OGB's node sets."""


def label_mask(y: Labels) -> Bool[Tensor, " N"]:
    """Return a mask [N] that is true at the labelled nodes.

    Args:
        y: labels [N] or [N, 1]; negative numbers mark unlabelled nodes.

    Examples:
        >>> label_mask(torch.tensor([0, 1, -1]))
        tensor([ True,  True, False])
    """
    return label_vector(y) >= 0


def random_split_per_class(
    y: Labels,
    per_class: int,
    num_val: int,
    num_test: int | None,
    generator: torch.Generator,
) -> Split:
    """Draw a split with the same number of training nodes from every class, as Kipf & Welling (2017) do.

    Validation and test nodes are drawn regardless of class.

    Args:
        y: labels [N] or [N, 1]; negative numbers mark unlabelled nodes, which are in no set.
        per_class: number of training nodes of each class.
        num_val: number of validation nodes.
        num_test: number of test nodes; `None` takes all labelled nodes that remain.
        generator: random generator on the CPU, so that a seed gives one split on every device.

    Raises:
        ValueError: there are too few labelled nodes for these numbers.

    Examples:
        >>> split = random_split_per_class(torch.arange(20) % 2, 3, 4, 5, torch.Generator().manual_seed(0))
        >>> [int(mask.sum()) for mask in split]
        [6, 4, 5]
    """
    per_class = as_whole(per_class, "per_class")
    num_val = as_whole(num_val, "num_val")
    num_test = None if num_test is None else as_whole(num_test, "num_test")
    if per_class < 1 or num_val < 0 or (num_test is not None and num_test < 0):
        raise ValueError(
            f"per_class must be at least 1 and num_val, num_test at least 0, got {per_class}, {num_val}, {num_test}."
        )
    # One permutation is drawn however many sets there are, so that a seed gives one order.
    labels, shuffled = _shuffled(y, generator)
    classes = labels.cpu()[shuffled]
    # Class by class in one random order, so that a larger per_class keeps the nodes of a smaller one and adds more.
    trained = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for c in classes.unique().tolist():
        members = shuffled[classes == c]
        if len(members) < per_class:
            raise ValueError(
                f"Class {c} has {len(members)} labelled nodes, fewer than per_class={per_class}; lower per_class."
            )
        trained[members[:per_class]] = True

    # What is left stays in the random order, in which validation and test nodes are drawn.
    train = shuffled[trained[shuffled]]
    rest = shuffled[~trained[shuffled]]
    if len(rest) < num_val + (num_test or 0):
        raise ValueError(
            f"num_val + num_test = {num_val + (num_test or 0)}, but only {len(rest)} labelled nodes are left after "
            f"{len(train)} for training; lower per_class, num_val or num_test (num_test=None takes what remains)."
        )
    end = len(rest) if num_test is None else num_val + num_test
    return _masks(labels, train, rest[:num_val], rest[num_val:end])


def random_split(
    y: Labels,
    train: float,
    val: float,
    generator: torch.Generator,
) -> Split:
    """Draw a split by fractions of the n labelled nodes, regardless of class: ⌊train · n⌋, ⌊val · n⌋ and the rest.

    Wu, Wipf & Yan (2025) split Pokec by 0.1 and 0.1 in the text, and by 0.5 and 0.25 in the released command (D13 in
    docs/errata.md).

    Args:
        y: labels [N] or [N, 1]; negative numbers mark unlabelled nodes, which are in no set.
        train: fraction of the training nodes, above 0.
        val: fraction of the validation nodes, at least 0.
        generator: random generator on the CPU, so that a seed gives one split on every device.

    Raises:
        ValueError: the fractions are out of range, or leave no training node.

    Examples:
        >>> split = random_split(torch.arange(10) % 2, 0.5, 0.2, torch.Generator().manual_seed(0))
        >>> [int(mask.sum()) for mask in split]
        [5, 2, 3]
    """
    check_number(train, "train")
    check_number(val, "val")
    if not (train > 0 and val >= 0 and train + val <= 1):
        raise ValueError(
            f"train must be above 0, val at least 0 and their sum at most 1; got {train} and {val}."
        )
    labels, shuffled = _shuffled(y, generator)
    # Rounded first, since 0.57 · 100 is 56.99… in floating point.
    num_train = math.floor(round(train * len(shuffled), 6))
    num_val = math.floor(round(val * len(shuffled), 6))
    # An empty validation set can be meant, an empty training set cannot.
    if num_train == 0:
        raise ValueError(
            f"train={train} of {len(shuffled)} labelled nodes is none; raise train."
        )
    return _masks(labels, *shuffled.tensor_split([num_train, num_train + num_val]))


def _shuffled(
    y: object, generator: torch.Generator
) -> tuple[Int[Tensor, " N"], Int[Tensor, " labelled"]]:
    """Return the labels, and the labelled nodes in random order on the CPU."""
    check_kind(
        generator,
        "generator",
        torch.Generator,
        "a torch.Generator, such as torch.Generator().manual_seed(0)",
    )
    labels = label_vector(y)
    labelled = (labels >= 0).nonzero().flatten().cpu()
    if not len(labelled):
        raise ValueError(
            "y has no labelled node, an entry of at least 0, so there is nothing to split."
        )
    # On the CPU, whose generator gives the same numbers on every machine.
    return labels, labelled[
        torch.randperm(len(labelled), generator=generator, device="cpu")
    ]


def _masks(labels: Int[Tensor, " N"], *parts: Int[Tensor, " _"]) -> Split:
    return Split(
        *(index_to_mask(nodes, len(labels)).to(labels.device) for nodes in parts)
    )
