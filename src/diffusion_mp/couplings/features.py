"""Features that turn functions of a distance into functions of an inner product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.unit import unit_vectors


def distance_features(
    x: Float[Tensor, "N H D"], y: Float[Tensor, "N H D"] | None = None
) -> tuple[Float[Tensor, "N H F"], Float[Tensor, "N H F"]]:
    r"""q, k with q_i·k_j = −½‖x_i − y_j‖² (y = x by default): q = [x, −½‖x‖², 1], k = [y, 1, −½‖y‖²].

    So a penalty's f(‖x_i − x_j‖²) is a score of an inner product, exactly and for states of any norm: the
    DIFFormer-s score 2 − ½z² stays low-rank, and the sigmoid's and the Gaussian's are tiled like any other. (The paper
    writes 1 + q_i·k_j for it, which is the same for unit vectors only; D8 of docs/errata.md.)
    In at least float32: the squares leave the range of half precision, and what they cancel to has no digits in it.

    Examples:
        >>> query, key = distance_features(q)
        >>> distance = torch.cdist(q.transpose(0, 1), q.transpose(0, 1))
        >>> torch.allclose(torch.einsum("ihf,jhf->hij", query, key), -distance.square() / 2, atol=1e-5)
        True
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(wide), (x if y is None else y).to(wide)

    def half(z: Tensor) -> Tensor:
        return -0.5 * z.square().sum(2, keepdim=True)

    one, of_x = x.new_ones(*x.shape[:2], 1), half(x)
    return torch.cat([x, of_x, one], dim=2), torch.cat([y, one, of_x if y is x else half(y)], dim=2)


def unit_rows(q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"]) -> tuple[Tensor, Tensor]:
    """Both with every vector divided by its norm, a zero vector left as it is; the same object where they are."""
    unit = unit_vectors(q)
    return unit, unit if k is q else unit_vectors(k)


def with_constant(features: Float[Tensor, "N H F"], constant: float) -> Float[Tensor, "N H G"]:
    """Append a constant feature c, which adds c·c′ to every inner product.

    Args:
        features: [N, H, F]; the result is [N, H, F + 1].
        constant: c.

    Examples:
        >>> query, key = with_constant(q, 1.0), with_constant(k, 1.0)
        >>> torch.allclose((query * key).sum(2), (q * k).sum(2) + 1)
        True
    """
    return torch.cat([features, features.new_full((*features.shape[:2], 1), constant)], dim=2)
