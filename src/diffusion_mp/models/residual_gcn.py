"""The GNN beside the attention of SGFormer, as PyG and the released code for large graphs have it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu
from torch_geometric.nn.inits import reset

from diffusion_mp.graph import Graph
from diffusion_mp.kernels.noise import dropout
from diffusion_mp.layers import GCNConv
from diffusion_mp.layers.features import input_linear
from diffusion_mp.layers.gps import make_norm


class ResidualGCN(nn.Module):
    r"""h⁰ = ReLU(BN(W X + b)),  hᵏ⁺¹ = ReLU(BN(Â hᵏ W_k + b_k)) + h⁰; dropout after every ReLU.

    Args:
        in_channels, hidden_channels: of X and of the states.
        num_layers: how many layers follow the first one.
        dropout: rate.

    Shapes:
        x: [N, in_channels], dense or sparse; output: [N, hidden_channels].
    """

    def __init__(self, in_channels: int, hidden_channels: int, num_layers: int, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.encoder = input_linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(GCNConv(hidden_channels, hidden_channels) for _ in range(num_layers))
        self.norms = nn.ModuleList(make_norm("batch", hidden_channels) for _ in range(num_layers + 1))

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and forget the statistics of the norms."""
        reset(self.encoder)
        reset(self.convs)
        reset(self.norms)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """The last state."""
        first = x = self._activated(self.norms[0](self.encoder(x)))
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = self._activated(norm(conv(x, graph))) + first
        return x

    def _activated(self, x: Tensor) -> Tensor:
        return dropout(relu(x), self.dropout, self.training)
