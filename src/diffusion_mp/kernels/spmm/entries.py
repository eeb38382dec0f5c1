"""Where the entries of a sparse operator are, as tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from diffusion_mp.pattern import Pattern


class Entries(NamedTuple):
    """Row and column of every entry; and boundaries and order of the entries by row and by column, where known."""

    row: Tensor
    col: Tensor
    row_ptr: Tensor | None
    row_order: Tensor | None
    col_ptr: Tensor | None
    col_order: Tensor | None

    @classmethod
    def of(cls, pattern: Pattern, *, by_row: bool, by_col: bool) -> Entries:
        """A pattern's entries, sorted only in the orders that will be needed."""
        rows, cols = pattern
        row_ptr, row_order = rows.ptr_and_order if by_row else (None, None)
        col_ptr, col_order = cols.ptr_and_order if by_col else (None, None)
        return cls(rows.node, cols.node, row_ptr, row_order, col_ptr, col_order)

    @property
    def T(self) -> Entries:
        """Those of the transpose."""
        return Entries(self.col, self.row, self.col_ptr, self.col_order, self.row_ptr, self.row_order)
