"""All-pair couplings evaluated by tiles: sigmoid, softmax, Gaussian, any function f(z²), and sparse-flow attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffusion_mp.couplings.base import Coupling, feature_sizes
from diffusion_mp.couplings.features import (
    all_products,
    at_least_zero,
    distance_features,
    fill_across,
    fill_blocks,
    heads_of,
    listed_products,
)
from diffusion_mp.couplings.stored import SparseCoupling
from diffusion_mp.errors import check_choice, check_flags, check_function, check_has_values, check_positive, describe
from diffusion_mp.graph import Graph
from diffusion_mp.graph.cache import cached_property, values_only
from diffusion_mp.kernels import pairwise, sparse_flow
from diffusion_mp.kernels.pairwise.scores import log_scores
from diffusion_mp.kernels.precision import accumulating, without_autocast
from diffusion_mp.kernels.segments import slices
from diffusion_mp.kernels.sparse_flow import RowTerms

TILE_ENTRIES = 1 << 20  # pairs, of all heads, that DistanceCoupling evaluates at a time


class PairwiseCoupling(Coupling):
    r"""Attention over all pairs of nodes, without a matrix in memory.

    s_ij = f(q_i·k_j) within a graph, or f(q_i·k_j) / Σ_l f(q_i·k_l) (Wu, Wipf & Yan 2025, Eq. 17).

    A product costs O(N² D) time and O(N) memory, forward and backward. Normalised rows are computed in log space, where
    no score overflows.

    Args:
        query, key: features of receivers and senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        score: f, ``"exp"`` or ``"sigmoid"``; with ``distance_features`` it is a function of ‖x_i − x_j‖².
        normalize: divide each row by its sum; ``"symmetric"``: D^-½SD^-½ with D the row sums (for a symmetric S).
        loops: whether a node couples with itself; otherwise s_ii = 0, and row sums are over the other nodes.
        symmetric, positive_semidefinite: promises about S after normalisation.
        reversible: the promise that q_i·k_j = q_j·k_i, implied if q is k; a row-normalised S then has a ``metric``.

    Examples:
        >>> torch.allclose(PairwiseCoupling(q, k).to_dense(), torch.einsum("ihf,jhf->hij", q, k).softmax(2))
        True
    """

    def __init__(
        self, query: Float[Tensor, "N H F"], key: Float[Tensor, "N H F"], ptr: Tensor | None = None,
        score: Literal["exp", "sigmoid"] = "exp",
        *, normalize: bool | Literal["symmetric"] = True, loops: bool = True, symmetric: bool = False,
        positive_semidefinite: bool = False, reversible: bool = False,
    ) -> None:  # fmt: skip
        if type(score) is not str or score not in pairwise.SCORES:
            check_choice(score, "score", pairwise.SCORES)
        sizes = feature_sizes(query, key)
        if not (type(normalize) is type(loops) is type(reversible) is bool):
            divides = True if isinstance(normalize, str) and normalize == "symmetric" else normalize
            check_flags(normalize=divides, loops=loops, reversible=reversible)
        divided, mutual = normalize is True, reversible or query is key
        promises: dict[str, Any] = {"symmetric": symmetric, "row_stochastic": divided, "nonnegative": True}
        promises["metric"] = (lambda: _row_sums(query, key, ptr, score, loops)) if divided and mutual else None
        super().__init__(*sizes, ptr=ptr, positive_semidefinite=positive_semidefinite, **promises)
        self.quadratic = True
        self.query, self.key, self.score, self.normalize, self.loops = query, key, score, normalize, loops
        self.mutual = mutual

    @cached_property
    def shifts(self) -> tuple[Float[Tensor, "N heads"], Float[Tensor, "N heads"]]:
        """Row and column shifts a and b of s_ij = exp(log f(q_i·k_j) + a_i + b_j), for entries and the transpose."""
        zero = self.query.new_zeros(self.num_nodes, self.heads)
        if not self.normalize:
            return zero, zero
        with torch.enable_grad():  # kept for later callers, who may need gradients if this one does not
            lse = pairwise.pairwise_logsumexp(self.query, self.key, self.ptr, score=self.score, loops=self.loops)
            lse = lse.masked_fill(lse == -torch.inf, 0.0)  # an empty row: its entries are zero at any shift
            half = -0.5 * lse
            return (half, half) if self.normalize == "symmetric" else (-lse, zero)

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        # A single head of S takes the heads of the values as channels.
        values = v.flatten(1).unsqueeze(1) if self.heads == 1 < v.size(1) else v
        pairs, score, mutual = (self.query, self.key, values), self.score, self.mutual
        if self.row_stochastic and self.loops:
            out = pairwise.pairwise_attention(*pairs, self.ptr, score=score, mutual=mutual)
            return out if values is v else out.view_as(v)
        a, b = self.shifts if self.normalize else (None, None)
        options: dict[str, Any] = {"score": score, "loops": self.loops, "mutual": mutual}
        return pairwise.pairwise_product(*pairs, a, b, self.ptr, **options).view_as(v)

    def both(self, v: Float[Tensor, "N H D"], w: Float[Tensor, "N H C"]) -> tuple[Tensor, Tensor]:
        if not (self.row_stochastic and self.loops and self.heads == v.size(1)) or "shifts" in vars(self):
            return super().both(v, w)
        options: dict[str, Any] = {"score": self.score, "mutual": self.mutual}
        found, log_sums = pairwise.pairwise_rows(self.query, self.key, v, self.ptr, **options)
        return found, self._turned(-log_sums, torch.zeros_like(log_sums)).matmul(w)

    def _transpose(self) -> Coupling:
        return self._turned(*self.shifts)

    def _turned(self, row: Tensor, column: Tensor) -> Coupling:
        """Return the transpose, given the shifts of S."""
        transposed = PairwiseCoupling(self.key, self.query, self.ptr, self.score, normalize=False, loops=self.loops)
        transposed.normalize, transposed.shifts, transposed.mutual = self.normalize, (column, row), self.mutual
        return transposed

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._ones() if self.row_stochastic and self.loops else super().degree()

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._log_at(edge_index).exp()

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        s = listed_products(self.query, self.key, edge_index, self.ptr, across=-torch.inf)
        if not self.loops:
            s = s.masked_fill((source == target).unsqueeze(1), -torch.inf)
        return pairwise.log_score(s, self.score) + self.shifts[0][target] + self.shifts[1][source]

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        logs = fill_blocks(log_scores(self.query, self.key, self.score, self.loops), self.ptr, -torch.inf)
        row, column = (shift.t() for shift in self.shifts)
        return (logs + row.unsqueeze(2) + column.unsqueeze(1)).exp()


def _row_sums(query: Tensor, key: Tensor, ptr: Tensor | None, score: Literal["exp", "sigmoid"], loops: bool) -> Tensor:
    """Σ_j f(q_i·k_j) in double precision, as multiples of the largest one; 1 for an empty row."""
    log_sums = pairwise.pairwise_logsumexp(query.double(), key.double(), ptr, score=score, loops=loops)
    largest = log_sums.amax(0) if len(log_sums) else 0.0
    sums = (log_sums - largest).exp().clamp(min=torch.finfo(torch.float64).tiny)
    return sums.masked_fill(log_sums == -torch.inf, 1.0)


class DistanceCoupling(Coupling):
    r"""s_ij = f(‖q_i − k_j‖²) within a graph, for any function f of a tensor of squared distances.

    A product costs O(N² D) time and O(N D) memory. Distances are computed in double precision, and f in that of the
    features (at least single). Where f is linear, exponential or a sigmoid, `LowRankCoupling` and `PairwiseCoupling`
    are several times faster.

    Args:
        function: f, elementwise, in single or double precision, differentiable at 0.
        query, key, ptr: as in :class:`PairwiseCoupling`.
        nonnegative, positive_semidefinite: promises about S, which is symmetric if query is key.

    Examples:
        >>> S = DistanceCoupling(lambda z2: 1 / (1 + z2), q, q)
        >>> torch.allclose(S.diagonal(), torch.ones(6, 2))
        True
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], query: Float[Tensor, "N H F"], key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        *, nonnegative: bool = False, positive_semidefinite: bool = False,
    ) -> None:  # fmt: skip
        check_function(function, "function", "of a tensor of squared distances")
        promises: dict[str, Any] = {"nonnegative": nonnegative, "positive_semidefinite": positive_semidefinite}
        super().__init__(*feature_sizes(query, key), ptr=ptr, symmetric=query is key, **promises)
        self.quadratic = True
        self.mutual = query is key
        self.function, self.query, self.key = function, query, key

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        (_, values), dtype = accumulating(self.query, v)
        with without_autocast(v):
            query, key = self._distance_features()
            if not values_only():  # without checkpoints
                return self._moved(query, key, values, self.ptr).to(dtype)
            tiles = self._tiles()
            again = partial(checkpoint, self._moved, use_reentrant=False, preserve_rng_state=False)
            move = self._moved if len(tiles) == 1 else again
            moved = []
            for rows, graph in tiles:
                first = rows.start - graph.start
                moved.append(move(query[rows], key[graph], values[graph], first=first))
            return torch.cat(moved).to(dtype)

    def _moved(
        self,
        query: Tensor,
        key: Tensor,
        values: Tensor,
        ptr: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        entries = fill_blocks(self._entries(query, key, values.dtype, first), ptr, 0.0)
        return (entries @ values.transpose(0, 1)).transpose(0, 1)

    def _distance_features(self) -> tuple[Float[Tensor, "N H G"], Float[Tensor, "N H G"]]:
        """Vectors whose inner products are the squared distances.

        In double precision, whatever that of the rows: the square of a short distance is a small difference of large
        numbers, and its rounding in single precision may be more than all other pairs contribute to a gradient.
        """
        wide = self.query.double()
        query, key = distance_features(wide, wide if self.mutual else self.key.double(), self.ptr)
        return -2 * query, key

    def _entries(
        self,
        query: Float[Tensor, "r H G"],
        key: Float[Tensor, "c H G"],
        dtype: torch.dtype,
        first: int = 0,
    ) -> Float[Tensor, "H r c"]:
        """f for all pairs of rows and columns with these features; the first row is column number ``first``."""
        products = query.transpose(0, 1) @ key.permute(1, 2, 0)
        squares = at_least_zero(products.to(dtype))
        if self.mutual:
            # No rounding is as small as the gradients of far rows, and f is often steepest at zero.
            squares.diagonal(first, 1, 2).zero_()
        return self._applied(squares)

    def _applied(self, squares: Tensor) -> Tensor:
        entries = self.function(squares)
        if not isinstance(entries, Tensor) or entries.shape != squares.shape:
            wanted = f"a number for each squared distance, {list(squares.shape)}"
            raise ValueError(f"function must return {wanted}; got {describe(entries)}.")
        return entries

    def _tiles(self) -> list[tuple[slice, slice]]:
        """The rows and columns of every tile, each within one graph; a single empty tile if there are no nodes."""
        tiles = []
        for graph in slices(self.ptr, self.num_nodes):
            start, stop = graph.start, graph.stop
            step = max(1, TILE_ENTRIES // max(1, self.heads * (stop - start)))
            tiles += [(slice(row, min(row + step, stop)), graph) for row in range(start, stop, step)]
        return tiles or [(slice(0, 0), slice(0, 0))]

    def _transpose(self) -> Coupling:
        return DistanceCoupling(self.function, self.key, self.query, self.ptr, nonnegative=self.nonnegative)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        (query, key), dtype = accumulating(self.query, self.key)
        entries = self._applied((query[target] - key[source]).square().sum(2)).to(dtype)
        return fill_across(entries, edge_index, self.ptr, 0.0)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        entries = self._entries(*self._distance_features(), torch.promote_types(self.dtype, torch.float32))
        return fill_blocks(entries, self.ptr, 0.0).to(self.dtype)


class SparseFlowCoupling(Coupling):
    r"""SFi-Former's sparse attention: every row is the flow of least energy.

    Row i is argmin_z ½Σ_j r_ij z_j² + λ_i Σ_j f_ij|z_j| + (α/2)(Σ_j z_j − 1)² (SFi-Former, Eqs. 6, 8 and 9).

    Resistances are r = softmax_j(−q_i·k_j) and frictions f = softmax_j(q̃_i·k̃_j), over the nodes j of i's graph. With
    thresholds θ = λf, Ohm's law gives s_ij = max(μ_i − θ_ij, 0)/r_ij, where the potential μ_i solves
    Σ_j s_ij + μ_i/α = 1. It is solved for directly, without the iteration of the paper (docs/errata.md, S3).

    For α = ∞ the flow is conserved and rows sum to one. For finite α they sum to 1 − μ_i/α, and a row with θ_ij ≥ α for
    all j is zero. λ = 0 and α = ∞ is softmax. A product costs O(N² D) time and O(N) memory, forward and backward.
    Entries are as accurate as those of softmax, except between nearly equal frictions.

    Args:
        query, key, ptr: as in :class:`PairwiseCoupling`; features include a scale such as 1/√d.
        friction_query, friction_key: q̃ and k̃ [N, H, G]; without both, the friction is constant, f = 1/n.
        lam, alpha: λ ≥ 0 and α > 0 (``math.inf`` for conservation), numbers or tensors that broadcast to [N, H].

    Examples:
        >>> SparseFlowCoupling(q, k, k, q, lam=0.5, alpha=0.1).density().shape  # by head
        torch.Size([2])
    """

    def __init__(
        self, query: Float[Tensor, "N H F"], key: Float[Tensor, "N H F"],
        friction_query: Float[Tensor, "N H G"] | None = None, friction_key: Float[Tensor, "N H G"] | None = None,
        ptr: Tensor | None = None,
        *, lam: float | Tensor, alpha: float | Tensor = math.inf,
    ) -> None:  # fmt: skip
        sizes = feature_sizes(query, key)
        if (friction_query is None) != (friction_key is None):
            raise ValueError("friction_query and friction_key come together; got one of them. Neither: f = 1/n.")
        if friction_query is None or friction_key is None:
            friction_query = friction_key = query[:, :, :0]
        feature_sizes(friction_query, friction_key, "friction_")
        if friction_query.shape[:2] != query.shape[:2]:
            shape, got = list(query.shape[:2]), describe(friction_query)
            raise ValueError(f"friction_query must have the nodes and heads of query, {shape}; got {got}.")
        conserved = isinstance(alpha, float) and alpha == math.inf
        if not torch.compiler.is_compiling():  # numbers may be symbolic while tracing
            if not isinstance(lam, Tensor):
                check_positive(lam, "lam", allow_zero=True)
            if not isinstance(alpha, Tensor) and not conserved:
                check_positive(alpha, "alpha")
        super().__init__(*sizes, ptr=ptr, row_stochastic=conserved, nonnegative=True)
        features, _ = accumulating(query, key, friction_query, friction_key)
        self._features = sparse_flow.Features(*features)
        self.lam, leak = self._by_row(lam, "lam", features[0]), self._by_row(1 / alpha, "alpha", features[0])
        solved = sparse_flow.sparse_flow_potentials(*self._features, self.lam, leak, self.ptr)
        self._terms, self.log_potentials = solved.terms, solved.log_mu
        self._work, self._support = solved.work, solved.support

    def _by_row(self, value: float | Tensor, name: str, like: Tensor) -> Tensor:
        shape = (self.num_nodes, self.heads)
        if not isinstance(value, Tensor):
            return like.new_full(shape, value)
        sizes = value.shape[::-1]  # broadcasting aligns the last dimensions
        if len(sizes) > 2 or any(size not in (1, full) for size, full in zip(sizes, shape[::-1], strict=False)):
            full_shape = f"[num_nodes, heads] = {list(shape)}"
            raise ValueError(f"{name} must be a number or broadcast to {full_shape}; got {describe(value)}.")
        if value.is_meta and not like.is_meta:
            check_has_values(value, name)
        return value.to(like).expand(shape)

    def moved(self, v: Float[Tensor, "N H D"], *, transpose: bool = False) -> Float[Tensor, "N H D"]:
        """S v or Sᵀ v, for values with the heads of S, or with any number of heads if S has one."""
        q, k, friction_q, friction_k = heads_of(v, *self._features)
        terms = RowTerms(*(t.expand(-1, v.size(1)) for t in self._terms))
        return sparse_flow.sparse_flow_product(q, k, friction_q, friction_k, v, terms, self.ptr, transpose=transpose)

    _product = moved

    def _transpose(self) -> Coupling:
        return _Transposed(self)

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._ones(self.dtype) if self.row_stochastic else super().degree()

    def _listed(self, edge_index: Int[Tensor, "two E"]) -> tuple[Tensor, Tensor, RowTerms, Tensor]:
        """s and u of listed pairs, the terms of their rows, and whether the source is the best conductor of the row."""
        source, target = edge_index
        s = listed_products(*self._features[:2], edge_index, self.ptr, across=-math.inf)
        u = listed_products(*self._features[2:], edge_index, self.ptr, across=0.0)
        terms = RowTerms(*(t[target] for t in self._terms))
        return s, u, terms, terms.best == source.unsqueeze(1)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return sparse_flow.entries(*self._listed(edge_index)).to(self.dtype)

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return sparse_flow.log_entries(*self._listed(edge_index)).to(self.dtype)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        s = all_products(*self._features[:2], self.ptr, across=-math.inf)
        u = all_products(*self._features[2:], self.ptr, across=0.0)
        terms = RowTerms(*(t.t().unsqueeze(2) for t in self._terms))
        best = terms.best == torch.arange(self.num_nodes, device=s.device)
        return sparse_flow.entries(s, u, terms, best).to(self.dtype)

    @property
    def potentials(self) -> Float[Tensor, "N heads"]:
        """μ [N, H], the potential at which a unit of flow enters every node (SFi-Former, Eq. 7)."""
        return self.log_potentials.exp()

    def energy(self) -> Float[Tensor, " heads"]:
        """Total energy Σ_i ½(μ_i + Σ_j θ_ij s_ij) of the rows at their minimum, Eq. 6 or 9, detached."""
        return 0.5 * (self.potentials.detach() + self._work).sum(0)

    def density(self) -> Float[Tensor, " heads"]:
        """The fraction of nonzero entries among the pairs within graphs."""
        sizes = torch.tensor([self.num_nodes]) if self.ptr is None else self.ptr.diff()
        return self._support.sum(0) / max(1, int(sizes.square().sum()))

    def without_friction(self) -> PairwiseCoupling:
        """Softmax attention: the conserved flow through the same resistances without friction (λ = 0, α = ∞)."""
        return PairwiseCoupling(self._features.q, self._features.k, self.ptr)

    def to_sparse(self) -> SparseCoupling:
        """The same operator with stored entries, differentiable: faster if :meth:`density` is well below one tenth."""
        with torch.no_grad():
            edge_index = sparse_flow.support(self._features, self._terms, self.ptr)
        graph = Graph(self.num_nodes, edge_index, ptr=self.ptr, validate=False)
        weight = self._at(edge_index)
        return SparseCoupling(graph, weight, symmetric=False, row_stochastic=self.row_stochastic, nonnegative=True)


class _Transposed(Coupling):
    """Sᵀ of a sparse flow, with the potentials of the rows of S."""

    def __init__(self, flow: SparseFlowCoupling) -> None:
        super().__init__(flow.num_nodes, flow.heads, flow, nonnegative=True)
        self.flow = flow

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.flow.moved(v, transpose=True)

    def _transpose(self) -> Coupling:
        return self.flow

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self.flow._at(edge_index.flip(0))

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self.flow._log_at(edge_index.flip(0))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self.flow.to_dense().transpose(1, 2)
