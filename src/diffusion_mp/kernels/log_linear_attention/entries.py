"""The fast path of single entries, in bounded chunks of edges."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Entries gathered at once: 4 MiB in float32.
CHUNK = 1 << 20


def entries(edge_index: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r), [E, H]."""
    out = log_q.new_empty(edge_index.size(1), log_q.size(1))
    for part, (source, target) in _chunks(edge_index, log_q):
        out[part] = (log_q[target] + log_k[source]).logsumexp(2)
    return out


def entries_backward(
    grad: Tensor, out: Tensor, edge_index: Tensor, log_q: Tensor, log_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of log_q and log_k: every entry's softmax over the features, times its gradient, summed at its ends."""
    dq, dk = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (log_q, log_k))
    for part, (source, target) in _chunks(edge_index, log_q):
        exponents = log_q[target] + log_k[source]
        share = exponents.sub_(out[part].unsqueeze(2)).exp_().mul_(grad[part].unsqueeze(2))
        dq.index_add_(0, target, share)
        dk.index_add_(0, source, share)
    return dq, dk


def _chunks(edge_index: Tensor, log_features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Runs of edges, and their ends."""
    edges = max(1, CHUNK // max(1, log_features[:1].numel()))
    for first in range(0, edge_index.size(1), edges):
        part = slice(first, first + edges)
        yield part, edge_index[:, part]
