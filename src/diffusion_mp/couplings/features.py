"""Features that turn functions of a distance into functions of an inner product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def distance_features(
    x: Float[Tensor, "N H D"],
) -> tuple[Float[Tensor, "N H F"], Float[Tensor, "N H F"]]:
    r"""q, k with q_i·k_j = −½‖x_i − x_j‖²: q = [x, −½‖x‖², 1], k = [x, 1, −½‖x‖²].

    So a penalty's f(‖x_i − x_j‖²) is a score of an inner product, exactly and for states of any norm: the
    DIFFormer-s score 2 − ½z² stays low-rank (ERRATA D8), and the sigmoid's and the Gaussian's are tiled like any other.
    """
    half = -0.5 * x.square().sum(2, keepdim=True)
    one = torch.ones_like(half)
    return torch.cat([x, half, one], dim=2), torch.cat([x, one, half], dim=2)


def with_constant(features: Float[Tensor, "N H F"], constant: float) -> Float[Tensor, "N H G"]:
    """Append a constant feature c, which adds c·c′ to every inner product."""
    return torch.cat([features, features.new_full((*features.shape[:2], 1), constant)], dim=2)
