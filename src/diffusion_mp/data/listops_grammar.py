"""The language of ListOps (Nangia & Bowman 2018): its tokens, a parser, and what an expression is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_mp.errors import check_choice


def _median(values: Sequence[int]) -> int:
    """The middle value; of an even number, the mean of the two in the middle, rounded down."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": _median,
    "SM": lambda values: sum(values) % 10,
    "FIRST": lambda values: values[0],
    "LAST": lambda values: values[-1],
}

TOKENS: tuple[str, ...] = ("<pad>", *map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")
_NUMBER = {token: number for number, token in enumerate(TOKENS)}
_VALUE = {_NUMBER[str(digit)]: digit for digit in range(10)}
_OPERATOR = {_NUMBER[f"[{name}"]: name for name in OPERATORS}
_END = _NUMBER["]"]


class Operation(NamedTuple):
    """An inner node of the tree of an expression."""

    operator: str
    arguments: tuple[Tree, ...]


Tree = int | Operation


def encode(expression: str) -> Int[Tensor, " L"]:
    """The tokens of an expression such as "[MAX 2 9 [MIN 4 7 ] ]", each its place in `TOKENS`.

    The published files also print the binary tree that shift-reduce parsers are trained with, as "(" and ")"; these are
    dropped. "]" is kept. The first code of the Long Range Arena lost it with its tokenizer, and the nesting with
    it (its issue 14); without "]" the answer is not a function of the tokens.

    Errors: ValueError naming a word that is no token.
    """
    words = expression.replace("(", " ").replace(")", " ").split()
    for word in words:
        check_choice(word, "every word of a ListOps expression", TOKENS[1:])
    return torch.tensor([_NUMBER[word] for word in words], dtype=torch.long)


def decode(tokens: Int[Tensor, " L"]) -> str:
    """The expression, without padding."""
    return " ".join(TOKENS[token] for token in tokens.tolist() if token)


def parse(tokens: Int[Tensor, " L"]) -> Tree:
    """The tree of an expression: a digit, or an operation on trees.

    Errors: ValueError saying where the tokens are no expression: "]" too many or missing, an operator without
    arguments, something after the end, or a number that is no token (padding too: cut it off first).
    """
    done: list[Tree] = []
    open_: list[tuple[str, list[Tree]]] = [("", done)]
    for place, token in enumerate(tokens.tolist()):
        name, arguments = open_[-1]
        if done:
            raise ValueError(f"tokens must be one expression; it ends before position {place} of {len(tokens)}.")
        if token in _VALUE:
            arguments.append(_VALUE[token])
        elif token in _OPERATOR:
            open_.append((_OPERATOR[token], []))
        elif token != _END:
            raise ValueError(f"tokens must be 1 .. {len(TOKENS) - 1}, without padding; got {token} at {place}.")
        elif not arguments:
            raise ValueError(f"tokens must have an operator and its arguments before ']'; not so at position {place}.")
        else:
            open_.pop()
            open_[-1][1].append(Operation(name, tuple(arguments)))
    if not done:
        raise ValueError(f"tokens must be a whole expression; {len(open_) - 1} of its operators are not closed.")
    return done[0]


def evaluate(tree: Tree) -> int:
    """What an expression is worth, 0–9: minimum, maximum, median, sum modulo 10, first or last of the arguments."""
    if isinstance(tree, int):
        return tree
    return OPERATORS[tree.operator]([evaluate(argument) for argument in tree.arguments])


def tokens_of(words: Iterable[str | int]) -> Int[Tensor, " L"]:
    """The tokens of words that are known to be in the vocabulary."""
    return torch.tensor([_NUMBER[str(word)] for word in words], dtype=torch.long)
