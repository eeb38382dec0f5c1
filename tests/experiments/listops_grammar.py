"""The language of ListOps (Nangia & Bowman 2018), as the tests read it: a parser, and what an expression is worth."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp_experiments.sequences.listops import OPERATORS, TOKENS

_NUMBER = {token: number for number, token in enumerate(TOKENS)}
_VALUE = {_NUMBER[str(digit)]: digit for digit in range(10)}
_OPERATOR = {_NUMBER[f"[{name}"]: name for name in OPERATORS}
_END = _NUMBER["]"]


class Operation(NamedTuple):
    """An inner node of the tree of an expression."""

    operator: str
    arguments: tuple[Tree, ...]


Tree = int | Operation


def encode(expression: str) -> Tensor:
    """The tokens of an expression such as "[MAX 2 9 [MIN 4 7 ] ]".

    The published files also print the binary tree that shift-reduce parsers are trained with, as "(" and ")"; these are
    dropped. "]" is kept: without it the answer is not a function of the tokens.
    """
    words = expression.replace("(", " ").replace(")", " ").split()
    return torch.tensor([_NUMBER[word] for word in words], dtype=torch.long)


def decode(tokens: Tensor) -> str:
    """The expression, without padding."""
    return " ".join(TOKENS[token] for token in tokens.tolist() if token)


def parse(tokens: Tensor) -> Tree:
    """The tree of an expression: a digit, or an operation on trees."""
    done: list[Tree] = []
    open_: list[tuple[str, list[Tree]]] = [("", done)]
    for token in tokens.tolist():
        assert not done, "it goes on after its end"
        arguments = open_[-1][1]
        if token in _VALUE:
            arguments.append(_VALUE[token])
        elif token in _OPERATOR:
            open_.append((_OPERATOR[token], []))
        else:
            assert token == _END
            assert arguments
            name, _ = open_.pop()
            open_[-1][1].append(Operation(name, tuple(arguments)))
    (tree,) = done
    return tree


def evaluate(tree: Tree) -> int:
    """What an expression is worth, 0-9."""
    if isinstance(tree, int):
        return tree
    return OPERATORS[tree.operator]([evaluate(argument) for argument in tree.arguments])


def published(path: Path) -> Iterator[tuple[Tensor, int]]:
    """Tokens and labels of Nangia & Bowman's files (label TAB expression), or the Arena's (expression TAB label)."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        for line in file:
            columns = line.rstrip("\n").split("\t")
            if columns != ["Source", "Target"]:
                label, expression = columns if columns[0].isdigit() else reversed(columns)
                yield encode(expression), int(label)
