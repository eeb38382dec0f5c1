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

    def some(self, *entries: Tensor) -> list[Tensor]:
        """Samples of every row; none where rows are short."""


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

    def some(self, *entries: Tensor) -> list[Tensor]:
        return [x[..., ::8].contiguous() for x in entries if x.size(-1) >= 512]


DENSE = Dense()


class Root(NamedTuple):
    """Of every row the root, Σ p and Σ pt of the entries below it; these, as 1 among 0, their number, and the steps."""

    root: Tensor
    slope: Tensor
    moment: Tensor
    active: Tensor
    support: Tensor
    steps: int


def newton(
    weight: Tensor,
    threshold: Tensor,
    leak: Tensor,
    total: Tensor | float = 1.0,
    support: Tensor | None = None,
    rows: Layout = DENSE,
) -> Root:
    r"""The root ν of Σ_j p_j max(ν − t_j, 0) + κν = b, row by row.

    The left side is convex, increasing and piecewise linear, so a step solves the linear equation of the active set
    {t_j < ν}: from the right of the root the steps fall towards it, reach it when the set stays, and are finite in
    number. Whatever set they start with, the first step leads to the right (S3 of docs/errata.md).

    Args:
        weight, threshold: p ≥ 0 and t.
        leak: κ ≥ 0 per row. total: b.
        support: how many entries have a weight, if these are the ones of least t: the set to start with. Otherwise that
            of a sample's root, or everybody.
        rows: how entries lie in rows.

    A row in which nothing is active and that has no leak keeps the ν that it had; 0 if it has no weight at all.
    """
    sample = rows.some(weight, threshold) if support is None else []
    if sample:
        some, among = sample
        share = some.size(-1) / weight.size(-1)
        guess = newton(some, among, share * leak, share * total, rows=rows).root
        active = torch.lt(threshold, guess.masked_fill_(guess == 0, math.inf), out=torch.empty_like(weight))
        slope = rows.add(active.mul_(weight))
        active.mul_(threshold)
    else:
        slope, active = rows.add(weight), weight * threshold
    moment = rows.add(active)
    root = torch.where(slope + leak > 0, (total + moment) / (slope + leak), 0.0)
    size = torch.full_like(root, math.inf) if support is None else support
    steps = 0
    while steps < MAX_STEPS:
        steps += 1
        torch.lt(threshold, rows.spread(root), out=active)  # 1 or 0: several times faster than a mask of booleans
        before, size = size, rows.add(active).minimum(size)
        # Sets of falling roots lie one within the other: where as many entries are active they are the same.
        if torch.equal(size, before):
            break
        slope = rows.add(active.mul_(weight))
        moment = rows.add(active.mul_(threshold))
        root = root.fmin((total + moment) / (slope + leak))  # not up again by rounding, nor where nothing is active
    return Root(root, slope, moment, active, size, steps)
