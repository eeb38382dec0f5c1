"""``PooledCoupling``: an O(N) coupling, whose product goes through a few sums over the senders."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings.base import Coupling


class Sums(NamedTuple):
    """Sums over some senders: Σ_j … = ``totals`` · exp(``shift``), with a shift that has no gradient (``None``: 0).

    Examples:
        >>> sums = LinearAttentionCoupling(q, k).pool(torch.rand(6, 2, 4))
        >>> isinstance(sums, Sums)
        True
    """

    totals: Tensor
    shift: Tensor | None = None

    def shifted(self, shift: Tensor | None) -> Tensor:
        """The totals that belong to another shift, which is at least as large as their own."""
        if self.shift is None or shift is None:
            return self.totals
        # No sender has the shift −∞ and totals of zero, whatever they are multiplied by.
        return self.totals * (self.shift - shift).masked_fill(self.shift == shift, 0.0).exp().to(self.totals)


def merge(a: Sums, b: Sums) -> Sums:
    """The sums over the senders of both."""
    shift = None if a.shift is None or b.shift is None else torch.maximum(a.shift, b.shift)
    return Sums(a.shifted(shift) + b.shifted(shift), shift)


def merged(parts: list[Sums]) -> Sums:
    """The sums over the senders of all.

    Args:
        parts: what `PooledCoupling.pool` gave for parts of the nodes, one at least.

    Examples:
        >>> first, second = LinearAttentionCoupling(q[:4], k[:4]), LinearAttentionCoupling(q[4:], k[4:])
        >>> v = torch.rand(6, 2, 4)
        >>> sums = merged([first.pool(v[:4]), second.pool(v[4:])])  # two halves of the nodes, one after the other
        >>> torch.allclose(first.read(sums, v[:4]), (LinearAttentionCoupling(q, k) @ v)[:4], atol=1e-6)
        True
    """
    return reduce(merge, parts)


class PooledCoupling(Coupling):
    r"""S v in two steps: :meth:`pool` sums over the senders, and each receiver reads these sums (:meth:`read`).

    The sums are a few numbers for a head, however many nodes there are, and sums over different senders merge. So rows
    may lie in blocks of which one is at hand at a time, or with different processes: with S^b the coupling made of the
    rows of block b alone, the rows of S v in block b are

    ```python
    sums = merged([S_b.pool(v_b) for S_b, v_b in zip(blocks, values)])
    S_b.read(sums, v_b)
    ```

    Both steps are differentiable once. They know one graph: a ragged batch is refused. A new kind writes ``_pool``,
    ``_read`` and ``block`` beside what every coupling writes, and ``check_coupling`` compares them with its entries.

    Args:
        num_nodes, heads, like, ptr, symmetric, row_stochastic, nonnegative, positive_semidefinite, low_rank, metric:
            as of :class:`Coupling`, for subclasses.

    Examples:
        >>> S = LinearAttentionCoupling(q, k)
        >>> v = torch.rand(6, 2, 4)
        >>> isinstance(S, PooledCoupling), torch.allclose(S.read(S.pool(v), v), S @ v, atol=1e-6)
        (True, True)
    """

    @abstractmethod
    def _pool(self, v: Float[Tensor, "N H D"]) -> Sums:
        """The sums over the senders that this coupling was made of."""

    @abstractmethod
    def _read(self, sums: Sums, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        """The rows of the receivers that this coupling was made of."""

    @abstractmethod
    def block(self, rows: slice) -> PooledCoupling:
        """The coupling made of these rows of one graph alone."""

    def pool(self, v: Float[Tensor, "N in_heads D"]) -> Sums:
        """What the receivers read: sums over the nodes of this coupling, each a sender with its values.

        Raises:
            ValueError: the coupling is of a ragged batch.
        """
        if self.ptr is not None:
            raise ValueError(
                f"pool sums over the nodes of one graph; by its ptr this {type(self).__name__} is of a batch of "
                f"{self.ptr.numel() - 1}. Take the graphs one by one."
            )
        return self._pool(self._by_head(v))

    def read(self, sums: Sums, v: Float[Tensor, "N in_heads D"]) -> Float[Tensor, "N out_heads D"]:
        """S v from the sums over all senders, for the nodes of this coupling as receivers; ``v`` are their values."""
        return self._read(sums, self._by_head(v))

    def _by_head(self, v: Tensor) -> Tensor:
        self.check(v, "v")
        return v.expand(-1, max(v.size(1), self.heads), -1)


def heads_of(v: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
    """The features with as many heads as the values have."""
    if features[0].size(1) == v.size(1):
        return features
    return tuple(t.expand(-1, v.size(1), -1) for t in features)
