"""What every model is: features and a graph in, logits out, and on request the operators of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from diffusion_mp.couplings import Coupling
from diffusion_mp.errors import check_counts, check_state
from diffusion_mp.graph import Graph


class GraphModel(nn.Module, ABC):
    """A model in PyG's calling convention; a new one writes :meth:`propagate`.

    Args:
        in_channels, hidden_channels, out_channels: of the features, the state and the logits (or embeddings).

    Shapes:
        x: [N, in_channels]; edges and batch as in :class:`DiffusionConv`; output: [N, out_channels], raw logits.
    """

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, hidden_channels=hidden_channels, out_channels=out_channels)
        self.in_channels = in_channels

    @abstractmethod
    def propagate(self, x: Tensor, graph: Graph) -> tuple[Tensor, list[Coupling]]:
        """The logits [N, out_channels] and the operator of every layer, for features and a graph that were checked."""

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        return_coupling: bool = False,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Logits [N, out_channels]; with ``return_coupling`` also the operator of every layer."""
        check_state(x, channels=self.in_channels, module=self)
        logits, couplings = self.propagate(x, Graph.coerce(x, edge_index, edge_weight, batch))
        return (logits, couplings) if return_coupling else logits

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in the order of the constructor."""
        for child in self.children():
            reset(child)
