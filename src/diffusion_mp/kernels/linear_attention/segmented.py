"""The fast path: two matrix products per graph, graphs of equal size at once."""

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import buckets, gather, rows_of, scatter


def linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """q(kᵀv) for large graphs and (qkᵀ)v for small ones: whichever is cheaper, so that memory never exceeds the
    values'.

    A graph of n nodes costs 2nFD one way and n²(F + D) the other; the intermediate is F×D or n×n.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    features, channels = q.size(2), v.size(2)
    for size, starts in buckets(ptr, q.size(0)):
        rows = rows_of(starts, size, q.device)
        qs, ks, vs = gather(q, rows), gather(k, rows), gather(v, rows)
        if size * (features + channels) < 2 * features * channels:
            result = (qs @ ks.transpose(2, 3)) @ vs
        else:
            result = qs @ (ks.transpose(2, 3) @ vs)
        scatter(out, rows, result)
    return out
