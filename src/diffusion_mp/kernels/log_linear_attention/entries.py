"""The fast path of single entries, in bounded chunks of edges."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Entries gathered at once: 4 MiB in float32.
CHUNK = 1 << 20


def _chunks(edges: int, width: int) -> Iterator[slice]:
    chunk = max(1, CHUNK // max(1, width))
    return (slice(first, first + chunk) for first in range(0, edges, chunk))


def entries(target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r), [E, H]."""
    out = log_q.new_empty(target.numel(), log_q.size(1))
    for part in _chunks(target.numel(), log_q[:1].numel()):
        out[part] = (log_q[target[part]] + log_k[source[part]]).logsumexp(2)
    return out


def entries_backward(
    grad: Tensor, out: Tensor, target: Tensor, source: Tensor, log_q: Tensor, log_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of log_q and log_k: every entry's softmax over the features, times its gradient, summed at its ends."""
    dq, dk = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k))
    for part in _chunks(target.numel(), log_q[:1].numel()):
        exponents = log_q[target[part]] + log_k[source[part]]
        share = exponents.sub_(out[part].unsqueeze(2)).exp_().mul_(grad[part].unsqueeze(2))
        dq.index_add_(0, target[part], share)
        dk.index_add_(0, source[part], share)
    return dq, dk
