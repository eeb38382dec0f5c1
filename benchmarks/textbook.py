"""The attentions and products as one writes them from the papers: the library is measured against them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize, scaled_dot_product_attention
from torch_geometric.utils import to_dense_batch

from diffusion_mp.graph import Graph


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DIFFormer-s (Wu, Wipf & Yan 2025, Eqs. 55–57): sums over all nodes first, then every query."""
    q = q / q.norm(dim=2, keepdim=True)
    k = k / k.norm(dim=2, keepdim=True)
    kv = torch.einsum("nhm,nhd->hmd", k, v)
    numerator = v.sum(0) + torch.einsum("nhm,hmd->nhd", q, kv)
    denominator = q.size(0) + torch.einsum("nhm,hm->nh", q, k.sum(0))
    return numerator / denominator.unsqueeze(2)


def linear_attention_of_one(x: Tensor) -> Tensor:
    """DIFFormer-s of a state [N, C] that is q, k and v, with one head: its rows are normalised once."""
    unit = x / x.norm(dim=1, keepdim=True)
    total = torch.addmm(x.sum(0), unit, unit.t() @ x)
    return total.div_((unit @ unit.sum(0)).add_(x.size(0)).unsqueeze(1))


def sigmoid_attention_of_one(x: Tensor) -> Tensor:
    """DIFFormer-a of such a state; rows are divided by their sums after the product."""
    scores = (x @ x.t()).sigmoid_()
    return (scores @ x).div_(scores.sum(1, keepdim=True))


def softmax_attention_of_one(x: Tensor) -> Tensor:
    """Softmax attention of such a state, by torch's fused kernel."""
    x = x[None, None]
    return scaled_dot_product_attention(x, x, x)[0, 0]


def gaussian_attention_of_one(x: Tensor) -> Tensor:
    """Gaussian attention of such a state; −½‖x_i‖² is the same in a row of the softmax, and is left out."""
    return (x @ x.t()).sub_(0.5 * x.square().sum(1)).softmax(1) @ x


def features(x: Tensor, projection: Tensor) -> Tensor:
    """Positive random features φ(x)_r = exp(w_r·x − ½‖x‖²)/√m, [N, H, m]."""
    exponent = torch.einsum("nhd,md->nhm", x, projection) - 0.5 * x.square().sum(
        -1, keepdim=True
    )
    return exponent.exp() / math.sqrt(projection.size(0))


def nodeformer(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, gumbel: Tensor, tau: float
) -> Tensor:
    """Algorithm 1 of the slides, the mean over K samples: every key times every sample's noise, [N, H, K, m]."""
    phi_q = features(q / math.sqrt(tau), projection)
    phi_k = features(k / math.sqrt(tau), projection).unsqueeze(2) * (
        gumbel / tau
    ).exp().unsqueeze(3)
    kv = torch.einsum("nhkm,nhd->hkmd", phi_k, v)
    numerator = torch.einsum("nhm,hkmd->nhkd", phi_q, kv)
    denominator = torch.einsum("nhm,hkm->nhk", phi_q, phi_k.sum(0))
    return (numerator / denominator.unsqueeze(3)).mean(2)


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DIFFormer-a (Wu, Wipf & Yan 2025, Eqs. 58–60): all scores at once, [N, N, H]."""
    scores = torch.einsum("nhm,lhm->nlh", q, k).sigmoid()
    attention = scores / scores.sum(1, keepdim=True)
    return torch.einsum("nlh,lhd->nhd", attention, v)


def gaussian_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp(−½‖q − k‖²) over its row sums, from all squared distances at once, [H, N, N]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    square = (
        q.square().sum(2, keepdim=True)
        + k.square().sum(2).unsqueeze(1)
        - 2 * q @ k.transpose(1, 2)
    )
    return ((-0.5 * square).softmax(2) @ v).transpose(0, 1)


def padded(graph: Graph, *states: Tensor) -> tuple[list[Tensor], Tensor]:
    """States [N, H, D] of a batch as [graphs, nodes, H, D], zero beyond a graph's nodes, and where there are nodes."""
    dense, mask = to_dense_batch(torch.cat(states, 2), graph.batch)
    return list(dense.split([x.size(2) for x in states], 3)), mask


def padded_linear_attention(q: Tensor, k: Tensor, v: Tensor, graph: Graph) -> Tensor:
    """DIFFormer-s for a batch: all graphs get the largest size, with rows of zeros, which add nothing."""
    (q, k, v), mask = padded(graph, q, k, v)
    q = normalize(q, dim=3)
    k = normalize(k, dim=3)
    numerator = v.sum(1, keepdim=True) + torch.einsum(
        "bnhm,bhmd->bnhd", q, torch.einsum("bnhm,bnhd->bhmd", k, v)
    )
    denominator = mask.sum(1).view(-1, 1, 1) + torch.einsum(
        "bnhm,bhm->bnh", q, k.sum(1)
    )
    return (numerator / denominator.unsqueeze(3))[mask]


def padded_linear_attention_of_one(x: Tensor, graph: Graph) -> Tensor:
    """DIFFormer-s of a state that is q, k and v, for a batch."""
    dense, mask = to_dense_batch(x, graph.batch)
    unit = normalize(dense, dim=2)
    total = torch.baddbmm(
        dense.sum(1, keepdim=True), unit, unit.transpose(1, 2) @ dense
    )
    return total.div_(unit @ unit.sum(1).unsqueeze(2) + mask.sum(1).view(-1, 1, 1))[
        mask
    ]


def padded_sigmoid_attention_of_one(x: Tensor, graph: Graph) -> Tensor:
    """DIFFormer-a of such a state, for a batch."""
    dense, mask = to_dense_batch(x, graph.batch)
    scores = (dense @ dense.transpose(1, 2)).sigmoid() * mask.unsqueeze(1)
    return (scores @ dense).div_(scores.sum(2, keepdim=True))[mask]


def padded_softmax_attention_of_one(x: Tensor, graph: Graph) -> Tensor:
    """Softmax attention of such a state for a batch, by torch's fused kernel with a mask."""
    dense, mask = to_dense_batch(x, graph.batch)
    dense = dense.unsqueeze(1)
    return scaled_dot_product_attention(
        dense, dense, dense, attn_mask=mask[:, None, None]
    ).squeeze(1)[mask]


def padded_sigmoid_attention(q: Tensor, k: Tensor, v: Tensor, graph: Graph) -> Tensor:
    """DIFFormer-a for a batch: all scores of graphs of the largest size, [graphs, H, n, n], and a mask."""
    (q, k, v), mask = padded(graph, q, k, v)
    scores = torch.einsum("bnhm,blhm->bhnl", q, k).sigmoid() * mask[:, None, None]
    return torch.einsum("bhnl,blhd->bnhd", scores / scores.sum(3, keepdim=True), v)[
        mask
    ]


def padded_softmax_attention(q: Tensor, k: Tensor, v: Tensor, graph: Graph) -> Tensor:
    """Softmax attention for a batch, by torch's fused kernel on graphs of the largest size, with a mask."""
    (q, k, v), mask = padded(graph, q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask[:, None, None], scale=1.0
    )
    return out.transpose(1, 2)[mask]


def nested_softmax_attention(q: Tensor, k: Tensor, v: Tensor, graph: Graph) -> Tensor:
    """Softmax attention for a batch, by torch's fused kernel on nested tensors."""
    sizes = graph.ptr.diff()
    low = int(sizes.min())
    high = int(sizes.max())
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            x, graph.ptr, min_seqlen=low, max_seqlen=high
        ).transpose(1, 2)
        for x in (q, k, v)
    )
    return scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).values()


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
    graphs = [
        x.unflatten(0, (-1, size)).transpose(1, 2)
        for x in (q, k, v, friction_q, friction_k)
    ]
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


class DIFFormer(nn.Module):
    """DIFFormer-s (Wu, Wipf & Yan 2025, Eqs. 53–64), in the form in which it was released.

    Every layer projects queries and keys, computes degrees and weights of the edges and adds up a message per edge.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        layers: int,
        tau: float = 0.5,
        rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = nn.Linear(in_channels, hidden)
        self.decoder = nn.Linear(hidden, out_channels)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers + 1))
        self.queries = nn.ModuleList(
            nn.Linear(hidden, hidden, bias=False) for _ in range(layers)
        )
        self.keys = nn.ModuleList(
            nn.Linear(hidden, hidden, bias=False) for _ in range(layers)
        )
        self.tau = tau
        self.rate = rate

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the logits."""
        x = dropout(self.norms[0](self.encoder(x)).relu(), self.rate, self.training)
        for query, key, norm in zip(
            self.queries, self.keys, self.norms[1:], strict=True
        ):
            q, k, v = (state.unsqueeze(1) for state in (query(x), key(x), x))
            moved = linear_attention(q, k, v).mean(1) + graph_convolution(x, edge_index)
            x = dropout(
                norm((1 - self.tau) * x + self.tau * moved), self.rate, self.training
            )
        return self.decoder(x)


def graph_convolution(x: Tensor, edge_index: Tensor) -> Tensor:
    """D^-½ A D^-½ x: degrees, a weight per edge, and torch's sparse product."""
    source, target = edge_index
    ones = x.new_ones(edge_index.size(1))
    n = x.size(0)
    degree = x.new_zeros(n).index_add(0, target, ones)
    weight = (degree[target] * degree[source]).rsqrt()
    indices = torch.stack([target, source])
    return torch.sparse.mm(
        torch.sparse_coo_tensor(indices, weight, (n, n), check_invariants=False), x
    )
