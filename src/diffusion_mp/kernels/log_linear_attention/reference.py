"""Attention through log features in plain torch: sums over the senders with a shift, and the rows that read them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.operation import Wide, pulled_back
from diffusion_mp.kernels.segments import slices


class Receivers(NamedTuple):
    """What a row of :func:`log_linear_product` depends on, or its gradients: log_q [N, H, F] and a [N, H, K].

    Examples:
        >>> pooled = log_linear_pool(Senders(k.log(), torch.zeros(6, 2, 1), torch.ones(6, 2, 1)))
        >>> rows = log_linear_read(Receivers(q.log(), row_shift=None), pooled).values
        >>> torch.allclose(rows, torch.ones(6, 2, 1))  # rows are divided by their sums
        True
    """

    log_q: Wide
    row_shift: Wide | None


class Senders(NamedTuple):
    """What the sums over senders depend on, or their gradients: log_k [N, H, F], b [N, H, K] and v [N, H, D].

    Examples:
        >>> zero = torch.zeros(6, 2, 1)
        >>> pooled = log_linear_pool(Senders(k.log(), col_shift=zero, v=zero))  # sums of k v, then sums of k
        >>> torch.allclose((pooled.sums * pooled.shift.exp()).sum(1)[..., -1].float(), k.sum(0))
        True
    """

    log_k: Wide
    col_shift: Wide
    v: Wide


class Pooled(NamedTuple):
    """U_sr = Σ_j exp(log_k_jr + b_js − M_sr) [v_j, 1]; exp(M − M′) U has the shift M′, and so such sums merge.

    U is [H, K, F, D + 1]. M, [H, K, F, 1] in double precision, has no gradient, and is −∞ where there is no sender.

    Examples:
        >>> pooled = log_linear_pool(Senders(k.log(), torch.zeros(6, 2, 1), torch.rand(6, 2, 4)))
        >>> isinstance(pooled, Pooled), pooled.shift.shape
        (True, torch.Size([2, 1, 3, 1]))
    """

    sums: Wide
    shift: Tensor


class LogLinearRows(NamedTuple):
    """Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j [N, H, D] and L, or their gradients.

    L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js) [N, H, K] has no row where shifts a are given.
    """

    values: Tensor
    log_sum: Tensor


def attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> LogLinearRows:
    parts = []
    for rows in slices(ptr, senders.v.size(0)):
        of = Receivers(
            receivers.log_q[rows],
            None if receivers.row_shift is None else receivers.row_shift[rows],
        )
        parts.append(read(of, pool(Senders(*(t[rows] for t in senders)))))
    return LogLinearRows(*map(torch.cat, zip(*parts, strict=True)))


def pool(senders: Senders) -> Pooled:
    exponents = senders.log_k.unsqueeze(2) + senders.col_shift.unsqueeze(3)
    shift = pad(exponents.detach(), (0, 0, 0, 0, 0, 0, 0, 1), value=-torch.inf).amax(
        0
    )  # padded, for no sender
    shift = shift.double().unsqueeze(3)
    return Pooled(sums(senders, shift), shift)


def sums(senders: Senders, shift: Tensor) -> Tensor:
    """Return the sums with a given shift."""
    exponents = senders.log_k.unsqueeze(2) + senders.col_shift.unsqueeze(3)
    share = (exponents - shift.squeeze(3).to(exponents.dtype)).exp()
    return torch.einsum("jhsr,jhd->hsrd", share, pad(senders.v, (0, 1), value=1.0))


def read(receivers: Receivers, pooled: Pooled) -> LogLinearRows:
    log_q, row_shift = receivers
    exponents = log_q.unsqueeze(2) + pooled.shift.squeeze(3).to(log_q.dtype)
    top = exponents.detach().amax(3, keepdim=True)
    total = torch.einsum("ihsr,hsrd->ihsd", (exponents - top).exp(), pooled.sums)
    values = total[..., :-1]
    count = total[..., -1:]
    log_sum = (count.log() + top).squeeze(3)
    if row_shift is None:
        return LogLinearRows((values / count).mean(2), log_sum)
    return LogLinearRows((values * (row_shift.unsqueeze(3) + top).exp()).sum(2), log_sum[:0])


def attention_backward(
    grad: LogLinearRows, receivers: Receivers, senders: Senders, ptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of log_q, a (no row where it is not given), log_k, b and v."""

    def rows(receivers: Receivers, *of_senders: Tensor) -> LogLinearRows:
        return attention(receivers, Senders(*of_senders), ptr)

    return _pulled(rows, receivers, tuple(senders), grad)


def pool_backward(
    grad_sums: Tensor, senders: Senders, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    by_log_k, by_col_shift, by_v = pulled_back(
        lambda *of: sums(Senders(*of), shift), senders, grad_sums
    )
    return by_log_k, by_col_shift, by_v


def read_backward(
    grad: LogLinearRows, receivers: Receivers, pooled: Pooled
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log_q, a (no row where it is not given) and the sums."""

    def rows(receivers: Receivers, sums: Tensor) -> LogLinearRows:
        return read(receivers, Pooled(sums, pooled.shift))

    return _pulled(rows, receivers, (pooled.sums,), grad)


def _pulled(
    rows: Callable[..., LogLinearRows],
    receivers: Receivers,
    others: tuple[Tensor, ...],
    grad: LogLinearRows,
) -> Any:
    """Return the gradients of the receivers and of the others."""
    log_q, row_shift = receivers
    if row_shift is not None:
        inputs = (log_q, row_shift, *others)
        return pulled_back(lambda q, a, *of: tuple(rows(Receivers(q, a), *of)), inputs, tuple(grad))
    inputs = (log_q, *others)
    by_log_q, *by_others = pulled_back(
        lambda q, *of: tuple(rows(Receivers(q, None), *of)), inputs, tuple(grad)
    )
    return (by_log_q, log_q.new_empty(0, *grad.log_sum.shape[1:]), *by_others)


def entries(edge_index: Tensor, log_q: Tensor, log_k: Tensor) -> Float[Tensor, "E H"]:
    source, target = edge_index
    return (log_q.index_select(0, target) + log_k.index_select(0, source)).logsumexp(2)
