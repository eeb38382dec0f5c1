"""``LowRankForm``: the part of a coupling that closed forms and preconditioners are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class LowRankForm(NamedTuple):
    """S = diag(e) + U Kᵀ within every graph, and where it is not ``complete`` something else besides.

    Attributes:
        left, right: U and K [N, H, F]; one head serves all.
        diagonal: e [N, H], ``None`` for zeros.
        ptr: row boundaries of the graphs, on the CPU; ``None`` is one graph.
        complete: whether this is all of S.
    """

    left: Float[Tensor, "N H F"]
    right: Float[Tensor, "N H F"]
    diagonal: Float[Tensor, "N H"] | None = None
    ptr: Tensor | None = None
    complete: bool = True

    def reweighted(self, row: Tensor | None, column: Tensor | None = None) -> LowRankForm:
        """diag(r) S diag(c) for r and c [N, H]."""
        left, right, diagonal = self.left, self.right, self.diagonal
        if row is not None:
            row = row.to(left.dtype)
            left, diagonal = row.unsqueeze(2) * left, None if diagonal is None else row * diagonal
        if column is not None:
            column = column.to(right.dtype)
            right, diagonal = column.unsqueeze(2) * right, None if diagonal is None else diagonal * column
        return LowRankForm(left, right, diagonal, self.ptr, self.complete)

    @classmethod
    def total(cls, terms: Sequence[LowRankForm | None]) -> LowRankForm | None:
        """The sum of those terms that have such a form: features stand beside each other.

        ``None`` where no term has one, or where features of two terms reach over different graphs.
        """
        known = [term for term in terms if term is not None]
        reaching = [term for term in known if term.left.size(2)]
        if not known or any(not _same(term.ptr, reaching[0].ptr) for term in reaching):
            return None
        heads = max(term.left.size(1) for term in known)
        left, right = (
            torch.cat([features.expand(-1, heads, -1) for features in side], dim=2)
            for side in ([term.left for term in known], [term.right for term in known])
        )
        diagonals = [term.diagonal for term in known if term.diagonal is not None]
        diagonal = torch.stack(torch.broadcast_tensors(*diagonals)).sum(0) if diagonals else None
        complete = len(known) == len(terms) and all(term.complete for term in known)
        return cls(left, right, diagonal, reaching[0].ptr if reaching else None, complete)


def _same(ptr: Tensor | None, other: Tensor | None) -> bool:
    return ptr is other or (ptr is not None and other is not None and torch.equal(ptr, other))
