"""Couplings with reweighted entries: degree normalisations, couplings without a diagonal, and projections of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.checks import check_flags, check_tensor, describe
from diffusion_mp.couplings.base import (
    Coupling,
    DerivedCoupling,
    ScaledCoupling,
    SumCoupling,
    check_coupling_kind,
)
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.pairwise import PairwiseCoupling
from diffusion_mp.couplings.stored import SparseCoupling
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph.ops import members
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import (
    inverse_root,
    reciprocal,
)


class ReweightedCoupling(DerivedCoupling):
    r"""A coupling with weights for its rows and its columns: s′_ij = r_i s_ij c_j, the operator diag(r) S diag(c).

    Args:
        coupling, row, column: S, and r and c [N, H]; one head broadcasts; ``None`` stands for ones.
        row_stochastic, nonnegative: promises about s′.
        symmetric: a promise about s′, implied if S is symmetric and r and c are one tensor, which keeps S ⪰ 0 too.
        positive: the promise that r, c > 0, except where a row and its column are zero. It gives s′ a ``metric``.

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
        symmetric: bool = False,
        row_stochastic: bool = False,
        nonnegative: bool = False,
        positive: bool = False,
    ) -> None:
        check_coupling_kind(coupling)
        check_flags(
            symmetric=symmetric,
            row_stochastic=row_stochastic,
            nonnegative=nonnegative,
            positive=positive,
        )
        heads = coupling.heads
        for name, weight in (("row", row), ("column", column)):
            if weight is None:
                continue
            check_tensor(
                weight, name, "[num_nodes, heads]", coupling.device, "the coupling"
            )
            fits = weight.dim() == 2 and weight.size(0) == coupling.num_nodes
            if not fits or (heads != 1 and weight.size(1) not in (1, heads)):
                sizes = f"{coupling.num_nodes} nodes and 1 or {heads} heads, as the coupling and the other factor"
                raise ValueError(
                    f"{name} must be [num_nodes, heads] with {sizes}; got {describe(weight)}."
                )
            heads = max(heads, weight.size(1))
        super().__init__(coupling.num_nodes, heads, coupling)
        self.coupling = coupling
        self.row = row
        self.column = column
        self.row_stochastic = row_stochastic
        self.nonnegative = nonnegative
        self._positive = positive
        if symmetric:
            self.symmetric = True

    @cached_property
    def symmetric(self) -> bool:
        return self.row is self.column and self.coupling.symmetric

    @cached_property
    def positive_semidefinite(self) -> bool:
        return self.row is self.column and self.coupling.positive_semidefinite

    @cached_property
    def _metric(self) -> Float[Tensor, "N heads"] | None:
        """d̄ c / r in double precision: its product with diag(r) S diag(c) is diag(c) [diag(d̄) S] diag(c)."""
        metric = self.coupling.metric if self._positive else None
        if metric is None:
            return None
        if self.column is not None:
            metric = metric * self.column.detach().double()
        if self.row is None:
            return metric
        return torch.where(self.row == 0, 1.0, metric / self.row.detach().double())

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        # Factors leave the range of half precision.
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        if self.column is None:
            inner = wide
        else:
            inner = self.column.unsqueeze(2).to(wide.dtype) * wide
        moved = self.coupling._product(inner)
        return (
            moved if self.row is None else self.row.unsqueeze(2).to(wide.dtype) * moved
        ).to(v.dtype)

    def _transpose(self) -> Coupling:
        return ReweightedCoupling(
            self.coupling.T, self.column, self.row, nonnegative=self.nonnegative
        )

    def degree(self) -> Float[Tensor, "N heads"]:
        if self.column is None:
            inner = self.coupling.degree()
        else:
            inner = self.coupling.matmul(
                self.column.to(self.dtype).unsqueeze(2)
            ).squeeze(2)
        return (inner if self.row is None else self.row * inner).expand(-1, self.heads)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        entries = self.coupling._at(edge_index)
        if self.row is None:
            entries = entries
        else:
            entries = self.row[target] * entries
        if self.column is None:
            return entries
        return entries * self.column[source]

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        if form is None:
            return None
        return form.reweighted(self.row, self.column)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        dense = self.coupling.to_dense()
        if self.row is None:
            dense = dense
        else:
            dense = self.row.t().unsqueeze(2) * dense
        if self.column is None:
            return dense
        return dense * self.column.t().unsqueeze(1)


def row_normalized(coupling: Coupling) -> ReweightedCoupling:
    """Divide the rows of a coupling by their sums; a row whose sum is zero becomes a zero row.

    Examples:
        >>> torch.allclose(row_normalized(LowRankCoupling(q, k, nonnegative=True)).degree(), torch.ones(6, 2))
        True
    """
    check_coupling_kind(coupling)
    degree = reciprocal(coupling.degree())
    sign = coupling.nonnegative
    # If entries are nonnegative, a row that sums to zero is zero, and its column too where S is reversible.
    return ReweightedCoupling(
        coupling, degree, row_stochastic=True, nonnegative=sign, positive=sign
    )


def averaged(coupling: Coupling) -> Coupling:
    """s_ij / n with n the nodes of the graph of i and j."""
    if coupling.ptr is None:
        return ScaledCoupling(1.0 / max(coupling.num_nodes, 1), coupling)
    member, count = members(coupling.ptr, coupling.num_nodes, coupling.device)
    weight = count.double().rsqrt().to(coupling.dtype)[member].unsqueeze(1)
    return ReweightedCoupling(
        coupling, weight, weight, nonnegative=coupling.nonnegative
    )


def symmetric_normalized(coupling: Coupling, *, diagonal: bool = True) -> Coupling:
    r"""Return D^-½SD^-½ with D the row sums of S, or the same for S without its diagonal (Zhou et al. 2004, Section 2).

    The spectral radius of the result is at most one; a node without neighbours becomes a zero row. Scores of pairs
    (:class:`PairwiseCoupling`) are normalised in log space, where no row sum under- or overflows.

    Args:
        coupling: S, nonnegative; the result is symmetric where S is.
        diagonal: whether to keep s_ii, which label spreading leaves out.

    Raises:
        CouplingMismatchError: S does not promise to be nonnegative, or its rows are divided by their sums already.

    Examples:
        >>> symmetric_normalized(LowRankCoupling(q, q, nonnegative=True, positive_semidefinite=True)).symmetric
        True
    """
    check_coupling_kind(coupling)
    check_flags(diagonal=diagonal)
    # A pass over the entries only to refuse the coupling would be a waste.
    if not coupling.examines and coupling.row_stochastic and not coupling.symmetric:
        raise CouplingMismatchError(
            f"symmetric_normalized takes a coupling before its rows are divided by their sums; got a "
            f"{type(coupling).__name__} that declares row_stochastic=True. Make it with row_stochastic=False, for "
            f"instance GaussianDiffusivity(row_stochastic=False)."
        )
    if not coupling.nonnegative:
        raise CouplingMismatchError(
            f"symmetric_normalized takes the roots of row sums, so entries must not be negative; got a "
            f"{type(coupling).__name__} that declares nonnegative=False. Unit queries and keys (normalize='row') make "
            f"the simple score non-negative; the sigmoid, the softmax and the Gaussian always are."
        )
    kept = coupling if diagonal else without_diagonal(coupling)
    if isinstance(kept, PairwiseCoupling) and not kept.normalize:
        return _same_scores(kept, "symmetric", kept.loops)
    root = inverse_root(kept.degree())
    return ReweightedCoupling(kept, root, root, nonnegative=True)


def without_diagonal(coupling: Coupling) -> Coupling:
    """Remove the diagonal: loops of edges and of scores of pairs are left out, other diagonals are subtracted.

    Examples:
        >>> bool((without_diagonal(UniformCoupling(6)).diagonal() == 0).all())
        True
    """
    check_coupling_kind(coupling)
    if isinstance(coupling, SumCoupling):
        return SumCoupling([without_diagonal(term) for term in coupling.terms])
    if isinstance(coupling, ScaledCoupling):
        return ScaledCoupling(
            coupling.scale,
            without_diagonal(coupling.coupling),
            nonnegative=coupling._positive,
        )
    if isinstance(coupling, SparseCoupling):
        source, target = coupling.graph.edges
        weight = coupling.weight.masked_fill((source == target).unsqueeze(1), 0.0)
        symmetric = None if coupling.examines else coupling.symmetric
        return SparseCoupling(
            coupling.graph,
            weight,
            symmetric=symmetric,
            nonnegative=coupling.nonnegative,
        )
    if isinstance(coupling, PairwiseCoupling) and not coupling.normalize:
        return _same_scores(coupling, False, loops=False)
    return OffDiagonalCoupling(coupling)


def _same_scores(
    coupling: PairwiseCoupling, normalize: Literal[False, "symmetric"], loops: bool
) -> PairwiseCoupling:
    """The scores of a coupling that is not normalised, with another normalisation."""
    scores = (coupling.query, coupling.key, coupling.ptr, coupling.score)
    definite = coupling.positive_semidefinite
    promises: dict[str, Any] = {
        "symmetric": coupling.symmetric,
        "positive_semidefinite": definite and loops,
    }
    return PairwiseCoupling(*scores, normalize=normalize, loops=loops, **promises)


class OffDiagonalCoupling(DerivedCoupling):
    """S − diag S by subtraction, which loses as many digits as the diagonal exceeds the rest of its row."""

    parts = ("coupling",)

    def __init__(self, coupling: Coupling) -> None:
        super().__init__(coupling.num_nodes, coupling.heads, coupling)
        self.coupling = coupling

    @cached_property
    def nonnegative(self) -> bool:
        return self.coupling.nonnegative

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        own = self.coupling.diagonal().unsqueeze(2).to(wide.dtype)
        return (self.coupling._product(wide) - own * wide).to(v.dtype)

    def _transpose(self) -> Coupling:
        return OffDiagonalCoupling(self.coupling.T)

    def degree(self) -> Float[Tensor, "N heads"]:
        whole = self.coupling.degree()
        own = self.coupling.diagonal().to(whole.dtype)
        # Zero if within the rounding of both, which a normalisation would amplify.
        rest = whole - own
        rounding = 16 * torch.finfo(self.dtype).eps * (whole.abs() + own.abs())
        return rest.masked_fill(rest.abs() <= rounding, 0.0)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        return self.coupling._at(edge_index).masked_fill(
            (source == target).unsqueeze(1), 0.0
        )

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        if form is None:
            return None
        return form._replace(diagonal=-(form.left * form.right).sum(2))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        loops = torch.eye(self.num_nodes, dtype=torch.bool, device=self.device)
        return self.coupling.to_dense().masked_fill(loops, 0.0)


def spectral_norms(w: Float[Tensor, "heads D C"]) -> Float[Tensor, " heads"]:
    """‖W_h‖₂ of every head; NaN for a head with an entry that is not finite, which LAPACK would refuse."""
    finite = w.isfinite()
    norms = torch.linalg.matrix_norm(w.masked_fill(~finite, 0.0), 2)
    return norms.masked_fill(~finite.all(2).all(1), torch.nan)


def contracting(
    matrix: Tensor, norms: Callable[[Tensor], Tensor] = spectral_norms
) -> Tensor:
    """Divide matrices [H, …] to norm at most one, in at least float32, since rounding may lengthen them."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return wide / norms(wide).clamp(min=1).view(-1, *[1] * (wide.dim() - 1))
