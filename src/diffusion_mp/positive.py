"""``Positive``: a learnable number that stays positive."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from diffusion_mp.errors import check_positive


class Positive(nn.Module):
    """softplus(r) = log(1 + eʳ) > 0 of a learnable number r, as a 0-dimensional tensor: a weight of an energy.

    Args:
        initial: what it is at the start, > 0.

    Raises:
        TypeError, ValueError: ``initial`` is no finite number above zero.

    Examples:
        >>> weight = Positive(1.0)  # softplus of a parameter, so it stays positive
        >>> diffusivity = weight * SimpleDiffusivity()
    """

    def __init__(self, initial: float = 1.0) -> None:
        super().__init__()
        check_positive(initial, "initial")
        self.initial = float(initial)
        self.raw = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the initial number."""
        nn.init.constant_(self.raw, self.initial + math.log(-math.expm1(-self.initial)))

    def forward(self) -> Float[Tensor, ""]:
        """The number as it is now."""
        return softplus(self.raw)

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"
