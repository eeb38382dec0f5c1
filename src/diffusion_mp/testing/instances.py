"""Small random states and graphs for the laws: weighted, directed, with self-loops and repeated edges, ragged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusion_mp.graph import Graph


@dataclass(frozen=True)
class Instance:
    """A state with its graphs.

    Shapes: x [N, C]; edge_index [2, E] or None; edge_weight [E] or None; ptr [B + 1].
    """

    x: Tensor
    edge_index: Tensor | None
    edge_weight: Tensor | None
    ptr: Tensor

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    @property
    def sizes(self) -> list[int]:
        return self.ptr.diff().tolist()

    @property
    def batch(self) -> Tensor | None:
        """Graph index of every node, None where there is one graph."""
        if len(self.sizes) == 1:
            return None
        return torch.repeat_interleave(torch.arange(len(self.sizes)), self.ptr.diff())

    def graph(self) -> Graph:
        weight = None if self.edge_weight is None else self.edge_weight.to(self.x.dtype)
        return Graph(self.num_nodes, self.edge_index, weight, ptr=self.ptr)

    def to(self, dtype: torch.dtype) -> Instance:
        weight = None if self.edge_weight is None else self.edge_weight.to(dtype)
        return replace(self, x=self.x.to(dtype), edge_weight=weight)

    def at(self, x: Tensor) -> Instance:
        """The same graphs with another state."""
        return replace(self, x=x)

    def empty(self) -> Instance:
        """The same kind of instance without a node."""
        edges = None if self.edge_index is None else self.edge_index[:, :0]
        weight = None if self.edge_weight is None else self.edge_weight[:0]
        return Instance(self.x[:0], edges, weight, torch.tensor([0, 0]))

    def permuted(self, permutation: Tensor, generator: torch.Generator) -> Instance:
        """Node k of the result is node permutation[k]; the edges are listed in another order too.

        A batch stays a batch only if the permutation stays inside each graph.
        """
        edge_index, edge_weight = self.edge_index, self.edge_weight
        if edge_index is not None:
            order = torch.randperm(edge_index.shape[1], generator=generator)
            edge_index = torch.argsort(permutation)[edge_index[:, order]]
            edge_weight = None if edge_weight is None else edge_weight[order]
        return Instance(self.x[permutation], edge_index, edge_weight, self.ptr)


def random_instance(num_nodes: int, channels: int, generator: torch.Generator, *, edges: bool = True) -> Instance:
    """A state inside the unit ball, where the premises of every penalty hold, on a graph without isolated nodes.

    The edges are a directed ring, as many random pairs (self-loops among them), and one edge given twice; the weights
    lie in [½, 3/2].
    """
    x = torch.randn(num_nodes, channels, generator=generator, dtype=torch.float64)
    x = x / (1 + x.norm(dim=-1, keepdim=True))
    edge_index = edge_weight = None
    if edges:
        node = torch.arange(num_nodes)
        ring = torch.stack([node, node.roll(-1)]) if num_nodes > 1 else torch.zeros(2, 0, dtype=torch.long)
        chords = torch.randint(num_nodes, (2, num_nodes), generator=generator)
        edge_index = torch.cat([ring, chords, ring[:, :1], torch.zeros(2, 1, dtype=torch.long)], dim=1)
        edge_weight = torch.rand(edge_index.shape[1], generator=generator, dtype=torch.float64) + 0.5
    return Instance(x, edge_index, edge_weight, torch.tensor([0, num_nodes]))


def join(instances: Sequence[Instance]) -> Instance:
    """The instances side by side, as one ragged batch."""
    sizes = torch.tensor([size for instance in instances for size in instance.sizes])
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    offset, index, weight = 0, [], []
    for instance in instances:
        if instance.edge_index is not None:
            index.append(instance.edge_index + offset)
        if instance.edge_weight is not None:
            weight.append(instance.edge_weight)
        offset += instance.num_nodes
    return Instance(
        torch.cat([instance.x for instance in instances]),
        torch.cat(index, dim=1) if index else None,
        torch.cat(weight) if weight else None,
        ptr,
    )


def hub_instance(num_nodes: int, channels: int, generator: torch.Generator, *, edges: bool = True) -> Instance:
    """Every node sends to node 0, so that one sum is long."""
    base = random_instance(num_nodes, channels, generator, edges=edges)
    if base.edge_index is None:
        return base
    spokes = torch.stack([torch.arange(num_nodes), torch.zeros(num_nodes, dtype=torch.long)])
    return replace(base, edge_index=torch.cat([base.edge_index, spokes], dim=1), edge_weight=None)
