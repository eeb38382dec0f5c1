"""Networks that stand in the tables beside the models of the library, and models without their attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import relu

from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity, IdentityDiffusivity, UniformDiffusivity
from diffusion_mp.diffusivities.all_pair import QueryKeyDiffusivity
from diffusion_mp.errors import check_probability
from diffusion_mp.kernels.noise import dropout
from diffusion_mp.layers import APPNPConv, DiffusionConv
from diffusion_mp.layers.certified_conv import AllPairs
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.models import DIFFormer, DiffusionGNN
from diffusion_mp.updates import HeatKernel

ABLATIONS: dict[str, type[Diffusivity]] = {"identity": IdentityDiffusivity, "uniform": UniformDiffusivity}


class Readout(nn.Module):
    """A `DiffusionGNN` whose logits are spread to equilibrium: α (I − (1 − α) Â)⁻¹ of what it says (`APPNPConv`).

    Args:
        in_channels, hidden_channels, out_channels, num_layers: of the network.
        alpha: α in (0, 1), the share of what the network says.
        options: further ones of the network (conv, dropout, …).
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        alpha: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.body = DiffusionGNN(in_channels, hidden_channels, out_channels, num_layers, **options)
        self.readout = APPNPConv(out_channels, K=None, alpha=alpha)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Logits [N, out_channels]."""
        return self.readout(self.body(x, edge_index, edge_weight), edge_index, edge_weight)


class HeatNetwork(nn.Module):
    """An encoder, the heat equation over the graph for a time t, a decoder: GRAND with a fixed, symmetric diffusivity
    (Chamberlain et al. 2021) and no error in time (`HeatKernel`).

    Args:
        in_channels, hidden_channels, out_channels: of the features, the state and the logits.
        t: diffusion time.
        dropout: rate, of the features and of the state before the decoder.
    """

    def __init__(
        self, in_channels: int, hidden_channels: int, out_channels: int, *, t: float = 5.0, dropout: float = 0.5
    ) -> None:
        super().__init__()
        check_probability(dropout, "dropout")
        self.dropout = dropout
        self.encoder, self.decoder = (
            FeatureLinear(in_channels, hidden_channels),
            nn.Linear(hidden_channels, out_channels),
        )
        adjacency = AdjacencyDiffusivity("sym", self_loops="remaining", direction="undirected")
        self.heat = DiffusionConv(
            hidden_channels, hidden_channels, adjacency, HeatKernel(t, "residual"), transform=False, bias=False
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Logits [N, out_channels]."""
        x = relu(self.encoder(dropout(x, self.dropout, self.training)))
        x = self.heat(x, edge_index, edge_weight)
        return self.decoder(dropout(x, self.dropout, self.training))


class DropoutSeenDIFFormer(DIFFormer):
    """`DIFFormer` whose dropout acts on the state before every layer, as published: its attention reads what is left.

    In the library dropout acts on what is propagated only (docs/errata.md, D20); this is for comparison.

    Args:
        in_channels, hidden_channels, out_channels, num_layers, options: as there.
        dropout: rate, of every state.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels, num_layers, **options)
        check_probability(dropout, "dropout")
        self.norms = nn.ModuleList(nn.Sequential(norm, nn.Dropout(dropout)) for norm in self.norms)


def without_attention(model: nn.Module, ablation: str) -> bool:
    """Puts the identity, or the mean over all nodes, in the place of every attention over pairs of a model.

    In a `CertifiedConv` only the identity: pairs that cost nothing. There `penalty="quadratic"` weighs them all alike.

    Args:
        model: is changed.
        ablation: "identity" or "uniform".

    Returns:
        Whether there was one.
    """
    certified = (AllPairs,) if ablation == "identity" else ()
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, (QueryKeyDiffusivity, *certified))
    ]
    for parent, name, child in found:
        setattr(parent, name, None if isinstance(child, AllPairs) else ABLATIONS[ablation]())
    return bool(found)
