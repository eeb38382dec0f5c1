"""The attentions and products as one writes them from the papers: what the library is measured against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diffusion_mp.graph import Graph


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DIFFormer-s (Wu, Wipf & Yan 2025, Eqs. 55–57): sums over all nodes first, then every query."""
    q, k = q / q.norm(dim=2, keepdim=True), k / k.norm(dim=2, keepdim=True)
    kv = torch.einsum("nhm,nhd->hmd", k, v)
    numerator = v.sum(0) + torch.einsum("nhm,hmd->nhd", q, kv)
    denominator = q.size(0) + torch.einsum("nhm,hm->nh", q, k.sum(0))
    return numerator / denominator.unsqueeze(2)


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


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DIFFormer-a (Wu, Wipf & Yan 2025, Eqs. 58–60): all scores at once, [N, N, H]."""
    scores = torch.einsum("nhm,lhm->nlh", q, k).sigmoid()
    attention = scores / scores.sum(1, keepdim=True)
    return torch.einsum("nlh,lhd->nhd", attention, v)


def sparse_flow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    friction_q: Tensor,
    friction_k: Tensor,
    ptr: Tensor,
    alpha: float = 0.1,
    steps: int = 200,
) -> Tensor:
    """Proximal steps (SFi-Former, Eq. 10, with the step that converges) on the dense rows of graphs of one size."""
    size = int(ptr[1])
    graphs = [x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v, friction_q, friction_k)]
    q, k, v, friction_q, friction_k = graphs
    resistance = (-q @ k.transpose(2, 3)).softmax(3)
    threshold = (friction_q @ friction_k.transpose(2, 3)).softmax(3) / size
    t = 1 / (resistance.amax(3, keepdim=True) + alpha * size)
    z = torch.full_like(resistance, 1 / size)
    for _ in range(steps):
        y = z - t * (resistance * z + alpha * (z.sum(3, keepdim=True) - 1))
        z = y.sign() * (y.abs() - t * threshold).clamp_min(0)
    return (z @ v).transpose(1, 2).flatten(0, 1)


def sequence_diffusion(v: Tensor, alpha: Tensor) -> Tensor:
    """α (x_{i−1} + x_{i+1}) with the ends repeated (Zhang & Zhou, Eq. 15)."""
    padded = torch.cat([v[:1], v, v[-1:]])
    return alpha.view(1, -1, 1) * (padded[:-2] + padded[2:])


def sparse_product(weight: Tensor, v: Tensor, graph: Graph) -> Tensor:
    """A message per edge, added up where it arrives."""
    source, target = graph.edge_index
    return torch.zeros_like(v).index_add(0, target, weight.unsqueeze(2) * v[source])
