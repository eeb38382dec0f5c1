"""Couplings with reweighted entries: degree normalisations, couplings without a diagonal, and projections of heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import check_flags, check_tensor, describe
from diffusion_mp.couplings.base import (
    Coupling,
    DerivedCoupling,
    ScaledCoupling,
    SumCoupling,
    check_coupling_kind,
)
from diffusion_mp.couplings.low_rank_form import LowRankForm, weighted
from diffusion_mp.couplings.pairwise import PairwiseCoupling
from diffusion_mp.couplings.shapes import ByRow, Entries, Matrices, Pairs, Values
from diffusion_mp.couplings.stored import SparseCoupling
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph.ops import members
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import inverse_root, reciprocal, widened


class ReweightedCoupling(DerivedCoupling):
    """Multiply the rows and the columns of a coupling by weights.

    The coupling S becomes the operator diag(r) S diag(c), with the entries

        s′_ij = r_i s_ij c_j

    If r and c are one tensor, s′ is symmetric and positive semi-definite where S is.

    Args:
        coupling: the coupling S.
        row: the weights r of the rows [N, H]; one head broadcasts. ``None`` stands for ones.
        column: the weights c of the columns [N, H]; one head broadcasts. ``None`` stands for ones.
        positive: the promise that r, c > 0, except where a row and its column are zero. It gives s′ a ``metric``.
            ``False`` by default, since the values of the weights are not examined.

    Options:
        symmetric: whether s′ is symmetric. ``None``, the default, follows from S, r and c.
        row_stochastic: whether every row of s′ sums to one, except for rows of zeros. ``None``, the default, promises
            nothing.
        nonnegative: whether no entry of s′ is negative. ``None``, the default, promises nothing.

    Examples:
        >>> torch.allclose(ReweightedCoupling(UniformCoupling(6), 2 * torch.ones(6, 1)).degree(), 2 * torch.ones(6, 1))
        True
    """

    parts = ("coupling", "row", "column")

    def __init__(
        self,
        coupling: Coupling,
        row: Tensor | None = None,
        column: Tensor | None = None,
        *,
        positive: bool = False,
        **promises: bool | None,
    ) -> None:
        check_coupling_kind(coupling)
        check_flags(positive=positive)
        heads = coupling.heads
        shape = "[num_nodes, heads]"
        for name, weight in (("row", row), ("column", column)):
            if weight is None:
                continue
            check_tensor(weight, name, shape, coupling.device, "the coupling")
            if (
                weight.dim() != 2
                or weight.size(0) != coupling.num_nodes
                or len({1, heads, weight.size(1)}) > 2
            ):
                raise ValueError(
                    f"{name} must be {shape} with {coupling.num_nodes} nodes and 1 or {heads} heads, as the coupling "
                    f"and the other factor; got {describe(weight)}."
                )
            heads = max(heads, weight.size(1))
        super().__init__(coupling, heads, **promises)
        self.row = row
        self.column = column
        self._positive = positive

    @cached_property
    def symmetric(self) -> bool:
        # Two tensors of equal values may change apart, and a comparison would wait for a GPU.
        return self.row is self.column and self.coupling.symmetric

    @cached_property
    def positive_semidefinite(self) -> bool:
        return self.row is self.column and self.coupling.positive_semidefinite

    @cached_property
    def _metric(self) -> ByRow | None:
        """The metric d̄ c / r in double precision; times diag(r) S diag(c) it is diag(c) [diag(d̄) S] diag(c)."""
        metric = self.coupling.metric if self._positive else None
        if metric is None:
            return None
        metric = weighted(metric, self.column)
        if self.row is None:
            return metric
        # A node of weight zero has no entries, and any number serves as its metric.
        return torch.where(self.row == 0, 1.0, metric / self.row.double())

    def _product(self, v: Values) -> Values:
        # Factors leave the range of half precision.
        wide = widened(v)
        moved = self.coupling._product(weighted(wide, self.column))
        return weighted(moved, self.row).to(v.dtype)

    def _transpose(self) -> Coupling:
        return ReweightedCoupling(
            self.coupling.T, self.column, self.row, nonnegative=self.nonnegative
        )

    def degree(self) -> ByRow:
        if self.column is None:
            inner = self.coupling.degree()
        else:
            # Row sums are a product with the weights of the columns in place of ones.
            column = self.column.to(self.dtype).unsqueeze(2)
            inner = self.coupling.matmul(column).squeeze(2)
        return weighted(inner, self.row).expand(-1, self.heads)

    def _at(self, edge_index: Pairs) -> Entries:
        source, target = edge_index
        entries = self.coupling._at(edge_index)
        if self.row is not None:
            entries = self.row[target] * entries
        if self.column is not None:
            entries = entries * self.column[source]
        return entries

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        # Factors of rows and columns multiply the features, and the rank stays.
        form = self.coupling.low_rank_form(dtype)
        if form is None:
            return None
        return form.reweighted(self.row, self.column)

    def _dense(self) -> Matrices:
        dense = self.coupling._dense()
        if self.row is not None:
            dense = self.row.t().unsqueeze(2) * dense
        if self.column is not None:
            dense = dense * self.column.t().unsqueeze(1)
        return dense


def row_normalized(coupling: Coupling) -> ReweightedCoupling:
    """Divide the rows of a coupling by their sums; a row whose sum is zero becomes a zero row.

    Args:
        coupling: the coupling to normalise. If it is nonnegative, so is the result.

    Examples:
        >>> torch.allclose(row_normalized(LowRankCoupling(q, k, nonnegative=True)).degree(), torch.ones(6, 2))
        True
    """
    check_coupling_kind(coupling)
    sign = coupling.nonnegative
    # If entries are nonnegative, a row that sums to zero is zero. If S is reversible, so is its column.
    return ReweightedCoupling(
        coupling,
        reciprocal(coupling.degree()),
        positive=sign,
        row_stochastic=True,
        nonnegative=sign,
    )


def averaged(coupling: Coupling, ptr: Tensor) -> Coupling:
    """Return the coupling with entries s_ij / n, where n is the number of nodes of the graph of i and j."""
    member, count = members(ptr, coupling.num_nodes, coupling.device)
    # One factor for rows and columns leaves S symmetric.
    root = count.double().rsqrt().to(coupling.dtype)[member].unsqueeze(1)
    return ReweightedCoupling(coupling, root, root, nonnegative=coupling.nonnegative)


def symmetric_normalized(coupling: Coupling, *, diagonal: bool = True) -> Coupling:
    """Divide a coupling by the square roots of its row sums, D^-½SD^-½ (Zhou et al. 2004, Section 2).

    D are the row sums of S, or of S without its diagonal. The spectral radius of the result is at most one. A node
    without neighbours becomes a zero row. The scores of a :class:`PairwiseCoupling` are normalised in log space, where
    no row sum underflows or overflows.

    Args:
        coupling: S, nonnegative. The result is symmetric where S is.
        diagonal: keep s_ii. ``False`` leaves the diagonal out before the division, as label spreading does.

    Raises:
        CouplingMismatchError: S does not promise to be nonnegative, or its rows are divided by their sums already.

    Examples:
        >>> symmetric_normalized(LowRankCoupling(q, q, nonnegative=True, positive_semidefinite=True)).symmetric
        True
    """
    check_coupling_kind(coupling)
    check_flags(diagonal=diagonal)
    # It does not matter whether the rows of a symmetric, examined S sum to one.
    divided = not coupling.examines and coupling.row_stochastic
    if not coupling.nonnegative or (divided and not coupling.symmetric):
        raise CouplingMismatchError(
            f"symmetric_normalized takes a coupling with nonnegative=True, before its rows are divided by their sums; "
            f"got {coupling!r}. Make it with row_stochastic=False; unit queries and keys (normalize='row') make the "
            f"simple score non-negative, and the sigmoid, the softmax and the Gaussian always are."
        )
    kept = coupling if diagonal else without_diagonal(coupling)
    if isinstance(kept, PairwiseCoupling) and not kept.normalize:
        return _same_scores(kept, "symmetric", kept.loops)
    # One tensor for rows and columns, which leaves S symmetric.
    root = inverse_root(kept.degree())
    return ReweightedCoupling(kept, root, root, nonnegative=True)


def without_diagonal(coupling: Coupling) -> Coupling:
    """Leave out the diagonal of edges and of unnormalised scores of pairs, also in multiples and sums of these.

    Args:
        coupling: a `SparseCoupling`, a `PairwiseCoupling` with ``normalize=False``, or multiples and sums of these.

    Raises:
        CouplingMismatchError: another coupling, whose diagonal could only be subtracted. The subtraction loses digits
            where the diagonal is large compared with the rest of a row.

    Examples:
        >>> bool((without_diagonal(PairwiseCoupling(q, q, normalize=False)).to_dense()[:, 0, 0] == 0).all())
        True
    """
    check_coupling_kind(coupling)
    if isinstance(coupling, SumCoupling):
        return SumCoupling([without_diagonal(term) for term in coupling.terms])
    if isinstance(coupling, ScaledCoupling):
        # The diagonal of a multiple is the multiple of the diagonal.
        bare = without_diagonal(coupling.coupling)
        return ScaledCoupling(coupling.scale, bare, nonnegative=coupling._positive)
    if isinstance(coupling, SparseCoupling):
        source, target = coupling.graph.edges
        return SparseCoupling(
            coupling.graph,
            coupling.weight.masked_fill((source == target).unsqueeze(1), 0.0),
            symmetric=None if coupling.examines else coupling.symmetric,
            nonnegative=coupling.nonnegative,
        )
    if isinstance(coupling, PairwiseCoupling) and not coupling.normalize:
        return _same_scores(coupling, False, loops=False)
    raise CouplingMismatchError(
        f"only edges and unnormalised scores of pairs have a diagonal that can be left out; got {coupling!r}. Take "
        f"AdjacencyDiffusivity, or SigmoidDiffusivity or GaussianDiffusivity with row_stochastic=False."
    )


def _same_scores(
    coupling: PairwiseCoupling, normalize: Literal[False, "symmetric"], loops: bool
) -> PairwiseCoupling:
    """Return the scores of a coupling that is not normalised, with another normalisation."""
    same = copy.copy(coupling)
    same.normalize = normalize
    same.loops = same.no_empty_row = loops
    same.positive_semidefinite = coupling.positive_semidefinite and loops
    # They belong to the former normalisation.
    vars(same).pop("shifts", None)
    return same


def spectral_norms(w: Float[Tensor, "heads D C"]) -> Float[Tensor, " heads"]:
    """Return ‖W_h‖₂ of every head, in at least float32; NaN for a head with an entry that is not finite."""
    # LAPACK refuses half precision, and what is not finite.
    w = widened(w)
    finite = w.isfinite()
    # One batch for all heads, NaN for those that had entries that are not finite.
    norms = torch.linalg.matrix_norm(w.masked_fill(~finite, 0.0), 2)
    return norms.masked_fill(~finite.all(2).all(1), torch.nan)


def contracting(
    matrix: Tensor, norms: Callable[[Tensor], Tensor] = spectral_norms
) -> Tensor:
    """Divide matrices [H, …] to norm at most one, in at least float32, since rounding may lengthen them."""
    # Half precision would round a norm of one to above one.
    wide = widened(matrix)
    return wide / norms(wide).clamp(min=1).view(-1, *[1] * (wide.dim() - 1))
