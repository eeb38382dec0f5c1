"""All-pair couplings evaluated by tiles: sigmoid, softmax, Gaussian, any function f(z²), and sparse-flow attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from diffusion_mp.checks import (
    check_choice,
    check_flags,
    check_function,
    check_positive,
    describe,
)
from diffusion_mp.couplings.base import Coupling, TransposedCoupling
from diffusion_mp.couplings.features import (
    FeatureCoupling,
    at_least_zero,
    check_features,
    distance_features,
    fill_across,
    fill_blocks,
    heads_of,
    listed_products,
)
from diffusion_mp.couplings.shapes import (
    ByRow,
    Entries,
    Features,
    Matrices,
    Pairs,
    Values,
)
from diffusion_mp.graph.ops import graph_sizes
from diffusion_mp.kernels import pairwise, sparse_flow
from diffusion_mp.kernels.pairwise.scores import log_scores
from diffusion_mp.kernels.segments import slices
from diffusion_mp.kernels.sparse_flow import RowTerms
from diffusion_mp.runtime.cache import cached_property, values_only
from diffusion_mp.runtime.precision import accumulating, wide_dtype, without_autocast

TILE_ENTRIES = 1 << 20  # pairs, of all heads, that DistanceCoupling evaluates at a time


class PairwiseCoupling(FeatureCoupling):
    """Attend to all pairs of nodes without a matrix in memory.

    For nodes i, j and l of one graph (Wu, Wipf & Yan 2025, Eq. 17):

        s_ij = f(q_i·k_j) / Σ_l f(q_i·k_l)

    A product costs O(N² D) time and O(N) memory, forward and backward. Normalised rows are computed in log space, where
    no score overflows.

    Args:
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.
        score: f, ``"exp"`` or ``"sigmoid"``. By default ``"exp"``, which makes softmax attention. With features of
            `distance_features`, f is a function of ‖x_i − x_j‖².
        normalize: divide each row by its sum. ``False`` gives s_ij = f(q_i·k_j). ``"symmetric"`` gives D^-½SD^-½ with D
            the row sums, for a symmetric S.
        loops: whether a node couples with itself. ``False`` gives s_ii = 0, and row sums over the other nodes.

    Options:
        mutual: whether q_i·k_j = q_j·k_i, as where a state attends to itself. Products then take half of the time, and
            a row-normalised S has a ``metric``. ``None``, the default, promises nothing.
        symmetric: whether S, after normalisation, is symmetric. ``None``, the default, promises nothing.
        positive_semidefinite: whether S, after normalisation, is positive semi-definite. ``None``, the default,
            promises nothing.

    Examples:
        >>> torch.allclose(PairwiseCoupling(q, k).to_dense(), torch.einsum("ihf,jhf->hij", q, k).softmax(2))
        True
    """

    parts = ("query", "key", "shifts")
    nonnegative = True
    quadratic = True

    def __init__(
        self,
        query: Features,
        key: Features,
        ptr: Tensor | None = None,
        score: Literal["exp", "sigmoid"] = "exp",
        *,
        normalize: bool | Literal["symmetric"] = True,
        loops: bool = True,
        _checked: bool | None = False,
        **promises: bool | None,
    ) -> None:
        if not _checked:
            check_choice(score, "score", pairwise.SCORES)
            if not isinstance(normalize, str):
                check_flags(normalize=normalize)
            else:
                check_choice(normalize, "normalize", ["symmetric"])
            check_flags(loops=loops)
        super().__init__(query, key, ptr, _checked=_checked, **promises)
        self.score = score
        self.normalize = normalize
        self.loops = loops
        self.row_stochastic = normalize is True
        self.no_empty_row = loops

    @cached_property
    def _metric(self) -> ByRow | None:
        """The row sums Σ_j f(q_i·k_j) in double precision, as multiples of the largest one; 1 for an empty row."""
        if not (self.row_stochastic and self.mutual):
            return None
        log_sums = pairwise.pairwise_logsumexp(
            self.query.double(),
            self.key.double(),
            self.ptr,
            score=self.score,
            loops=self.loops,
            mutual=True,
        )
        largest = log_sums.amax(0) if len(log_sums) else 0.0
        # A metric is positive even for a row so light that its ratio to the largest underflows.
        sums = (log_sums - largest).exp().clamp(min=torch.finfo(torch.float64).tiny)
        return sums.masked_fill(log_sums == -torch.inf, 1.0)

    @cached_property
    def shifts(self) -> tuple[ByRow, ByRow]:
        """The shifts a of rows and b of columns in s_ij = exp(log f(q_i·k_j) + a_i + b_j)."""
        zero = self.query.new_zeros(self.num_nodes, self.heads)
        if not self.normalize:
            return zero, zero
        # Kept for later callers, who may need gradients if this one does not.
        with torch.enable_grad():
            lse = pairwise.pairwise_logsumexp(
                self.query,
                self.key,
                self.ptr,
                score=self.score,
                loops=self.loops,
                mutual=self.mutual,
            )
            # An empty row: its entries are zero at any shift.
            shift = -lse.masked_fill(lse == -torch.inf, 0.0)
            if self.normalize == "symmetric":
                return 0.5 * shift, 0.5 * shift
            return shift, zero

    def _product(self, v: Values, *, transpose: bool = False) -> Values:
        # A single head of S takes the heads of the values as channels.
        values = v.flatten(1).unsqueeze(1) if self.heads == 1 < v.size(1) else v
        options: dict[str, Any] = {"score": self.score, "mutual": self.mutual}
        query, key = self.query, self.key
        if self.row_stochastic and self.loops and not transpose:
            return pairwise.pairwise_attention(
                query, key, values, self.ptr, **options
            ).view_as(v)
        # Without shifts the kernel computes f itself; with shifts its logarithm and an exponential.
        row, column = self.shifts if self.normalize else (None, None)
        if transpose:
            query, key, row, column = key, query, column, row
        return pairwise.pairwise_product(
            query,
            key,
            values,
            row,
            column,
            self.ptr,
            loops=self.loops,
            **options,
        ).view_as(v)

    def both(self, v: Values, w: Float[Tensor, "N H C"]) -> tuple[Tensor, Tensor]:
        shares = self.row_stochastic and self.loops and self.heads == v.size(1)
        # Where the row sums are known there is no work to share.
        if not shares or "shifts" in vars(self):
            return super().both(v, w)
        product, log_sums = pairwise.pairwise_rows(
            self.query, self.key, v, self.ptr, score=self.score, mutual=self.mutual
        )
        # S does not keep these row sums: S may outlive the transform of torch to which they belong.
        shifted = copy.copy(self)
        shifted.shifts = (-log_sums, torch.zeros_like(log_sums))
        return product, shifted._product(w, transpose=True)

    def _transpose(self) -> Coupling:
        return TransposedCoupling(self)

    def _at(self, edge_index: Pairs) -> Entries:
        return self._log_at(edge_index).exp()

    def _log_at(self, edge_index: Pairs) -> Entries:
        source, target = edge_index
        s = listed_products(
            self.query, self.key, edge_index, self.ptr, across=-torch.inf
        )
        if not self.loops:
            s = s.masked_fill((source == target).unsqueeze(1), -torch.inf)
        row, column = self.shifts
        return pairwise.log_score(s, self.score) + row[target] + column[source]

    def _dense(self) -> Matrices:
        logs = log_scores(self.query, self.key, self.score, self.loops)
        row, column = (shift.t() for shift in self.shifts)
        # Filled before the exponential, since the gradient ∞ · 0 is NaN.
        logs = fill_blocks(logs, self.ptr, -torch.inf)
        return (logs + row.unsqueeze(2) + column.unsqueeze(1)).exp()


def features_of_squares(
    query: Values,
    key: Values | None,
    ptr: Tensor | None,
    centre: Tensor | None = None,
) -> tuple[Features, Features]:
    """Return vectors in double precision whose inner products are squared distances, see `distance_features`."""
    other = None if key is None else key.double()
    first, second = distance_features(query.double(), other, ptr, centre=centre)
    return -2 * first, second


def squared_distances(
    query: Float[Tensor, "r H G"], key: Float[Tensor, "c H G"], dtype: torch.dtype
) -> Float[Tensor, "H r c"]:
    """Return the inner products of the vectors of :func:`features_of_squares`, which rounding may make negative."""
    products = query.transpose(0, 1) @ key.permute(1, 2, 0)
    return at_least_zero(products.to(dtype))


class DistanceCoupling(FeatureCoupling):
    """Couple all pairs of nodes by any function of their squared distance.

    For nodes i and j of one graph:

        s_ij = f(‖q_i − k_j‖²)

    A product costs O(N² D) time and O(N D) memory. Distances are computed in double precision, and f in the precision
    of the features, at least single. `LowRankCoupling` and `PairwiseCoupling` are several times faster where f is
    linear, exponential or a sigmoid.

    Args:
        function: f, which maps a tensor of squared distances to a tensor of the same shape. f works elementwise, in
            single or double precision, and is differentiable at 0. If f is a module, ``to`` and ``detach`` of S also
            apply to its parameters. Other functions stay as they are.
        query: features q of the receivers [N, H, F].
        key: features k of the senders [N, H, F].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.

    Options:
        mutual: whether a state attends to itself, so that key is query. S is then symmetric, and the distance of a node
            to itself is zero. ``None``, the default, promises nothing.
        nonnegative: whether no entry is negative. ``None``, the default, promises nothing.
        positive_semidefinite: whether xᵀSx ≥ 0 for all x, and S = Sᵀ. ``None``, the default, promises nothing.

    Raises:
        ValueError: f does not return one number for each squared distance.

    Examples:
        >>> S = DistanceCoupling(lambda z2: 1 / (1 + z2), q, q, mutual=True)
        >>> torch.allclose(S.at(torch.arange(6).expand(2, -1)), torch.ones(6, 2))
        True
    """

    parts = ("query", "key", "tensors")
    quadratic = True

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        query: Features,
        key: Features,
        ptr: Tensor | None = None,
        **promises: bool | None,
    ) -> None:
        check_function(function, "function", "of a tensor of squared distances")
        super().__init__(query, key, ptr, **promises)
        self.function = function
        # Parameters and buffers of a module change with S; the module itself keeps its own.
        self.tensors: dict[str, Tensor] = {}
        if isinstance(function, nn.Module):
            self.tensors |= dict(function.named_parameters())
            self.tensors |= dict(function.named_buffers())

    def _product(self, v: Values) -> Values:
        (_, values), dtype = accumulating(self.query, v)
        with without_autocast(v):
            query, key = self._distance_features()
            if not values_only():  # without checkpoints
                return self._moved(query, key, values, self.ptr).to(dtype)
            tiles = self._tiles()
            move = self._moved
            if len(tiles) > 1:
                # The backward pass computes every tile anew, or all of them would stay in memory.
                move = partial(
                    checkpoint, move, use_reentrant=False, preserve_rng_state=False
                )
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

    def _distance_features(self) -> tuple[Features, Features]:
        """Return vectors whose inner products are the squared distances.

        They are in double precision for rows of any precision. The square of a short distance is a small difference of
        large numbers. Its rounding error in single precision may exceed the contribution of all other pairs to a
        gradient.
        """
        return features_of_squares(
            self.query, None if self.mutual else self.key, self.ptr
        )

    def _entries(
        self,
        query: Float[Tensor, "r H G"],
        key: Float[Tensor, "c H G"],
        dtype: torch.dtype,
        first: int = 0,
    ) -> Float[Tensor, "H r c"]:
        """Return f for all pairs of rows and columns with these features; the first row is column number ``first``."""
        squares = squared_distances(query, key, dtype)
        if self.mutual:
            # Rounding exceeds the gradients of far rows, and f is often steepest at zero.
            squares.diagonal(first, 1, 2).zero_()
        return self.applied(squares)

    def applied(self, squares: Tensor) -> Tensor:
        """Return f of squared distances."""
        entries: object
        if isinstance(self.function, nn.Module):
            entries = functional_call(self.function, self.tensors, squares)
        else:
            entries = self.function(squares)
        if not isinstance(entries, Tensor) or entries.shape != squares.shape:
            raise ValueError(
                f"function must return a number for each squared distance, {list(squares.shape)}; got "
                f"{describe(entries)}."
            )
        return entries

    def _tiles(self) -> list[tuple[slice, slice]]:
        """Return the rows and columns of every tile, each within one graph; one empty tile if there are no nodes."""
        tiles = []
        for graph in slices(self.ptr, self.num_nodes):
            size = graph.stop - graph.start
            step = max(1, TILE_ENTRIES // max(1, self.heads * size))
            for row in range(graph.start, graph.stop, step):
                tiles.append((slice(row, min(row + step, graph.stop)), graph))
        return tiles or [(slice(0, 0), slice(0, 0))]

    def _transpose(self) -> Coupling:
        return DistanceCoupling(
            self.function,
            self.key,
            self.query,
            self.ptr,
            mutual=self.mutual,
            nonnegative=self.nonnegative,
        )

    def _at(self, edge_index: Pairs) -> Entries:
        source, target = edge_index
        (query, key), dtype = accumulating(self.query, self.key)
        # Explicit differences keep the digits of near rows, and cost no more for listed pairs.
        entries = self.applied((query[target] - key[source]).square().sum(2)).to(dtype)
        return fill_across(entries, edge_index, self.ptr, 0.0)

    def _dense(self) -> Matrices:
        entries = self._entries(*self._distance_features(), wide_dtype(self.dtype))
        return fill_blocks(entries, self.ptr, 0.0).to(self.dtype)


class SparseFlowCoupling(Coupling):
    """Attend sparsely to all nodes, where every row is the flow of least energy (SFi-Former).

    Row i is the minimiser over z of this energy (SFi-Former, Eqs. 6, 8 and 9):

        ½Σ_j r_ij z_j² + λ_i Σ_j f_ij|z_j| + (α/2)(Σ_j z_j − 1)²

    Resistances are r = softmax_j(−q_i·k_j) and frictions are f = softmax_j(q̃_i·k̃_j), over the nodes j of the graph of
    i. With thresholds θ = λf, Ohm's law gives the entries:

        s_ij = max(μ_i − θ_ij, 0) / r_ij

    The potential μ_i solves Σ_j s_ij + μ_i/α = 1. The coupling computes it directly, without the iteration of the paper
    (docs/errata.md, S3).

    For α = ∞ the flow is conserved and rows sum to one. For finite α, row i sums to 1 − μ_i/α, and a row with θ_ij ≥ α
    for all j is zero. λ = 0 and α = ∞ is softmax. A product costs O(N² D) time and O(N) memory, forward and backward.
    Entries are as accurate as the entries of softmax, except between nearly equal frictions.

    Args:
        query: features q of the receivers [N, H, F], including a scale such as 1/√d.
        key: features k of the senders [N, H, F].
        friction_query: features q̃ of the receivers for the frictions [N, H, G]. ``None``, together with
            ``friction_key``, is the constant friction f = 1/n.
        friction_key: features k̃ of the senders for the frictions [N, H, G]. ``None`` if ``friction_query`` is.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.
        lam: λ ≥ 0, the weight of the friction; a number, or a tensor that broadcasts to [N, H].
        alpha: α > 0, the weight of conservation; a number, or a tensor that broadcasts to [N, H]. ``math.inf`` by
            default: the flow is conserved, so rows sum to one.

    Examples:
        >>> SparseFlowCoupling(q, k, k, q, lam=0.5, alpha=0.1).density().shape  # by head
        torch.Size([2])
    """

    parts = ("_features", "_terms", "lam", "log_potentials", "_work", "_support")
    nonnegative = True
    no_empty_row = True

    def __init__(
        self,
        query: Features,
        key: Features,
        friction_query: Float[Tensor, "N H G"] | None = None,
        friction_key: Float[Tensor, "N H G"] | None = None,
        ptr: Tensor | None = None,
        *,
        lam: float | Tensor,
        alpha: float | Tensor = math.inf,
    ) -> None:
        check_features(query, key)
        if (friction_query is None) != (friction_key is None):
            raise ValueError(
                "friction_query and friction_key come together; got one of them. Neither: f = 1/n."
            )
        if friction_query is None or friction_key is None:
            # Scores of vectors without features are zero, and equal scores have the softmax 1/n.
            friction_query = friction_key = query[:, :, :0]
        check_features(friction_query, friction_key, "friction_")
        if friction_query.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"friction_query must have the nodes and heads of query, {list(query.shape[:2])}; got "
                f"{describe(friction_query)}."
            )
        conserved = isinstance(alpha, float) and alpha == math.inf
        if not isinstance(lam, Tensor):
            check_positive(lam, "lam", allow_zero=True)
        if not isinstance(alpha, Tensor) and not conserved:
            check_positive(alpha, "alpha")
        super().__init__(query.size(0), query.size(1), query, ptr)
        self.row_stochastic = conserved
        # Potentials are differences of logarithms, which half precision does not resolve.
        features, _ = accumulating(query, key, friction_query, friction_key)
        self._features = sparse_flow.Features(*features)
        self.lam = self._by_row(lam, "lam", features[0])
        # The kernels take 1/α, which is a number for α = ∞ too.
        leak = self._by_row(1 / alpha, "alpha", features[0])
        solved = sparse_flow.sparse_flow_potentials(
            *self._features, self.lam, leak, self.ptr
        )
        # The features and some numbers for each row give every entry, so no entry is kept.
        self._terms = solved.terms
        self.log_potentials = solved.log_mu
        self._work = solved.work
        self._support = solved.support

    def _by_row(self, value: float | Tensor, name: str, like: Tensor) -> Tensor:
        shape = (self.num_nodes, self.heads)
        if not isinstance(value, Tensor):
            return like.new_full(shape, value)
        try:
            return value.to(like).expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"{name} must be a number or broadcast to [num_nodes, heads] = {list(shape)}; got {describe(value)}."
            ) from error

    def _product(self, v: Values, *, transpose: bool = False) -> Values:
        features = sparse_flow.Features(*heads_of(v, *self._features))
        terms = RowTerms(*(t.expand(-1, v.size(1)) for t in self._terms))
        return sparse_flow.sparse_flow_product(
            *features,
            v,
            terms,
            self.ptr,
            transpose=transpose,
        )

    def _transpose(self) -> Coupling:
        return TransposedCoupling(self)

    def _listed(self, edge_index: Pairs) -> tuple[Tensor, Tensor, RowTerms, Tensor]:
        """Return s and u of listed pairs, the terms of their rows, and whether the source conducts best in its row."""
        source, target = edge_index
        s = listed_products(*self._features[:2], edge_index, self.ptr, across=-math.inf)
        u = listed_products(*self._features[2:], edge_index, self.ptr, across=0.0)
        terms = RowTerms(*(t[target] for t in self._terms))
        return s, u, terms, terms.best == source.unsqueeze(1)

    def _at(self, edge_index: Pairs) -> Entries:
        return sparse_flow.entries(*self._listed(edge_index)).to(self.dtype)

    def _log_at(self, edge_index: Pairs) -> Entries:
        return sparse_flow.log_entries(*self._listed(edge_index)).to(self.dtype)

    _dense = Coupling._entries_of_all_pairs

    @property
    def potentials(self) -> ByRow:
        """μ [N, H], the potential at which a unit of flow enters every node (SFi-Former, Eq. 7)."""
        return self.log_potentials.exp()

    def energy(self) -> Float[Tensor, " heads"]:
        """Return the energy of all rows at their minimum, Eq. 6 or 9 of SFi-Former, for every head, detached.

            Σ_i ½(μ_i + Σ_j θ_ij s_ij)

        Returns:
            One energy per head, [H].
        """
        return 0.5 * (self.potentials.detach() + self._work).sum(0)

    def density(self) -> Float[Tensor, " heads"]:
        """Return the fraction of nonzero entries among the pairs within graphs, for every head, [H]."""
        pairs = sum(size * size for size in graph_sizes(self.ptr, self.num_nodes))
        return self._support.sum(0) / max(1, pairs)

    def without_friction(self) -> PairwiseCoupling:
        """Return softmax attention, the conserved flow through the same resistances without friction (λ = 0, α = ∞)."""
        return PairwiseCoupling(self._features.q, self._features.k, self.ptr)
