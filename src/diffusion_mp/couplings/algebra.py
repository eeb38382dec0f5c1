"""The algebra of couplings: multiples and sums, which are couplings again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.couplings.low_rank_form import LowRankForm
from diffusion_mp.errors import check_flags, describe


def check_scale(scale: object, heads: int) -> None:
    """Raise unless ``scale`` is a finite number, or a tensor of one number or of one per head."""
    if not isinstance(scale, Tensor):
        if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
            raise TypeError(f"scale must be a number or a tensor; got {describe(scale)}.")
        if not torch.compiler.is_compiling() and not math.isfinite(scale):  # a number may be a symbol there
            raise ValueError(f"scale must be a finite number; got {scale}.")
        return
    if scale.is_complex() or scale.dtype == torch.bool or scale.layout != torch.strided:
        raise TypeError(f"scale must hold real numbers; got {describe(scale)}.")
    if scale.dim() > 1 or not scale.numel() or (scale.dim() == 1 and heads != 1 and scale.numel() not in (1, heads)):
        raise ValueError(f"scale must be a number, a 0-dimensional tensor or [{heads}]; got {describe(scale)}.")


class ScaledCoupling(Coupling):
    """a S with a number, a 0-dimensional tensor or one factor per head [H].

    Args:
        scale: a. A tensor may be learnable.
        coupling: S.
        nonnegative: a promise that a tensor holds no negative number, which keeps the promises of S about signs; of a
            number that is known.

    Raises:
        TypeError, ValueError: no coupling, or a scale that is not finite or does not fit its heads.

    Examples:
        >>> isinstance(0.5 * UniformCoupling(6), ScaledCoupling)
        True
    """

    def __init__(self, scale: float | Tensor, coupling: Coupling, *, nonnegative: bool = False) -> None:
        check_coupling_kind(coupling)
        check_scale(scale, coupling.heads)
        check_flags(nonnegative=nonnegative)
        one = not isinstance(scale, Tensor) and bool(scale == 1)  # of a symbol these would be symbols
        positive = nonnegative if isinstance(scale, Tensor) else bool(scale >= 0)
        super().__init__(
            coupling.num_nodes,
            max(coupling.heads, scale.numel()) if isinstance(scale, Tensor) else coupling.heads,
            coupling,
            symmetric=lambda: coupling.symmetric,
            row_stochastic=one and (lambda: coupling.row_stochastic),
            nonnegative=positive and (lambda: coupling.nonnegative),
            positive_semidefinite=positive and (lambda: coupling.positive_semidefinite),
            low_rank=lambda: coupling.low_rank,
            metric=lambda: coupling.metric,
        )
        self.scale, self.coupling, self._positive = scale, coupling, positive

    def _by_head(self, value: Tensor, dim: int) -> Tensor:
        """a · value, with the head axis of ``value`` at ``dim``."""
        if not isinstance(self.scale, Tensor):
            return self.scale * value
        shape = [1] * value.dim()
        shape[dim] = -1
        return self.scale.view(shape) * value

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self._by_head(self.coupling._product(v), 1)

    def _transpose(self) -> Coupling:
        return ScaledCoupling(self.scale, self.coupling.T, nonnegative=self._positive)

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._by_head(self.coupling.degree(), 1)

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        moved, bound = self.coupling._majorized(v, convex)
        return self._by_head(moved, 1), self._by_head(bound, 1)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self._by_head(self.coupling._at(edge_index), 1)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        form = self.coupling.low_rank_form(dtype)
        if form is None:
            return None
        return form.reweighted(self._by_head(torch.ones(1, self.coupling.heads, dtype=dtype, device=self.device), 1))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self._by_head(self.coupling.to_dense(), 0)


class SumCoupling(Coupling):
    """S₁ + S₂ + …; a term with one head is added to every head of the others.

    Args:
        terms: the couplings; the terms of one that is itself a sum are taken out of it.

    Raises:
        TypeError, ValueError: no couplings, none at all, or couplings of different nodes or heads.

    Examples:
        >>> isinstance(UniformCoupling(6) + IdentityCoupling(6), SumCoupling)
        True
    """

    def __init__(self, terms: Sequence[Coupling]) -> None:
        if not isinstance(terms, Iterable):
            raise TypeError(f"terms must be a sequence of couplings; got {describe(terms)}.")
        flat: list[Coupling] = []
        heads = 1
        for term in terms:
            if not isinstance(term, Coupling):
                check_coupling_kind(term, "every one of terms")
            flat += term.terms if isinstance(term, SumCoupling) else [term]
            heads = max(heads, term.heads)
        if not flat:
            raise ValueError("terms must hold a coupling at least; got none.")
        nodes, dtype = flat[0].num_nodes, flat[0].dtype
        for term in flat:
            if term.num_nodes != nodes:
                raise ValueError(
                    f"the terms of a sum must couple the same nodes; got {nodes} and {term.num_nodes} nodes."
                )
            if term.heads not in (1, heads):
                raise ValueError(f"the terms of a sum must have one head or {heads}; got {[t.heads for t in flat]}.")
            dtype = torch.promote_types(dtype, term.dtype)
        super().__init__(
            nodes,
            heads,
            flat[0],
            ptr=lambda: _common_boundaries(flat),
            symmetric=lambda: all(term.symmetric for term in flat),
            row_stochastic=lambda: _sums_to_one(flat),
            nonnegative=lambda: all(term.nonnegative for term in flat),
            positive_semidefinite=lambda: all(term.positive_semidefinite for term in flat),
            low_rank=lambda: all(term.low_rank for term in flat) and _same_graphs(flat),
            metric=lambda: _common_metric(flat),
        )
        self.quadratic = any(term.quadratic for term in flat)
        self.whole = all(term.whole for term in flat)
        self.terms: list[Coupling] = flat
        self.dtype = dtype

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        total = self.terms[0]._product(v)
        for term in self.terms[1:]:
            total = total + term._product(v)
        return total

    def _transpose(self) -> Coupling:
        return SumCoupling([term.T for term in self.terms])

    def degree(self) -> Float[Tensor, "N heads"]:
        return reduce(add, [term.degree() for term in self.terms])

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        moved, bounds = zip(*(term._majorized(v, convex) for term in self.terms), strict=True)
        return reduce(add, moved), reduce(add, bounds)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return reduce(add, [term._at(edge_index) for term in self.terms])

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        forms = [term.low_rank_form(dtype) for term in self.terms]
        known = [form for form in forms if form is not None]
        return LowRankForm.total(known) if known and _same_graphs(self.terms) else None

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return reduce(add, [term.to_dense() for term in self.terms])


def _common_boundaries(terms: Sequence[Coupling]) -> Tensor | None:
    """The row boundaries that all terms have; ``None``, one graph, where one of them couples everything."""
    common = terms[0].ptr
    for term in terms[1:]:
        if common is None or term.ptr is None:
            return None
        common, other = sorted((common, term.ptr), key=len)
        common = common[torch.isin(common, other)]
    return common


def _reaching(terms: Sequence[Coupling]) -> list[Coupling]:
    """The terms that couple a node with another one."""
    return [term for term in terms if term.ptr is None or bool((term.ptr.diff() > 1).any())]


def _same_graphs(terms: Sequence[Coupling]) -> bool:
    """Whether all terms that reach beyond a node reach over the same graphs."""
    bounds = [term.ptr for term in _reaching(terms)]
    return all(
        ptr is bounds[0] or (ptr is not None and bounds[0] is not None and torch.equal(ptr, bounds[0]))
        for ptr in bounds
    )


def _common_metric(terms: Sequence[Coupling]) -> Tensor | None:
    """The metric of all terms; one that couples every node with itself alone is self-adjoint in any."""
    metrics = [term.metric for term in _reaching(terms)] or [term.metric for term in terms]
    first = metrics[0]
    same = first is not None and all(metric is not None and bool((metric == first).all()) for metric in metrics)
    return first if same else None


def _sums_to_one(terms: Sequence[Coupling]) -> bool:
    """Whether the terms are multiples of row-stochastic couplings whose factors add up to one, and a row that is empty
    in one of them is empty in all: half an empty row and half a full one sum to one half."""
    total, empty = 0.0, []
    for term in terms:
        factor, part = 1.0, term
        if isinstance(term, ScaledCoupling) and not isinstance(term.scale, Tensor):
            factor, part = term.scale, term.coupling
        if not part.row_stochastic:
            return False
        total += factor
        empty.append(part.degree() == 0)
    return abs(total - 1.0) < 1e-12 and all(bool((rows == empty[0]).all()) for rows in empty)
