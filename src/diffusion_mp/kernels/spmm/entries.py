"""Where the entries of a sparse operator are, as tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from diffusion_mp.graph.pattern import Pattern


class Entries(NamedTuple):
    """The shape; row and column of every entry; and compressed forms by both, where somebody expected a product.

    A compressed form is that of `Compressed`: boundaries, the entry that stands at every place (``None`` where nothing
    moves), and its other end.
    """

    rows: int
    cols: int
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
        forms = *(rows.parts if by_row else unknown), *(cols.parts if by_col else unknown)
        return cls(rows.num_nodes, cols.num_nodes, rows.node, cols.node, *forms)

    @property
    def T(self) -> Entries:
        """Those of the transpose."""
        return Entries(self.cols, self.rows, self.col, self.row, *self[7:], *self[4:7])
