"""Rename the parameters of another implementation by a table of rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""A regular expression, and what replaces its match: a template or a function of the match, as for ``re.sub``."""


def new_name(name: str, rules: Iterable[Rule]) -> str:
    """Apply the rules to a name, one after another."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def renamed(state: Mapping[str, Tensor], rules: Iterable[Rule], owner: str, prefix: str = "") -> dict[str, Tensor]:
    """Rename the tensors of a state dict; several may get one name only if they are equal, else a ``ValueError``.

    ``owner`` and ``prefix`` are the class of the module and its path, for the error message.
    """
    rules, found, source = list(rules), dict[str, Tensor](), dict[str, str]()
    for key, value in state.items():
        name = new_name(key, rules)
        if name in found and (value.shape != found[name].shape or not torch.equal(value, found[name])):
            both = f"{prefix}{source[name]} and {prefix}{key}"
            raise ValueError(f"{owner} has one matrix, {name}, where the state has two that differ: {both}.")
        found[name], source[name] = value, key
    return found
