"""The symmetric normalisation D^-½SD^-½ of any coupling, with its diagonal or without."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.algebra import ScaledCoupling, SumCoupling
from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.couplings.pairwise import PairwiseCoupling
from diffusion_mp.couplings.reweighted import ReweightedCoupling
from diffusion_mp.couplings.sparse import SparseCoupling
from diffusion_mp.errors import CouplingMismatchError, check_flags
from diffusion_mp.kernels.unit import inverse_root


def symmetric_normalized(coupling: Coupling, *, diagonal: bool = True) -> Coupling:
    r"""D^-½SD^-½ with D the row sums of S, or with S less its diagonal in place of S (Zhou et al. 2004, Section 2).

    The spectral radius of the result is at most one. Labels that spread want it without the diagonal: a node that
    mostly hears itself hears nobody else. A node without anybody else becomes a zero row. Scores of pairs
    (:class:`PairwiseCoupling`) are normalised in log space, where no row sum under- or overflows, however sharp a
    kernel is.

    Args:
        coupling: S, non-negative; the result is symmetric where S is.
        diagonal: whether s_ii counts.

    Raises:
        CouplingMismatchError: S is not promised to be non-negative, or its rows were divided by their sums already.

    Examples:
        >>> symmetric_normalized(LowRankCoupling(q, q, symmetric=True, nonnegative=True)).symmetric
        True
    """
    check_coupling_kind(coupling)
    check_flags(diagonal=diagonal)
    known = vars(coupling)  # what takes a look at the entries is not asked for
    if known.get("row_stochastic") and known.get("symmetric") is False:
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
    """S less its diagonal, s_ii = 0. Edges and scores of pairs leave their loops out; of others they are subtracted.

    Raises:
        TypeError: no coupling.

    Examples:
        >>> S = without_diagonal(LowRankCoupling(q, q, symmetric=True))
        >>> bool((S.to_dense().diagonal(dim1=1, dim2=2).abs() < 1e-6).all())
        True
    """
    check_coupling_kind(coupling)
    if isinstance(coupling, SumCoupling):
        return SumCoupling([without_diagonal(term) for term in coupling.terms])
    if isinstance(coupling, ScaledCoupling):
        return ScaledCoupling(coupling.scale, without_diagonal(coupling.coupling), nonnegative=coupling._positive)
    if isinstance(coupling, SparseCoupling):
        source, target = coupling.graph.edges
        weight = coupling.weight.masked_fill((source == target).unsqueeze(1), 0.0)
        symmetric, nonnegative = (lambda: coupling.symmetric), coupling.nonnegative
        return SparseCoupling(coupling.graph, weight, symmetric=symmetric, nonnegative=nonnegative)
    if isinstance(coupling, PairwiseCoupling) and not coupling.normalize:
        return _same_scores(coupling, False, loops=False)
    return OffDiagonalCoupling(coupling)


def _same_scores(coupling: PairwiseCoupling, normalize: Literal[False, "symmetric"], loops: bool) -> PairwiseCoupling:
    """Those of a coupling that are not normalised, normalised."""
    return PairwiseCoupling(
        coupling.query,
        coupling.key,
        coupling.ptr,
        coupling.score,
        normalize=normalize,
        loops=loops,
        symmetric=coupling.symmetric,
        positive_semidefinite=coupling.positive_semidefinite and loops,
    )


class OffDiagonalCoupling(Coupling):
    """S − diag S, by subtraction: what is left of a row that is nearly all diagonal has lost that many digits."""

    def __init__(self, coupling: Coupling) -> None:
        super().__init__(
            coupling.num_nodes,
            coupling.heads,
            coupling,
            symmetric=lambda: coupling.symmetric,
            nonnegative=lambda: coupling.nonnegative,
            low_rank=lambda: coupling.low_rank,
            metric=lambda: coupling.metric,
        )
        self.coupling = coupling

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        own = self.coupling.diagonal().unsqueeze(2).to(wide.dtype)
        return (self.coupling._product(wide) - own * wide).to(v.dtype)

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        moved = self.coupling._majorized(v, convex)[0]  # a Laplacian does not see the diagonal
        degree = self.degree().unsqueeze(2)
        return moved, degree if convex else 2 * degree

    def _transpose(self) -> Coupling:
        return OffDiagonalCoupling(self.coupling.T)

    def degree(self) -> Float[Tensor, "N heads"]:
        whole = self.coupling.degree()
        own = self.coupling.diagonal().to(whole.dtype)
        rest = whole - own
        # So little is the rounding of both: nobody else has any weight in this row.
        rounding = 16 * torch.finfo(self.dtype).eps * (whole.abs() + own.abs())
        return rest.masked_fill(rest.abs() <= rounding, 0.0)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        return self.coupling._at(edge_index).masked_fill((source == target).unsqueeze(1), 0.0)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        return None if form is None else form._replace(diagonal=-(form.left * form.right).sum(2))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        loops = torch.eye(self.num_nodes, dtype=torch.bool, device=self.device)
        return self.coupling.to_dense().masked_fill(loops, 0.0)
