"""The row problem of sparse flow by Newton's method: no sort, on rows of a tile or on segments of edges."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

# Newton needs three to six steps on random rows; no row needs more than it has entries.
MAX_STEPS = 100


@runtime_checkable
class Layout(Protocol):
    """How entries lie in rows."""

    def add(self, entries: Tensor) -> Tensor:
        """The sum of every row."""

    def top(self, entries: Tensor) -> Tensor:
        """The largest entry of every row."""

    def best(self, entries: Tensor) -> Tensor:
        """The place of the largest entry of every row."""

    def at(self, entries: Tensor, place: Tensor) -> Tensor:
        """One entry of every row."""

    def without(self, entries: Tensor, place: Tensor) -> Tensor:
        """The entries, with a zero at one place of every row; may write over them."""

    def spread(self, row: Tensor) -> Tensor:
        """The number of its row beside every entry."""


class Dense:
    """Rows along the last dimension, [..., n]; their numbers are [..., 1]."""

    def add(self, entries: Tensor) -> Tensor:
        return entries.sum(-1, keepdim=True)

    def top(self, entries: Tensor) -> Tensor:
        return entries.amax(-1, keepdim=True)

    def best(self, entries: Tensor) -> Tensor:
        n = entries.size(-1)  # the first of the largest, in a third of the time of max and argmax
        last = torch.arange(n, 0, -1, dtype=entries.dtype, device=entries.device)
        largest = torch.eq(entries, self.top(entries), out=torch.empty_like(entries)).mul_(last).amax(-1, keepdim=True)
        return (n - largest).long().clamp_max(n - 1)  # of NaN none is the largest

    def at(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.gather(-1, place)

    def without(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.scatter_(-1, place, 0.0)

    def spread(self, row: Tensor) -> Tensor:
        return row


DENSE = Dense()


class Root(NamedTuple):
    """Of every row the root, Σ p and Σ pt of the entries below it, and how many these are; and the steps."""

    root: Tensor
    slope: Tensor
    moment: Tensor
    support: Tensor
    steps: int


def newton(
    weight: Tensor,
    threshold: Tensor,
    leak: Tensor,
    total: Tensor | float = 1.0,
    support: Tensor | float = math.inf,
    rows: Layout = DENSE,
) -> Root:
    r"""The root ν of Σ_j p_j max(ν − t_j, 0) + κν = b, row by row.

    The left side is convex, increasing and piecewise linear, so a step solves the linear equation of the active set
    {t_j < ν}: from the right of the root the steps fall towards it, reach it when the set stays, and are finite in
    number. They start where every entry that has a weight is active, which lies to the right (S3 of docs/errata.md).

    Args:
        weight, threshold: p ≥ 0 and t. Weights are written over: those that are not below the root become zero.
        leak: κ ≥ 0 per row. total: b.
        support: how many entries have a weight, the ones of least t: infinity asks for one step more.
        rows: how entries lie in rows.

    A row in which nothing is active and that has no leak keeps the ν that it had; 0 if it has no weight at all.
    """
    entries = torch.empty_like(weight)
    slope, moment = rows.add(weight), rows.add(torch.mul(weight, threshold, out=entries))
    below = slope + leak
    root = torch.where(below > 0, (total + moment) / below.clamp_min(torch.finfo(below.dtype).tiny), 0.0)
    support = torch.as_tensor(support, dtype=weight.dtype, device=weight.device)
    for step in range(MAX_STEPS):
        torch.lt(threshold, rows.spread(root), out=entries)  # 1 or 0: several times faster than a mask of booleans
        # Sets of falling roots lie one within the other: as many entries are the same ones.
        active = rows.add(entries)
        fewer = active < support
        if not bool(fewer.any()):
            break
        slope = rows.add(weight.mul_(entries))
        moment = rows.add(torch.mul(weight, threshold, out=entries))
        below, support = slope + leak, active.minimum(support)
        following = (total + moment) / below
        root = torch.where((below > 0) & (following < root), following, root)  # not up again, by rounding
    return Root(root, slope, moment, support, step + 1)
