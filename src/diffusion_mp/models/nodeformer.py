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
    """Of `NodeFormer`: beside those of the stack, of its layers."""

    activation: Literal["elu"] | None
    heads: Count
    head_channels: Count | None
    relational_bias: Literal["sum", "sym", "row"] | None
    qkv_bias: bool
    bias: bool


class NodeFormer(LayerStack):
    r"""Softmax attention over all pairs of nodes in O(N), with a loss on edges (Wu et al. 2022; slides, Algorithm 1).

    Z^(0) = ELU(LayerNorm(W_I X)),  Z^(l+1) = LayerNorm(s NodeFormerConv(Z^(l), A) + Z^(l)),  Ŷ = W_O Z^(L).

    In training with a graph every layer also stores λ/L times its edge loss; the objective of the slides, L_s + λ L_e,
    is ``cross_entropy(model(x, edge_index)[mask], y[mask]) + auxiliary_loss(model)``.

    The model of the slides has ``jump="cat"``, the layers of :class:`NodeFormerConv`, s = 1 (docs/errata.md,
    N12), and ``edge_regularization=1.0, relative_edge_loss=False``, an edge loss that dominates that of the task (N11).

    Args:
        in_channels, hidden_channels, out_channels: see :class:`GraphModel`.
        num_layers: L.
        edge_regularization: λ, the weight of the edge loss.
        residual, step: add the input state of a layer to s times its output; s is min(1, 2/L) by default.
        jump: input of the output layer: the last state (``None``), all states (``"cat"``) or their ``"max"``.

    Options:
        layer_norm, task: see :class:`GraphModel`; with LayerNorm by default.
        dropout: dropout rate after the input layer and on the output of every layer.
        activation: after every layer, ``"elu"`` or ``None``, the default; the input layer always has one.
        heads, tau, num_features, hops, …: further ones of :class:`NodeFormerConv`.

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
        # The states of all layers, and that of the input layer.
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
