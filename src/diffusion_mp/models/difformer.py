"""``DIFFormer``: the Transformer made of diffusion steps."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import relu

from diffusion_mp.dropout import dropout
from diffusion_mp.errors import check_choice, check_flags, check_kind
from diffusion_mp.graph import Graph
from diffusion_mp.layers import DIFFormerConv
from diffusion_mp.models.base import LayerStack, Record, recorded
from diffusion_mp.models.heads import Task
from diffusion_mp.updates import StateUpdate


class DIFFormer(LayerStack):
    r"""DIFFormer (Wu, Wipf & Yan 2025, Eqs. 53–64): an input layer, K propagation layers, an output layer.

    Z^(0) = ReLU(LayerNorm(W_I X + b_I)),  Z^(k+1) = σ′(LayerNorm((1 − τ) Z^(k) + τ P̄^(k))),  Ŷ = Z^(K) W_O + b_O.

    By default the diffusivity reads the state itself, without projections (Eqs. 17–18), and dropout acts only on what
    is propagated: projections of a state with dropout are what makes the published form unstable with few labels
    (docs/errata.md, D20). With LayerNorm in between no theorem covers the stack; ``layer_norm=False`` leaves it out.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the state and the logits (or embeddings).
        num_layers: K.
        transform: a value transformation W_V in every layer (the paper: on large data sets, not on citation networks).
        source: add the initial embedding as a source with β = 1 (Eq. 10, footnote 4). It does not keep a deep stack
            apart unless there is a ``leak`` κ beside it (docs/errata.md, D22).
        activation: σ′ after every layer, ``"relu"`` or ``None``.
        layer_norm: normalise after the input layer and after every step.
        dropout: rate.
        task: ``"node"``, ``"graph"`` or ``"link"``.
        update: what moves the state in place of the explicit step; every layer has a copy of its own. One of two steps
            (`StateUpdate`) is told the state before the last layer.
        options: further ones of :class:`DIFFormerConv` (``kernel``, ``heads``, ``tau``, ``graph``, ``leak``, …); what
            is learned in them, every layer has a copy of.

    Shapes: see :class:`GraphModel`.
    """

    references = DIFFormerConv.references

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        *,
        transform: bool = False,
        source: bool = False,
        activation: Literal["relu"] | None = None,
        layer_norm: bool = True,
        dropout: float = 0.0,
        task: Task = "node",
        update: StateUpdate | None = None,
        **options: Any,
    ) -> None:
        check_choice(activation, "activation", ["relu", None])
        check_flags(source=source)
        check_kind(update, "update", (StateUpdate, NoneType), "a StateUpdate")
        if source and update is not None and not update.beta:
            raise ValueError(
                f"source=True adds a source, which {update!r} has not; give the update a beta, ExplicitEuler(tau, "
                f"beta=1.0, leak=...) for instance."
            )

        def conv() -> DIFFormerConv:
            return DIFFormerConv(
                hidden_channels,
                hidden_channels,
                transform=transform,
                beta=1.0 if source and update is None else 0.0,
                update=copy.deepcopy(update),
                keep="state",
                bias=False,
                dropout=dropout,
                **copy.deepcopy(options),
            )

        super().__init__(
            in_channels,
            hidden_channels,
            out_channels,
            num_layers,
            conv,
            layer_norm=layer_norm,
            dropout=dropout,
            task=task,
        )
        self.activation, self.source = activation, source
        self.two_steps = update is not None and update.takes_previous

    def propagate(self, x: Tensor, graph: Graph, record: Record) -> Tensor:
        x = relu(self.norms[0](self.encoder(x)))
        initial, previous = x if self.source else None, None
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            before = {"previous": previous} if self.two_steps else {}
            x, previous = norm(recorded(record, conv, x, graph, source=initial, **before)), x
            x = relu(x) if self.activation == "relu" else x
        return self.decoder(dropout(x, self.dropout, self.training))
