"""Row-normalised low-rank attention, normalised on the way: DIFFormer-s and SGFormer are of this kind."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.algebra import SumCoupling
from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.features import unit_rows, with_constant
from diffusion_mp.couplings.identity import IdentityCoupling
from diffusion_mp.couplings.inner_products import check_features
from diffusion_mp.couplings.low_rank import LowRankCoupling, UniformCoupling
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.pooled import PooledCoupling, Sums, heads_of
from diffusion_mp.couplings.reweighted import ReweightedCoupling, row_normalized
from diffusion_mp.errors import check_flags, check_number
from diffusion_mp.kernels.linear_attention import Terms, linear_attention, linear_pool, linear_read


class LinearAttentionCoupling(PooledCoupling):
    r"""(S v)_i = (own n v_i + Σ_j (c + q_i·k_j) v_j) / (own n + Σ_j (c + q_i·k_j)), j over the n nodes of i's graph.

    DIFFormer-s is c = 1 with unit vectors (Wu, Wipf & Yan 2025, Eqs. 55–57), SGFormer own = 1 with unit vectors (Wu et
    al. 2023b). A product is one operation, O(N F D): neither unit vectors nor row sums are kept. A row whose sum is
    zero becomes a zero row.

    Args:
        query: q of the receivers [N, H, F].
        key: k of the senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        constant: c.
        own: what a node weighs in its own row beyond s_ii, as a multiple of n.
        unit: divide every q_i and k_j by its norm.
        symmetric, nonnegative: promises about the entries of S as it is in the end.
        reversible: the promise that the scores q_i·k_j are symmetric, made anyway where q and k are one tensor. Where S
            is nonnegative too, it is self-adjoint in the ``metric`` of its row sums.

    Raises:
        ValueError: query and key are not of one shape [N, H, F].

    Examples:
        >>> S = LinearAttentionCoupling(q, k, nonnegative=True)
        >>> torch.allclose(S.degree(), torch.ones(6, 2))  # every row sums to one
        True
    """

    def __init__(
        self,
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        *,
        constant: float = 0.0,
        own: float = 0.0,
        unit: bool = False,
        symmetric: bool = False,
        nonnegative: bool = False,
        reversible: bool = False,
    ) -> None:
        check_features(query, key)
        if type(unit) is not bool or type(reversible) is not bool:
            check_flags(unit=unit, reversible=reversible)
        for name, value in (("constant", constant), ("own", own)):
            # Numbers may be symbols while torch traces.
            if not (torch.compiler.is_compiling() or (type(value) is float and math.isfinite(value))):
                check_number(value, name)
        mutual = reversible or query is key
        super().__init__(
            query.size(0),
            query.size(1),
            query,
            ptr=ptr,
            symmetric=symmetric,
            row_stochastic=True,
            nonnegative=nonnegative,
            low_rank=True,
            metric=(
                (lambda: _by_entries(query.double(), key.double(), ptr, terms, True, True).metric)
                if nonnegative and mutual
                else None
            ),
        )
        terms: dict[str, Any] = {"constant": constant, "own": own, "unit": unit}
        self.query, self.key, self.terms, self.mutual = query, key, terms, mutual

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return linear_attention(self.query, self.key, v, self.ptr, **self.terms)

    def _pool(self, v: Float[Tensor, "N H D"]) -> Sums:
        return Sums(linear_pool(*heads_of(v, self.key), v, Terms(**self.terms)))

    def _read(self, sums: Sums, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return linear_read(*heads_of(v, self.query), v, sums.totals, Terms(**self.terms)).values

    def block(self, rows: slice) -> PooledCoupling:
        return LinearAttentionCoupling(self.query[rows], self.key[rows], nonnegative=self.nonnegative, **self.terms)

    def _by_entries(self, dtype: torch.dtype | None = None) -> ReweightedCoupling:
        """The same operator as a coupling that has each of its parts."""
        query, key = self.query.to(dtype or self.dtype), self.key.to(dtype or self.dtype)
        return _by_entries(query, key, self.ptr, self.terms, self.nonnegative, self.mutual)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        return self._by_entries(dtype).low_rank_form(dtype)

    def _transpose(self) -> Coupling:
        return self._by_entries().T

    def degree(self) -> Float[Tensor, "N heads"]:
        """1, or 0 for a row whose sum is zero."""
        ones = torch.ones(self.num_nodes, self.heads, 1, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            return (self._product(ones) != 0).squeeze(2).to(self.dtype)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._by_entries()._at(edge_index)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self._by_entries().to_dense()


def _by_entries(
    query: Tensor, key: Tensor, ptr: Tensor | None, terms: dict[str, Any], nonnegative: bool, symmetric: bool
) -> ReweightedCoupling:
    """D⁻¹(own n I + c 11ᵀ + QKᵀ); ``symmetric`` says whether the sum in brackets is."""
    constant, own, unit = terms.values()
    query, key = unit_rows(query, key) if unit else (query, key)
    pairs: Coupling = LowRankCoupling(
        with_constant(query, constant), with_constant(key, 1.0), ptr, symmetric=symmetric, nonnegative=nonnegative
    )
    if own:
        like: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
        weight = own * UniformCoupling(query.size(0), ptr, normalize=False, **like).degree()
        identity = IdentityCoupling(query.size(0), **like)
        own_rows = ReweightedCoupling(identity, weight, symmetric=True, nonnegative=own > 0)
        pairs = SumCoupling([own_rows, pairs])
    return row_normalized(pairs)
