"""Positive orthogonal random features: softmax attention as an inner product (Choromanski et al. 2021)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.precision import accumulating, without_autocast


def orthogonal_directions(
    num_features: int, dim: int, generator: torch.Generator | None = None
) -> Float[Tensor, "m D"]:
    """m Gaussian directions w_r ~ N(0, I), orthogonal within every block of ``dim`` of them.

    The blocks are Haar-distributed; every direction has the length of an independent Gaussian vector, so that each
    one alone is exactly Gaussian and the kernel estimate unbiased, with less variance than independent ones have.
    """
    blocks = -(-num_features // dim)
    gaussian = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
    lengths = torch.randn(num_features, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (q.reshape(-1, dim)[:num_features] * lengths).to(torch.get_default_dtype())


def positive_features(
    a: Float[Tensor, "N H D"], directions: Float[Tensor, "m D"]
) -> tuple[Float[Tensor, "N H m"], Float[Tensor, "N H one"]]:
    r"""w_r·a and −½‖a‖²: log φ(a)_r is their sum, less ½ log m, with E[φ(a)·φ(b)] = exp(a·b).

    They come apart because the second is one weight for all features of a node: that of a query cancels from its row
    of a normalised attention, and left in it would cost digits. In at least float32, also under autocast.
    """
    (a, directions), _ = accumulating(a, directions)
    with without_autocast(a):
        return a @ directions.t(), -0.5 * a.square().sum(2, keepdim=True)
