"""The plain truth: every graph's score matrix, written out."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor


def linear_attention(
    q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], ptr: Tensor | None
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph; O(n²) per graph."""
    bounds = [0, q.size(0)] if ptr is None else ptr.tolist()
    parts = [torch.einsum("ihf,jhf,jhd->ihd", q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    return torch.cat(parts) if parts else torch.zeros_like(v)
