"""``DIFFormer``: the Transformer made of diffusion steps."""

from __future__ import annotations

import copy
from typing import Literal, Unpack

from torch import Tensor
from torch.nn.functional import relu

from diffusion_mp.checks import (
    Count,
    NonnegativeNumber,
)
from diffusion_mp.diffusivities import Positive
from diffusion_mp.energies import Penalty
from diffusion_mp.graph import Graph
from diffusion_mp.layers import DIFFormerConv
from diffusion_mp.layers.options import DIFFormerParts, split
from diffusion_mp.models.base import Collect, LayerStack, StackOptions, run_layer
from diffusion_mp.runtime.noise import dropout
from diffusion_mp.updates import StateUpdate

#: Default growth, over all steps of a model, of the component that all nodes share, and the largest default step.
GROWTH = 4.0
LARGEST = 0.75


class DIFFormerModelOptions(StackOptions, DIFFormerParts, total=False):
    """Options of `DIFFormer`: the options of the stack and of its layers."""

    activation: Literal["relu"] | None
    heads: Count
    kernel: Literal["simple", "sigmoid", "softmax", "gaussian"] | Penalty
    graph: Literal["sum", "mean"] | None
    graph_weight: float | None
    leak: NonnegativeNumber


class DIFFormer(LayerStack):
    r"""Attention over all pairs of nodes plus the graph, O(N) in its simple form (Wu, Wipf & Yan 2025, Eqs. 53–64).

        Z^(0) = ReLU(W_I X + b_I),   Z^(k+1) = σ′((1 − τ) Z^(k) + τ P̄^(k)),   Ŷ = Z^(K) W_O + b_O

    By default the diffusivity reads the state itself, without projections (Eqs. 17–18), and dropout acts only on the
    propagated values (docs/errata.md, D20). Beside a graph, every step multiplies the component that all nodes share by
    1 + τ. The default τ limits the total growth to (1 + τ)^K = 4 (docs/errata.md, D27). The published form is
    ``tau=0.5, layer_norm=True``.

    Args:
        in_channels: Number of channels of the features; -1 takes it from the first call.
        hidden_channels: Number of channels C of the state.
        out_channels: Number of logits.
        num_layers: Number of layers K.
        tau: Step size τ. ``None`` is 4^(1/K) − 1, and at most 0.75: 0.41 for 4 layers, 0.09 for 16.
        source: Add the initial embedding as a source with β = 1 (Eq. 10, footnote 4). See docs/errata.md, D22 for a
            source with a ``leak``.
        dropout_on: ``"values"``: dropout of the propagated values and of the input of the output layer, which leaves
            the state that the diffusivity reads as it is; ``"state"``: dropout after the input layer and every layer,
            as in the released code.
        update: An update of one or two steps in place of the explicit step, copied for every layer.

    Options:
        dropout (float): Dropout rate; 0 by default.
        task (str): ``"node"`` (default): predict for every node; ``"graph"``: an MLP reads the mean over the nodes of
            each graph; ``"link"``: score pairs of nodes.
        head (str): Score of a pair in link tasks: ``"dot"`` (default), ⟨z_u, z_v⟩ with states of ``out_channels``, as
            in PyG's ``GAE``; or ``"mlp"``, ⟨MLP(z_u), MLP(z_v)⟩ / √out_channels with states of ``hidden_channels``.
        layer_norm (bool): LayerNorm before every ReLU or σ′, as published. ``False`` by default, since no theorem
            covers a stack with norms.
        activation (str or None): σ′ after every layer, ``"relu"`` or ``None`` (default).
        transform (bool): Apply W_V in every layer. ``False`` by default; the paper has W_V on large data sets and not
            on citation networks.
        heads (int): Number of heads H of every layer; 1 by default.
        kernel (str or Penalty): The attention: ``"simple"`` (default, O(N)), ``"sigmoid"``, ``"softmax"``,
            ``"gaussian"``, or a `Penalty`.
        graph (str or None): How observed edges enter: ``"sum"`` (default), ``"mean"``, or ``None``, which does not read
            them; see :class:`DIFFormerConv`.
        graph_weight (float or None): Weight w of the graph, (1 − w) Ŝ + w Ã, in place of the sum or mean.
        leak (float): Leak κ of the explicit step; 0 by default.
        projection (str or None): ``"separate"``, ``"tied"`` or ``None`` (default), as in :class:`QueryKeyDiffusivity`;
            projections are unstable with few labels (docs/errata.md, D20).
        normalize (str or None): Norm of queries and keys, ``"row"`` (default, Eq. 55), ``"frobenius"`` or ``None``.
        self_loops (str): Self-loops of Ã: ``"remaining"`` (default), ``"keep"``, ``"add"`` or ``"remove"``.
        direction (str): Degrees of Ã: ``"pyg"`` (default), ``"directed"`` or ``"undirected"``.
        degrees (str): Degrees of Ã: ``"weighted"`` (default) or ``"count"``.
        qkv_bias (bool): Add biases in W_Q, W_K and W_V, as far as the layers have them; ``False`` by default.
        bias (bool or None): Add a bias to the output of every layer; ``False`` by default, since the channels stay the
            same.
        keep (str or None): The state from which the update starts, ``"state"`` (default, Eq. 63) or ``"values"``.
        reads (str): The input of the diffusivity, ``"state"`` (default) or ``"values"``.
        concat (bool): Concatenate the heads instead of averaging them (Eq. 62); ``False`` by default.
        steps (int): Number of updates of a layer with the same coupling; 1 by default.

    Shapes:
        x: [N, in_channels], dense or sparse.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        edge_label_index: [2, L], the pairs to score with ``task="link"``.
        output: Raw logits [N, out_channels]; [B, out_channels] for graphs; scores [L] for links.

    Examples:
        >>> logits, couplings = DIFFormer(4, 16, 3, num_layers=2)(x, edge_index, return_coupling=True)
        >>> logits.shape, couplings[0].to_dense().shape  # the first layer's, [heads, nodes, nodes]
        (torch.Size([6, 3]), torch.Size([1, 6, 6]))
    """

    references = DIFFormerConv.references

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: Count = 2,
        *,
        tau: float | Tensor | Positive | None = None,
        source: bool = False,
        dropout_on: Literal["values", "state"] = "values",
        update: StateUpdate | None = None,
        **options: Unpack[DIFFormerModelOptions],
    ) -> None:
        stack, layer = split(options, StackOptions)
        activation = layer.pop("activation", None)
        layer.setdefault("transform", False)
        if source and update is not None and not update.beta:
            raise ValueError(
                f"source=True adds a source, which {update!r} has not; give the update a beta, "
                f"ExplicitEuler(tau, beta=1.0, leak=...) for instance."
            )
        # An update has its own step size and its own weight of the source.
        if update is None:
            layer["beta"] = float(source)
            # Beside a graph the rows of S + Ã sum to two, so every step multiplies the common component by 1 + τ. A
            # fixed τ would let it grow without bound in depth; this one keeps its total growth.
            if tau is None:
                tau = min(LARGEST, GROWTH ** (1.0 / num_layers) - 1.0)
        if tau is not None:
            layer["tau"] = tau
        if dropout_on == "values":
            layer["dropout"] = stack.get("dropout", 0.0)

        def conv() -> DIFFormerConv:
            one = DIFFormerConv(
                hidden_channels, hidden_channels, update=update, **layer
            )
            # Layers share no learnable option, such as a `Positive` τ.
            return copy.deepcopy(one)

        super().__init__(
            (in_channels, hidden_channels, out_channels),
            num_layers,
            conv,
            **stack,
        )
        self.activation = activation
        self.source = source
        self.dropout_on = dropout_on
        # Updates of one state refuse another one.
        self.two_steps = update is not None and update.takes_previous

    def propagate(self, x: Tensor, graph: Graph, collect: Collect) -> Tensor:
        # Dropout of the state would change what the diffusivity reads, and with it the energy (D20). By default it acts
        # on values, within the layers, and on the input of the decoder.
        on_state = self.training and self.dropout_on == "state"
        x = dropout(relu(self.norms[0](self.encoder(x))), self.dropout, on_state)
        initial = None
        if self.source:
            initial = x
        previous = None
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            inputs = {"source": initial}
            # Before the first step there is no previous state, and the update begins at rest.
            if self.two_steps:
                inputs["previous"] = previous
            previous = x
            x = norm(run_layer(collect, conv, x, graph, **inputs))
            if self.activation == "relu":
                x = relu(x)
            x = dropout(x, self.dropout, on_state)
        return self.decoder(dropout(x, self.dropout, self.training and not on_state))
