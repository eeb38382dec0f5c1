"""All-pair couplings with a nonlinear score, evaluated tile by tile: sigmoid, softmax, Gaussian."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.inner_products import all_products, check_features, listed_products
from diffusion_mp.errors import check_choice, check_flags
from diffusion_mp.kernels.pairwise import SCORES, log_score, pairwise_attention, pairwise_logsumexp, pairwise_product


class PairwiseCoupling(Coupling):
    r"""s_ij = f(q_i·k_j) within a graph, or with ``normalize`` f(q_i·k_j) / Σ_l f(q_i·k_l) (Wu, Wipf & Yan 2025, Eq.
    17).

    A product costs O(N² D) time and O(N) memory, forward and backward: no N×N tensor exists outside ``to_dense``.
    Normalised rows are computed in log space, so that no score can overflow.

    Args:
        query, key: features of receivers and senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        score: f, ``"exp"`` or ``"sigmoid"``; with ``distance_features`` it is a function of ‖x_i − x_j‖².
        normalize: divide each row by its sum; ``"symmetric"``: each entry by the roots of the sums of row i and row j,
            D^-½SD^-½ (for a symmetric S).
        loops: whether a node couples with itself; else s_ii = 0, and sums of rows are over the other nodes.
        symmetric, positive_semidefinite: promises about S as it is in the end.
        reversible: the promise that the scores q_i·k_j are symmetric, made anyway where q and k are one tensor. Rows
            divided by their sums are then self-adjoint in the ``metric`` of these.

    Examples:
        >>> S = PairwiseCoupling(q, k, score="exp")  # softmax attention
        >>> torch.allclose(S.to_dense(), torch.einsum("ihf,jhf->hij", q, k).softmax(2))
        True
    """

    def __init__(
        self,
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        score: Literal["exp", "sigmoid"] = "exp",
        *,
        normalize: bool | Literal["symmetric"] = True,
        loops: bool = True,
        symmetric: bool = False,
        positive_semidefinite: bool = False,
        reversible: bool = False,
    ) -> None:
        check_choice(score, "score", SCORES)
        check_features(query, key)
        if normalize != "symmetric":
            check_flags(normalize=normalize)
        check_flags(loops=loops, reversible=reversible)
        divided, tied = normalize is True, query is key
        super().__init__(
            query.size(0),
            query.size(1),
            query,
            ptr=ptr,
            symmetric=symmetric,
            row_stochastic=divided,
            nonnegative=True,
            positive_semidefinite=positive_semidefinite,
            metric=(lambda: _row_sums(query, key, ptr, score, loops)) if divided and (reversible or tied) else None,
        )
        self.quadratic = True
        self.query, self.key, self.score = query, key, score
        self.normalize, self.loops = normalize, loops
        self._shifts: tuple[Tensor, Tensor] | None = None

    @property
    def shifts(self) -> tuple[Float[Tensor, "N heads"], Float[Tensor, "N heads"]]:
        """Row and column shifts of s_ij = exp(log f(q_i·k_j) + a_i + b_j); entries and the transpose need them."""
        if self._shifts is None:
            with torch.enable_grad():  # also where the first who asks needs no gradient
                self._shifts = self._normalizing_shifts()
        return self._shifts

    def _normalizing_shifts(self) -> tuple[Tensor, Tensor]:
        zero = self.query.new_zeros(self.num_nodes, self.heads)
        if not self.normalize:
            return zero, zero
        lse = pairwise_logsumexp(self.query, self.key, self.ptr, score=self.score, loops=self.loops)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # an empty row, whose entries are zero at any shift
        return (-0.5 * lse, -0.5 * lse) if self.normalize == "symmetric" else (-lse, zero)

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        if self.heads == 1 < v.size(1):  # one head weighs all of the values: they are channels of it
            return self._weighted(v.flatten(1).unsqueeze(1)).view_as(v)
        return self._weighted(v)

    def _weighted(self, v: Float[Tensor, "N heads C"]) -> Float[Tensor, "N heads C"]:
        if self.row_stochastic and self.loops:
            return pairwise_attention(self.query, self.key, v, self.ptr, score=self.score)
        return pairwise_product(self.query, self.key, v, *self.shifts, self.ptr, score=self.score, loops=self.loops)

    def _transpose(self) -> Coupling:
        transposed = PairwiseCoupling(self.key, self.query, self.ptr, self.score, normalize=False, loops=self.loops)
        transposed.normalize = self.normalize
        row_shift, col_shift = self.shifts
        transposed._shifts = (col_shift, row_shift)
        return transposed

    def degree(self) -> Float[Tensor, "N heads"]:
        if not (self.row_stochastic and self.loops):
            return super().degree()
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.ones(self.num_nodes, self.heads, dtype=dtype, device=self.device)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._log_at(edge_index).exp()

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        s = listed_products(self.query, self.key, edge_index, self.ptr, across=-torch.inf)
        if not self.loops:
            s = s.masked_fill((source == target).unsqueeze(1), -torch.inf)
        row_shift, col_shift = self.shifts
        return log_score(s, self.score) + row_shift[target] + col_shift[source]

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        s = all_products(self.query, self.key, self.ptr, across=-torch.inf)
        if not self.loops:
            s = s.masked_fill(torch.eye(self.num_nodes, dtype=torch.bool, device=self.device), -torch.inf)
        row_shift, col_shift = self.shifts
        return (log_score(s, self.score) + row_shift.t().unsqueeze(2) + col_shift.t().unsqueeze(1)).exp()


def _row_sums(query: Tensor, key: Tensor, ptr: Tensor | None, score: Literal["exp", "sigmoid"], loops: bool) -> Tensor:
    """Σ_j f(q_i·k_j) in double, as multiples of the largest one; 1 for an empty row."""
    log_sums = pairwise_logsumexp(query.double(), key.double(), ptr, score=score, loops=loops)
    largest = log_sums.amax(0) if len(log_sums) else 0.0
    sums = (log_sums - largest).exp().clamp(min=torch.finfo(torch.float64).tiny)
    return sums.masked_fill(log_sums == -torch.inf, 1.0)
