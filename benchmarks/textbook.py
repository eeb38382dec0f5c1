"""NodeFormer's attention as one writes it from the paper: what the library is measured against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def features(x: Tensor, projection: Tensor) -> Tensor:
    """Positive random features φ(x)_r = exp(w_r·x − ½‖x‖²)/√m, [N, H, m]."""
    exponent = torch.einsum("nhd,md->nhm", x, projection) - 0.5 * x.square().sum(-1, keepdim=True)
    return exponent.exp() / math.sqrt(projection.size(0))


def nodeformer(q: Tensor, k: Tensor, v: Tensor, projection: Tensor, gumbel: Tensor, tau: float) -> Tensor:
    """Algorithm 1 of the slides, the mean over K samples: every key times every sample's noise, [N, H, K, m]."""
    phi_q = features(q / math.sqrt(tau), projection)
    phi_k = features(k / math.sqrt(tau), projection).unsqueeze(2) * (gumbel / tau).exp().unsqueeze(3)
    kv = torch.einsum("nhkm,nhd->hkmd", phi_k, v)
    numerator = torch.einsum("nhm,hkmd->nhkd", phi_q, kv)
    denominator = torch.einsum("nhm,hkm->nhk", phi_q, phi_k.sum(0))
    return (numerator / denominator.unsqueeze(3)).mean(2)
