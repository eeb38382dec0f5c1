"""The plain truth: every graph's log scores, written out."""

from itertools import pairwise

import torch
from torch import Tensor


def log_scores(log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_ir + log_k_jr), [n, n, H], for one graph."""
    return (log_q[:, None] + log_k[None]).logsumexp(3)


def _per_graph(ptr: Tensor | None, num_nodes: int) -> list[slice]:
    bounds = [0, num_nodes] if ptr is None else ptr.tolist()
    return [slice(a, b) for a, b in pairwise(bounds)]


def log_linear_logsumexp(log_q: Tensor, log_k: Tensor, col_shift: Tensor, ptr: Tensor | None = None) -> Tensor:
    """log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js), [N, H, K]."""
    parts = []
    for rows in _per_graph(ptr, log_q.size(0)):
        exponents = log_scores(log_q[rows], log_k[rows]).unsqueeze(3) + col_shift[rows]
        parts.append(exponents.logsumexp(1))
    return torch.cat(parts)


def log_linear_product(
    log_q: Tensor, log_k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None = None
) -> Tensor:
    """Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j, [N, H, D]."""
    parts = []
    for rows in _per_graph(ptr, log_q.size(0)):
        exponents = log_scores(log_q[rows], log_k[rows]).unsqueeze(3) + row_shift[rows][:, None] + col_shift[rows]
        parts.append(torch.einsum("ijhs,jhd->ihd", exponents.exp(), v[rows]))
    return torch.cat(parts)


def log_linear_entries(target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r), [E, H]."""
    return (log_q[target] + log_k[source]).logsumexp(2)
