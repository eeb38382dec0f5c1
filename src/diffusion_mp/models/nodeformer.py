"""``NodeFormer``: a linear-time Transformer over nodes, with the observed graph as bias and supervision."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor
from torch.nn.functional import elu
from torch_geometric.nn import JumpingKnowledge

from diffusion_mp.checks import (
    Count,
    NonnegativeNumber,
    PositiveNumber,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers import NodeFormerConv
from diffusion_mp.layers.options import NodeFormerParts, split
from diffusion_mp.models.base import Collect, LayerStack, StackOptions, run_layer
from diffusion_mp.runtime.noise import dropout


class NodeFormerModelOptions(StackOptions, NodeFormerParts, total=False):
    """Options of `NodeFormer`: the options of the stack and of its layers."""

    activation: Literal["elu"] | None
    heads: Count
    head_channels: Count | None
    relational_bias: Literal["sum", "sym", "row"] | None
    qkv_bias: bool
    bias: bool


class NodeFormer(LayerStack):
    r"""Softmax attention over all pairs of nodes in O(N), with a loss on edges (Wu et al. 2022; slides, Algorithm 1).

        Z^(0) = ELU(LayerNorm(W_I X)),   Z^(l+1) = LayerNorm(s NodeFormerConv(Z^(l), A) + Z^(l)),   Ŷ = W_O Z^(L)

    In training with a graph every layer also stores λ/L times its edge loss. The objective of the slides, L_s + λ L_e,
    is ``cross_entropy(model(x, edge_index)[mask], y[mask]) + auxiliary_loss(model)``.

    The model of the slides has ``jump="cat"``, the options of the slides for every :class:`NodeFormerConv`, s = 1
    (docs/errata.md, N12), and ``edge_regularization=1.0, relative_edge_loss=False``. Its edge loss dominates the loss
    of the task (docs/errata.md, N11).

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_layers: Number of layers L.
        edge_regularization: λ, the weight of the edge loss. The default is smaller than the 1 of the slides, with which
            the edge loss dominates the loss of the task (docs/errata.md, N11).
        residual: Add the input state of a layer to s times its output.
        step: s. ``None`` is min(1, 2/L), so that all layers of a deep stack together move the state as far as two do
            (docs/errata.md, N12).
        jump: Input of the output layer: the last state (``None``), all states (``"cat"``) or their maximum (``"max"``).

    Options:
        layer_norm (bool): LayerNorm after the input layer and after every layer; ``True`` by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.
        dropout (float): Dropout rate after the input layer and on the output of every layer; 0 by default.
        activation (str or None): Activation after every layer, ``"elu"`` or ``None`` (default). The input layer always
            has one.
        heads (int): Number of heads H of every layer; 1 by default.
        head_channels (int or None): Number of channels D of queries, keys and values; ``hidden_channels`` by default.
        relational_bias (str or None): Normalisation of the observed edges: ``"sym"`` (default), ``"row"`` or ``"sum"``;
            ``None`` leaves the edges out.
        hops (int): Largest power P of A in the relational bias; 4 by default.
        powers (str): ``"walks"`` (default) or ``"reach"``; see :class:`RelationalBias`.
        direction (str): Degrees of A: ``"pyg"`` (default), ``"directed"`` or ``"undirected"``; see
            :class:`AdjacencyDiffusivity`.
        gate (str or None): ``"sigmoid"`` (default): weights σ(b) of the powers; ``None``: weights b.
        qkv_bias (bool): Add biases in W_Q, W_K and W_V; ``False`` by default.
        bias (bool): Add a bias in W_O; ``True`` by default.
        projection (str or None): ``"separate"`` (default), ``"tied"`` or ``None``; see :class:`QueryKeyDiffusivity`.
        normalize (str or None): Norm of queries and keys: ``"row"``, ``"frobenius"`` or ``None`` (default).
        num_features (int): Number of random features m; 32 by default.
        tau (float): Temperature τ; 1 by default (docs/errata.md, N11).
        logits (str): ``"scaled_dot"`` (default): q·k/√d; ``"dot"``: q·k.
        num_samples (int): Number of noise samples per training step; 0 by default, no noise, which trains better with
            few labels (docs/errata.md, N11).
        relative_edge_loss (bool): Divide the edge loss by log n; ``True`` by default.
        generator (torch.Generator or None): Draws the features and the seed of the noise; ``None`` (default) is torch's
            global generator.
        stabilizer (float): Number added to features whose maximum is one, for parity with the released code; 0 by
            default.

    Shapes:
        x: [N, in_channels], dense or sparse.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> model = NodeFormer(4, 16, 3, heads=2)
        >>> (model(x, edge_index).logsumexp(1).mean() + auxiliary_loss(model)).backward()
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: Count = 2,
        *,
        edge_regularization: NonnegativeNumber = 0.1,
        residual: bool = True,
        step: PositiveNumber | None = None,
        jump: Literal["cat", "max"] | None = None,
        **options: Unpack[NodeFormerModelOptions],
    ) -> None:
        stack, layer = split(options, StackOptions)
        activation = layer.pop("activation", None)
        stack.setdefault("layer_norm", True)
        if step is None:
            # A deep stack takes smaller steps, so that all layers together move the state as far as two do.
            step = min(1.0, 2 / num_layers)
        # The mean over layers, so that λ means the same at every depth.
        share = edge_regularization / num_layers
        # The states of all layers and of the input layer.
        states = 1
        if jump == "cat":
            states = num_layers + 1

        def conv() -> NodeFormerConv:
            return NodeFormerConv(
                hidden_channels, hidden_channels, edge_regularization=share, **layer
            )

        super().__init__(
            (in_channels, hidden_channels, out_channels),
            num_layers,
            conv,
            states=states,
            **stack,
        )
        self.residual = residual
        self.step = step
        self.activation = activation
        # The last state needs no module.
        self.jump = None
        if jump is not None:
            self.jump = JumpingKnowledge(jump)

    def propagate(self, x: Tensor, graph: Graph, collect: Collect) -> Tensor:
        x = dropout(elu(self.norms[0](self.encoder(x))), self.dropout, self.training)
        states = [x]
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            # Attention takes no part of the state along: without the residual a node would be what others are.
            moved = dropout(
                run_layer(collect, conv, x, graph), self.dropout, self.training
            )
            if self.residual:
                moved = self.step * moved + x
            x = norm(moved)
            if self.activation == "elu":
                x = elu(x)
            states.append(x)
        if self.jump is not None:
            x = self.jump(states)
        return self.decoder(x)
