"""The plain truth: every graph's score matrix, written out."""

import torch
from torch import Tensor

from diffusion_mp.kernels.pairwise.scores import Attended, Weighting, log_score
from diffusion_mp.kernels.segments import slices


def log_scores(q: Tensor, k: Tensor, score: str, loops: bool = True) -> Tensor:
    """log f(q_i·k_j), [H, n, n], for one graph; −∞ for i = j without ``loops``."""
    s = log_score(torch.einsum("ihf,jhf->hij", q, k), score)
    return s if loops else s.masked_fill(torch.eye(len(q), dtype=torch.bool, device=q.device), -torch.inf)


def pairwise_attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> Attended:
    """Σ_j p_ij v_j with p the softmax of log f(q_i·k_j) over row i, also for the sigmoid (D11 of docs/errata.md)."""
    parts = [
        torch.einsum("hij,jhd->ihd", log_scores(q[rows], k[rows], score).softmax(2), v[rows])
        for rows in slices(ptr, q.size(0))
    ]
    return Attended(torch.cat(parts), q.new_empty(0))


def pairwise_logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str, loops: bool) -> Tensor:
    """log Σ_j f(q_i·k_j), [N, H]."""
    return torch.cat([log_scores(q[rows], k[rows], score, loops).logsumexp(2).t() for rows in slices(ptr, q.size(0))])


def pairwise_product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j exp(log f(q_i·k_j) + a_i + b_j) v_j, [N, H, D]."""
    row_shift, col_shift, ptr, score, loops = weighting
    parts = []
    for rows in slices(ptr, q.size(0)):
        shift = row_shift[rows].t()[:, :, None]
        if col_shift is not None:
            shift = shift + col_shift[rows].t()[:, None, :]
        weights = (log_scores(q[rows], k[rows], score, loops) + shift).exp()
        parts.append(torch.einsum("hij,jhd->ihd", weights, v[rows]))
    return torch.cat(parts)
