"""The plain truth: one message per edge, summed where it arrives."""

from torch import Tensor


def spmm(target: Tensor, source: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """out_i = Σ_{e: target(e) = i} w_e v_source(e); weight [E, H] (H may be 1), v [N, H, D]."""
    messages = weight.unsqueeze(2) * v[source]
    return v.new_zeros(messages.shape[1:]).expand(v.size(0), -1, -1).index_add(0, target, messages)


def sddmm(target: Tensor, source: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """s_e = a_target(e)·b_source(e), [E, H]."""
    return (a[target] * b[source]).sum(2)
