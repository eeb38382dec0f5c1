"""Linear attention cut in two: sums over the senders, and the rows that read them. Plain torch, differentiable."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from diffusion_mp.kernels.precision import accumulating, without_autocast


def pool(k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"]) -> Float[Tensor, "H F D"]:
    """Σ_j k_j v_jᵀ, in at least float32."""
    (k, v), _ = accumulating(k, v)
    with without_autocast(v):
        return k.permute(1, 2, 0) @ v.transpose(0, 1)


def read(q: Float[Tensor, "N H F"], sums: Float[Tensor, "H F D"]) -> Float[Tensor, "N H D"]:
    """q_i times the sums, in at least float32."""
    (q, sums), _ = accumulating(q, sums)
    with without_autocast(q):
        return (q.transpose(0, 1) @ sums).transpose(0, 1)


def pool_attention(
    k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], unit: bool
) -> Float[Tensor, "H F_and_one D_and_one"]:
    """Σ_j [k_j, 1] [v_j, 1]ᵀ: KᵀV, Σk, Σv and the count, (F + 1)(D + 1) numbers for a head."""
    (k, v), _ = accumulating(k, v)
    k = normalize(k, dim=2) if unit else k
    sums = torch.cat([pool(k, v), v.sum(0).unsqueeze(1)], dim=1)
    ones = torch.cat([k.sum(0), k.new_full((k.size(1), 1), k.size(0))], dim=1)
    return torch.cat([sums, ones.unsqueeze(2)], dim=2)


def read_attention(
    q: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    sums: Float[Tensor, "H F_and_one D_and_one"],
    constant: float,
    own: float,
    unit: bool,
) -> Float[Tensor, "N H D"]:
    """(own n v_i + Σ_j (c + q_i·k_j) v_j) / (own n + Σ_j (c + q_i·k_j)) with the sums over all senders j."""
    (q, v), dtype = accumulating(q, v)
    q = normalize(q, dim=2) if unit else q
    total = read(q, sums[:, :-1]) + constant * sums[:, -1]
    own_weight = own * sums[:, -1, -1:]
    numerator, denominator = total[..., :-1] + own_weight * v, total[..., -1:] + own_weight
    empty = denominator == 0
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, denominator)).to(dtype)
