"""Couplings between the nodes of one rank and those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from diffusion_mp.couplings import Coupling, LogLowRankCoupling, PooledCoupling, SparseCoupling
from diffusion_mp.couplings.log_low_rank import LogTerms
from diffusion_mp.distributed.collectives import all_merged
from diffusion_mp.kernels.log_linear_attention import Pooled, Receivers, log_linear_read

Exchange = Callable[[Tensor], Tensor]
"""From a rank's own rows to these and those of its halo."""


class _OverRanks(Coupling):
    """Rows of this rank, columns of all ranks."""

    def __init__(self, num_nodes: int, coupling: Coupling, exchange: Exchange) -> None:
        super().__init__(
            num_nodes,
            coupling.heads,
            torch.empty(0, dtype=coupling.dtype, device=coupling.device),
            row_stochastic=coupling.row_stochastic,
            nonnegative=coupling.nonnegative,
        )
        self.exchange = exchange

    def _transpose(self) -> NoReturn:
        raise NotImplementedError(
            "the transpose of a coupling over several ranks is not available: a rank has rows only. Explicit updates "
            "need none; run others in one process."
        )

    def _at(self, edge_index: Int[Tensor, "two E"]) -> NoReturn:
        raise NotImplementedError(
            "the entries of a coupling over several ranks are not available, but for log_at of attention through log "
            "features. Export attention in one process: the state dict is the same."
        )

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._product(torch.ones(self.num_nodes, self.heads, 1, dtype=self.dtype, device=self.device)).squeeze(2)


class SummedCoupling(_OverRanks):
    """An O(N) coupling: the sums over the senders of every rank are added up over ranks, and read by each."""

    def __init__(self, coupling: PooledCoupling, exchange: Exchange, group: ProcessGroup | None) -> None:
        super().__init__(coupling.num_nodes, coupling, exchange)
        self.coupling, self.group = coupling, group

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.coupling.read(all_merged(self.coupling.pool(v), self.group), v)

    def diagonal(self) -> Float[Tensor, "N heads"]:
        """s_ii of this rank's nodes, unless sums of all nodes divide it."""
        return super().diagonal() if self.row_stochastic else self.coupling.diagonal()

    def log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """log s_ij for edges of the sharded graph, which has checked them: sources may be nodes of other ranks."""
        if not isinstance(self.coupling, LogLowRankCoupling):
            self._at(edge_index)
        log_query, log_key, col_shift = self.coupling.log_query, self.coupling.log_key, self.coupling.col_shift
        nothing = log_key.new_zeros(*log_key.shape[:2], 0)
        counts = all_merged(self.coupling.pool(nothing), self.group)
        shift = cast("Tensor", counts.shift)
        most = shift.amax(1, keepdim=True)
        terms = LogTerms(log_query, log_key, col_shift, None).around(most.squeeze((1, 3)))
        pooled = Pooled(counts.totals, shift - most)
        row_shift = -math.log(col_shift.size(2)) - log_linear_read(Receivers(terms.log_query, None), pooled).log_sum
        keys, shifts = self.exchange(terms.log_key), self.exchange(terms.col_shift)
        queries = pad(terms.log_query, (0, 0, 0, 0, 0, keys.size(0) - log_query.size(0)))  # no edge ends beyond
        return LogTerms(queries, keys, shifts, row_shift).entries(edge_index)


class HaloCoupling(_OverRanks):
    """A sparse coupling of a rank's nodes and its halo: what the halo sends is fetched, and the product is local."""

    def __init__(self, num_nodes: int, coupling: SparseCoupling, exchange: Exchange) -> None:
        super().__init__(num_nodes, coupling, exchange)
        self.coupling = coupling

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.coupling.matmul(self.exchange(v))[: self.num_nodes]

    def degree(self) -> Float[Tensor, "N heads"]:
        return self.coupling.degree()[: self.num_nodes]

    def diagonal(self) -> Float[Tensor, "N heads"]:
        return self.coupling.diagonal()[: self.num_nodes]
