"""What a batch knows about the graph that it was cut from."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from diffusion_mp.errors import as_whole, check_choice, describe, index_vector
from diffusion_mp.graph import Graph


class PartOf(BaseTransform):
    """Tells a batch, a part of `data` with `n_id` and `batch_size` as PyG's loaders set them, what it is a part of.

    `RandomPartitionLoader` does so by itself; a loader of PyG takes it as its transform and yields the same attributes:

    ```python
    NeighborLoader(data, [15, 10], data.train_mask, batch_size=1024, transform=PartOf(data, degrees="full"))
    ```

    - `kept_edges`, a float: of the edges that arrive at the batch's own nodes (the first `batch_size`) in `data`, the
      share that the batch has; 1.0 where none arrives.
    - Its masks (every boolean `*_mask` of a row per node) are false at nodes that are not its own.
    - With `degrees="full"`, `full_degree` [n, 2]: the weighted in- and out-degree in `data`, over all its edges. A
      `Graph.from_data(batch)` then has these degrees, so that `AdjacencyDiffusivity` gives every edge of the batch the
      entry of the whole graph, a_ij/√(d_i d_j) or a_ij/d_i, and full-graph inference meets the entries that training
      saw. (Of loops that a policy replaces, a graph must have those of its nodes; PyG may sample without them.) By
      default (`degrees="batch"`, the published recipe) the batch normalises by the edges it kept: entries are larger
      than those of the whole graph, by the share that was lost.

    Args:
        data: the whole graph, on the CPU; its edges and weights are read, once, and not kept.
        degrees: "batch" or "full", see above.

    Raises:
        TypeError, ValueError: where `Graph.from_data` has them, for edges that are not on the CPU or come as `adj_t`,
            and for an unknown choice.

    Examples:
        >>> data = Data(x=x, edge_index=edge_index)
        >>> part = PartOf(data, degrees="full")  # NeighborLoader(data, [15, 10], transform=part)
    """

    def __init__(self, data: Data, degrees: Literal["batch", "full"] = "batch") -> None:
        check_choice(degrees, "degrees", ["batch", "full"])
        graph = observed(data)
        self.arriving: Int[Tensor, " N"] = torch.bincount(graph.edges[1], minlength=graph.num_nodes)
        self.full_degree: Float[Tensor, "N two"] | None = None
        if degrees == "full":
            self.full_degree = torch.stack([graph.degree("in"), graph.degree("out")], 1)

    def forward(self, data: Data) -> Data:
        """The (shallow) copy of the batch that PyG hands over, with these attributes.

        Raises:
            TypeError: a batch without `n_id` and `batch_size`.
            ValueError: nodes that `data` does not have.
        """
        own = as_whole(getattr(data, "batch_size", None), "batch_size", "PyG's loaders set it, and n_id, in a batch.")
        n_id = index_vector(getattr(data, "n_id", None), "n_id", "[n], the batch's nodes in the whole graph")
        if not 0 <= own <= len(n_id) or (
            len(n_id) and not 0 <= int(n_id.min()) <= int(n_id.max()) < len(self.arriving)
        ):
            raise ValueError(
                f"a batch must have batch_size <= n nodes n_id of the {len(self.arriving)} of data; got {own} of "
                f"{describe(n_id)}."
            )
        arriving = int(self.arriving[n_id[:own]].sum())
        kept = int((data.edge_index[1] < own).sum()) if data.edge_index is not None else 0
        data.kept_edges = kept / arriving if arriving else 1.0
        for name in _node_masks(data):
            data[name] = data[name].clone()
            data[name][own:] = False
        if self.full_degree is not None:
            data.full_degree = self.full_degree[n_id]
        return data


def observed(data: Data) -> Graph:
    """The graph of `data`, checked: in range, on the CPU, and by `edge_index`, whose edges have an order."""
    if not isinstance(data, Data):
        raise TypeError(f"data must be one graph, a torch_geometric Data; got {type(data).__name__}.")
    if data.edge_index is not None and not isinstance(data.edge_index, Tensor):
        raise TypeError(f"edge_index must be a tensor [2, num_edges]; got {describe(data.edge_index)}.")
    if data.edge_index is None and getattr(data, "adj_t", None) is not None:
        raise ValueError("data must have edge_index; got adj_t, whose edges have no order to follow. Set edge_index.")
    if data.edge_index is not None and data.edge_index.device.type != "cpu":
        raise ValueError(
            f"data must be on the CPU, where parts are cut; got edge_index on {data.edge_index.device}. "
            "Pass data.cpu(), and move every batch: batch.to(device)."
        )
    return Graph.from_data(data)


def _node_masks(data: Data) -> list[str]:
    return [name for name in data.node_attrs() if name.endswith("_mask") and data[name].dtype == torch.bool]
