"""All-pair couplings with a nonlinear score, evaluated by tiles: sigmoid, softmax, Gaussian, any function f(z²)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffusion_mp.couplings.base import Coupling, feature_sizes
from diffusion_mp.couplings.features import all_products, fill_across, fill_blocks, listed_products
from diffusion_mp.errors import check_choice, check_flags, check_function
from diffusion_mp.kernels.pairwise import SCORES, log_score, pairwise_attention, pairwise_logsumexp, pairwise_product
from diffusion_mp.kernels.precision import accumulating, without_autocast

TILE_ENTRIES = 1 << 20  # pairs, of all heads, that DistanceCoupling evaluates at a time


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
        loops: whether a node couples with itself; otherwise s_ii = 0, and row sums are over the other nodes.
        symmetric, positive_semidefinite: promises about S after normalisation.
        reversible: the promise that the scores q_i·k_j are symmetric, implied if q and k are one tensor. Rows divided
            by their sums are then self-adjoint in the ``metric`` of these sums.

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
        sizes = feature_sizes(query, key)
        if normalize != "symmetric":
            check_flags(normalize=normalize)
        check_flags(loops=loops, reversible=reversible)
        divided, tied = normalize is True, query is key
        super().__init__(
            *sizes,
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
        """Row and column shifts a and b of s_ij = exp(log f(q_i·k_j) + a_i + b_j), for entries and the transpose."""
        if self._shifts is None:
            row = column = self.query.new_zeros(self.num_nodes, self.heads)
            if self.normalize:
                with torch.enable_grad():  # kept for later callers, who may need gradients if this one does not
                    lse = pairwise_logsumexp(self.query, self.key, self.ptr, score=self.score, loops=self.loops)
                    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # an empty row: its entries are zero at any shift
                    row, column = (-0.5 * lse, -0.5 * lse) if self.normalize == "symmetric" else (-lse, column)
            self._shifts = row, column
        return self._shifts

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        # A single head of S takes the heads of the values as channels.
        values = v.flatten(1).unsqueeze(1) if self.heads == 1 < v.size(1) else v
        pairs = self.query, self.key, values
        if self.row_stochastic and self.loops:
            return pairwise_attention(*pairs, self.ptr, score=self.score).view_as(v)
        return pairwise_product(*pairs, *self.shifts, self.ptr, score=self.score, loops=self.loops).view_as(v)

    def _transpose(self) -> Coupling:
        transposed = PairwiseCoupling(self.key, self.query, self.ptr, self.score, normalize=False, loops=self.loops)
        transposed.normalize = self.normalize
        row_shift, col_shift = self.shifts
        transposed._shifts = (col_shift, row_shift)
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
    """Σ_j f(q_i·k_j) in double precision, as multiples of the largest one; 1 for an empty row."""
    log_sums = pairwise_logsumexp(query.double(), key.double(), ptr, score=score, loops=loops)
    largest = log_sums.amax(0) if len(log_sums) else 0.0
    sums = (log_sums - largest).exp().clamp(min=torch.finfo(torch.float64).tiny)
    return sums.masked_fill(log_sums == -torch.inf, 1.0)


class DistanceCoupling(Coupling):
    r"""s_ij = f(‖q_i − k_j‖²) within a graph, for any function f of a tensor of squared distances.

    A product costs O(N² D) time and O(N D) memory beside one tile of pairs: the backward pass computes every tile
    again. Where f is linear, exponential or a sigmoid, `LowRankCoupling` and `PairwiseCoupling` are several times
    faster. Inside ``torch.compile`` there is one tile.

    Args:
        function: f, elementwise, called with tensors of single and double precision. It needs a derivative at 0, the
            distance of a node from itself.
        query, key: features of receivers and senders [N, H, F].
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        nonnegative, positive_semidefinite: promises about S, which is symmetric if query is key.

    Raises:
        TypeError, ValueError: no function; features that are no [N, H, F] of one shape, dtype and device.

    Examples:
        >>> S = DistanceCoupling(lambda z2: 1 / (1 + z2), q, q)
        >>> torch.allclose(S.to_dense()[0], 1 / (1 + torch.cdist(q[:, 0], q[:, 0]).square()), atol=1e-5)
        True
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        ptr: Tensor | None = None,
        *,
        nonnegative: bool = False,
        positive_semidefinite: bool = False,
    ) -> None:
        check_function(function, "function", "of a tensor of squared distances")
        super().__init__(
            *feature_sizes(query, key),
            ptr=ptr,
            symmetric=query is key,
            nonnegative=nonnegative,
            positive_semidefinite=positive_semidefinite,
        )
        self.quadratic = True
        self.function, self.query, self.key = function, query, key

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        (query, key, values), dtype = accumulating(self.query, self.key, v)
        with without_autocast(v):
            if torch.compiler.is_compiling():
                return self._moved(query, key, values, self.ptr).to(dtype)
            tiles = self._tiles()
            moved = []
            for rows, columns in tiles:
                tile = query[rows], key[columns], values[columns]
                if len(tiles) == 1:
                    moved.append(self._moved(*tile))
                else:
                    moved.append(checkpoint(self._moved, *tile, use_reentrant=False, preserve_rng_state=False))
            return torch.cat(moved).to(dtype)

    def _moved(self, query: Tensor, key: Tensor, values: Tensor, ptr: Tensor | None = None) -> Tensor:
        return (fill_blocks(self._entries(query, key), ptr, 0.0) @ values.transpose(0, 1)).transpose(0, 1)

    def _entries(self, query: Float[Tensor, "r H F"], key: Float[Tensor, "c H F"]) -> Float[Tensor, "H r c"]:
        """f for all pairs of the given rows and columns."""
        q, k = query.transpose(0, 1), key.transpose(0, 1)
        squares = q.square().sum(2).unsqueeze(2) + k.square().sum(2).unsqueeze(1)
        return self.function(torch.clamp(squares - 2 * q @ k.mT, min=0))

    def _tiles(self) -> list[tuple[slice, slice]]:
        """The rows and columns of every tile, each within one graph; a single empty tile if there are no nodes."""
        bounds = [0, self.num_nodes] if self.ptr is None else self.ptr.tolist()
        tiles = []
        for start, stop in pairwise(bounds):
            step = max(1, TILE_ENTRIES // max(1, self.heads * (stop - start)))
            tiles += [(slice(row, min(row + step, stop)), slice(start, stop)) for row in range(start, stop, step)]
        return tiles or [(slice(0, 0), slice(0, 0))]

    def _transpose(self) -> Coupling:
        return DistanceCoupling(self.function, self.key, self.query, self.ptr, nonnegative=self.nonnegative)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        source, target = edge_index
        (query, key), dtype = accumulating(self.query, self.key)
        entries = self.function((query[target] - key[source]).square().sum(2)).to(dtype)
        return fill_across(entries, edge_index, self.ptr, 0.0)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        (query, key), dtype = accumulating(self.query, self.key)
        return fill_blocks(self._entries(query, key), self.ptr, 0.0).to(dtype)
