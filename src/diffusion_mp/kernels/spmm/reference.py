"""The plain truth: one message per edge, summed where it arrives."""

from torch import Tensor

from diffusion_mp.graph import Pattern


def spmm(pattern: Pattern, weight: Tensor, v: Tensor) -> Tensor:
    """out_i = Σ_{e: row(e) = i} w_e v_col(e); weight [E, H] (H may be 1), v [N, H, D]."""
    messages = weight.unsqueeze(2) * v[pattern.col]
    return v.new_zeros(messages.shape[1:]).expand(v.size(0), -1, -1).index_add(0, pattern.row, messages)


def sddmm(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """s_e = a_row(e)·b_col(e), [E, H]."""
    return (a[pattern.row] * b[pattern.col]).sum(2)
