"""Couplings of the nodes of one rank with the nodes of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from diffusion_mp.couplings import (
    LogLowRankCoupling,
    PooledCoupling,
    SparseCoupling,
)
from diffusion_mp.couplings.log_low_rank import LogTerms
from diffusion_mp.couplings.shapes import ByRow, Entries, Pairs
from diffusion_mp.distributed.parallel import all_merged, all_reduce
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.inference import PartialCoupling
from diffusion_mp.kernels.log_linear_attention import log_linear_read
from diffusion_mp.runtime.cache import cached_property

Exchange = Callable[[Tensor], Tensor]
"""From the rows of a rank to these rows and the rows of its halo."""


class OverRanks(PartialCoupling):
    """Rows of this rank, columns of all ranks."""

    no_transpose = (
        "the transpose of a coupling over several ranks is not available: a rank has rows only. Explicit updates "
        "need none; run others in one process."
    )

    whole = False

    def _at(self, edge_index: Pairs | None = None) -> NoReturn:
        raise NotImplementedError(
            "the entries of a coupling over several ranks are not available, but for log_at of attention through log "
            "features. Export attention in one process: the state dict is the same."
        )

    to_dense = _at  # products with the columns of one rank would be added up over ranks


class SummedCoupling(OverRanks):
    """An O(N) coupling: the sums over the senders are added up over ranks, and each rank reads the total."""

    def __init__(
        self, coupling: PooledCoupling, exchange: Exchange, group: ProcessGroup | None
    ) -> None:
        super().__init__(coupling.num_nodes, coupling)
        self.coupling: PooledCoupling = coupling
        self.exchange = exchange
        self.group = group

    def _product(self, v: HeadState) -> HeadState:
        return self.coupling.read(all_merged(self.coupling.pool(v), self.group), v)

    def log_at(self, edge_index: Pairs) -> Entries:
        """Return log s_ij for edges of the sharded graph, which checked them: sources may be nodes of other ranks."""
        coupling = self.coupling
        if not isinstance(coupling, LogLowRankCoupling):
            self._at(edge_index)
        # Values of no channels: of the sums over senders only their weights are needed.
        counts = all_merged(coupling.pool(coupling.log_key[:, :, :0]), self.group)
        shift = cast("Tensor", counts.shift)
        # Over the samples, as `around` takes it.
        most = shift.amax(1, keepdim=True)
        features = LogTerms(
            coupling.log_query,
            coupling.log_key,
            coupling.col_shift,
            None,
        )
        terms = features.around(most.squeeze((1, 3)))
        _, log_sum = log_linear_read(terms.log_query, None, counts.totals, shift - most)
        row_shift = -math.log(terms.col_shift.size(2)) - log_sum
        # Edges may begin at nodes of other ranks, whose keys are fetched.
        keys = self.exchange(terms.log_key)
        shifts = self.exchange(terms.col_shift)
        # No edge ends beyond.
        queries = pad(terms.log_query, (0, 0, 0, 0, 0, len(keys) - self.num_nodes))
        return LogTerms(queries, keys, shifts, row_shift).entries(edge_index)


class HaloCoupling(OverRanks):
    """A sparse coupling of the nodes of a rank and its halo: rows of the halo are fetched, and the product is local."""

    def __init__(
        self,
        num_nodes: int,
        coupling: SparseCoupling,
        exchange: Exchange,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(num_nodes, coupling)
        self.coupling: SparseCoupling = coupling
        self.exchange = exchange
        self.group = group

    @cached_property
    def symmetric(self) -> bool:
        coupling = self.coupling
        if not coupling.examines:
            return coupling.symmetric
        # The graph keeps the answer for its own weights, unless they are learned.
        if coupling.own:
            return coupling.graph.derived("symmetric", self._is_symmetric)
        return self._is_symmetric()

    def _is_symmetric(self) -> bool:
        """Return whether Sv = Sᵀv over all ranks for a random v, where Sᵀv is a derivative of Sv."""
        # Other numbers on every rank: with equal ones an asymmetry between ranks may cancel.
        generator = torch.Generator().manual_seed(distributed.get_rank(self.group))
        shape = (self.num_nodes, self.heads, 1)
        v = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
        v = v.to(self.device).requires_grad_()
        weight = self.coupling.weight.detach()
        detached = SparseCoupling(self.coupling.graph, weight)
        with torch.enable_grad():
            # The backward pass of the exchange adds up what all ranks send, which is the transpose over ranks.
            forth = detached.matmul(self.exchange(v))[: self.num_nodes]
            (back,) = torch.autograd.grad(forth, v, v.detach())
        away = (forth - back).abs() > 1e-6 * (forth.abs() + back.abs())
        return not bool(all_reduce(away.sum(dtype=torch.float64), self.group))

    def _product(self, v: HeadState) -> HeadState:
        # Rows of the halo lack edges that other ranks hold; their own ranks compute them.
        return self.coupling.matmul(self.exchange(v))[: self.num_nodes]

    def degree(self) -> ByRow:
        return self.coupling.degree()[: self.num_nodes]
