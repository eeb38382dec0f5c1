"""A diagonal plus a product of features: what solvers in O(N) need of a coupling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings.shapes import Features


class LowRankForm(NamedTuple):
    """diag(e) + U Kᵀ within every graph of ``ptr``, where a single head broadcasts; without ``diagonal`` e is zero."""

    left: Features
    right: Features
    diagonal: Float[Tensor, "N H"] | None = None
    ptr: Tensor | None = None

    def reweighted(
        self, row: Tensor | None, column: Tensor | None = None
    ) -> LowRankForm:
        """diag(r) S diag(c) for r and c [N, H]."""
        left = self.left
        right = self.right
        diagonal = self.diagonal
        if row is not None:
            row = row.to(left.dtype)
            left = row.unsqueeze(2) * left
            diagonal = None if diagonal is None else row * diagonal
        if column is not None:
            column = column.to(right.dtype)
            right = column.unsqueeze(2) * right
            diagonal = None if diagonal is None else diagonal * column
        return LowRankForm(left, right, diagonal, self.ptr)

    @classmethod
    def total(cls, terms: Sequence[LowRankForm]) -> LowRankForm:
        """The sum of terms over the same graphs, with their features concatenated."""
        heads = max(term.left.size(1) for term in terms)
        left = torch.cat([term.left.expand(-1, heads, -1) for term in terms], dim=2)
        right = torch.cat([term.right.expand(-1, heads, -1) for term in terms], dim=2)
        diagonals = [term.diagonal for term in terms if term.diagonal is not None]
        if diagonals:
            diagonal = torch.stack(torch.broadcast_tensors(*diagonals)).sum(0)
        else:
            diagonal = None
        reaching = [term.ptr for term in terms if term.left.size(2)]
        return cls(left, right, diagonal, reaching[0] if reaching else None)
