"""Features for nodes that have none, from those of their edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from diffusion_mp.errors import check_edge_rows, check_kind, check_pairs, check_state

_BLOCK = 1 << 22  # edges; ogbn-proteins has 79 million


class SumEdgeFeatures(BaseTransform):
    """x_i = Σ_{j→i} e_ji, the sum of the features of the edges that end in a node; zero where none does.

    Models take these features on ogbn-proteins, which publishes none for nodes (Hu et al. 2020). They are summed block
    by block and in double precision, so the edges may be memory-mapped.

    Shapes: reads edge_index [2, E] and edge_attr [E, D] of `Data`, and sets x [N, D], in the type of edge_attr.

    Raises:
        TypeError, ValueError: there are no such edges, or no features of them.

    Examples:
        >>> data = SumEdgeFeatures()(Data(x=x, edge_index=edge_index, edge_attr=torch.ones(12, 2)))
    """

    def forward(self, data: Any) -> Data:
        """The (shallow) copy of data that PyG hands over, with its features."""
        check_kind(data, "data", Data, "a torch_geometric Data")
        check_kind(data.edge_index, "data.edge_index", Tensor, "a tensor [2, E]")
        check_kind(data.edge_attr, "data.edge_attr", Tensor, "a tensor [E, D] with the features of the edges")
        attr, nodes = data.edge_attr, int(data.num_nodes or 0)
        edges = check_pairs(data.edge_index, "data.edge_index", nodes, attr.device)
        check_edge_rows(attr, edges.size(1), "data.edge_attr")
        check_state(attr, "data.edge_attr")
        x = torch.zeros(nodes, attr.size(1), dtype=torch.float64, device=attr.device)
        for start in range(0, edges.size(1), _BLOCK):
            here = slice(start, start + _BLOCK)
            x.index_add_(0, edges[1, here], attr[here].double())
        data.x = x.to(attr.dtype)
        return data
