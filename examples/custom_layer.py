"""A layer of this library inside your own PyTorch Geometric model, and a diffusivity of your own.

    python examples/custom_layer.py

The script trains on a small stochastic block model whose features say little and whose edges say more. Then it checks
the diffusivity against every law of couplings: dense oracle, gradients, permutations, batches, autocast.
"""

import argparse

import torch
from runs import count, options
from torch import nn
from torch.nn.functional import cross_entropy, elu
from torch_geometric.nn import GCNConv
from torch_geometric.utils import stochastic_blockmodel_graph

from diffusion_mp import (
    AdjacencyDiffusivity,
    Coupling,
    DiffusionConv,
    Diffusivity,
    ExplicitEuler,
    Graph,
)
from diffusion_mp.couplings import LinearAttentionCoupling
from diffusion_mp.testing import check_diffusivity


class EluDiffusivity(Diffusivity):
    """Linear attention (Katharopoulos et al. 2020): s_ij = φ(W_Q x_i)·φ(W_K x_j), rows normalised, φ = elu + 1."""

    row_stochastic = True

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)

    def couple(self, x: torch.Tensor, graph: Graph) -> Coupling:
        q = elu(self.query(x)) + 1
        k = elu(self.key(x)) + 1
        return LinearAttentionCoupling(
            q.unsqueeze(1), k.unsqueeze(1), graph.segments, nonnegative=True
        )


class MyModel(nn.Module):
    """A GCN layer of PyG, then one step of diffusion over all pairs and the edges."""

    def __init__(self, in_channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.local = GCNConv(in_channels, hidden)
        mixed = 0.5 * EluDiffusivity(hidden) + 0.5 * AdjacencyDiffusivity("row")
        self.diffuse = DiffusionConv(hidden, hidden, mixed, ExplicitEuler(tau=0.5))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.local(x, edge_index).relu()
        return self.head(self.diffuse(x, edge_index).relu())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=count, default=100)
    args = options(parser, argv, epochs=25)
    torch.manual_seed(0)
    sizes = [100, 100, 100]
    edge_index = stochastic_blockmodel_graph(
        sizes, torch.full((3, 3), 0.01) + 0.07 * torch.eye(3)
    )
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    x = torch.randn(300, 16) + 0.5 * nn.functional.one_hot(y, 16)
    train = torch.rand(300) < 0.1

    model = MyModel(16, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-3)
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        loss = cross_entropy(model(x, edge_index)[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 25 == 0:
            accuracy = (
                (model(x, edge_index).argmax(1) == y)[~train].float().mean().item()
            )
            print(
                f"epoch {epoch:3d}  loss {loss.item():.3f}  accuracy on unlabelled nodes {accuracy:.3f}"
            )

    check_diffusivity(EluDiffusivity(8), channels=8)
    print("EluDiffusivity passes check_diffusivity")


if __name__ == "__main__":
    main()
