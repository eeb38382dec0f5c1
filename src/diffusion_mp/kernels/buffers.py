"""``Buffers``: memory that blocks of any shape use again and again."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Buffers:
    """Tensors by name: a new one would be unmapped with its block, and mapping it anew costs more than writing it.

    A tensor is valid until its name is asked for again.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self._taken: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor of this shape."""
        size = math.prod(shape)
        if name not in self._taken or self._taken[name].numel() < size:
            self._taken[name] = self.like.new_empty(size, dtype=self.dtype)
        return self._taken[name][:size].view(shape)
