"""``GPSBlock``: message passing over edges and attention over all pairs, side by side."""

from __future__ import annotations

from types import NoneType
from typing import cast

from torch import Tensor, nn

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_kind
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.dropout import dropout
from diffusion_mp.layers.edge_layer import EdgeLayer, Norm, make_norm
from diffusion_mp.layers.gated_gcn_conv import GatedGCNConv


class GPSBlock(EdgeLayer):
    r"""One layer of GraphGPS (Rampášek et al. 2022, Eqs. 3–8), the frame of SFi-Former.

    x_M = Norm(local(x, e, A)),  x_T = Norm(x + Dropout(attention(x, A))),  z = x_M + x_T,
    x′ = Norm(z + FFN(z)),  FFN(z) = Dropout(W₂ Dropout(ReLU(W₁ z))) with twice the channels between.

    Without observed edges, or without ``local``, z = x_T; without ``attention`` z = x_M. The coupling of a call is that
    of the attention, or without attention that of ``local``.

    Args:
        channels: of the state.
        local: a :class:`GatedGCNConv`, which has its own residual and updates edge features, or any other layer of this
            library on ``channels``, whose residual Norm(x + Dropout(local(x, A))) is added here.
        attention: any layer of this library on ``channels`` that gives the change of the state, such as
            ``SFiConv(..., residual=False)``.
        norm: ``"batch"``, ``"layer"`` or ``None``; see :func:`make_norm`.
        dropout: rate of all dropouts above; the layers have their own.

    Shapes: as in :class:`EdgeLayer`; edge_index may be ``None`` with attention.

    Raises:
        TypeError, ValueError: neither layer is given, or the input does not fit.

    Examples:
        >>> block = GPSBlock(8, local=GatedGCNConv(8), attention=SFiConv(8, 8, heads=2))
        >>> nodes, edges = block(torch.rand(6, 8), edge_index, edge_attr=torch.rand(12, 8))
        >>> nodes.shape, edges.shape
        (torch.Size([6, 8]), torch.Size([12, 8]))
    """

    references = ("rampasek2022gps",)

    def __init__(
        self,
        channels: int,
        local: nn.Module | None = None,
        attention: nn.Module | None = None,
        *,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, dropout)
        if local is None and attention is None:
            raise ValueError("GPSBlock needs local or attention, or both; got neither.")
        for name, layer in (("local", local), ("attention", attention)):
            check_kind(layer, name, (nn.Module, NoneType), "a layer of this library")
            sizes = [getattr(layer, size, channels) for size in ("in_channels", "out_channels")]
            if sizes != [channels, channels]:
                raise ValueError(f"{name} must map {channels} channels to {channels}; got {sizes[0]} to {sizes[1]}.")
        self.local, self.attention = local, attention
        self.local_norm = None if local is None else make_norm(norm, channels)
        self.attention_norm = None if attention is None else make_norm(norm, channels)
        self.ffn = nn.Sequential(
            nn.Linear(channels, 2 * channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels, channels),
            nn.Dropout(dropout),
        )
        self.norm = make_norm(norm, channels)

    def step(self, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> tuple[Tensor, Tensor | None, Coupling]:
        total, edges, coupling = x.new_zeros(()), edge_attr, cast("Coupling", None)
        needed = graph.edge_index is not None or self.attention is None  # then it is local that asks for edges
        if self.local is not None and self.local_norm is not None and needed:
            if isinstance(self.local, GatedGCNConv):
                moved, *carried, coupling = self.local(x, graph, edge_attr=edge_attr, return_coupling=True)
                edges = carried[0] if carried else None
            else:
                moved, coupling = self._residual(self.local, x, graph)
            total = total + self.local_norm(moved)
        if self.attention is not None and self.attention_norm is not None:
            moved, coupling = self._residual(self.attention, x, graph)
            total = total + self.attention_norm(moved)
        return self.norm(total + self.ffn(total)), edges, coupling

    def _residual(self, layer: nn.Module, x: Tensor, graph: Graph) -> tuple[Tensor, Coupling]:
        """The state with the change that a layer gives."""
        change, coupling = layer(x, graph, return_coupling=True)
        return x + dropout(change, self.dropout, self.training), coupling

    def extra_repr(self) -> str:
        return f"{self.in_channels}, dropout={self.dropout}"
