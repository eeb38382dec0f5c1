"""Rows of sparse matrices; torch itself selects rows of COO tensors only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of a sparse CSR, CSC or COO matrix [N, C], as a matrix in the same layout; O(entries) for CSR."""
    # The entries of a row are scattered over columns, so the matrix is converted once.
    if x.layout is torch.sparse_csc:
        return select_rows(x.to_sparse_csr(), rows).to_sparse_csc()
    if x.layout is not torch.sparse_csr:
        return x.index_select(0, rows)
    bounds = x.crow_indices()
    first = bounds[:-1].index_select(0, rows)
    count = bounds.diff().index_select(0, rows)
    new_bounds = pad(count.cumsum(0), (1, 0))
    # Entry e of the result is entry e + shift of x, with one shift for every row.
    shift = (first - new_bounds[:-1]).repeat_interleave(count)
    entry = torch.arange(shift.numel(), device=shift.device) + shift
    # torch's check of the invariants would take another pass over entries that are correct by construction.
    return torch.sparse_csr_tensor(
        new_bounds.to(bounds.dtype),
        x.col_indices().index_select(0, entry),
        x.values().index_select(0, entry),
        size=(rows.numel(), x.size(1)),
        check_invariants=False,
    )
