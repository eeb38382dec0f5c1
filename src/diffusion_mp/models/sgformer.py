"""``SGFormer``: one layer of global attention plus a GNN."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from diffusion_mp.checks import (
    Count,
    Probability,
    Share,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers import SGFormerConv
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.models.base import (
    Collect,
    GraphModel,
    Head,
    Task,
    output_layers,
    run_layer,
)
from diffusion_mp.models.gnn import ConvName, DiffusionGNN, ResidualGCN
from diffusion_mp.runtime.noise import dropout

#: The names of this class by PyG's names of options.
PYG_NAMES = {
    "trans_num_heads": "heads",
    "trans_dropout": "dropout",
    "gnn_num_layers": "num_gnn_layers",
    "graph_weight": "alpha",
}
#: What PyG's class always does, and its defaults where this class has others.
PYG_OPTIONS: dict[str, Any] = {
    "gnn": "residual",
    "activation": "relu",
    "dropout_on": "state",
    "trans_num_layers": 2,
    "dropout": 0.5,
    "num_gnn_layers": 3,
    "gnn_dropout": 0.5,
    "alpha": 0.5,
}


class SGFormer(GraphModel):
    r"""Linear attention over all pairs of nodes plus a GNN (slides, "SGFormer"; Wu et al. 2023b).

        Z^(0) = ReLU(LayerNorm(W_I X + b_I)),   Z = LayerNorm(β D⁻¹[V + (1/n) Q̃(K̃ᵀV)] + (1 − β) Z^(0))
        Z_O = (1 − α) Z + α GN(Z^(0), A),   Ŷ = Z_O W_O + b_O

    Without observed edges Z_O = Z. :meth:`like_pyg` builds PyG's class. docs/released.md lists the options of the
    released code.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_gnn_layers: Number of layers of GN.
        gnn: GN: the ``conv`` of a :class:`DiffusionGNN` on hidden channels (slides: ``"gcn"``); or ``"residual"``, the
            `ResidualGCN` of PyG's SGFormer, which reads X.
        alpha: α in [0, 1], the weight of GN.
        shared_encoder: GN reads Z^(0), as in the slides. ``False``: GN reads X through its own encoder, as in the
            released code.
        layer_norm: LayerNorm in the encoders and after the attention.
        dropout: Dropout rate of the values of the attention and of Z_O.
        gnn_dropout: Dropout rate inside GN; ``dropout`` by default.
        task: ``"node"``: predict for every node; ``"graph"``: an MLP reads the mean over the nodes of each graph;
            ``"link"``: score pairs of nodes.
        head: Score of a pair in link tasks: ``"dot"``, ⟨z_u, z_v⟩ with states of ``out_channels``, as in PyG's ``GAE``;
            or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.
        trans_num_layers: Number of attention layers with norms. Further layers read Z instead of Z^(0).
        activation: Activation after the norm of every attention layer, ``"relu"`` or ``None``.
        dropout_on: ``"values"``: dropout of the values of the attention and of Z_O; ``"state"``: dropout after the
            encoder and every attention layer, and not of Z_O, as in PyG.
        aggregate: ``"add"``: the sum above; ``"cat"``: Z_O = [Z ‖ GN(Z^(0), A)], which needs observed edges.

    Options:
        heads (int): Number of heads H of the attention; 1 by default.
        beta (float): Weight β of the attention, in (0, 1]; 0.5 by default.
        projection (str or None): ``"separate"`` (default), ``"tied"`` or ``None``; see :class:`SGFormerConv`.
        normalize (str): Norm of queries and keys, ``"row"`` (default, as in PyG) or ``"frobenius"``, as in the slides,
            with which the attention vanishes on large graphs (docs/errata.md, G1).
        transform (bool): Apply W_V; ``True`` by default.
        qkv_bias (bool): Add biases in W_Q, W_K and W_V; ``False`` by default.
        bias (bool): Add a bias to the output of the attention; ``False`` by default.

    Shapes:
        x: [N, in_channels], dense or sparse.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> SGFormer(4, 16, 3)(x, edge_index).shape
        torch.Size([6, 3])
    """

    references = SGFormerConv.references

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_gnn_layers: Count = 10,
        gnn: ConvName | Literal["residual"] = "appnp",
        alpha: Share = 0.8,
        shared_encoder: bool = True,
        layer_norm: bool = True,
        dropout: Probability = 0.0,
        gnn_dropout: Probability | None = None,
        task: Task = "node",
        head: Head = "dot",
        trans_num_layers: Count = 1,
        activation: Literal["relu"] | None = None,
        dropout_on: Literal["values", "state"] = "values",
        aggregate: Literal["add", "cat"] = "add",
        **options: Any,
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        # One rate is enough for most models: the GNN takes the rate of the attention by default.
        if gnn_dropout is None:
            gnn_dropout = dropout
        self.alpha = alpha
        self.dropout = dropout
        self.activation = activation
        self.dropout_on = dropout_on
        self.aggregate = aggregate
        # Once only: of the values within the attention, or here of the state.
        options["dropout"] = dropout if dropout_on == "values" else 0.0
        # Identities keep the names of a state dict the same.
        norm = nn.LayerNorm if layer_norm else nn.Identity

        def encoder() -> nn.Module:
            return nn.Sequential(
                FeatureLinear(in_channels, hidden_channels),
                norm(hidden_channels),
                nn.ReLU(),
            )

        def attention() -> nn.ModuleList:
            conv = SGFormerConv(hidden_channels, hidden_channels, **options)
            return nn.ModuleList([conv, norm(hidden_channels)])

        self.encoder = encoder()
        self.gnn_encoder: nn.Module | None = None
        # A ResidualGCN has an encoder of its own.
        if not shared_encoder and gnn != "residual":
            self.gnn_encoder = encoder()
        # The first layer is not in the list: models of one layer were saved under these names.
        self.conv, self.norm = attention()
        self.further = nn.ModuleList(attention() for _ in range(trans_num_layers - 1))
        sizes = (hidden_channels, num_gnn_layers)
        self.gnn: ResidualGCN | DiffusionGNN
        if gnn == "residual":
            self.gnn = ResidualGCN(in_channels, *sizes, dropout=gnn_dropout)
        else:
            self.gnn = DiffusionGNN(
                hidden_channels, hidden_channels, *sizes, conv=gnn, dropout=gnn_dropout
            )
        # Side by side, attention and GNN are twice as wide as their sum.
        channels = hidden_channels
        if aggregate == "cat":
            channels = 2 * hidden_channels
        self.decoder, self.head = output_layers(channels, out_channels, task, head)

    @classmethod
    def like_pyg(
        cls, in_channels: int, hidden_channels: int, out_channels: int, **options: Any
    ) -> SGFormer:
        """Return the model that PyG's ``SGFormer`` computes, from PyG's names of options and with PyG's defaults.

        PyG returns the log-softmax of these logits.

        Args:
            in_channels: Number of channels of the features.
            hidden_channels: Number of channels C of the state.
            out_channels: Number of logits.
            options: Options of PyG's ``SGFormer``, such as ``trans_num_heads`` and ``gnn_num_layers``; and options of
                this class, such as ``normalize="frobenius", qkv_bias=True`` for the released code.

        Examples:
            >>> SGFormer.like_pyg(4, 16, 3, trans_num_heads=2, gnn_num_layers=1)(x, edge_index).shape
            torch.Size([6, 3])
        """
        renamed = {PYG_NAMES.get(name, name): value for name, value in options.items()}
        return cls(
            in_channels, hidden_channels, out_channels, **(PYG_OPTIONS | renamed)
        )

    def propagate(self, x: Tensor, graph: Graph, collect: Collect) -> Tensor:
        on_state = self.training and self.dropout_on == "state"
        initial = self.encoder(x)
        # The GNN reads the embedding without this dropout, and has its own.
        z = dropout(initial, self.dropout, on_state)
        for conv, norm in [(self.conv, self.norm), *self.further]:
            z = norm(run_layer(collect, conv, z, graph))
            if self.activation == "relu":
                z = relu(z)
            z = dropout(z, self.dropout, on_state)
        z = self._beside_gnn(z, x, initial, graph)
        return self.decoder(dropout(z, self.dropout, self.training and not on_state))

    def _beside_gnn(
        self, z: Tensor, x: Tensor, initial: Tensor, graph: Graph
    ) -> Tensor:
        """Return Z_O from the attention's Z, the features X and the embedding Z^(0)."""
        # A graph whose edges were not observed is not one without edges, on which the GNN would still say something of
        # every node by itself.
        if graph.edge_index is None:
            if self.aggregate == "add":
                return z
            raise ValueError(
                "aggregate='cat' puts what the GNN makes of the observed edges beside the attention; got a graph "
                "without any. Pass edge_index (an empty [2, 0] one if no edge was observed), or take aggregate='add'."
            )
        read = initial
        if isinstance(self.gnn, ResidualGCN):
            read = x
        elif self.gnn_encoder is not None:
            read = self.gnn_encoder(x)
        observed = self.gnn(read, graph)
        if self.aggregate == "cat":
            return torch.cat([z, observed], 1)
        return (1 - self.alpha) * z + self.alpha * observed
