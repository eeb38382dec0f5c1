"""``DIFFormer``: the Transformer made of diffusion steps."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_choice, check_counts, check_flags, check_probability
from diffusion_mp.graph import Graph, SelfLoops
from diffusion_mp.layers import DIFFormerConv
from diffusion_mp.layers.difformer_conv import Kernel
from diffusion_mp.models.base import GraphModel


class DIFFormer(GraphModel):
    r"""DIFFormer (Wu, Wipf & Yan 2025, Eqs. 53–64): an input layer, K propagation layers, an output layer.

    Z^(0) = ReLU(LayerNorm(W_I X + b_I)),  Z^(k+1) = σ′(LayerNorm((1 − τ) Z^(k) + τ P̄^(k))),  Ŷ = Z^(K) W_O + b_O.

    By default the diffusivity reads the state itself, without projections (Eqs. 17–18; ERRATA D20), and dropout acts
    only on what is propagated. With LayerNorm in between no theorem covers the stack; ``layer_norm=False`` leaves it
    out.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the state and the logits (or embeddings).
        num_layers: K.
        heads, kernel, projection, normalize, tau, graph, self_loops: see :class:`DIFFormerConv`.
        transform: a value transformation W_V in every layer (the paper: on large data sets, not on citation networks).
        source: add the initial embedding as a source with β = 1 (Eq. 10, footnote 4).
        leak: κ beside the source; a pure source does not keep a deep stack apart (ERRATA D22).
        activation: σ′ after every layer, ``"relu"`` or ``None``.
        layer_norm: normalise after the input layer and after every step.
        dropout: rate.

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
        heads: int = 1,
        kernel: Kernel = "simple",
        projection: Literal["separate", "tied"] | None = None,
        normalize: Literal["row", "frobenius"] | None = "row",
        tau: float = 0.5,
        graph: Literal["sum", "mean"] | None = "sum",
        self_loops: SelfLoops = "remaining",
        transform: bool = False,
        source: bool = False,
        leak: float = 0.0,
        activation: Literal["relu"] | None = None,
        layer_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(in_channels, hidden_channels, out_channels)
        check_counts(num_layers=num_layers)
        check_choice(activation, "activation", ["relu", None])
        check_probability(dropout, "dropout")
        check_flags(source=source, layer_norm=layer_norm)
        self.activation, self.source, self.dropout = activation, source, dropout
        self.encoder = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            DIFFormerConv(
                hidden_channels,
                hidden_channels,
                heads,
                kernel=kernel,
                projection=projection,
                normalize=normalize,
                tau=tau,
                graph=graph,
                self_loops=self_loops,
                beta=1.0 if source else 0.0,
                leak=leak,
                transform=transform,
                keep="state",
                bias=False,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(hidden_channels) if layer_norm else nn.Identity() for _ in range(num_layers + 1)
        )
        self.decoder = nn.Linear(hidden_channels, out_channels)

    def propagate(self, x: Tensor, graph: Graph) -> tuple[Tensor, list[Coupling]]:
        x = relu(self.norms[0](self.encoder(x)))
        initial = x if self.source else None
        couplings = []
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x, coupling = conv(x, graph, source=initial, return_coupling=True)
            x = norm(x)
            x = relu(x) if self.activation == "relu" else x
            couplings.append(coupling)
        logits = self.decoder(dropout(x, self.dropout, self.training))
        return logits, couplings
