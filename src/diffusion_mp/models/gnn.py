"""``DiffusionGNN``: the fixed-diffusivity GNNs as one model (Wu, Wipf & Yan 2025, Table 1)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_choice, check_count, check_probability, check_state
from diffusion_mp.graph import Graph
from diffusion_mp.layers import (
    APPNPConv,
    DiffusionConv,
    GATConv,
    GCNConv,
    GCNIIConv,
    GINConv,
    MLPConv,
    SGConv,
)

ConvName = Literal["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"]


class DiffusionGNN(nn.Module):
    r"""MLP, GCN, SGC, GIN, GAT, APPNP or GCNII: a chain of diffusion steps with ReLU and dropout in between.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the hidden states and the logits.
        num_layers: layers of the stack (MLP, GCN, GIN, GAT, GCNII), or propagation steps (SGC, APPNP).
        conv: which one.
        heads: of GAT's hidden layers; its last layer has one.
        dropout: on the input of every layer with weights.
        alpha: teleport of APPNP and GCNII.
        theta: of GCNII.

    Shapes: as :class:`DIFFormer`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        conv: ConvName = "gcn",
        heads: int = 1,
        dropout: float = 0.5,
        alpha: float = 0.1,
        theta: float = 0.5,
    ) -> None:
        super().__init__()
        for name, value in (
            ("in_channels", in_channels),
            ("hidden_channels", hidden_channels),
            ("out_channels", out_channels),
            ("num_layers", num_layers),
            ("heads", heads),
        ):
            check_count(value, name)
        check_choice(conv, "conv", ["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"])
        check_probability(dropout, "dropout")
        if conv == "gat" and hidden_channels % heads:
            raise ValueError(f"heads must divide hidden_channels; got {heads} heads, {hidden_channels} channels.")
        self.in_channels, self.dropout = in_channels, dropout
        self.convs = nn.ModuleList()

        def stack(make: type[DiffusionConv], depth: int) -> None:
            widths = [in_channels, *[hidden_channels] * (depth - 1), out_channels]
            self.convs.extend(make(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))

        if conv == "mlp":
            stack(MLPConv, num_layers)
        elif conv == "gcn":
            stack(GCNConv, num_layers)
        elif conv == "sgc":
            self.convs.append(SGConv(in_channels, out_channels, num_layers))
        elif conv == "appnp":
            stack(MLPConv, 2)
            self.convs.append(APPNPConv(out_channels, num_layers, alpha))
        elif conv == "gat":
            for k in range(num_layers - 1):
                width = in_channels if k == 0 else hidden_channels
                self.convs.append(GATConv(width, hidden_channels // heads, heads, dropout=dropout))
            self.convs.append(GATConv(hidden_channels if num_layers > 1 else in_channels, out_channels, dropout=dropout))
        elif conv == "gin":
            for k in range(num_layers):
                width = in_channels if k == 0 else hidden_channels
                last = out_channels if k == num_layers - 1 else hidden_channels
                mlp = nn.Sequential(nn.Linear(width, hidden_channels), nn.ReLU(), nn.Linear(hidden_channels, last))
                self.convs.append(GINConv(width, mlp, train_eps=True))
        else:
            self.convs.append(MLPConv(in_channels, hidden_channels))
            self.convs.extend(GCNIIConv(hidden_channels, alpha, theta, k + 1) for k in range(num_layers))
            self.convs.append(MLPConv(hidden_channels, out_channels))

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor."""
        for conv in self.convs:
            conv.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        return_coupling: bool = False,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Logits [N, out_channels]; with ``return_coupling`` also the operator of every layer."""
        check_state(x, channels=self.in_channels)
        graph = Graph.coerce(x, edge_index, edge_weight, batch)
        couplings, initial = [], None
        for k, conv in enumerate(self.convs):
            if k and not isinstance(conv, APPNPConv):
                x = relu(x)
            if not isinstance(conv, APPNPConv):
                x = dropout(x, self.dropout, self.training)
            if isinstance(conv, GCNIIConv):
                initial = x if initial is None else initial
            x, coupling = conv(x, graph, source=initial if isinstance(conv, GCNIIConv) else None, return_coupling=True)
            couplings.append(coupling)
        return (x, couplings) if return_coupling else x
