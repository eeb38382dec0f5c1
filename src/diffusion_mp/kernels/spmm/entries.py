"""Where the entries of a sparse operator are, as tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from diffusion_mp.pattern import Pattern


class Entries(NamedTuple):
    """Row and column of every entry; and the compressed forms by row and by column, where somebody expected a product.

    A compressed form is that of `Compressed`: boundaries, the entry that stands at every place (``None`` where nothing
    moves), and its other end.
    """

    row: Tensor
    col: Tensor
    row_ptr: Tensor | None
    row_moved: Tensor | None
    row_other: Tensor | None
    col_ptr: Tensor | None
    col_moved: Tensor | None
    col_other: Tensor | None

    @classmethod
    def of(cls, pattern: Pattern, *, by_row: bool, by_col: bool) -> Entries:
        """A pattern's entries, compressed only in the forms that will be needed."""
        rows, cols = pattern
        unknown = None, None, None
        return cls(rows.node, cols.node, *(rows.parts if by_row else unknown), *(cols.parts if by_col else unknown))

    @property
    def T(self) -> Entries:
        """Those of the transpose."""
        return Entries(self.col, self.row, *self[5:], *self[2:5])
