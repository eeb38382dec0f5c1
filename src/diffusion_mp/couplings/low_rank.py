"""Low-rank all-pair couplings: bilinear scores as they are, and the all-one matrix."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.pooled import PooledCoupling, Sums
from diffusion_mp.couplings.ragged import same_graph
from diffusion_mp.errors import check_device, check_flags, check_tensor, describe, floating
from diffusion_mp.graph import Graph
from diffusion_mp.graph_checks import as_num_nodes, row_bounds
from diffusion_mp.kernels.linear_attention import linear_product
from diffusion_mp.kernels.precision import accumulating, without_autocast
from diffusion_mp.kernels.spmm import sddmm
from diffusion_mp.kernels.unit import quotient


class LowRankCoupling(PooledCoupling):
    r"""s_ij = q_i·k_j for i, j of one graph, and 0 across graphs; a product costs O(N F D).

    Args:
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        symmetric, row_stochastic, nonnegative: promises about S.

    With rows divided by their sums it is a :class:`LinearAttentionCoupling`.
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
            symmetric=symmetric,
            row_stochastic=row_stochastic,
            nonnegative=nonnegative,
        )
        self.query, self.key, self.ptr = query, key, row_bounds(ptr, query.size(0))

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        query, key = (t.expand(-1, v.size(1), -1) for t in (self.query, self.key))
        return linear_product(query, key, v, self.ptr)

    def _pool(self, v: Float[Tensor, "N H D"]) -> Sums:
        (key, values), _ = accumulating(self.key.expand(-1, v.size(1), -1), v)
        with without_autocast(v):
            return Sums(key.permute(1, 2, 0) @ values.transpose(0, 1))

    def _read(self, sums: Sums, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        (query, totals), _ = accumulating(self.query.expand(-1, v.size(1), -1), sums.totals)
        with without_autocast(v):
            return (query.transpose(0, 1) @ totals).transpose(0, 1).to(v.dtype)

    def block(self, rows: slice) -> PooledCoupling:
        return LowRankCoupling(self.query[rows], self.key[rows], nonnegative=self.nonnegative)

    def _transpose(self) -> Coupling:
        return LowRankCoupling(self.key, self.query, self.ptr, nonnegative=self.nonnegative)

    def degree(self) -> Float[Tensor, "N heads"]:
        dtype = torch.promote_types(self.dtype, torch.float32)  # a sum over many nodes leaves the range of half
        ones = torch.ones(self.num_nodes, self.heads, 1, dtype=dtype, device=self.device)
        return linear_product(self.query, self.key, ones, self.ptr).squeeze(2)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        pairs = Graph(self.num_nodes, edge_index, validate=False)
        entries = sddmm(pairs.pattern, self.query, self.key)
        if self.ptr is None:
            return entries
        return entries.masked_fill(~same_graph(self.ptr, edge_index[1], edge_index[0]).unsqueeze(1), 0.0)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        dense = torch.einsum("ihf,jhf->hij", self.query, self.key)
        mask = block_mask(self.ptr, self.num_nodes, self.device)
        return dense if mask is None else dense.masked_fill(~mask, 0.0)


class UniformCoupling(LowRankCoupling):
    """The all-one coupling (the *All One* ablation of Wu, Wipf & Yan 2025, Fig. 3): s_ij = 1/n with n the graph's size.

    Args:
        num_nodes: N.
        ptr: row boundaries of a ragged batch; ``None`` is one graph.
        normalize: 1/n (the mean over the graph); otherwise s_ij = 1 (the sum).
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

    def _pool(self, v: Float[Tensor, "N H D"]) -> Sums:
        total = v.sum(0, dtype=torch.promote_types(v.dtype, torch.float32))
        return Sums(pad(total, (0, 1), value=float(v.size(0))))

    def _read(self, sums: Sums, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        total, count = sums.totals[:, :-1], sums.totals[:, -1:]
        return (quotient(total, count) if self.row_stochastic else total).to(v.dtype).expand_as(v)

    def block(self, rows: slice) -> PooledCoupling:
        size = len(range(*rows.indices(self.num_nodes)))
        return UniformCoupling(size, normalize=self.row_stochastic, dtype=self.dtype, device=self.device)


def reciprocal(degree: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1/d in at least float32, and 0 where d = 0: a row nobody sends to stays a zero row, in the gradient too."""
    return quotient(degree.new_ones(()), degree)


def check_features(query: Tensor, key: Tensor, prefix: str = "") -> None:
    """Raise unless both are floating-point [N, H, F] of equal shape, dtype and device."""
    if (
        isinstance(query, Tensor)
        and (key is query or (isinstance(key, Tensor) and key.shape == query.shape and key.dtype == query.dtype))
        and query.dim() == 3
        and query.is_floating_point()
        and query.layout is key.layout is torch.strided
        and query.device == key.device
    ):
        return
    for name, features in (("query", query), ("key", key)):
        check_tensor(features, f"{prefix}{name}", "[num_nodes, heads, features]")
    if query.dim() != 3 or query.shape != key.shape:
        raise ValueError(
            f"{prefix}query and {prefix}key must both be [num_nodes, heads, features] of one shape; "
            f"got {describe(query)} and {describe(key)}."
        )
    if query.dtype != key.dtype:
        raise TypeError(
            f"{prefix}query and {prefix}key must have one dtype; got {describe(query)} and {describe(key)}."
        )
    check_device(key, f"{prefix}key", query.device, f"{prefix}query")


def block_mask(ptr: Tensor | None, num_nodes: int, device: torch.device) -> Bool[Tensor, "N N"] | None:
    """The diagonal blocks of a ragged batch; ``None`` where one block is everything."""
    if ptr is None:
        return None
    nodes = torch.arange(num_nodes, device=device)
    return same_graph(ptr, nodes[:, None], nodes[None, :])
