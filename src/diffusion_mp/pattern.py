"""``Pattern``: where the entries of a sparse operator are, sorted by row or column when that is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

T = TypeVar("T")


class Compressed:
    """The edges by one of their ends, a compressed sparse form: CSR over targets, or CSC over sources.

    ``node`` [E] is that end of every edge. ``ptr`` [N+1] bounds the entries of each node, ``order`` [E] gives the edge
    of each entry: these two are sorted when first asked for, and kept.
    """

    def __init__(self, node: Int[Tensor, " E"], num_nodes: int) -> None:
        self.node, self.num_nodes = node, num_nodes
        self._sorted: tuple[Tensor, Tensor] | None = None

    @property
    def ptr(self) -> Int[Tensor, " N_plus_one"]:
        return self.ptr_and_order[0]

    @property
    def order(self) -> Int[Tensor, " E"]:
        return self.ptr_and_order[1]

    @property
    def ptr_and_order(self) -> tuple[Tensor, Tensor]:
        """Both, which are found together."""
        if self._sorted is None:
            self._sorted = kept(self._sort)
        return self._sorted

    def _sort(self) -> tuple[Tensor, Tensor]:
        ordered, order = torch.sort(self.node, stable=True)
        bounds = torch.arange(self.num_nodes + 1, device=self.node.device)
        return torch.searchsorted(ordered, bounds), order


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


def kept(make: Callable[[], T]) -> T:
    """What is kept for later calls: made outside inference mode, whose tensors no later gradient could use."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()
