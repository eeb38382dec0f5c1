"""The fast path: two matrix products per graph, graphs of nearly one size at once."""

import torch
from torch import Tensor

from diffusion_mp.kernels.segments import stacks

# Entries of the rows that are stacked at once.
BLOCK = 1 << 20


def linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """q(kᵀv) for large graphs and (qkᵀ)v for small ones: whichever is cheaper, so that memory never exceeds the
    values'.

    A graph of n nodes costs 2nFD one way and n²(F + D) the other; the intermediate is F×D or n×n.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    heads, features, channels = v.size(1), q.size(2), v.size(2)
    rows = BLOCK // max(1, heads * max(features, channels))
    for mask, (result,), (qs, ks, vs) in stacks(ptr, rows, [out], [q, k, v]):
        senders = ks if mask is None else ks * mask  # below the end of a graph nothing is sent
        if qs.size(1) * (features + channels) < 2 * features * channels:
            torch.bmm(torch.bmm(qs, senders.transpose(1, 2)), vs, out=result)
        else:
            torch.bmm(qs, torch.bmm(senders.transpose(1, 2), vs), out=result)
    return out
