"""A coupling with its rows and columns rescaled: degree normalisations of every kind."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.algebra import ScaledCoupling
from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.errors import check_device, check_flags, check_tensor, describe
from diffusion_mp.kernels.unit import reciprocal


class ReweightedCoupling(Coupling):
    r"""s′_ij = r_i s_ij c_j, the operator diag(r) S diag(c).

    Args:
        coupling: S.
        row, column: r and c [N, H]; one head broadcasts; ``None`` stands for ones.
        row_stochastic, nonnegative: promises about s′.
        symmetric: a promise too, kept anyway where r is c, the same tensor, and S is symmetric. There s′ is also
            positive semi-definite if S is.
        positive: the promise that r and c are positive, but for rows of zeros whose columns are zero too. Then S may be
            reversible (``metric``): if S is symmetric, diag(c/r) S′ is.

    Raises:
        ValueError: r or c has other nodes than S, or heads that do not match.

    Examples:
        >>> S = ReweightedCoupling(UniformCoupling(6), row=torch.full((6, 1), 2.0))
        >>> torch.allclose(S.degree(), torch.full((6, 1), 2.0))
        True
    """

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
        check_flags(positive=positive)
        heads = coupling.heads
        for name, weight in (("row", row), ("column", column)):
            if weight is None:
                continue
            check_tensor(weight, name, "[num_nodes, heads]")
            check_device(weight, name, coupling.device, "the coupling")
            fits = weight.dim() == 2 and weight.size(0) == coupling.num_nodes
            if not fits or (1 not in (heads, weight.size(1)) and weight.size(1) != heads):
                raise ValueError(
                    f"{name} must be [num_nodes, heads] with {coupling.num_nodes} nodes and one head or as many as the "
                    f"others, who have {heads}; got {describe(weight)}."
                )
            heads = max(heads, weight.size(1))
        super().__init__(
            coupling.num_nodes,
            heads,
            coupling,
            low_rank=lambda: coupling.low_rank,
            metric=lambda: _reweighted_metric(coupling, row, column) if positive else None,
            symmetric=(lambda: row is column and coupling.symmetric) if symmetric is False else symmetric,
            row_stochastic=row_stochastic,
            nonnegative=nonnegative,
            positive_semidefinite=lambda: row is column and coupling.positive_semidefinite,
        )
        self.coupling, self.row, self.column = coupling, row, column

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        # At least float32 from factor to factor: the sums and the factors alone leave the range of half precision.
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        inner = wide if self.column is None else self.column.unsqueeze(2).to(wide.dtype) * wide
        moved = self.coupling._product(inner)
        return (moved if self.row is None else self.row.unsqueeze(2).to(wide.dtype) * moved).to(v.dtype)

    def _transpose(self) -> Coupling:
        return ReweightedCoupling(self.coupling.T, self.column, self.row, nonnegative=self.nonnegative)

    def degree(self) -> Float[Tensor, "N heads"]:
        inner = (
            self.coupling.degree()
            if self.column is None
            else self.coupling.matmul(self.column.to(self.dtype).unsqueeze(2)).squeeze(2)
        )
        return (inner if self.row is None else self.row * inner).expand(-1, self.heads)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        entries = self.coupling._at(edge_index)
        entries = entries if self.row is None else self.row[target] * entries
        return entries if self.column is None else entries * self.column[source]

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        return None if form is None else form.reweighted(self.row, self.column)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        dense = self.coupling.to_dense()
        dense = dense if self.row is None else self.row.t().unsqueeze(2) * dense
        return dense if self.column is None else dense * self.column.t().unsqueeze(1)


def row_normalized(coupling: Coupling) -> ReweightedCoupling:
    """D⁻¹S with D the row sums of S; a row whose sum is zero becomes a zero row.

    Args:
        coupling: S.

    Examples:
        >>> S = row_normalized(LowRankCoupling(q, k, nonnegative=True))
        >>> torch.allclose(S.degree(), torch.ones(6, 2))
        True
    """
    degree = reciprocal(coupling.degree())
    nonnegative = coupling.nonnegative  # a row that sums to zero is zero then; its column too, where S is reversible
    return ReweightedCoupling(coupling, degree, row_stochastic=True, nonnegative=nonnegative, positive=nonnegative)


def _reweighted_metric(coupling: Coupling, row: Tensor | None, column: Tensor | None) -> Tensor | None:
    """d̄ c / r: times diag(r) S diag(c) that is diag(c) [diag(d̄) S] diag(c). In double, whatever was rounded into r."""
    metric = coupling.metric
    if metric is None:
        return None
    metric = metric if column is None else metric * column.detach().double()
    return metric if row is None else torch.where(row == 0, 1.0, metric / row.detach().double())


def averaged(coupling: Coupling, num_nodes: int | None = None) -> Coupling:
    """s_ij / n with n the number of nodes of the graph of i and j: what S v sums, as a mean.

    Args:
        coupling: S, of one graph or a batch.
        num_nodes: n of one graph, where not all of its nodes are rows of S.
    """
    if coupling.ptr is None:
        return ScaledCoupling(1.0 / max(coupling.num_nodes if num_nodes is None else num_nodes, 1), coupling)
    sizes = coupling.ptr.diff()
    root = sizes.clamp(min=1).to(torch.float64).rsqrt().repeat_interleave(sizes, output_size=coupling.num_nodes)
    weight = root.to(coupling.device, coupling.dtype).unsqueeze(1)
    return ReweightedCoupling(coupling, weight, weight, nonnegative=coupling.nonnegative)
