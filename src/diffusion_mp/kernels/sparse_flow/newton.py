"""The row problem of sparse flow by Newton's method: no sort, on rows of a tile or on segments of edges."""

from __future__ import annotations

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
        return entries.max(-1, keepdim=True).indices  # faster than argmax

    def at(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.gather(-1, place)

    def without(self, entries: Tensor, place: Tensor) -> Tensor:
        return entries.scatter_(-1, place, 0.0)

    def spread(self, row: Tensor) -> Tensor:
        return row


DENSE = Dense()


class Root(NamedTuple):
    """Of every row the root, and Σ p and Σ pt of the entries below it; these entries, as 1 among 0, and the steps."""

    root: Tensor
    slope: Tensor
    moment: Tensor
    active: Tensor
    steps: int


def newton(weight: Tensor, threshold: Tensor, leak: Tensor, total: Tensor | float = 1.0, rows: Layout = DENSE) -> Root:
    r"""The root ν of Σ_j p_j max(ν − t_j, 0) + κν = b, row by row.

    The left side is convex, increasing and piecewise linear, so a step solves the linear equation of the active set
    {t_j < ν}: from the right of the root the steps fall towards it, reach it when the set stays, and are finite in
    number. They start where every entry is active, which lies to the right (S3 of docs/errata.md).

    Args:
        weight, threshold: p ≥ 0 and t. Weights are written over: those that are not below the root become zero.
        leak: κ ≥ 0 per row. total: b.
        rows: how entries lie in rows.

    A row in which nothing is active and that has no leak keeps the ν that it had; 0 if it has no weight at all.
    """
    moments, active = weight * threshold, torch.empty_like(weight)
    slope, moment = rows.add(weight), rows.add(moments)
    below = slope + leak
    root = torch.where(below > 0, (total + moment) / below.clamp_min(torch.finfo(below.dtype).tiny), 0.0)
    steps = 0
    while steps < MAX_STEPS:
        steps += 1
        torch.lt(threshold, rows.spread(root), out=active)  # 1 or 0: several times faster than a mask of booleans
        # In place: the set only shrinks.
        slope, moment = rows.add(weight.mul_(active)), rows.add(moments.mul_(active))
        below = slope + leak
        following = (total + moment) / below
        # Rounding may leave a last step of a few units: what does not fall has arrived (and so has a row with NaN).
        falls = (below > 0) & (following < root)
        if not bool(falls.any()):
            break
        root = torch.where(falls, following, root)
    return Root(root, slope, moment, active, steps)
