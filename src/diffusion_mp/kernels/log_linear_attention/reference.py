"""Attention through log features in plain torch: sums over the senders with a shift, and the rows that read them."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.operation import Wide
from diffusion_mp.kernels.segments import slices


class Receivers(NamedTuple):
    """What a row of attention depends on, or the gradients by these.

    Examples:
        >>> v, zero = torch.rand(6, 2, 4), torch.zeros(6, 2, 1)
        >>> pooled = log_linear_pool(Senders(k.log(), zero, torch.ones(6, 2, 1)))
        >>> rows = log_linear_read(Receivers(q.log(), row_shift=None), pooled).values
        >>> torch.allclose(rows, torch.ones(6, 2, 1))  # rows are divided by their sums
        True
    """

    log_q: Wide
    """Logarithms of positive features [N, H, F]."""
    row_shift: Wide | None
    """a, a log weight for every sample [N, H, K]. ``None``: each row of each sample is divided by its sum and by K."""


class Senders(NamedTuple):
    """What the sums that rows read depend on, or the gradients by these.

    Examples:
        >>> zero = torch.zeros(6, 2, 1)
        >>> pooled = log_linear_pool(Senders(k.log(), col_shift=zero, v=zero))  # sums of k beside those of k v
        >>> torch.allclose((pooled.sums * pooled.shift.exp()).sum(1)[..., -1].float(), k.sum(0))
        True
    """

    log_k: Wide
    """Logarithms of positive features [N, H, F]."""
    col_shift: Wide
    """b, a log weight for every sample [N, H, K]."""
    v: Wide
    """Values [N, H, D]."""


class Pooled(NamedTuple):
    """U_sr = Σ_j exp(log_k_jr + b_js − M_sr) [v_j, 1]; exp(M − M′) U has the shift M′, and so such sums merge.

    Examples:
        >>> pooled = log_linear_pool(Senders(k.log(), torch.zeros(6, 2, 1), torch.rand(6, 2, 4)))
        >>> isinstance(pooled, Pooled), pooled.shift.shape
        (True, torch.Size([2, 1, 3, 1]))
    """

    sums: Wide
    """U, [H, K, F, D + 1]."""
    shift: Tensor
    """M in double precision [H, K, F, 1], a constant without a gradient, and −∞ where there is no sender."""


class Attended(NamedTuple):
    """What attention returns, or its gradients."""

    values: Tensor
    """Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j, [N, H, D]."""
    log_sum: Tensor
    """L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js), [N, H, K]; fast paths return none of it where a is given."""


def attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> Attended:
    """Each graph of a batch by itself."""
    parts = []
    for rows in slices(ptr, senders.v.size(0)):
        shift = None if receivers.row_shift is None else receivers.row_shift[rows]
        pooled = pool(Senders(*(t[rows] for t in senders)))
        parts.append(read(Receivers(receivers.log_q[rows], shift), pooled))
    return Attended(*map(torch.cat, zip(*parts, strict=True)))


def pool(senders: Senders) -> Pooled:
    """The sums over the senders of one graph."""
    exponents = senders.log_k.unsqueeze(2) + senders.col_shift.unsqueeze(3)
    shift = pad(exponents.detach(), (0, 0, 0, 0, 0, 0, 0, 1), value=-torch.inf).amax(0)  # also of no sender
    sums = torch.einsum("jhsr,jhd->hsrd", (exponents - shift).exp(), pad(senders.v, (0, 1), value=1.0))
    return Pooled(sums, shift.double().unsqueeze(3))


def read(receivers: Receivers, pooled: Pooled) -> Attended:
    """The rows of some receivers from the sums over all senders."""
    log_q, row_shift = receivers
    exponents = log_q.unsqueeze(2) + pooled.shift.squeeze(3).to(log_q.dtype)
    top = exponents.detach().amax(3, keepdim=True)
    total = torch.einsum("ihsr,hsrd->ihsd", (exponents - top).exp(), pooled.sums)
    values, count = total[..., :-1], total[..., -1:]
    log_sum = (count.log() + top).squeeze(3)
    if row_shift is None:
        return Attended((values / count).mean(2), log_sum)
    return Attended((values * (row_shift.unsqueeze(3) + top).exp()).sum(2), log_sum)


def entries(edge_index: Tensor, log_q: Tensor, log_k: Tensor) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r)."""
    source, target = edge_index
    return (log_q[target] + log_k[source]).logsumexp(2)
