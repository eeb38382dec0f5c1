"""``LowRankForm``: a diagonal and a product of features, what closed forms and preconditioners are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class LowRankForm(NamedTuple):
    """diag(e) + U Kᵀ within every graph.

    Attributes:
        left, right: U and K [N, H, F]; one head serves all.
        diagonal: e [N, H], ``None`` for zeros.
        ptr: row boundaries of the graphs, on the CPU; ``None`` is one graph.
    """

    left: Float[Tensor, "N H F"]
    right: Float[Tensor, "N H F"]
    diagonal: Float[Tensor, "N H"] | None = None
    ptr: Tensor | None = None

    def reweighted(self, row: Tensor | None, column: Tensor | None = None) -> LowRankForm:
        """diag(r) S diag(c) for r and c [N, H]."""
        left, right, diagonal = self.left, self.right, self.diagonal
        if row is not None:
            row = row.to(left.dtype)
            left, diagonal = row.unsqueeze(2) * left, None if diagonal is None else row * diagonal
        if column is not None:
            column = column.to(right.dtype)
            right, diagonal = column.unsqueeze(2) * right, None if diagonal is None else diagonal * column
        return LowRankForm(left, right, diagonal, self.ptr)

    @classmethod
    def total(cls, terms: Sequence[LowRankForm]) -> LowRankForm:
        """The sum of terms over the same graphs: features stand beside each other."""
        heads = max(term.left.size(1) for term in terms)
        left, right = (
            torch.cat([features.expand(-1, heads, -1) for features in side], dim=2)
            for side in ([term.left for term in terms], [term.right for term in terms])
        )
        diagonals = [term.diagonal for term in terms if term.diagonal is not None]
        diagonal = torch.stack(torch.broadcast_tensors(*diagonals)).sum(0) if diagonals else None
        reaching = [term.ptr for term in terms if term.left.size(2)]
        return cls(left, right, diagonal, reaching[0] if reaching else None)
