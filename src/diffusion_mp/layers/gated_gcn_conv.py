"""``GatedGCNConv``: edges that gate every channel of what they carry, and carry a state of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from diffusion_mp.couplings import Coupling, ReweightedCoupling, SparseCoupling
from diffusion_mp.errors import check_flags, check_positive
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.dropout import dropout
from diffusion_mp.layers.edge_layer import EdgeLayer, Norm, make_norm


class GatedGCNConv(EdgeLayer):
    r"""Residual gated graph convolution with edge features (Bresson & Laurent 2017; Dwivedi et al. 2023, Section 3).

    h′_i = h_i + ReLU(BN(A h_i + Σ_j η_ij ∘ B h_j)),  η_ij = a_ij σ(ê_ij) / (Σ_l a_il σ(ê_il) + ε),
    ê_ij = C e_ij + D h_i + E h_j,  e′_ij = e_ij + ReLU(BN(ê_ij)),

    j over the senders of i, all matrices with a bias. The gates are a coupling with one head per channel; a weight a_ij
    says how often its edge counts. A node that nobody sends to keeps A h_i alone. Without ``edge_attr`` e = 0.

    Args:
        channels: of nodes and edges, before and after.
        norm: BN: ``"batch"``, ``"layer"`` or ``None``.
        residual: add h_i and e_ij.
        dropout: rate, on what is added to h_i and e_ij.
        eps: ε.

    Shapes: as in :class:`EdgeLayer`, but observed edges there must be.

    Examples:
        >>> nodes, edges = GatedGCNConv(4)(x, edge_index, edge_attr=torch.rand(12, 4))
        >>> nodes.shape, edges.shape
        (torch.Size([6, 4]), torch.Size([12, 4]))
    """

    references = ("bresson2017gatedgcn", "dwivedi2023benchmarking")

    def __init__(
        self, channels: int, *, norm: Norm = "batch", residual: bool = True, dropout: float = 0.0, eps: float = 1e-6
    ) -> None:
        super().__init__(channels, dropout)
        check_positive(eps, "eps")
        check_flags(residual=residual)
        self.residual, self.eps = residual, eps
        self.own, self.value, self.edge, self.target, self.source = (nn.Linear(channels, channels) for _ in range(5))
        self.node_norm, self.edge_norm = make_norm(norm, channels), make_norm(norm, channels)

    def step(self, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> tuple[Tensor, Tensor | None, Coupling]:
        if graph.edge_index is None:
            raise ValueError(
                "GatedGCNConv works on observed edges; got none. Pass edge_index (an empty [2, 0] one if no edge was "
                "observed), or choose a layer with attention over all pairs."
            )
        source, target = graph.edge_index
        logits = self.target(x).index_select(0, target) + self.source(x).index_select(0, source)
        if edge_attr is not None:
            logits = logits + self.edge(edge_attr)
        gates = self._gates(logits, graph)
        moved = self._next(x, self.own(x) + gates.matmul(self.value(x).unsqueeze(2)).squeeze(2), self.node_norm)
        return moved, None if edge_attr is None else self._next(edge_attr, logits, self.edge_norm), gates

    def _gates(self, logits: Tensor, graph: Graph) -> Coupling:
        # The derivative of a gate is up to |v|/ε, beyond half precision until the sigmoid's own makes it small.
        gate = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
        if graph.edge_weight is not None:
            gate = gate * graph.weights(gate).unsqueeze(1)
        total = SparseCoupling(graph, gate, symmetric=False, nonnegative=True)
        return ReweightedCoupling(total, 1 / (total.degree() + self.eps), nonnegative=True)

    def _next(self, state: Tensor, change: Tensor, norm: nn.Module) -> Tensor:
        change = dropout(relu(norm(change)), self.dropout, self.training)
        return state + change if self.residual else change

    def extra_repr(self) -> str:
        return f"{self.in_channels}, residual={self.residual}, dropout={self.dropout}"
