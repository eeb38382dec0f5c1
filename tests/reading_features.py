"""A small model whose attention reads its inputs while its hidden state moves."""

from torch import Tensor, nn

from diffusion_mp import (
    AdjacencyDiffusivity,
    DiffusionConv,
    Graph,
    SimpleDiffusivity,
    SymmetricDiffusivity,
)


class ReadsInputs(nn.Module):
    """encoder → DiffusionConv(reads="features") → logits, with D^-½ΩD^-½ of the inputs beside a graph."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        attention = SimpleDiffusivity(
            in_channels, projection="tied", row_stochastic=False
        )
        attention = SymmetricDiffusivity(attention)
        self.encoder = nn.Linear(in_channels, out_channels)
        self.conv = DiffusionConv(
            out_channels,
            out_channels,
            0.5 * attention + 0.5 * AdjacencyDiffusivity("row"),
            reads="features",
            steps=2,
        )

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        hidden: Tensor = self.encoder(x).tanh()
        out: Tensor = self.conv(hidden, edge_index, edge_weight, features=x)
        return out
