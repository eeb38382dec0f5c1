"""``DiffusionGNN``: the fixed-diffusivity GNNs as one model (Wu, Wipf & Yan 2025, Table 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, starmap
from typing import Literal, cast, get_args

from torch import Tensor, nn
from torch.nn.functional import relu

from diffusion_mp.dropout import dropout
from diffusion_mp.errors import check_choice, check_counts, check_positive, check_probability
from diffusion_mp.graph import Graph
from diffusion_mp.layers import APPNPConv, DiffusionConv, GATConv, GCNConv, GCNIIConv, GINConv, MLPConv, SGConv
from diffusion_mp.models.base import GraphModel, Record, recorded
from diffusion_mp.models.heads import Task, output_layers
from diffusion_mp.updates import teleport

ConvName = Literal["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"]


class DiffusionGNN(GraphModel):
    r"""MLP, GCN, SGC, GIN, GAT, APPNP or GCNII: a chain of diffusion steps that differ in diffusivity and update only.

    ReLU and dropout stand before every layer that has weights (dropout also on the features).

    Args:
        in_channels, hidden_channels, out_channels: of the features, the hidden states and the logits.
        num_layers: layers of the stack (MLP, GCN, GIN, GAT, GCNII), or propagation steps (SGC, APPNP).
        conv: which one.
        heads: of GAT's hidden layers; its last layer has one.
        dropout: rate.
        alpha: teleport of APPNP and GCNII.
        theta: of GCNII.
        task: ``"node"``; ``"graph"`` or ``"link"``, whose head reads ReLU of a last layer of ``hidden_channels``.

    Shapes: see :class:`GraphModel`.

    Examples:
        >>> model = DiffusionGNN(4, 16, 3, conv="appnp", num_layers=10)
        >>> model(x, edge_index).shape
        torch.Size([6, 3])
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
        task: Task = "node",
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        check_counts(num_layers=num_layers, heads=heads)
        check_choice(conv, "conv", get_args(ConvName))
        check_probability(dropout, "dropout")
        teleport(alpha)  # refuses what no step could teleport, whichever layers there are
        check_positive(theta, "theta")
        if hidden_channels % heads:
            raise ValueError(f"heads must divide hidden_channels; got {heads} heads, {hidden_channels} channels.")
        self.dropout = dropout
        if task != "node":
            _, self.head = output_layers(hidden_channels, out_channels, task)
            out_channels = hidden_channels

        def layers() -> Iterator[DiffusionConv]:
            pairs = list(pairwise([in_channels, *[hidden_channels] * (num_layers - 1), out_channels]))
            match conv:
                case "mlp":
                    yield from starmap(MLPConv, pairs)
                case "gcn":
                    yield from starmap(GCNConv, pairs)
                case "sgc":
                    yield SGConv(in_channels, out_channels, num_layers)
                case "gin":
                    for a, b in pairs:
                        mlp = nn.Sequential(nn.Linear(a, hidden_channels), nn.ReLU(), nn.Linear(hidden_channels, b))
                        yield GINConv(a, mlp, train_eps=True)
                case "gat":
                    *hidden, last = pairs
                    yield from (GATConv(a, b // heads, heads, dropout=dropout) for a, b in hidden)
                    yield GATConv(*last, dropout=dropout)
                case "appnp":
                    yield from (MLPConv(in_channels, hidden_channels), MLPConv(hidden_channels, out_channels))
                    yield APPNPConv(out_channels, num_layers, alpha)
                case "gcnii":
                    yield MLPConv(in_channels, hidden_channels)
                    yield from (GCNIIConv(hidden_channels, alpha, theta, k + 1) for k in range(num_layers))
                    yield MLPConv(hidden_channels, out_channels)

        self.convs = nn.ModuleList(layers())
        cast("DiffusionConv", self.convs[0]).sparse_features = conv != "gin"  # which moves them as they are

    def propagate(self, x: Tensor, graph: Graph, record: Record) -> Tensor:
        initial = None
        for k, conv in enumerate(cast("Iterable[DiffusionConv]", self.convs)):
            has_weights = any(True for _ in conv.parameters())
            has_source = conv.update.beta != 0
            x = relu(x) if has_weights and k else x
            # The first state that a source is asked for is the initial embedding of Eq. 10.
            initial = x if has_source and initial is None else initial
            x = dropout(x, self.dropout, self.training) if has_weights else x
            x = recorded(record, conv, x, graph, source=initial if has_source else None)
        return x if self.head is None else relu(x)
