"""The plain truth: every graph's score matrix, written out."""

from itertools import pairwise

import torch
from torch import Tensor

from diffusion_mp.kernels.pairwise.scores import log_score


def log_scores(q: Tensor, k: Tensor, score: str) -> Tensor:
    """log f(q_i·k_j), [H, n, n], for one graph."""
    return log_score(torch.einsum("ihf,jhf->hij", q, k), score)


def _per_graph(ptr: Tensor | None, num_nodes: int) -> list[slice]:
    bounds = [0, num_nodes] if ptr is None else ptr.tolist()
    return [slice(a, b) for a, b in pairwise(bounds)]


def pairwise_attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> Tensor:
    """Σ_j p_ij v_j with p the softmax of log f(q_i·k_j) over row i (ERRATA D11), [N, H, D]."""
    parts = [
        torch.einsum("hij,jhd->ihd", log_scores(q[rows], k[rows], score).softmax(2), v[rows])
        for rows in _per_graph(ptr, q.size(0))
    ]
    return torch.cat(parts)


def pairwise_logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str) -> Tensor:
    """log Σ_j f(q_i·k_j), [N, H]."""
    parts = [log_scores(q[rows], k[rows], score).logsumexp(2).t() for rows in _per_graph(ptr, q.size(0))]
    return torch.cat(parts)


def pairwise_product(
    q: Tensor, k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None, score: str
) -> Tensor:
    """Σ_j exp(log f(q_i·k_j) + a_i + b_j) v_j, [N, H, D]."""
    parts = []
    for rows in _per_graph(ptr, q.size(0)):
        shift = row_shift[rows].t()[:, :, None] + col_shift[rows].t()[:, None, :]
        weights = (log_scores(q[rows], k[rows], score) + shift).exp()
        parts.append(torch.einsum("hij,jhd->ihd", weights, v[rows]))
    return torch.cat(parts)
