"""``roughness``: how much a state varies between neighbouring tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_mp.errors import check_mask, check_tensor, describe
from diffusion_mp.layers.sequences import tokens_first


def roughness(x: Float[Tensor, "B L C"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, " B"]:
    r"""𝓔(x) = ½ Σ_i ‖x_{i+1} − x_i‖² of every sequence, its Dirichlet energy (Zhang & Zhou, Eq. 6).

    Summed in at least float32. Where ``mask`` is given, the tokens (true) of a row are neighbours in their order, and
    what stands between them is ignored, NaN included.

    Raises:
        TypeError, ValueError: x is not [B, L, C], or the mask is not [B, L] of bool.

    Examples:
        >>> roughness(torch.rand(3, 10, 4)).shape  # of three sequences
        torch.Size([3])
    """
    check_tensor(x, "x", "[batch, length, channels]")
    if x.dim() != 3:
        raise ValueError(f"x must be [batch, length, channels]; got {describe(x)}. For one sequence: x.unsqueeze(0).")
    check_mask(mask, x)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return x.diff(dim=1).square().sum((1, 2)) / 2
    order, _ = tokens_first(mask)
    ordered, tokens = x.flatten(0, 1)[order].view_as(x), mask.flatten()[order].view_as(mask)
    steps = ordered.diff(dim=1).masked_fill(~tokens[:, 1:, None], 0)
    return steps.square().sum((1, 2)) / 2
