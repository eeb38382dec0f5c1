"""The published solver of the row problem: proximal gradient steps (SFi-Former, Eq. 10), corrected."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def proximal(
    resistance: Tensor,
    threshold: Tensor,
    alpha: float,
    *,
    steps: int = 10_000,
    step_size: Literal[
        "corrected", "published", "barzilai_borwein"
    ] = "barzilai_borwein",
    tolerance: float = 0.0,
    target: Tensor | None = None,
) -> tuple[Tensor, int]:
    r"""Solve the row problem by proximal gradient steps (SFi-Former, Eq. 10 and Appendix A.2).

        Y = z − t (r z + α(Σz − 1)),  z′ = sgn(Y) max(|Y| − tθ, 0)

    The steps begin with z = 1/n. As printed the threshold stands inside the absolute value, which gives no proximal map
    (S2 of docs/errata.md). Return the flow [..., n] and the number of steps done.

    Args:
        resistance: r > 0, [..., n].
        threshold: θ = λf, [..., n].
        alpha: α, finite.
        steps: the largest number of steps.
        step_size: t. ``"corrected"`` is 1/(max r + αn), the inverse of the Lipschitz constant. ``"published"`` is 1/(1
            + α√n), which diverges unless αn is small (S1). ``"barzilai_borwein"`` is ⟨A, B⟩/‖B‖² of the last changes A
            of z and B of the gradient, row by row, starting from the corrected step (with ‖B‖ as printed it has the
            wrong unit, S2).
        target: the solution, if it is known.
        tolerance: stop when no entry of any row is further from ``target`` than this or, without a target, when no
            entry moved by more.
    """
    n = resistance.size(-1)
    if step_size == "published":
        t = torch.full_like(resistance[..., :1], 1 / (1 + alpha * n**0.5))
    else:
        t = 1 / (resistance.amax(-1, keepdim=True) + alpha * n)
    z = torch.full_like(resistance, 1 / n)
    gradient = resistance * z + alpha * (z.sum(-1, keepdim=True) - 1)
    done = 0
    while done < steps:
        done += 1
        y = z - t * gradient
        moved = y.sign() * (y.abs() - t * threshold).clamp_min(0)
        following = resistance * moved + alpha * (moved.sum(-1, keepdim=True) - 1)
        a = moved - z
        b = following - gradient
        if step_size == "barzilai_borwein":
            square = b.square().sum(-1, keepdim=True)
            t = torch.where(square > 0, (a * b).sum(-1, keepdim=True) / square, t)
        z = moved
        gradient = following
        change = a if target is None else z - target
        if tolerance and bool(change.abs().amax() <= tolerance):
            break
    return z, done
