"""Couplings in O(N), whose product needs only a few sums over the senders: low-rank products and linear attention."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from diffusion_mp.checks import check_flags, check_number, floating
from diffusion_mp.couplings.algebra import IdentityCoupling
from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.features import (
    FeatureCoupling,
    heads_of,
    listed_products,
    unit_rows,
    with_constant,
)
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.shapes import (
    ByRow,
    Entries,
    Features,
    Pairs,
    Received,
    Sent,
    Values,
)
from diffusion_mp.couplings.weighted import ReweightedCoupling, row_normalized
from diffusion_mp.graph.arguments import as_num_nodes, row_bounds
from diffusion_mp.kernels import linear_attention as kernels
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import (
    accumulating,
    quotient,
    reciprocal,
    wide_dtype,
    widened,
    without_autocast,
)
from diffusion_mp.runtime.torch_private import one_view


class Sums(NamedTuple):
    """Hold sums over some senders as totals and a logarithmic shift, so that they do not overflow.

    A sum over the senders is ``totals`` · exp(``shift``).

    Attributes:
        totals: the sums divided by exp(``shift``).
        shift: the logarithm of the common factor, without gradient. ``None`` is 0.

    Examples:
        >>> isinstance(LinearAttentionCoupling(q, k).pool(torch.rand(6, 2, 4)), Sums)
        True
    """

    totals: Tensor
    shift: Tensor | None = None

    def shifted(self, shift: Tensor | None) -> Tensor:
        """Return the totals for another shift.

        Args:
            shift: the new shift, at least as large as the present one.
        """
        if self.shift is None or shift is None:
            return self.totals
        # Sums over no senders have the shift −∞ and totals of zero; −∞ − (−∞) would make them NaN.
        return self.totals * (self.shift - shift).masked_fill(
            self.shift == shift, 0.0
        ).exp().to(self.totals)


def merged(parts: list[Sums]) -> Sums:
    """Combine sums over disjoint sets of senders into the sums over all these senders.

    Args:
        parts: results of `PooledCoupling.pool`, at least one.

    Returns:
        The sums over the senders of all parts.

    Examples:
        >>> first, second = LinearAttentionCoupling(q[:4], k[:4]), LinearAttentionCoupling(q[4:], k[4:])
        >>> sums = merged([first.pool(q[:4]), second.pool(q[4:])])  # the nodes in two blocks
        >>> torch.allclose(first.read(sums, q[:4]), (LinearAttentionCoupling(q, k) @ q)[:4], atol=1e-6)
        True
    """

    if not parts:
        raise ValueError("parts must hold the sums of a block at least; got none.")

    def merge(a: Sums, b: Sums) -> Sums:
        shift = None
        if a.shift is not None and b.shift is not None:
            shift = torch.maximum(a.shift, b.shift)
        return Sums(a.shifted(shift) + b.shifted(shift), shift)

    # From zero, so that the sums of a single block are copied too, and can be written to.
    first = parts[0]
    return reduce(merge, parts, Sums(torch.zeros_like(first.totals), first.shift))


P = TypeVar("P", bound="PooledCoupling")


class PooledCoupling(Coupling):
    """Base of couplings whose product has two steps: `pool` sums over the senders, and receivers `read` these sums.

    The sums are a few numbers per head for any number of nodes. `merged` combines the sums of different senders. Rows
    may therefore be processed block by block, or be distributed over processes. Both steps are differentiable and
    refuse a ragged batch. A subclass implements ``_pool`` and ``_read``. The constructor is the one of `Coupling`.

    Examples:
        >>> S = LinearAttentionCoupling(q, k)
        >>> isinstance(S, PooledCoupling), torch.allclose(S.read(S.pool(q), q), S @ q, atol=1e-6)
        (True, True)
    """

    @abstractmethod
    def _pool(self, v: Values) -> Sums:
        """Return the sums over the nodes of this coupling as senders."""

    @abstractmethod
    def _read(self, sums: Sums, v: Values) -> Values:
        """Return the rows of the nodes of this coupling as receivers."""

    def block(self: P, rows: slice) -> P:
        """Return the coupling that consists of these rows only.

        Args:
            rows: slice of the nodes of one graph.
        """
        block = self._mapped(lambda part: part[rows])
        block.num_nodes = len(range(self.num_nodes)[rows])
        # The metric holds row sums over all nodes, and the block has only some.
        vars(block).pop("_metric", None)
        return block

    def pool(self, v: Sent) -> Sums:
        """Return the sums that receivers read, over the nodes of this coupling as senders.

        Args:
            v: values [N, H, D] of the nodes.

        Raises:
            ValueError: the coupling is of a ragged batch.
        """
        if self.ptr is not None:
            raise ValueError(
                f"pool sums over the nodes of one graph; by its ptr {self!r} is of a batch of {self.ptr.numel() - 1}. "
                f"Take the graphs one by one."
            )
        self.check(v, "v")
        return self._pool(self._expanded(v))

    def read(self, sums: Sums, v: Sent) -> Received:
        """Return S v from the sums over all senders.

        Args:
            sums: the sums over all senders, from `pool` or `merged`.
            v: values [N, H, D] of the nodes of this coupling, which receive.
        """
        self.check(v, "v")
        return self._read(sums, self._expanded(v))


class LowRankCoupling(FeatureCoupling, PooledCoupling):
    """Attend to all nodes by inner products without normalisation, in O(N F D).

    For nodes i and j of one graph:

        s_ij = q_i·k_j

    S is positive semi-definite if key and query are one tensor. Promise this by ``positive_semidefinite=True``.

    Args:
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.

    Options:
        mutual: whether q_i·k_j = q_j·k_i, as where a state attends to itself. S is then symmetric. ``None``, the
            default, promises nothing.
        nonnegative: whether no entry is negative. ``None``, the default, promises nothing.
        positive_semidefinite: whether xᵀSx ≥ 0 for all x, and S = Sᵀ. It holds if key and query are one tensor.
            ``None``, the default, promises nothing.
        row_stochastic: whether every row sums to one, except for rows of zeros. ``None``, the default, promises
            nothing.

    Examples:
        >>> torch.allclose(LowRankCoupling(q, k).to_dense(), torch.einsum("ihf,jhf->hij", q, k))
        True
    """

    low_rank = True

    def _product(self, v: Values) -> Values:
        # Views of one head, which no kernel copies for the heads of the values.
        query, key = heads_of(v, self.query, self.key)
        return kernels.trilinear(query, key, v, self.ptr)

    def _pool(self, v: Values) -> Sums:
        # In at least float32: the sums run over all nodes.
        (key, values), _ = accumulating(*heads_of(v, self.key), v)
        with without_autocast(v):
            return Sums(key.permute(1, 2, 0) @ values.transpose(0, 1))

    def _read(self, sums: Sums, v: Values) -> Values:
        (query, totals), _ = accumulating(*heads_of(v, self.query), sums.totals)
        with without_autocast(v):
            return (query.transpose(0, 1) @ totals).transpose(0, 1).to(v.dtype)

    def _transpose(self) -> Coupling:
        return LowRankCoupling(
            self.key, self.query, self.ptr, nonnegative=self.nonnegative
        )

    def _at(self, edge_index: Pairs) -> Entries:
        # Of two graphs the product of features is a number too, and has to be zero.
        return listed_products(self.query, self.key, edge_index, self.ptr, across=0.0)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        return LowRankForm(self.query.to(dtype), self.key.to(dtype), ptr=self.ptr)


class UniformCoupling(LowRankCoupling):
    """Average or sum over the n nodes of a graph.

    s_ij is 1/n, the *All One* ablation of Wu, Wipf & Yan (2025), Fig. 3.

    Args:
        num_nodes: number N of nodes.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.
        normalize: s_ij = 1/n, the mean. ``False`` gives s_ij = 1, the sum.
        dtype: dtype of the coupling, raised to at least float32. ``None`` is the default dtype of torch.
        device: device of the coupling. ``None`` is the default device of torch.

    Examples:
        >>> torch.allclose(UniformCoupling(6).to_dense(), torch.full((1, 6, 6), 1 / 6))
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
        # A count and its reciprocal may not fit in half precision.
        one = widened(one)
        ptr = row_bounds(ptr, one.size(0))
        query = one
        if normalize:
            query = reciprocal(kernels.linear_product(one, one, one, ptr))
        super().__init__(
            query,
            one,
            ptr,
            row_stochastic=normalize,
            nonnegative=True,
            positive_semidefinite=True,
        )

    def _product(self, v: Values) -> Values:
        # torch.sum adds in pairs and keeps digits that a matrix product loses.
        if self.ptr is not None:
            return super()._product(v)
        return self._read(self._pool(v), v)

    def _pool(self, v: Values) -> Sums:
        # The number of nodes goes with the sums, so that the mean over several blocks is known.
        total = v.sum(0, dtype=wide_dtype(v.dtype))
        return Sums(
            torch.cat([total, total.new_full((len(total), 1), v.size(0))], dim=1)
        )

    def _read(self, sums: Sums, v: Values) -> Values:
        row = sums.totals[:, :-1]
        if self.row_stochastic:
            row = quotient(row, sums.totals[:, -1:])
        # A copy for every node, since the caller may write to rows that would share memory.
        return row.to(v.dtype).expand_as(v).clone()


class LinearAttentionCoupling(FeatureCoupling, PooledCoupling):
    """Attend to all nodes by linear attention with normalised rows, in O(N).

    For the n nodes j of the graph of i, with c = ``constant`` and o = ``own``:

        (S v)_i = (o n v_i + Σ_j (c + q_i·k_j) v_j) / (o n + Σ_j (c + q_i·k_j))

    DIFFormer-s has c = 1 and unit vectors (Wu, Wipf & Yan 2025, Eqs. 55–57). SGFormer has o = 1 and unit vectors (Wu et
    al. 2023b). A product costs O(N F D). A row whose sum is zero becomes a zero row.

    Args:
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.
        constant: c, a constant added to every score. 0 by default: scores are inner products only.
        own: o, the additional weight of a node in its own row, as a multiple of n. 0 by default: no additional weight.
        unit: divide every q_i and k_j by its norm. ``False`` by default: the vectors are used as given.

    Options:
        mutual: whether q_i·k_j = q_j·k_i, as where a state attends to itself. A nonnegative and mutual S has a
            ``metric``. ``None``, the default, promises nothing.
        nonnegative: whether no entry of S, after normalisation, is negative. ``None``, the default, promises nothing.
        symmetric: whether S, after normalisation, is symmetric. ``None``, the default, promises nothing.

    Examples:
        >>> torch.allclose(LinearAttentionCoupling(q, k).degree(), torch.ones(6, 2))  # every row sums to one
        True
    """

    row_stochastic = True
    low_rank = True

    def __init__(
        self,
        query: Features,
        key: Features,
        ptr: Tensor | None = None,
        *,
        constant: float = 0.0,
        own: float = 0.0,
        unit: bool = False,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        # While torch traces, numbers may be symbols.
        if not (_checked or torch.compiler.is_compiling()):
            check_flags(unit=unit)
            check_number(constant, "constant")
            check_number(own, "own")
        super().__init__(query, key, ptr, _checked=_checked, **promises)
        self.terms = kernels.Terms(ptr, constant, own, unit)

    @cached_property
    def _metric(self) -> ByRow | None:
        if not (self.nonnegative and self.mutual):
            return None
        # In double precision, since solvers divide by it.
        return self.to(torch.float64)._by_entries().metric

    def _product(self, v: Values) -> Values:
        query, key = heads_of(v, self.query, self.key)
        # The kernel computes every norm and sum once if one tensor has all roles, as where a state attends to itself.
        if query is key and one_view(query, v):
            v = query
        return kernels.linear_rows(query, key, v, self.terms).values

    def _pool(self, v: Values) -> Sums:
        (key,) = heads_of(v, self.key)
        return Sums(kernels.linear_pool(key, v, self.terms))

    def _read(self, sums: Sums, v: Values) -> Values:
        (query,) = heads_of(v, self.query)
        return kernels.linear_read(query, v, sums.totals, self.terms)

    def _by_entries(self) -> ReweightedCoupling:
        """Return the same operator D⁻¹(own n I + c 11ᵀ + QKᵀ), composed of couplings with explicit entries."""
        _, constant, own, unit = self.terms
        query = self.query
        key = self.key
        if unit:
            query, key = unit_rows(query, key)
        # The constant of all scores is one more feature.
        features = with_constant(query, constant), with_constant(key, 1.0)
        pairs: Coupling = LowRankCoupling(
            *features, self.ptr, symmetric=self.mutual, nonnegative=self.nonnegative
        )
        if own:
            options: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
            # Of every node the number of nodes of its graph, which ``own`` multiplies.
            counts = UniformCoupling(
                self.num_nodes, self.ptr, normalize=False, **options
            ).degree()
            loops = ReweightedCoupling(
                IdentityCoupling(self.num_nodes, **options),
                own * counts,
                symmetric=True,
                nonnegative=own > 0,
            )
            pairs = loops + pairs
        return row_normalized(pairs)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        return self.to(dtype)._by_entries().low_rank_form(dtype)

    def _transpose(self) -> Coupling:
        # The rows are divided by sums that belong to the receivers, which become the senders.
        return self._by_entries().T

    def degree(self) -> ByRow:
        """Return 1 for every row, or 0 for a row whose sum is zero."""
        with torch.no_grad():
            return (
                # The kernel decides which sums count as zero, so it is asked.
                (self._product(self._ones(self.dtype).unsqueeze(2)) != 0)
                .squeeze(2)
                .to(self.dtype)
            )

    def _at(self, edge_index: Pairs) -> Entries:
        return self._by_entries()._at(edge_index)
