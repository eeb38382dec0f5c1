"""A diagonal plus a product of features: what solvers in O(N) need of a coupling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
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
        diagonal = self.diagonal
        if diagonal is not None:
            diagonal = weighted(weighted(diagonal, row), column)
        left = weighted(self.left, row)
        return LowRankForm(left, weighted(self.right, column), diagonal, self.ptr)

    @classmethod
    def total(cls, terms: Sequence[LowRankForm]) -> LowRankForm:
        """Return the sum of terms over the same graphs, with concatenated features."""
        heads = max(term.left.size(1) for term in terms)

        def joined(features: list[Features]) -> Features:
            return torch.cat([x.expand(-1, heads, -1) for x in features], dim=2)

        left = joined([term.left for term in terms])
        right = joined([term.right for term in terms])
        diagonals = [term.diagonal for term in terms if term.diagonal is not None]
        diagonal = reduce(add, diagonals) if diagonals else None
        # A diagonal has no features, and its boundaries separate every node. The boundaries of the other terms count.
        ptr = next((term.ptr for term in terms if term.left.size(2)), None)
        return cls(left, right, diagonal, ptr)
