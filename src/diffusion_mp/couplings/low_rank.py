"""Low-rank all-pair couplings: bilinear scores as they are, and the all-one matrix."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.inner_products import all_products, check_features, listed_products
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.pooled import PooledCoupling, Sums, heads_of
from diffusion_mp.errors import check_flags, floating
from diffusion_mp.graph.checks import as_num_nodes, row_bounds
from diffusion_mp.kernels.linear_attention import linear_product
from diffusion_mp.kernels.precision import accumulating, without_autocast
from diffusion_mp.kernels.unit import quotient, reciprocal


class LowRankCoupling(PooledCoupling):
    r"""s_ij = q_i·k_j for i, j of one graph, and 0 across graphs; a product costs O(N F D).

    Args:
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        symmetric, row_stochastic, nonnegative: promises about S.

    With rows divided by their sums it is a :class:`LinearAttentionCoupling`.

    Examples:
        >>> S = LowRankCoupling(q, k)
        >>> torch.allclose(S.to_dense(), torch.einsum("ihf,jhf->hij", q, k))
        True
    """

    def __init__(
        self,
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        *,
        symmetric: bool = False,
        row_stochastic: bool = False,
        nonnegative: bool = False,
    ) -> None:
        check_features(query, key)
        super().__init__(
            query.size(0),
            query.size(1),
            query,
            ptr=ptr,
            symmetric=symmetric,
            row_stochastic=row_stochastic,
            nonnegative=nonnegative,
            positive_semidefinite=query is key,
            low_rank=True,
        )
        self.query, self.key = query, key

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        query, key = heads_of(v, self.query, self.key)
        return linear_product(query, key, v, self.ptr)

    def _pool(self, v: Float[Tensor, "N H D"]) -> Sums:
        (key, values), _ = accumulating(*heads_of(v, self.key), v)
        with without_autocast(v):
            return Sums(key.permute(1, 2, 0) @ values.transpose(0, 1))

    def _read(self, sums: Sums, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        (query, totals), _ = accumulating(*heads_of(v, self.query), sums.totals)
        with without_autocast(v):
            return (query.transpose(0, 1) @ totals).transpose(0, 1).to(v.dtype)

    def block(self, rows: slice) -> PooledCoupling:
        return LowRankCoupling(self.query[rows], self.key[rows], nonnegative=self.nonnegative)

    def _transpose(self) -> Coupling:
        return LowRankCoupling(self.key, self.query, self.ptr, nonnegative=self.nonnegative)

    def diagonal(self) -> Float[Tensor, "N heads"]:
        (query, key), _ = accumulating(self.query, self.key)
        return (query * key).sum(2)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return listed_products(self.query, self.key, edge_index, self.ptr, across=0.0)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        return LowRankForm(self.query.to(dtype), self.key.to(dtype), ptr=self.ptr)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        return all_products(self.query, self.key, self.ptr, across=0.0)


class UniformCoupling(LowRankCoupling):
    """The all-one coupling (the *All One* ablation of Wu, Wipf & Yan 2025, Fig. 3): s_ij = 1/n with n the graph's size.

    Args:
        num_nodes: N.
        ptr: row boundaries of a ragged batch; ``None`` is one graph.
        normalize: 1/n (the mean over the graph); otherwise s_ij = 1 (the sum).

    Examples:
        >>> S = UniformCoupling(6)
        >>> torch.allclose(S.to_dense(), torch.full((1, 6, 6), 1 / 6))
        True
    """

    def __init__(
        self,
        num_nodes: int,
        ptr: Tensor | None = None,
        *,
        normalize: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_flags(normalize=normalize)
        one = floating((as_num_nodes(num_nodes), 1, 1), dtype, device)
        one = one.to(torch.promote_types(one.dtype, torch.float32))  # a count and its reciprocal are beyond half
        ptr = row_bounds(ptr, one.size(0))
        query = reciprocal(linear_product(one, one, one, ptr)) if normalize else one
        super().__init__(query, one, ptr, symmetric=True, row_stochastic=normalize, nonnegative=True)
        self.positive_semidefinite = True

    def _pool(self, v: Float[Tensor, "N H D"]) -> Sums:
        total = v.sum(0, dtype=torch.promote_types(v.dtype, torch.float32))
        return Sums(pad(total, (0, 1), value=float(v.size(0))))

    def _read(self, sums: Sums, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        total, count = sums.totals[:, :-1], sums.totals[:, -1:]
        return (quotient(total, count) if self.row_stochastic else total).to(v.dtype).expand_as(v)

    def block(self, rows: slice) -> PooledCoupling:
        size = len(range(*rows.indices(self.num_nodes)))
        return UniformCoupling(size, normalize=self.row_stochastic, dtype=self.dtype, device=self.device)
