"""Couplings between the nodes of one rank and those of all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.couplings import Coupling, LogLowRankCoupling, PooledCoupling, SparseCoupling
from diffusion_mp.distributed.collectives import all_merged
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.log_linear_attention import log_linear_entries, pooled

if TYPE_CHECKING:
    from diffusion_mp.distributed.sharded_graph import ShardedGraph


class _OverRanks(Coupling):
    """Rows of this rank, columns of all ranks; made of a coupling of local rows."""

    def __init__(self, coupling: Coupling, graph: ShardedGraph) -> None:
        super().__init__(
            graph.num_nodes,
            coupling.heads,
            torch.empty(0, dtype=coupling.dtype, device=coupling.device),
            row_stochastic=coupling.row_stochastic,
            nonnegative=coupling.nonnegative,
        )
        self.graph = graph

    def _transpose(self) -> NoReturn:
        raise NotImplementedError(
            "the transpose of a coupling over several ranks is not available: a rank has rows only. Explicit updates "
            "need none; run others in one process."
        )

    def at(self, edge_index: Int[Tensor, "two E"]) -> NoReturn:
        raise NotImplementedError(
            "the entries of a coupling over several ranks are not available, but for log_at of attention through log "
            "features. Export attention in one process: the state dict is the same."
        )

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._product(torch.ones(self.num_nodes, self.heads, 1, dtype=self.dtype, device=self.device)).squeeze(2)


class SummedCoupling(_OverRanks):
    """An O(N) coupling: the sums over the senders of every rank are added up over ranks, and read by each."""

    def __init__(self, coupling: PooledCoupling, graph: ShardedGraph) -> None:
        super().__init__(coupling, graph)
        self.coupling = coupling

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.coupling.read(all_merged(self.coupling.pool(v), self.graph.group), v)

    def log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """log s_ij for edges of the graph: sources may be nodes of other ranks."""
        if not isinstance(self.coupling, LogLowRankCoupling):
            return super().log_at(edge_index)
        log_query, log_key, col_shift = self.coupling.log_query, self.coupling.log_key, self.coupling.col_shift
        nothing = log_key.new_zeros(*log_key.shape[:2], 0)
        counts = all_merged(self.coupling.pool(nothing), self.graph.group)
        log_sum = pooled.read_logsumexp(log_query, counts.totals, cast("Tensor", counts.shift))
        row_shift = -math.log(col_shift.size(2)) - log_sum
        keys, shifts = self.graph.exchange(log_key), self.graph.exchange(col_shift)
        queries = pad(log_query, (0, 0, 0, 0, 0, keys.size(0) - log_query.size(0)))  # no edge ends beyond
        pattern = Graph(keys.size(0), edge_index, validate=False).pattern
        entries = log_linear_entries(pattern, queries, keys)
        source, target = edge_index
        return entries + (row_shift[target] + shifts[source]).logsumexp(2)


class HaloCoupling(_OverRanks):
    """A sparse coupling: the values of senders on other ranks are fetched, and the product is a local one."""

    def __init__(self, coupling: SparseCoupling, graph: ShardedGraph) -> None:
        super().__init__(coupling, graph)
        self.coupling = coupling

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.coupling.matmul(self.graph.exchange(v))[: self.num_nodes]

    def degree(self) -> Float[Tensor, "N heads"]:
        return self.coupling.degree()[: self.num_nodes]
