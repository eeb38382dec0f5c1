"""``ToDiffusionGraph``: the graph of data as layers take it, made where data are made."""

from __future__ import annotations

from typing import Any, get_args

from torch_geometric.data import Batch, Data
from torch_geometric.transforms import BaseTransform

from diffusion_mp.errors import check_choice, check_kind
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops


class ToDiffusionGraph(BaseTransform):
    """Adds ``data.graph``, a checked `Graph`, for ``model(data.x, data.graph)``.

    What layers find out about a graph is kept on it: edges are checked, compressed and normalised once, not at every
    step. It moves with ``data.to(device)``, and goes to a loader's workers and comes from them. It is that of the edges
    as they are: put this transform last.

    A batch has a graph of its own. Called with a list of data it makes a batch of them, so that this loads batches::

        loader = torch.utils.data.DataLoader(dataset, 64, shuffle=True, collate_fn=ToDiffusionGraph())

    PyG's loaders of parts of a graph take it as their ``transform``.

    Args:
        self_loops: prepare the graph for layers with this policy (`Graph.with_self_loops`) here, in a worker say, and
            not in the first layer. Worth it from some 100 000 edges on: smaller ones are prepared faster than sent.

    Raises:
        TypeError, ValueError: no data, or where `Graph.from_data` has them.

    Examples:
        >>> data = ToDiffusionGraph()(Data(x=x, edge_index=edge_index))
    """

    def __init__(self, self_loops: SelfLoops | None = None) -> None:
        check_choice(self_loops, "self_loops", [*get_args(SelfLoops), None])
        self.self_loops = self_loops

    def forward(self, data: Any) -> Data:
        """The (shallow) copy of data that PyG hands over, or a batch of the list of data, with its graph."""
        for part in data if isinstance(data, list) and data else [data]:
            check_kind(part, "data", Data, "a torch_geometric Data or Batch, or a list of Data")
        if isinstance(data, list):
            data = Batch.from_data_list(data)
        data.graph = graph = Graph.from_data(data)
        if self.self_loops is not None:
            graph.with_self_loops(self.self_loops).prepare()
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(self_loops={self.self_loops!r})"
