"""Attention through log features in plain torch: sums over the senders with a shift, and the rows that read them.

With M_sr = max_j (log_k_jr + b_js) over the senders at hand, they are U_sr = Σ_j exp(log_k_jr + b_js − M_sr) [v_j, 1].
Sums over other senders have another M; times exp(M − M′) they are sums with the shift M′, and so they merge.
"""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


def attention(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H K"] | None,
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None,
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N H K"]]:
    """Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j, and L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js).

    Without a, the mean over the samples of rows that are divided by their sums: a_is = −L_is − log K.
    """
    bounds = [0, log_q.size(0)] if ptr is None else ptr.tolist()
    rows = []
    for graph in (slice(first, last) for first, last in pairwise(bounds)):
        a = None if row_shift is None else row_shift[graph]
        rows.append(read(log_q[graph], a, *pool(log_k[graph], col_shift[graph], v[graph])))
    out, log_sum = zip(*rows, strict=True) if rows else ([v], [col_shift])
    return torch.cat(out), torch.cat(log_sum)


def pool(
    log_k: Float[Tensor, "N H F"], col_shift: Float[Tensor, "N H K"], v: Float[Tensor, "N H D"]
) -> tuple[Float[Tensor, "H K F D_and_one"], Float[Tensor, "H K F one"]]:
    """U and M of one graph; M is a constant in double precision, has no gradient, and is −∞ where there is no sender."""
    exponents = log_k.unsqueeze(2) + col_shift.unsqueeze(3)
    shift = exponents.detach().amax(0) if log_k.size(0) else torch.full_like(exponents.sum(0), -torch.inf)
    sums = torch.einsum("jhsr,jhd->hsrd", (exponents - shift).exp(), pad(v, (0, 1), value=1.0))
    return sums, shift.double().unsqueeze(3)


def read(
    log_q: Float[Tensor, "N H F"],
    row_shift: Float[Tensor, "N H K"] | None,
    sums: Float[Tensor, "H K F D_and_one"],
    shift: Float[Tensor, "H K F one"],
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N H K"]]:
    """The rows of ``attention``, and L, from the sums over all senders."""
    exponents = log_q.unsqueeze(2) + shift.squeeze(3).to(log_q.dtype)
    top = exponents.detach().amax(3, keepdim=True)
    total = torch.einsum("ihsr,hsrd->ihsd", (exponents - top).exp(), sums)
    values, count = total[..., :-1], total[..., -1:]
    log_sum = (count.log() + top).squeeze(3)
    if row_shift is None:
        return (values / count).mean(2), log_sum
    return (values * (row_shift.unsqueeze(3) + top).exp()).sum(2), log_sum


def entries(edge_index: Tensor, log_q: Tensor, log_k: Tensor) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r)."""
    source, target = edge_index
    return (log_q[target] + log_k[source]).logsumexp(2)
