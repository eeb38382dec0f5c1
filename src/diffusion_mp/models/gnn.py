"""``DiffusionGNN``: the fixed-diffusivity GNNs as one model (Wu, Wipf & Yan 2025, Table 1); ``ResidualGCN``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, starmap
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.nn.functional import relu
from torch_geometric.nn.models import JumpingKnowledge
from torch_geometric.nn.resolver import activation_resolver

from diffusion_mp.checks import (
    Count,
    PositiveNumber,
    Probability,
    check_kind,
)
from diffusion_mp.diffusivities.base import check_heads_divide
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
from diffusion_mp.layers.features import FeatureLinear, check_input
from diffusion_mp.models.base import (
    Collect,
    GraphModel,
    Head,
    Task,
    make_readout,
    run_layer,
)
from diffusion_mp.modules import Norm, Resettable, make_norm
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.updates import teleport

ConvName = Literal["mlp", "gcn", "sgc", "gin", "gat", "appnp", "gcnii"]
LAYERED = ("mlp", "gcn", "gin", "gat")  # those with layers of one kind


class DiffusionGNN(GraphModel):
    r"""MLP, GCN, SGC, GIN, GAT, APPNP or GCNII: a chain of diffusion steps that differ in diffusivity and update only.

    Norm, activation and dropout precede every layer with weights. Dropout also acts on the features and on the values
    of GAT. Every layer is an explicit step (Wu, Wipf & Yan 2025, Table 1),

        x′ = (1 − τ) x + τ S v

    with values v, and in APPNP and GCNII with the initial state as a source.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_layers: Number of layers; for SGC and APPNP, number of propagation steps.
        conv: Kind of the layers: ``"mlp"``, ``"gcn"``, ``"sgc"``, ``"gin"``, ``"gat"``, ``"appnp"`` or ``"gcnii"``.
        heads: Number of heads H of the hidden layers of GAT. Its last layer has one head.
        dropout: Dropout rate.
        alpha: Teleport probability α of APPNP and GCNII.
        theta: θ of GCNII.
        norm: Norm of the hidden states of an MLP, GCN, GIN or GAT: ``"batch"``, ``"layer"`` or ``None``.
        act: The activation, the name of a class of torch.nn (``"relu"``, ``"elu"``, …).
        jk: How a linear map reads the states of all layers (Xu et al. 2018): ``"cat"``, ``"max"`` or ``"lstm"``; or
            ``"last"``, the last state. ``None``: the last layer gives the output.
        edge_dim: Number of channels of ``edge_attr``, which the attention of GAT reads. ``None``: no features of edges.
        task: ``"node"``: predict for every node; ``"graph"``: an MLP reads the mean over the nodes of each graph;
            ``"link"``: score pairs of nodes. For graphs, and for links with ``head="mlp"``, a head reads the activation
            of a last layer of ``hidden_channels``.
        head: Score of a pair in link tasks: ``"dot"``, ⟨z_u, z_v⟩ with states of ``out_channels``, as in PyG's ``GAE``;
            or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.

    Shapes:
        x: [N, in_channels], dense; or sparse except for GIN, which propagates the features themselves.
        edge_index: [2, E], a sparse CSR tensor or a ``Graph``; ``None`` for an MLP.
        edge_weight: [E].
        batch: [N], sorted.
        edge_attr: [E, edge_dim].
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> DiffusionGNN(4, 16, 3, conv="appnp", num_layers=10)(x, edge_index).shape
        torch.Size([6, 3])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: Count = 2,
        *,
        conv: ConvName = "gcn",
        heads: Count = 1,
        dropout: Probability = 0.5,
        alpha: float = 0.1,
        theta: PositiveNumber = 0.5,
        norm: Norm = None,
        act: str = "relu",
        jk: Literal["last", "cat", "max", "lstm"] | None = None,
        edge_dim: int | None = None,
        task: Task = "node",
        head: Head = "dot",
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        # All options are checked whichever layers are built, so that a search over conv fails at once or not at all.
        # An α out of range raises here.
        teleport(alpha)
        check_heads_divide(hidden_channels, heads, "hidden_channels")
        for name, value in (("norm", norm), ("jk", jk)):
            if value is not None and conv not in LAYERED:
                raise ValueError(
                    f"{name} goes with conv={', '.join(map(repr, LAYERED))}; got conv={conv!r}."
                )
        if edge_dim is not None and conv != "gat":
            raise ValueError(
                f"edge_dim goes with conv='gat', whose attention reads edge_attr; got conv={conv!r}."
            )
        self.dropout = dropout
        self.act = _activation(act)
        if edge_dim is not None:
            self.reads = ("edge_attr",)
        self.head = make_readout(hidden_channels, out_channels, task, head)
        # The last layer is one more hidden layer: its activation is what the MLP of a head reads.
        if self.head.mlp is not None:
            out_channels = hidden_channels
        # "last" needs no module: the linear map below reads only the last state.
        self.jk = None
        if jk not in (None, "last"):
            self.jk = JumpingKnowledge(jk, hidden_channels, num_layers)
        self.lin: nn.Linear | None = None
        if jk is not None:
            states = num_layers if jk == "cat" else 1
            self.lin = nn.Linear(states * hidden_channels, out_channels)
            out_channels = hidden_channels
        # A norm stands in front of every layer but the first, and of the linear map that jk adds.
        num_norms = 0 if norm is None else num_layers - (jk is None)
        self.norms = nn.ModuleList(
            make_norm(norm, hidden_channels) for _ in range(num_norms)
        )
        sizes = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]

        # Those of PyG's `GCN`, `GAT` and `GIN`, and of the papers of the others.
        def layers() -> Iterator[DiffusionConv]:
            match conv:
                case "mlp":
                    yield from starmap(MLPConv, pairwise(sizes))
                case "gcn":
                    yield from starmap(GCNConv, pairwise(sizes))
                case "sgc":  # all steps, then one linear map: one layer
                    yield SGConv(in_channels, out_channels, num_layers)
                case "gin":
                    # One hidden layer, as wide as the state, as in the GIN of PyG.
                    for a, b in pairwise(sizes):
                        mlp = nn.Sequential(
                            FeatureLinear(a, hidden_channels),
                            _activation(act),
                            nn.Linear(hidden_channels, b),
                        )
                        yield GINConv(a, mlp, train_eps=True)
                case "gat":
                    # Hidden heads are concatenated to hidden_channels; the last layer has one, as wide as the output.
                    for k, (a, b) in enumerate(pairwise(sizes)):
                        count = heads if k + 1 < num_layers else 1
                        yield GATConv(
                            a,
                            b // count,
                            count,
                            edge_dim=edge_dim,
                            value_dropout=dropout,
                        )
                # The papers' predict-then-propagate: an MLP, and steps without weights.
                case "appnp":
                    yield MLPConv(in_channels, hidden_channels)
                    yield MLPConv(hidden_channels, out_channels)
                    yield APPNPConv(out_channels, num_layers, alpha)
                # All layers hold on to the first state, so they need one width, and maps in front and behind.
                case "gcnii":
                    yield MLPConv(in_channels, hidden_channels)
                    for k in range(num_layers):
                        yield GCNIIConv(hidden_channels, alpha, theta, k + 1)
                    yield MLPConv(hidden_channels, out_channels)

        self.convs = nn.ModuleList(layers())
        # All but GIN begin with a linear map, which reads sparse features; GIN propagates the features themselves.
        if conv != "gin":
            cast("DiffusionConv", self.convs[0]).check_features = check_input

    def propagate(
        self, x: Tensor, graph: Graph, collect: Collect, **features: Any
    ) -> Tensor:
        initial = None
        # What stands in front of every layer but the first: with the last output, the states that jk reads.
        states = []
        for k, conv in enumerate(cast("Iterable[DiffusionConv]", self.convs)):
            # Layers without weights, the steps of APPNP, are one propagation: nothing stands between them.
            has_weights = any(True for _ in conv.parameters())
            if has_weights and k:
                x = self._activated(x, k - 1)
            source = None
            if conv.update.beta != 0:
                # The initial embedding of Eq. 10 is the input of the first layer that has a source.
                if initial is None:
                    initial = x
                source = initial
            if has_weights:
                x = dropout(x, self.dropout, self.training)
            if k:
                states.append(x)
            x = run_layer(collect, conv, x, graph, source=source, **features)
        if self.lin is not None:
            x = dropout(self._activated(x, len(states)), self.dropout, self.training)
            if self.jk is not None:
                x = self.jk([*states, x])
            x = self.lin(x)
        # Hidden states are activated.
        if self.head.mlp is not None:
            x = self.act(x)
        return x

    def _activated(self, x: Tensor, layer: int) -> Tensor:
        # Empty without norms, for which PyG's state dicts have no entries either.
        if self.norms:
            x = self.norms[layer](x)
        return self.act(x)


class ResidualGCN(Resettable):
    r"""The GNN of PyG's SGFormer, a GCN in which every layer adds the first state.

        h⁰ = ReLU(BN(W X + b)),   hᵏ⁺¹ = ReLU(BN(Â hᵏ W_k + b_k)) + h⁰

    Args:
        in_channels: Number of channels of the features.
        hidden_channels: Number of channels C of the state.
        num_layers: Number of layers.
        dropout: Dropout rate after every ReLU.

    Shapes:
        x: [N, in_channels].
        output: [N, C].
    """

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
