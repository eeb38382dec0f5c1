"""The algebra of couplings: the identity, multiples, sums and polynomials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.errors import (
    check_device,
    check_flags,
    check_tensor,
    describe,
    floating,
    python_number,
)


class LowRankForm(NamedTuple):
    """diag(e) + U Kᵀ within every graph of ``ptr``, where a single head broadcasts; without ``diagonal`` e is zero."""

    left: Float[Tensor, "N H F"]
    right: Float[Tensor, "N H F"]
    diagonal: Float[Tensor, "N H"] | None = None
    ptr: Tensor | None = None

    def reweighted(self, row: Tensor | None, column: Tensor | None = None) -> LowRankForm:
        """diag(r) S diag(c) for r and c [N, H]."""
        left = self.left
        right = self.right
        diagonal = self.diagonal
        if row is not None:
            row = row.to(left.dtype)
            left = row.unsqueeze(2) * left
            diagonal = None if diagonal is None else row * diagonal
        if column is not None:
            column = column.to(right.dtype)
            right = column.unsqueeze(2) * right
            diagonal = None if diagonal is None else diagonal * column
        return LowRankForm(left, right, diagonal, self.ptr)

    @classmethod
    def total(cls, terms: Sequence[LowRankForm]) -> LowRankForm:
        """The sum of terms over the same graphs, with their features concatenated."""
        heads = max(term.left.size(1) for term in terms)
        left = torch.cat([term.left.expand(-1, heads, -1) for term in terms], dim=2)
        right = torch.cat([term.right.expand(-1, heads, -1) for term in terms], dim=2)
        diagonals = [term.diagonal for term in terms if term.diagonal is not None]
        if diagonals:
            diagonal = torch.stack(torch.broadcast_tensors(*diagonals)).sum(0)
        else:
            diagonal = None
        reaching = [term.ptr for term in terms if term.left.size(2)]
        return cls(left, right, diagonal, reaching[0] if reaching else None)


class IdentityCoupling(Coupling):
    """s_ij = 1 if i = j, else 0: every node couples with itself only (an MLP; Wu, Wipf & Yan 2025, Table 1).

    In its ``ptr`` every node is a separate graph, so the boundaries of a sum are those of the other terms.

    Examples:
        >>> torch.equal(IdentityCoupling(6).to_dense()[0], torch.eye(6))
        True
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        kept = ("row_stochastic", "nonnegative", "positive_semidefinite", "low_rank")
        promises: dict[str, Any] = {"ptr": lambda: torch.arange(num_nodes + 1)} | dict.fromkeys(
            kept, True
        )
        super().__init__(num_nodes, 1, floating((0,), dtype, device), **promises)

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return v

    def _transpose(self) -> Coupling:
        return self

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._ones(self.dtype)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return (edge_index[0] == edge_index[1]).to(self.dtype).unsqueeze(1)

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        nothing = torch.empty(self.num_nodes, 1, 0, dtype=dtype, device=self.device)
        return LowRankForm(nothing, nothing, self._ones(dtype))


def as_scale(scale: object, heads: int) -> float | Tensor:
    """Return a finite number, or a tensor with a single element or one per head; numbers of NumPy become Python's."""
    scale = python_number(scale)
    if isinstance(scale, Tensor):
        if scale.is_complex() or scale.dtype == torch.bool or scale.layout != torch.strided:
            raise TypeError(f"scale must hold real numbers; got {describe(scale)}.")
        if scale.dim() > 1 or not scale.numel() or (heads != 1 and scale.numel() not in (1, heads)):
            raise ValueError(
                f"scale must be a number, a 0-dimensional tensor or [{heads}]; got {describe(scale)}."
            )
        return scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
        if isinstance(scale, np.ndarray):
            way_out = " A tensor has one factor per head."
        else:
            way_out = ""
        raise TypeError(f"scale must be a number or a tensor; got {describe(scale)}.{way_out}")
    if not torch.compiler.is_compiling() and not math.isfinite(scale):  # symbolic while tracing
        raise ValueError(f"scale must be a finite number; got {scale}.")
    return cast("float", scale)


class ScaledCoupling(Coupling):
    """A coupling times a number, a 0-dimensional tensor or one factor per head [H].

    Args:
        scale, coupling: a, which may be learnable, and S.
        nonnegative: the promise that a tensor ``scale`` has no negative element, which keeps the promises about signs.

    Examples:
        >>> isinstance(0.5 * UniformCoupling(6), ScaledCoupling)
        True
    """

    def __init__(
        self, scale: float | Tensor, coupling: Coupling, *, nonnegative: bool = False
    ) -> None:
        if not isinstance(coupling, Coupling):
            check_coupling_kind(coupling)
        if isinstance(scale, Tensor):
            if scale.device != coupling.device:
                check_device(scale, "scale", coupling.device, "the coupling")
            if scale.dim() or not scale.is_floating_point():
                as_scale(scale, coupling.heads)
        elif type(scale) is not float or not -math.inf < scale < math.inf:
            scale = as_scale(scale, coupling.heads)
        if type(nonnegative) is not bool:
            check_flags(nonnegative=nonnegative)
        # bool() also makes a comparison of symbols concrete.
        if isinstance(scale, Tensor):
            positive = nonnegative
        else:
            positive = bool(scale >= 0)
        one = not isinstance(scale, Tensor) and bool(scale == 1)
        if isinstance(scale, Tensor):
            heads = max(coupling.heads, scale.numel())
        else:
            heads = coupling.heads
        same = [coupling]
        signs = positive and [coupling]
        promises: dict[str, Any] = {
            "symmetric": same,
            "low_rank": same,
            "row_stochastic": one and same,
        }
        promises |= {
            "nonnegative": signs,
            "positive_semidefinite": signs,
            "metric": lambda: coupling.metric,
        }
        super().__init__(coupling.num_nodes, heads, coupling, **promises)
        self.scale = scale
        self.coupling = coupling
        self._positive = positive

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
        one = torch.ones(1, self.coupling.heads, dtype=dtype, device=self.device)
        if form is None:
            return None
        return form.reweighted(self._by_head(one, 1))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self._by_head(self.coupling.to_dense(), 0)


class SumCoupling(Coupling):
    """The sum of couplings; one with a single head is added to every head of the others, and sums in it are flattened.

    Examples:
        >>> isinstance(UniformCoupling(6) + IdentityCoupling(6), SumCoupling)
        True
    """

    def __init__(self, terms: Sequence[Coupling]) -> None:
        if not isinstance(terms, Iterable):
            raise TypeError(f"terms must be a sequence of couplings; got {describe(terms)}.")
        flat: list[Coupling] = []
        for term in terms:
            if not isinstance(term, Coupling):
                check_coupling_kind(term, "every one of terms")
            flat += term.terms if isinstance(term, SumCoupling) else [term]
        if not flat:
            raise ValueError("terms must hold a coupling at least; got none.")
        first = flat[0]
        heads = 1
        dtype = first.dtype
        quadratic = False
        whole = True
        one_graph = None
        for term in flat:
            if term.num_nodes != first.num_nodes:
                sizes = f"{first.num_nodes} and {term.num_nodes}"
                raise ValueError(
                    f"the terms of a sum must couple the same nodes; got {sizes} nodes."
                )
            if term.device != first.device:
                got = f"got {first.device} and {term.device}. Move one with .to(device)."
                raise ValueError(f"the terms of a sum must couple nodes on one device; {got}")
            if term.heads not in (1, heads) and heads != 1:
                most = max(t.heads for t in flat)
                raise ValueError(
                    f"the terms of a sum must have one head or {most}; got {[t.heads for t in flat]}."
                )
            heads = max(heads, term.heads)
            dtype = torch.promote_types(dtype, term.dtype)
            quadratic = quadratic or term.quadratic
            whole = whole and term.whole
            if vars(term).get("ptr", term) is None:  # known to be one graph, so the sum is one too
                one_graph = term
        promises: dict[str, Any] = dict.fromkeys(
            ("symmetric", "nonnegative", "positive_semidefinite"), flat
        )
        promises |= {
            "row_stochastic": lambda: _sums_to_one(flat),
            "metric": lambda: _common_metric(flat),
        }
        promises["low_rank"] = lambda: all(term.low_rank for term in flat) and _same_graphs(flat)
        promises["ptr"] = None if one_graph else lambda: _common_boundaries(flat)
        super().__init__(first.num_nodes, heads, one_graph or first, **promises)
        self.quadratic = quadratic
        self.whole = whole
        self.dtype = dtype
        self.terms: list[Coupling] = flat

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
        moved, bound = self.terms[0]._majorized(v, convex)
        for term in self.terms[1:]:
            more, further = term._majorized(v, convex)
            moved = moved + more
            bound = bound + further
        return moved, bound

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return reduce(add, [term._at(edge_index) for term in self.terms])

    def low_rank_form(self, dtype: torch.dtype) -> LowRankForm | None:
        known = [form for term in self.terms if (form := term.low_rank_form(dtype)) is not None]
        if known and _same_graphs(self.terms):
            return LowRankForm.total(known)
        return None

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return reduce(add, [term.to_dense() for term in self.terms])


def _common_boundaries(terms: Sequence[Coupling]) -> Tensor | None:
    """The row boundaries common to all terms; ``None``, one graph, if one of the terms has no boundaries."""
    common = terms[0].ptr
    for term in terms[1:]:
        if common is None or term.ptr is None:
            return None
        common, other = sorted((common, term.ptr), key=len)
        common = common[torch.isin(common, other)]
    return common


def _reaching(terms: Sequence[Coupling]) -> list[Coupling]:
    """The terms that couple different nodes."""
    return [term for term in terms if term.ptr is None or bool((term.ptr.diff() > 1).any())]


def _same_graphs(terms: Sequence[Coupling]) -> bool:
    """Whether all terms that couple different nodes have the same row boundaries."""
    ptr, *others = [term.ptr for term in _reaching(terms)] or [None]
    return all(
        p is ptr or (p is not None and ptr is not None and torch.equal(p, ptr)) for p in others
    )


def _common_metric(terms: Sequence[Coupling]) -> Tensor | None:
    """The metric of all terms; a diagonal term is self-adjoint in any."""
    metrics = [term.metric for term in _reaching(terms) or terms]
    first = metrics[0]
    if all(m is not None and first is not None and bool((m == first).all()) for m in metrics):
        return first
    return None


def _sums_to_one(terms: Sequence[Coupling]) -> bool:
    """Whether terms are row-stochastic up to factors that add up to one, and a row of zeros in one is zero in all."""
    total = 0.0
    empty = []
    for term in terms:
        factor = 1.0
        part = term
        if isinstance(term, ScaledCoupling) and not isinstance(term.scale, Tensor):
            factor = term.scale
            part = term.coupling
        if not part.row_stochastic:
            return False
        total += factor
        empty.append(part.degree() == 0)
    return abs(total - 1.0) < 1e-12 and all(bool((rows == empty[0]).all()) for rows in empty)


class PolynomialCoupling(Coupling):
    r"""A polynomial of a coupling, Σ_{p=1..P} c_p Sᵖ by Horner's rule: P products, and no power of it is stored.

    Args:
        coupling, coefficients: S, and c [P], or [P, H] with one polynomial per head.
        nonnegative: a promise about the entries of the polynomial. It is symmetric where S is.

    Examples:
        >>> S = PolynomialCoupling(UniformCoupling(6), torch.tensor([0.5, 0.5]))  # ½A + ½A²
        >>> torch.allclose(S.degree(), torch.ones(6, 1))
        True
    """

    def __init__(
        self, coupling: Coupling, coefficients: Tensor, *, nonnegative: bool = False
    ) -> None:
        if not isinstance(coupling, Coupling):
            check_coupling_kind(coupling)
        check_tensor(
            coefficients,
            "coefficients",
            "[degree] or [degree, heads]",
            coupling.device,
            "the coupling",
        )
        if coefficients.dim() == 1:
            by_head = coefficients.unsqueeze(1)
        else:
            by_head = coefficients
        if (
            by_head.dim() != 2
            or not by_head.numel()
            or len({1, coupling.heads, by_head.size(1)}) > 2
        ):
            raise ValueError(
                f"coefficients must be [degree] or [degree, heads] with a degree of at least 1, and one head or those "
                f"of the coupling, which has {coupling.heads}; got {describe(coefficients)}."
            )
        heads = max(coupling.heads, by_head.size(1))
        promises: dict[str, Any] = {"symmetric": [coupling], "nonnegative": nonnegative}
        super().__init__(
            coupling.num_nodes, heads, coupling, metric=lambda: coupling.metric, **promises
        )
        self.coupling = coupling
        self.coefficients = by_head

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        coefficients = self.coefficients.to(v.dtype).unsqueeze(2)
        inner = coefficients[-1] * v
        for p in range(coefficients.size(0) - 2, -1, -1):
            inner = coefficients[p] * v + self.coupling._product(inner)
        return self.coupling._product(inner)

    def _transpose(self) -> Coupling:
        turned = self.coupling.T
        if turned is self.coupling:
            return self
        return PolynomialCoupling(turned, self.coefficients, nonnegative=self.nonnegative)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        """O(E) for P = 1; for P > 1 an entry is a sum over walks."""
        if self.coefficients.size(0) > 1:
            return super()._at(edge_index)
        return self.coefficients[0].to(self.dtype) * self.coupling._at(edge_index)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        base = self.coupling.to_dense()
        *lower, last = self.coefficients.to(self.dtype)[:, :, None, None]
        return reduce(lambda dense, c: c * base + dense @ base, reversed(lower), last * base)


Coupling._multiple = ScaledCoupling
Coupling._sum = SumCoupling
