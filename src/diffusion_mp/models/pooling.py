"""From the states of a padded sequence to one state: the mean of its tokens, the first or the last of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Pooling = Literal["mean", "first", "last"]
States = Float[Tensor, "B L C"]
Mask = Bool[Tensor, "B L"]
Pooled = Float[Tensor, "B C"]


def mean_token(x: States, mask: Mask) -> Pooled:
    """The mean of the tokens, summed in at least float32; a sequence without any counts as zero."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * mask.unsqueeze(2)
    return (wide.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


def first_token(x: States, mask: Mask) -> Pooled:
    """The first token, where a tokeniser puts its [CLS]; a sequence without any counts as zero."""
    return _only(x, mask & (mask.cumsum(1) == 1))


def last_token(x: States, mask: Mask) -> Pooled:
    """The last token, which has seen all others in a causal model; a sequence without any counts as zero."""
    return _only(x, mask & (mask.flip(1).cumsum(1).flip(1) == 1))


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean_token,
    "first": first_token,
    "last": last_token,
}


def _only(x: States, here: Mask) -> Pooled:
    """The state at the one position of every sequence that is ``here``."""
    return x.masked_fill(~here.unsqueeze(2), 0).sum(1)
