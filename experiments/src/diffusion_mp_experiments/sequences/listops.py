"""ListOps without a download: the generator of the Long Range Arena's first task."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from hashlib import blake2b
from random import Random
from statistics import median

import torch

from diffusion_mp.checks import Count, check_choice, check_counts, check_kind
from diffusion_mp_experiments.sequences.dataset import DrawnDataset, Item
from diffusion_mp_experiments.settings import settings

OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    # Of an even number, the mean of the middle two, rounded down.
    "MED": lambda values: int(median(values)),
    "SM": lambda values: sum(values) % 10,
    "FIRST": lambda values: values[0],
    "LAST": lambda values: values[-1],
}

TOKENS: tuple[str, ...] = (
    "<pad>",
    *map(str, range(10)),
    *(f"[{name}" for name in OPERATORS),
    "]",
)
_NUMBER = {token: number for number, token in enumerate(TOKENS)}
_SIZES = {"train": 96_000, "val": 2_000, "test": 2_000}
_OPERATION = 0.25  # VALUE_P of the published generators, which is the share of operations, not of values
_SHORTEST = 4
_ATTEMPTS = 100_000


@settings
class ListOps(DrawnDataset):
    """Nested operations on lists of digits, such as [MAX 2 9 [MIN 4 7 ] 0 ]; the label is their value.

    The grammar is Nangia & Bowman's (2018), with the parameters of the Long Range Arena (Tay et al. 2021). A node above
    `max_depth` is an operation with probability 1/4 and otherwise a digit. An operation has 2 .. `max_args` arguments.
    Operators and digits are uniform. Trees are drawn until the length fits. The Arena's bounds of 500 and 2 000 tokens
    are exclusive. MED rounds down, as in the published code.

    Item i depends only on `seed`, split, i and the parameters; nothing is stored. A hash of an expression assigns it to
    one split. Within a split short expressions repeat, which the Arena drops. Labels are not balanced.

    Args:
        split: "train", "val" or "test".
        num: number of items. By default the Arena's 96 000/2 000/2 000.
        seed: draws everything.
        min_length: smallest number of tokens, inclusive. The default 501 is the Arena's. Access raises RuntimeError if
            no tree of a fitting length is found.
        max_length: largest number of tokens, inclusive. The default 1 999 is the Arena's.
        max_depth: depth of the tree at which there are only digits; the outermost operation is at depth 1. The original
            has 20.
        max_args: largest number of arguments of an operation. The original has 5.
        operators: the operators to draw from: MIN, MAX, MED, SM, FIRST and LAST.

    Shapes:
        tokens: [L] of int64 in 1–17 (`TOKENS` of this module), min_length <= L <= max_length.
        label: 0–9.

    Examples:
        >>> tokens, value = ListOps(num=2, min_length=10, max_length=50)[0]
    """

    vocabulary = len(TOKENS)
    classes = 10
    sizes = _SIZES

    _: KW_ONLY
    min_length: Count = 501
    max_length: Count = 1999
    max_depth: int = 10
    max_args: int = 10
    operators: Sequence[str] = ("MIN", "MAX", "MED", "SM")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(2, max_depth=self.max_depth, max_args=self.max_args)
        if not _SHORTEST <= self.min_length <= self.max_length:
            least = f"{_SHORTEST}, that of [MAX 1 2 ]"
            raise ValueError(
                f"lengths must be in order and at least {least}; got {self.min_length, self.max_length}."
            )
        check_kind(self.operators, "operators", (list, tuple), "a list of names")
        if not self.operators:
            raise ValueError(
                f"operators must name at least one of {', '.join(OPERATORS)}; got none."
            )
        for operator in self.operators:
            check_choice(operator, "operators", OPERATORS)

    def item(self, index: int) -> Item:
        random = self.random(index)
        shapes = (self._shape(random) for _ in range(_ATTEMPTS))
        shape = next(filter(None, shapes), None)
        if shape is None:
            raise RuntimeError(
                f"No tree of {self.min_length} .. {self.max_length} tokens in {_ATTEMPTS} draws; raise max_depth "
                f"{self.max_depth} or max_args {self.max_args}, or widen the lengths."
            )
        # The shape stays, so that lengths are spread alike in all splits.
        while True:
            words, answer = self._fill(shape, random)
            home = blake2b(" ".join(words).encode(), digest_size=8).digest()
            number = int.from_bytes(home, "big") % len(_SIZES)
            # Filled anew until the expression belongs to this split.
            if self.split == list(_SIZES)[number]:
                return torch.tensor([_NUMBER[word] for word in words]), answer

    def _shape(self, random: Random) -> list[int] | None:
        """Draw the numbers of arguments of a tree's nodes, in order, 0 for a digit; None if the length is unfit."""
        shape: list[int] = []
        # Of the nodes that are still to come.
        depths = [1]
        length = 0
        while depths:
            depth = depths.pop()
            arguments = 0
            length += 1
            if depth < self.max_depth and random.random() < _OPERATION:
                arguments = 2 + int(random.random() * (self.max_args - 1))
                length += 1  # the bracket that closes it
            depths += [depth + 1] * arguments
            shape.append(arguments)
            # Every node to come has a token at least, so what gets too long ends early.
            if length + len(depths) > self.max_length:
                return None
        return shape if length >= self.min_length else None

    def _fill(self, shape: list[int], random: Random) -> tuple[list[str], int]:
        words: list[str] = []
        # Operator, number of arguments, those known.
        open_: list[tuple[str, int, list[int]]] = [("FIRST", 2, [])]
        for arguments in shape:
            if arguments:
                operator = self.operators[int(random.random() * len(self.operators))]
                words.append(f"[{operator}")
                open_.append((operator, arguments, []))
                continue
            digit = int(random.random() * 10)
            words.append(str(digit))
            open_[-1][2].append(digit)
            while len(open_[-1][2]) == open_[-1][1]:
                operator, _, values = open_.pop()
                words.append("]")
                open_[-1][2].append(OPERATORS[operator](values))
        return words, open_[0][2][0]
