"""The weights of pairs in log space, and the operations with every graph's score matrix written out."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from diffusion_mp.kernels.operation import Wide
from diffusion_mp.kernels.segments import slices

SCORES = ("exp", "sigmoid")
"""``"exp"`` is the softmax's score (with distance features, the Gaussian's); ``"sigmoid"`` is DIFFormer-a's.

Examples:
    >>> [pairwise_attention(q, k, torch.rand(6, 2, 4), score=score).shape for score in SCORES]
    [torch.Size([6, 2, 4]), torch.Size([6, 2, 4])]
"""


class Weighting(NamedTuple):
    """w_ij = f(q_i·k_j) e^{a_i + b_j} for nodes i and j of the same graph: all but the features."""

    row_shift: Wide
    """a [N, H]."""
    col_shift: Wide | None
    """b [N, H]; ``None`` is zero."""
    ptr: Tensor | None
    score: str
    loops: bool = True
    """Whether i and j may be the same node; otherwise w_ii = 0."""


class Attended(NamedTuple):
    """Σ_j p_ij v_j [N, H, D]; and log Σ_j f(q_i·k_j) [N, H] if a kernel needs it for its derivative, else nothing."""

    out: Tensor
    lse: Tensor


def log_score(s: Tensor, score: str) -> Tensor:
    """log f(s).

    Args:
        s: inner products.
        score: one of `SCORES`.

    Examples:
        >>> torch.allclose(log_score(x, "sigmoid"), x.sigmoid().log())
        True
    """
    return logsigmoid(s) if score == "sigmoid" else s


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
