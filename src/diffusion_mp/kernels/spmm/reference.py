"""The plain truth: one message per edge, summed where it arrives."""

from torch import Tensor

from diffusion_mp.kernels.spmm.entries import Entries


def spmm(entries: Entries, weight: Tensor, v: Tensor) -> Tensor:
    """out_i = Σ_{e: row(e) = i} w_e v_col(e); weight [E, H] (H may be 1), v [C, H, D]."""
    messages = weight.unsqueeze(2) * v[entries.col]
    return v.new_zeros(messages.shape[1:]).expand(entries.rows, -1, -1).index_add(0, entries.row, messages)


def sddmm(entries: Entries, a: Tensor, b: Tensor) -> Tensor:
    """s_e = a_row(e)·b_col(e), [E, H]."""
    return (a[entries.row] * b[entries.col]).sum(2)
