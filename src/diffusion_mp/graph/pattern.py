"""``Pattern``: where the entries of a sparse operator are, by row and by column, found when that is first asked for."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_mp.graph.cache import cached_property, persistent
from diffusion_mp.graph.ops import bounds, compress, values_only

T = TypeVar("T")
Parts = tuple[Tensor, Tensor | None, Tensor]


class Compressed:
    """The edges by one of their ends, a compressed sparse form: CSR over targets, or CSC over sources.

    Args:
        node: [E], that end of every edge.
        opposite: [E], the other end of every edge.
        num_nodes: N.
        ptr: [N+1], where the edges are known to stand in this order already.

    Attributes:
        ptr: [N+1] bounds the entries of each node.
        order: [E], the edge of each entry.
        moved: ``order``, or ``None`` where the edges already stand in this order and nothing has to be moved.
        other: [E], the other end of each entry.

    These are found when first asked for, in one pass, and kept; they are int32 where that is enough.
    """

    def __init__(
        self, node: Int[Tensor, " E"], opposite: Int[Tensor, " E"], num_nodes: int, ptr: Tensor | None = None
    ) -> None:
        self.node, self.opposite, self.num_nodes = node, opposite, num_nodes
        if ptr is not None:
            self.parts = (ptr, None, opposite.to(ptr.dtype))

    @property
    def ptr(self) -> Int[Tensor, " N_plus_one"]:
        return self.parts[0]

    @cached_property
    def order(self) -> Int[Tensor, " E"]:
        ptr, moved, other = self.parts
        if moved is None:
            return persistent(lambda: torch.arange(other.numel(), dtype=ptr.dtype, device=ptr.device))
        return moved

    @property
    def moved(self) -> Int[Tensor, " E"] | None:
        return self.parts[1]

    @property
    def other(self) -> Int[Tensor, " E"]:
        return self.parts[2]

    @property
    def found(self) -> bool:
        """Whether somebody has asked for these."""
        return "parts" in self.__dict__

    @cached_property
    def parts(self) -> Parts:
        """``ptr``, ``moved`` and ``other``, which are found together."""
        return persistent(self._find)

    def _find(self) -> Parts:
        node = self.node
        if node.is_meta or not values_only() or bool((node[1:] < node[:-1]).any()):
            return compress(node, self.opposite, self.num_nodes)
        ptr = bounds(node, self.num_nodes)
        return ptr, None, self.opposite.to(ptr.dtype)


class Pattern(NamedTuple):
    """Where the entries of a sparse operator are: edges by their row, the target, and by their column, the source."""

    by_row: Compressed
    by_col: Compressed

    @property
    def row(self) -> Int[Tensor, " E"]:
        """The row of every entry."""
        return self.by_row.node

    @property
    def col(self) -> Int[Tensor, " E"]:
        """The column of every entry."""
        return self.by_col.node

    @property
    def T(self) -> Pattern:
        """The pattern of the transpose."""
        return Pattern(self.by_col, self.by_row)
