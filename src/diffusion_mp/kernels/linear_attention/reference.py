"""The plain truth: every graph's score matrix, written out."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.unit import quotient, unit_vectors


def linear_product(
    q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], ptr: Tensor | None
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph; O(n²) per graph."""
    bounds = [0, q.size(0)] if ptr is None else ptr.tolist()
    parts = [torch.einsum("ihf,jhf,jhd->ihd", q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    return torch.cat(parts) if parts else torch.zeros_like(v)


def linear_attention(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None,
    constant: float,
    own: float,
    unit: bool,
) -> Float[Tensor, "N H D"]:
    """out_i = (own n v_i + Σ_j s_ij v_j) / (own n + Σ_j s_ij), s_ij = constant + q_i·k_j; O(n²) per graph."""
    if unit:
        q, k = unit_vectors(q), unit_vectors(k)
    bounds = [0, q.size(0)] if ptr is None else ptr.tolist()
    parts = []
    for a, b in pairwise(bounds):
        scores = constant + torch.einsum("ihf,jhf->ihj", q[a:b], k[a:b])
        # own n on the diagonal: a node is a sender of its own row once more.
        scores = scores + own * (b - a) * torch.eye(b - a, dtype=q.dtype, device=q.device).unsqueeze(1)
        weights = quotient(scores, scores.sum(2, keepdim=True))
        parts.append(torch.einsum("ihj,jhd->ihd", weights, v[a:b]))
    return torch.cat(parts) if parts else torch.zeros_like(v)
