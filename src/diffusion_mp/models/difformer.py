"""``DIFFormer``: the Transformer made of diffusion steps."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import relu

from diffusion_mp.dropout import dropout
from diffusion_mp.errors import check_choice, check_flags
from diffusion_mp.graph import Graph
from diffusion_mp.layers import DIFFormerConv
from diffusion_mp.models.base import LayerStack, Record, recorded
from diffusion_mp.models.heads import Task


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
        options: further ones of :class:`DIFFormerConv` (``kernel``, ``heads``, ``tau``, ``graph``, ``leak``, …).

    Shapes: see :class:`GraphModel`.

    Examples:
        >>> model = DIFFormer(4, 16, 3, num_layers=2, kernel="simple")
        >>> model(x, edge_index).shape
        torch.Size([6, 3])
        >>> logits, couplings = model(x, edge_index, return_coupling=True)  # one coupling per layer
        >>> couplings[0].to_dense().shape  # [heads, nodes, nodes]
        torch.Size([1, 6, 6])
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
        **options: Any,
    ) -> None:
        check_choice(activation, "activation", ["relu", None])
        check_flags(source=source)

        def conv() -> DIFFormerConv:
            return DIFFormerConv(
                hidden_channels,
                hidden_channels,
                transform=transform,
                beta=1.0 if source else 0.0,
                keep="state",
                bias=False,
                dropout=dropout,
                **options,
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

    def propagate(self, x: Tensor, graph: Graph, record: Record) -> Tensor:
        x = relu(self.norms[0](self.encoder(x)))
        initial = x if self.source else None
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = norm(recorded(record, conv, x, graph, source=initial))
            x = relu(x) if self.activation == "relu" else x
        return self.decoder(dropout(x, self.dropout, self.training))
