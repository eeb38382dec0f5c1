"""Sums and multiples of couplings: ``a * S`` and ``S + R``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling
from diffusion_mp.errors import describe


class ScaledCoupling(Coupling):
    """a S with a number, a 0-dimensional tensor or one factor per head [H].

    A tensor may be learnable; its sign is then unknown, and nothing but symmetry is promised.
    """

    def __init__(self, scale: float | Tensor, coupling: Coupling) -> None:
        heads = coupling.heads
        if isinstance(scale, Tensor):
            if scale.dim() > 1 or (scale.dim() == 1 and heads != 1 and scale.numel() not in (1, heads)):
                raise ValueError(f"scale must be a number, a 0-dimensional tensor or [{heads}]; got {describe(scale)}.")
            heads = max(heads, scale.numel())
            nonnegative = unchanged = False
        elif isinstance(scale, (int, float)):
            nonnegative, unchanged = scale >= 0, scale == 1
        else:
            raise TypeError(f"scale must be a number or a tensor; got {describe(scale)}.")
        super().__init__(
            coupling.num_nodes,
            heads,
            torch.empty(0, dtype=coupling.dtype, device=coupling.device),
            symmetric=coupling.symmetric,
            row_stochastic=coupling.row_stochastic and unchanged,
            nonnegative=coupling.nonnegative and nonnegative,
        )
        self.scale = scale
        self.coupling = coupling

    def _by_head(self, value: Tensor, dim: int) -> Tensor:
        """a · value, with the head axis of ``value`` at ``dim``."""
        if not isinstance(self.scale, Tensor):
            return self.scale * value
        shape = [1] * value.dim()
        shape[dim] = -1
        return self.scale.view(shape) * value

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self._by_head(self.coupling.matmul(v), 1)

    def _transpose(self) -> Coupling:
        return ScaledCoupling(self.scale, self.coupling.T)

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._by_head(self.coupling.degree(), 1)

    def at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._by_head(self.coupling.at(edge_index), 1)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self._by_head(self.coupling.to_dense(), 0)


class SumCoupling(Coupling):
    """S₁ + S₂ + …; a term with one head is added to every head of the others."""

    def __init__(self, terms: Sequence[Coupling]) -> None:
        self.terms: list[Coupling] = [
            part for term in terms for part in (term.terms if isinstance(term, SumCoupling) else [term])
        ]
        sizes = sorted({term.num_nodes for term in self.terms})
        if len(sizes) != 1:
            raise ValueError(
                f"the terms of a sum must couple the same nodes; got {' and '.join(map(str, sizes))} nodes."
            )
        heads = max(term.heads for term in self.terms)
        if any(term.heads not in (1, heads) for term in self.terms):
            raise ValueError(f"the terms of a sum must have one head or {heads}; got {[t.heads for t in self.terms]}.")
        dtype = reduce(torch.promote_types, (term.dtype for term in self.terms))
        super().__init__(
            sizes[0],
            heads,
            torch.empty(0, dtype=dtype, device=self.terms[0].device),
            symmetric=all(term.symmetric for term in self.terms),
            row_stochastic=self._sums_to_one(),
            nonnegative=all(term.nonnegative for term in self.terms),
        )

    def _sums_to_one(self) -> bool:
        """Whether the terms are multiples of row-stochastic couplings whose factors add up to one."""
        total = 0.0
        for term in self.terms:
            if term.row_stochastic:
                total += 1.0
            elif (
                isinstance(term, ScaledCoupling)
                and term.coupling.row_stochastic
                and isinstance(term.scale, (int, float))
            ):
                total += term.scale
            else:
                return False
        return abs(total - 1.0) < 1e-12

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return reduce(add, (term.matmul(v) for term in self.terms))

    def _transpose(self) -> Coupling:
        return SumCoupling([term.T for term in self.terms])

    def degree(self) -> Float[Tensor, "N heads"]:
        return reduce(add, (term.degree() for term in self.terms))

    def at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return reduce(add, (term.at(edge_index) for term in self.terms))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return reduce(add, (term.to_dense() for term in self.terms))
