"""The row problem of sparse flow by Newton's method: no sort, on dense rows or on segments of edges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Newton needs three to six steps on random rows; no row needs more than it has entries.
MAX_STEPS = 100

Sum = Callable[[Tensor], Tensor]


def sum_of_row(entries: Tensor) -> Tensor:
    """[..., n] → [..., 1]."""
    return entries.sum(-1, keepdim=True)


def same(row: Tensor) -> Tensor:
    """Row scalars [..., 1] stand beside entries [..., n] as they are."""
    return row


def newton(
    weight: Tensor,
    threshold: Tensor,
    leak: Tensor,
    total: Tensor | float = 1.0,
    *,
    add: Sum = sum_of_row,
    spread: Sum = same,
) -> tuple[Tensor, int]:
    r"""The root ν of Σ_j p_j max(ν − t_j, 0) + κν = b, row by row, and the number of steps that it took.

    The left side is convex, increasing and piecewise linear, so a step solves the linear equation of the active set
    {t_j < ν}: from the right of the root the steps fall towards it, reach it when the set stays, and are finite in
    number. They start where every entry is active, which lies to the right (S3 of docs/errata.md).

    Args:
        weight, threshold: p ≥ 0 and t.
        leak: κ ≥ 0 per row. total: b.
        add: sums entries over their row; spread: gives every entry its row's number.

    A row in which nothing is active and that has no leak keeps the ν that it had; 0 if it has no weight at all.
    """
    moment = weight * threshold
    slope = add(weight) + leak
    root = torch.where(slope > 0, (total + add(moment)) / slope.clamp_min(torch.finfo(slope.dtype).tiny), 0.0)
    active = torch.empty_like(weight)
    steps = 0
    while steps < MAX_STEPS:
        steps += 1
        torch.lt(threshold, spread(root), out=active)  # 1 or 0: several times faster than a mask of booleans
        slope = add(weight * active) + leak
        following = (total + add(moment * active)) / slope
        # Rounding may leave a last step of a few units: what does not fall has arrived (and so has a row with NaN).
        falls = (slope > 0) & (following < root)
        root = torch.where(falls, following, root)
        if not bool(falls.any()):
            break
    return root, steps
