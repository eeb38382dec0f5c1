"""What a user writes, with the types that a checker sees: mypy reads it in test_user_types.py, and it runs."""

# ruff: noqa: F403, F405 (everything public)
from typing import assert_type

import torch
from torch import Tensor, nn

from diffusion_mp import *
from diffusion_mp.couplings import LinearAttentionCoupling
from diffusion_mp.energies import PairTerm, ProximalTerm


class Mine(Diffusivity):
    """A diffusivity of one's own."""

    row_stochastic = True

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Linear(channels, channels)

    def couple(self, x: Tensor, graph: Graph) -> Coupling:
        q = self.query(x).exp().unsqueeze(1)
        return LinearAttentionCoupling(
            q, q, graph.segments, nonnegative=True, mutual=True
        )


x = torch.randn(10, 4)
edge_index = torch.randint(0, 10, (2, 30))
graph = Graph(10, edge_index)
mixed = assert_type(
    0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym"), Diffusivity
)
conv = DiffusionConv(4, 8, mixed, ExplicitEuler(tau=0.5))
out: Tensor = conv(x, edge_index)
model = DIFFormer(4, 8, 3)
loss: Tensor = model(x, edge_index).sum() + assert_type(auxiliary_loss(model), Tensor)
coupling: Coupling = Mine(4)(x, graph)
product: Tensor = coupling @ torch.randn(10, 1, 4)
rows = assert_type(graph.ptr, Tensor)
energy: Tensor = Energy([ProximalTerm(), 0.1 * PairTerm(QuadraticPenalty())])(x, x)
tau: float = certify(SimpleDiffusivity(), x, 0.1).tau_max
