"""Low-rank couplings whose positive features are given by logarithms: kernelised softmax and its samples."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import check_flags, check_tensor, describe
from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.features import check_features, fill_across, heads_of
from diffusion_mp.couplings.low_rank import PooledCoupling, Sums
from diffusion_mp.couplings.shapes import Entries, Features, Pairs, Values
from diffusion_mp.graph.ops import max_rows
from diffusion_mp.kernels import log_linear_attention as kernels
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import finite_shift, wide_dtype


class LogTerms(NamedTuple):
    """The terms of s_ij = Σ_s exp(log φ_i·ψ_j + a_is + b_js)."""

    log_query: Features
    log_key: Features
    col_shift: Float[Tensor, "N H K"]
    row_shift: Float[Tensor, "N H K"] | None

    @property
    def heaviest(self) -> Float[Tensor, "N H 1"]:
        """The largest log weight of every sender, in double precision and detached; 0 for a sender of weight zero."""
        return finite_shift(self.col_shift.detach().double().amax(2, keepdim=True))

    def around(self, most: Float[Tensor, "M H F"]) -> LogTerms:
        """Return terms with the same entries after row normalisation, and with logarithms of at most about zero.

        ``most`` is about max_j (log ψ_jr + max_s b_js) of the graph, either for all nodes or for each node.
        """
        dtype = wide_dtype(self.log_query.dtype)
        most = finite_shift(most)
        # In double precision, since small differences of large logarithms decide.
        log_query = self.log_query.double() + most
        # A factor of a row cancels in the division by its sum, so its largest feature becomes one.
        log_query = log_query - log_query.detach().amax(2, keepdim=True)
        log_key = self.log_key.double() + (self.heaviest - most)
        col_shift = self.col_shift.double() - self.heaviest
        return LogTerms(
            log_query.to(dtype), log_key.to(dtype), col_shift.to(dtype), None
        )

    def entries(self, edge_index: Pairs) -> Float[Tensor, "E H"]:
        """Return log s_ij of listed pairs j → i of one graph."""
        source, target = edge_index
        shifts = cast("Tensor", self.row_shift)[target] + self.col_shift[source]
        # The sum over samples is taken of logarithms: a sample may underflow by itself.
        return kernels.log_linear_entries(
            edge_index, self.log_query, self.log_key
        ) + shifts.logsumexp(2)


class LogLowRankCoupling(PooledCoupling):
    """Attend to all nodes by positive features that are given as logarithms, as in NodeFormer.

    With features φ = exp(log_query) and ψ = exp(log_key), and log weights b of the senders in K samples:

        s_ij = (1/K) Σ_s φ_i·ψ_j e^{b_js} / Σ_l φ_i·ψ_l e^{b_ls}

    Here i, j and l are nodes of one graph. No feature overflows and no row vanishes for any range of the logarithms. A
    product costs O(N K F D) time and O(N (F + D)) memory, forward and backward.

    Args:
        log_query: logarithms of the features of the receivers [N, H, F], F ≥ 1.
        log_key: logarithms of the features of the senders [N, H, F].
        ptr: row boundaries [B+1] of a ragged batch, on the CPU (``Graph.segments``). ``None`` is one graph.
        log_weight: b, the log weight of every sender in every sample [N, H, K]. ``None`` is a single sample with b = 0.
        normalize: divide each row of each sample by its sum, as attention does. ``False`` gives s_ij = (1/K) Σ_s
            φ_i·ψ_j e^{b_js}.

    Options:
        symmetric: whether S, after normalisation, is symmetric. ``None``, the default, promises nothing.

    Examples:
        >>> torch.allclose(LogLowRankCoupling(q.log(), k.log()).degree(), torch.ones(6, 2))
        True
    """

    parts = ("log_query", "log_key", "col_shift", "row_shift")
    nonnegative = True
    no_empty_row = True

    def __init__(
        self,
        log_query: Features,
        log_key: Features,
        ptr: Tensor | None = None,
        log_weight: Float[Tensor, "N H K"] | None = None,
        *,
        normalize: bool = True,
        **promises: bool | None,
    ) -> None:
        check_features(log_query, log_key, "log_")
        if not log_query.size(2):
            raise ValueError(
                f"log_query and log_key must have a feature at least, or every entry is zero and no row can be divided "
                f"by its sum; got {describe(log_query)}."
            )
        if log_weight is None:
            # One sample in which all senders weigh the same: the softmax without noise.
            log_weight = log_key.new_zeros(*log_key.shape[:2], 1)
        shape = "[num_nodes, heads, samples]"
        check_tensor(log_weight, "log_weight", shape, log_key.device, "log_key")
        if (
            log_weight.dim() != 3
            or log_weight.shape[:2] != log_key.shape[:2]
            or not log_weight.size(2)
        ):
            raise ValueError(
                f"log_weight must be {shape} with the nodes and heads of log_key and a sample at least; got "
                f"{describe(log_weight)}."
            )
        check_flags(normalize=normalize)
        super().__init__(log_key.size(0), log_key.size(1), log_key, ptr, **promises)
        self.row_stochastic = normalize
        self.log_query = log_query
        self.log_key = log_key
        # The shifts a and b of `LogTerms`. Products divide rows by their sums and need no a that normalises.
        self.col_shift = log_weight
        self.row_shift: Tensor | None = None
        if not normalize:
            self.row_shift = torch.full_like(log_weight, -math.log(log_weight.size(2)))

    @cached_property
    def terms(self) -> LogTerms:
        """The terms for entries and the transpose, with the row shift a that normalises the rows."""
        features = LogTerms(
            self.log_query, self.log_key, self.col_shift, self.row_shift
        )
        if self.row_shift is not None:
            return features
        # Kept for later callers, who may need gradients if this one does not.
        with torch.enable_grad():
            # First shift the largest logarithms to about zero: the difference of large logarithms loses all digits.
            terms = features.around(
                max_rows(
                    features.log_key.detach().double() + features.heaviest, self.ptr
                )
            )
            log_sum = kernels.log_linear_logsumexp(
                terms.log_query, terms.log_key, terms.col_shift, self.ptr
            )
            return terms._replace(row_shift=-math.log(self.col_shift.size(2)) - log_sum)

    def _shift_of_rows(self, v: Values) -> Tensor | None:
        """Return the shift a of the rows, with the heads of the values; ``None`` where the kernels normalise."""
        return None if self.row_shift is None else heads_of(v, self.row_shift)[0]

    def _product(self, v: Values) -> Values:
        log_query, log_key, col_shift = heads_of(
            v, self.log_query, self.log_key, self.col_shift
        )
        return kernels.log_linear_product(
            log_query,
            log_key,
            v,
            self._shift_of_rows(v),
            col_shift,
            self.ptr,
        )

    def _pool(self, v: Values) -> Sums:
        log_key, col_shift = heads_of(v, self.log_key, self.col_shift)
        # The shift that was taken out of the features comes along, by which sums of blocks are merged.
        return Sums(*kernels.log_linear_pool(log_key, col_shift, v))

    def _read(self, sums: Sums, v: Values) -> Values:
        (log_query,) = heads_of(v, self.log_query)
        rows, _ = kernels.log_linear_read(
            log_query,
            self._shift_of_rows(v),
            sums.totals,
            cast("Tensor", sums.shift),
        )
        # The sums are in float32 at least, for values of any dtype.
        return rows.to(v.dtype)

    def _transpose(self) -> Coupling:
        log_query, log_key, col_shift, row_shift = self.terms
        transposed = LogLowRankCoupling(
            log_key, log_query, self.ptr, row_shift, normalize=False
        )
        # Both shifts change sides. The constructor has divided by the number of samples, which the shift holds already.
        transposed.row_shift = col_shift
        return transposed

    def _log_at(self, edge_index: Pairs) -> Entries:
        return fill_across(
            self.terms.entries(edge_index), edge_index, self.ptr, -torch.inf
        )

    def _at(self, edge_index: Pairs) -> Entries:
        return self._log_at(edge_index).exp()

    # By logarithms of entries, which are right where a product with a unit vector underflows.
    _dense = Coupling._entries_of_all_pairs
