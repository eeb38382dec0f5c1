"""Which graph of a ragged batch a row belongs to."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def same_graph(ptr: Int[Tensor, " bounds"], a: Int[Tensor, "*rows"], b: Int[Tensor, "*cols"]) -> Bool[Tensor, " ..."]:
    """Whether nodes ``a`` and ``b`` (broadcast against each other) lie in one graph."""
    # right=True skips empty graphs: a boundary belongs to the last graph that starts there.
    starts = ptr[1:].to(a.device)
    return torch.bucketize(a, starts, right=True) == torch.bucketize(b, starts, right=True)
