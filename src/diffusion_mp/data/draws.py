"""Random numbers for one item of a data set."""

from __future__ import annotations

from random import Random


def item_random(*key: str | int) -> Random:
    """A source of uniform numbers that depends on `key` alone, say task, seed, split and index.

    Item i is then the same whether the items before it were drawn or not, in any worker and in any order. Callers use
    `random()` only: Python promises its sequence for a seed across versions and machines, and promises it for no other
    method. The key is hashed, so that neighbouring keys give unrelated sequences.
    """
    return Random("/".join(map(str, key)))
