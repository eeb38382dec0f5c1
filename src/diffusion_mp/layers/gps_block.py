"""``GPSBlock``: message passing over edges and attention over all pairs, side by side."""

from __future__ import annotations

from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_counts, check_kind, check_probability, check_state
from diffusion_mp.graph import Graph
from diffusion_mp.layers.gated_gcn_conv import GatedGCNConv
from diffusion_mp.layers.norm import Norm, make_norm


class GPSBlock(nn.Module):
    r"""One layer of GraphGPS (Rampášek et al. 2022, Eqs. 3–8), the frame of SFi-Former.

    x_M = Norm(local(x, e, A)),  x_T = Norm(x + Dropout(attention(x, A))),  z = x_M + x_T,
    x′ = Norm(z + FFN(z)),  FFN(z) = Dropout(W₂ Dropout(ReLU(W₁ z))) with twice the channels between.

    Without observed edges, or without ``local``, z = x_T; without ``attention`` z = x_M.

    Args:
        channels: of the state.
        local: a :class:`GatedGCNConv`, which has its own residual and updates edge features, or any other layer of this
            library on ``channels``, whose residual Norm(x + Dropout(local(x, A))) is added here.
        attention: any layer of this library on ``channels`` that gives the change of the state, such as
            ``SFiConv(..., residual=False)``.
        norm: ``"batch"``, ``"layer"`` or ``None``; see :func:`make_norm`.
        dropout: rate of all dropouts above; the layers have their own.

    Shapes:
        - x, edges, batch and edge_attr as in :class:`GatedGCNConv`; edge_index may be ``None`` with attention.
        - output: x′; the pair (x′, e′) if ``edge_attr`` was given; with ``return_coupling`` the coupling of the
          attention (without attention: of ``local``) comes last.

    Raises:
        TypeError, ValueError: neither layer is given, or the input does not fit.
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
        super().__init__()
        check_counts(channels=channels)
        check_probability(dropout, "dropout")
        if local is None and attention is None:
            raise ValueError("GPSBlock needs local or attention, or both; got neither.")
        for name, layer in (("local", local), ("attention", attention)):
            check_kind(layer, name, (nn.Module, NoneType), "a layer of this library")
            sizes = [getattr(layer, size, channels) for size in ("in_channels", "out_channels")]
            if sizes != [channels, channels]:
                raise ValueError(f"{name} must map {channels} channels to {channels}; got {sizes[0]} to {sizes[1]}.")
        self.in_channels = self.out_channels = channels
        self.dropout = dropout
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

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor; running statistics start again."""
        for child in self.children():
            reset(child)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Any:
        """The next state; with ``edge_attr`` also the edges' next state; with ``return_coupling`` also the coupling."""
        check_state(x, channels=self.in_channels, module=self)
        graph = Graph.coerce(x, edge_index, edge_weight, batch)
        total, edges, coupling = x.new_zeros(()), edge_attr, None
        if (
            self.local is not None
            and self.local_norm is not None
            and (graph.edge_index is not None or self.attention is None)
        ):
            moved, edges, coupling = self._local(self.local, x, graph, edge_attr)
            total = total + self.local_norm(moved)
        if self.attention is not None and self.attention_norm is not None:
            change, coupling = self.attention(x, graph, return_coupling=True)
            total = total + self.attention_norm(x + dropout(change, self.dropout, self.training))
        out = self.norm(total + self.ffn(total))
        results = [out, *([] if edge_attr is None else [edges]), *([coupling] if return_coupling else [])]
        return out if len(results) == 1 else tuple(results)

    def _local(
        self, local: nn.Module, x: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Coupling]:
        """The state and the edges after message passing, residual included."""
        if not isinstance(local, GatedGCNConv):
            change, coupling = local(x, graph, return_coupling=True)
            return x + dropout(change, self.dropout, self.training), edge_attr, coupling
        moved, *edges, coupling = local(x, graph, edge_attr=edge_attr, return_coupling=True)
        return moved, edges[0] if edges else None, coupling

    def extra_repr(self) -> str:
        return f"{self.in_channels}, dropout={self.dropout}"
