"""``DiffusionGNN``: the fixed-diffusivity GNNs as one model (Wu, Wipf & Yan 2025, Table 1); ``ResidualGCN``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, starmap
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn
from torch.nn.functional import relu
from torch_geometric.nn.models import JumpingKnowledge
from torch_geometric.nn.resolver import activation_resolver

from diffusion_mp.diffusivities.base import check_heads_divide
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_kind,
    check_positive,
    check_probability,
)
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.noise import dropout
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
from diffusion_mp.layers.features import FeatureLinear, check_input
from diffusion_mp.models.base import Collect, GraphModel, Task, output_layers, run_layer
from diffusion_mp.modules import Norm, Resettable, make_norm
from diffusion_mp.updates import teleport

ConvName = Literal["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"]
LAYERED = ("mlp", "gcn", "gin", "gat")  # those with layers of one kind


class DiffusionGNN(GraphModel):
    r"""MLP, GCN, SGC, GIN, GAT, APPNP or GCNII: a chain of diffusion steps that differ in diffusivity and update only.

    Norm, activation and dropout precede every layer with weights; dropout also acts on features and GAT's values.

    Args:
        in_channels, hidden_channels, out_channels, dropout: see :class:`GraphModel`.
        num_layers, conv: number and kind of the layers, for SGC and APPNP of the propagation steps.
        heads: of the hidden layers of GAT; its last layer has one.
        alpha, theta: teleport probability of APPNP and GCNII, and θ of GCNII.
        norm: of the hidden states of an MLP, GCN, GIN or GAT: ``"batch"``, ``"layer"`` or ``None``.
        act: the activation, the name of a class of torch.nn (``"relu"``, ``"elu"``, …).
        jk: ``"last"``, ``"cat"``, ``"max"`` or ``"lstm"``: a linear map reads the states of these layers so combined
            (Xu et al. 2018); ``None``: the last layer gives the output.
        edge_dim: channels of ``edge_attr`` [E, edge_dim], which the attention of GAT reads.
        task: ``"node"``, ``"graph"`` or ``"link"``; a head reads the activation of a last layer of ``hidden_channels``.

    Examples:
        >>> DiffusionGNN(4, 16, 3, conv="appnp", num_layers=10)(x, edge_index).shape
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
        norm: Norm = None,
        act: str = "relu",
        jk: Literal["last", "cat", "max", "lstm"] | None = None,
        edge_dim: int | None = None,
        task: Task = "node",
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        check_counts(num_layers=num_layers, heads=heads)
        check_choice(conv, "conv", get_args(ConvName))
        check_probability(dropout, "dropout")
        teleport(alpha)  # checks alpha, whichever layers are built
        check_positive(theta, "theta")
        check_heads_divide(hidden_channels, heads, "hidden_channels")
        check_choice(task, "task", get_args(Task))
        check_choice(norm, "norm", ["batch", "layer", None])
        check_choice(jk, "jk", ["last", "cat", "max", "lstm", None])
        for name, given in (("norm", norm), ("jk", jk)):
            if given is not None and conv not in LAYERED:
                raise ValueError(
                    f"{name} goes with conv={', '.join(map(repr, LAYERED))}; got conv={conv!r}."
                )
        if edge_dim is not None and conv != "gat":
            raise ValueError(
                f"edge_dim goes with conv='gat', whose attention reads edge_attr; got conv={conv!r}."
            )
        self.dropout = dropout
        self.act = _activation(act)
        self.reads = () if edge_dim is None else ("edge_attr",)
        if task != "node":
            _, self.head = output_layers(hidden_channels, out_channels, task)
            out_channels = hidden_channels
        if jk in (None, "last"):
            self.jk = None
        else:
            self.jk = JumpingKnowledge(jk, hidden_channels, num_layers)
        self.lin: nn.Linear | None = None
        if jk is not None:
            self.lin = nn.Linear((num_layers if jk == "cat" else 1) * hidden_channels, out_channels)
            out_channels = hidden_channels
        hidden = num_layers - (jk is None)
        self.norms = nn.ModuleList(
            make_norm(norm, hidden_channels) for _ in range(0 if norm is None else hidden)
        )

        def layers() -> Iterator[DiffusionConv]:
            pairs = list(
                pairwise([in_channels, *[hidden_channels] * (num_layers - 1), out_channels])
            )
            match conv:
                case "mlp":
                    yield from starmap(MLPConv, pairs)
                case "gcn":
                    yield from starmap(GCNConv, pairs)
                case "sgc":
                    yield SGConv(in_channels, out_channels, num_layers)
                case "gin":
                    for a, b in pairs:
                        first = FeatureLinear(a, hidden_channels)
                        second = nn.Linear(hidden_channels, b)
                        yield GINConv(
                            a, nn.Sequential(first, _activation(act), second), train_eps=True
                        )
                case "gat":
                    *hidden, last = pairs
                    own: dict[str, Any] = {"edge_dim": edge_dim, "value_dropout": dropout}
                    yield from (GATConv(a, b // heads, heads, **own) for a, b in hidden)
                    yield GATConv(*last, **own)
                case "appnp":
                    yield from (
                        MLPConv(in_channels, hidden_channels),
                        MLPConv(hidden_channels, out_channels),
                    )
                    yield APPNPConv(out_channels, num_layers, alpha)
                case "gcnii":
                    yield MLPConv(in_channels, hidden_channels)
                    yield from (
                        GCNIIConv(hidden_channels, alpha, theta, k + 1) for k in range(num_layers)
                    )
                    yield MLPConv(hidden_channels, out_channels)

        self.convs = nn.ModuleList(layers())
        if conv != "gin":  # which propagates the features themselves
            cast("DiffusionConv", self.convs[0]).check_features = check_input

    def propagate(self, x: Tensor, graph: Graph, collect: Collect, **features: Any) -> Tensor:
        initial = None
        states = []
        for k, conv in enumerate(cast("Iterable[DiffusionConv]", self.convs)):
            has_weights = any(True for _ in conv.parameters())
            has_source = conv.update.beta != 0
            x = self._activated(x, k - 1) if has_weights and k else x
            # The initial embedding of Eq. 10 is the input of the first layer that has a source.
            initial = x if has_source and initial is None else initial
            if has_weights:
                x = dropout(x, self.dropout, self.training)
            else:
                x = x
            states += [x] if k else []
            x = run_layer(
                collect, conv, x, graph, source=initial if has_source else None, **features
            )
        if self.lin is not None:
            x = dropout(self._activated(x, len(states)), self.dropout, self.training)
            x = self.lin(x if self.jk is None else self.jk([*states, x]))
        return x if self.head is None else self.act(x)

    def _activated(self, x: Tensor, layer: int) -> Tensor:
        return self.act(self.norms[layer](x) if self.norms else x)


class ResidualGCN(Resettable):
    r"""The GNN of PyG's SGFormer, h⁰ = ReLU(BN(W X + b)),  hᵏ⁺¹ = ReLU(BN(Â hᵏ W_k + b_k)) + h⁰, dropout after ReLU."""

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, *, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.encoder = FeatureLinear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            GCNConv(hidden_channels, hidden_channels) for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(
            make_norm("batch", hidden_channels) for _ in range(num_layers + 1)
        )

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        first = x = self._activated(self.norms[0](self.encoder(x)))
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = self._activated(norm(conv(x, graph))) + first
        return x

    def _activated(self, x: Tensor) -> Tensor:
        return dropout(relu(x), self.dropout, self.training)


def _activation(act: str) -> nn.Module:
    check_kind(act, "act", str, "the name of an activation, such as 'relu'")
    try:
        return cast("nn.Module", activation_resolver(act))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"act must name an activation of torch.nn ('relu', 'elu', 'gelu', …); got {act!r}."
        ) from error
