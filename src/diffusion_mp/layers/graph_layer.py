"""``GraphLayer``: what a call of a layer or model checks, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from diffusion_mp import checks
from diffusion_mp.graph import Graph
from diffusion_mp.graph.arguments import check_edge_order
from diffusion_mp.layers.features import channels_at_first
from diffusion_mp.layers.pyg import KnowsPyGNames, refuse_inputs
from diffusion_mp.modules import Resettable


class GraphLayer(KnowsPyGNames, Resettable):
    """Base of layers and models. They are called as ``module(x, edge_index, edge_weight, batch, …)``."""

    in_channels: int
    check_features: Callable[..., None] = staticmethod(checks.check_state)
    """The check of x. A model sets `check_input`, which admits a sparse x, in a first layer where only W_V reads x."""

    def inputs_to_graph(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        return_coupling: bool = False,
        others: Mapping[str, Any] = {},
        edge_attr: Tensor | None = None,
    ) -> Graph:
        """Check the inputs that all layers take, refuse ``others``, and return the graph."""
        # The check of x needs the channels, which the first call decides.
        if others:
            refuse_inputs(self, others)
        if edge_attr is not None:
            check_edge_order(edge_index, edge_attr)
        if not isinstance(return_coupling, bool):
            checks.check_flags(return_coupling=return_coupling)
        # Of a lazy layer; every later call compares with what the first one had.
        if self.in_channels == -1:
            self._find_channels(x)
        self.check_features(x, channels=self.in_channels, module=self)
        return Graph.coerce(x, edge_index, edge_weight, batch)

    def _find_channels(self, x: Tensor) -> None:
        self.in_channels = channels_at_first(self, x)
