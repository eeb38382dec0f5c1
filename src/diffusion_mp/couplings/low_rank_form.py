"""A diagonal plus a product of features: what solvers in O(N) need of a coupling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings.shapes import ByRow, Features


def weighted(values: Tensor, weight: ByRow | None) -> Tensor:
    """Multiply values [N, H] or [N, H, D] by the weight of their row; ``None`` leaves them unchanged."""
    if weight is None:
        return values
    if values.dim() == 3:
        weight = weight.unsqueeze(2)
    return weight.to(values.dtype) * values


class LowRankForm(NamedTuple):
    """The operator diag(e) + U Kᵀ within every graph of ``ptr``; a single head broadcasts.

    Attributes:
        left: U [N, H, F].
        right: K [N, H, F].
        diagonal: e [N, H]. ``None`` is zero.
        ptr: row boundaries of a ragged batch. ``None`` is one graph.
    """

    left: Features
    right: Features
    diagonal: Float[Tensor, "N H"] | None = None
    ptr: Tensor | None = None

    def reweighted(
        self, row: Tensor | None, column: Tensor | None = None
    ) -> LowRankForm:
        """Return diag(r) S diag(c) for r and c [N, H]."""
        left = weighted(self.left, row)
        right = weighted(self.right, column)
        diagonal = self.diagonal
        if diagonal is not None:
            diagonal = weighted(weighted(diagonal, row), column)
        return LowRankForm(left, right, diagonal, self.ptr)

    @classmethod
    def total(cls, terms: Sequence[LowRankForm]) -> LowRankForm:
        """Return the sum of terms over the same graphs, with concatenated features."""
        heads = max(term.left.size(1) for term in terms)
        left = []
        right = []
        diagonal: Tensor | None = None
        ptr: Tensor | None = None
        for term in terms:
            left.append(term.left.expand(-1, heads, -1))
            right.append(term.right.expand(-1, heads, -1))
            if term.diagonal is not None:
                diagonal = term.diagonal + (0.0 if diagonal is None else diagonal)
            # A diagonal has no features, and its boundaries separate every node: those of the other terms count.
            if term.left.size(2):
                ptr = term.ptr
        return cls(torch.cat(left, 2), torch.cat(right, 2), diagonal, ptr)
