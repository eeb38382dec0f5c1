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
        normalize: divide each row by its sum.
        symmetric, positive_semidefinite: promises about S as it is in the end.
        reversible: the promise that the scores q_i·k_j are symmetric, made anyway where q and k are one tensor. Then
            normalised rows are self-adjoint in the ``metric`` of their sums.
    """

    def __init__(
        self,
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        score: Literal["exp", "sigmoid"] = "exp",
        *,
        normalize: bool = True,
        symmetric: bool = False,
        positive_semidefinite: bool = False,
        reversible: bool = False,
    ) -> None:
        check_choice(score, "score", SCORES)
        check_features(query, key)
        check_flags(normalize=normalize)
        super().__init__(
            query.size(0),
            query.size(1),
            query,
            ptr=ptr,
            symmetric=symmetric,
            row_stochastic=normalize,
            nonnegative=True,
            positive_semidefinite=positive_semidefinite,
            metric=lambda: _row_sums(query, key, ptr, score) if normalize and (reversible or query is key) else None,
        )
        self.quadratic = True
        self.query, self.key, self.score = query, key, score
        self._shifts: tuple[Tensor, Tensor] | None = None

    @property
    def shifts(self) -> tuple[Float[Tensor, "N heads"], Float[Tensor, "N heads"]]:
        """Row and column shifts of s_ij = exp(log f(q_i·k_j) + a_i + b_j); entries and the transpose need them."""
        if self._shifts is None:
            zero = self.query.new_zeros(self.num_nodes, self.heads)
            lse = pairwise_logsumexp(self.query, self.key, self.ptr, score=self.score) if self.row_stochastic else zero
            self._shifts = (-lse, zero)
        return self._shifts

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        if self.heads == 1:  # one head weighs all of the values: they are channels of it
            return self._weighted(v.flatten(1).unsqueeze(1)).view_as(v)
        return self._weighted(v)

    def _weighted(self, v: Float[Tensor, "N heads C"]) -> Float[Tensor, "N heads C"]:
        if self.row_stochastic:
            return pairwise_attention(self.query, self.key, v, self.ptr, score=self.score)
        return pairwise_product(self.query, self.key, v, *self.shifts, self.ptr, score=self.score)

    def _transpose(self) -> Coupling:
        transposed = PairwiseCoupling(self.key, self.query, self.ptr, self.score, normalize=False)
        row_shift, col_shift = self.shifts
        transposed._shifts = (col_shift, row_shift)
        return transposed

    def degree(self) -> Float[Tensor, "N heads"]:
        if not self.row_stochastic:
            return super().degree()
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.ones(self.num_nodes, self.heads, dtype=dtype, device=self.device)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._log_at(edge_index).exp()

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        s = listed_products(self.query, self.key, edge_index, self.ptr, across=-torch.inf)
        row_shift, col_shift = self.shifts
        return log_score(s, self.score) + row_shift[target] + col_shift[source]

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        s = all_products(self.query, self.key, self.ptr, across=-torch.inf)
        row_shift, col_shift = self.shifts
        return (log_score(s, self.score) + row_shift.t().unsqueeze(2) + col_shift.t().unsqueeze(1)).exp()


def _row_sums(query: Tensor, key: Tensor, ptr: Tensor | None, score: Literal["exp", "sigmoid"]) -> Tensor:
    """Σ_j f(q_i·k_j) in double, as multiples of the largest one, and none of them zero."""
    log_sums = pairwise_logsumexp(query.double(), key.double(), ptr, score=score)
    largest = log_sums.amax(0) if len(log_sums) else 0.0
    return (log_sums - largest).exp().clamp(min=torch.finfo(torch.float64).tiny)
