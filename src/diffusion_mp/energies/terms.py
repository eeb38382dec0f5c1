"""``EnergyTerm``, a part of an energy that certified steps descend (Theorem T11), and the terms of Theorem T1."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, ProjectedCoupling
from diffusion_mp.couplings.weighted import averaged, spectral_norms
from diffusion_mp.energies.constraints import Ball, Constraint, Unconstrained
from diffusion_mp.energies.pairs import check_channels, check_heads, check_metric
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.promises import not_as_declared, not_declared
from diffusion_mp.errors import (
    check_device,
    check_flags,
    check_kind,
    check_positive,
    check_tensor,
    describe,
    python_number,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import graph_sizes, mean_rows, members
from diffusion_mp.kernels.precision import reciprocal

#: A weight ≥ 0 of a term: a number, a 0-dimensional tensor, or a module such as ``Positive`` that computes one.
Weight = float | Tensor | Callable[[], Tensor]


class Majorant(NamedTuple):
    """The half gradient [N, H, D] of a term at a state, and the damping [N, H, 1] by which a step divides it."""

    half_gradient: Tensor
    damping: Tensor


class Mean(NamedTuple):
    """A half gradient p z − c − s f(z) whose p, the ``damping`` of a step, c and s are the same at every state."""

    damping: Tensor
    constant: Tensor | None = None
    pull: Callable[[Tensor], Tensor] | None = None
    scale: float | Tensor = 1.0


def damping_and_constant(means: Sequence[Mean]) -> tuple[Tensor, Tensor]:
    """Return the sums of p and of c."""
    damping = reduce(add, [mean.damping for mean in means])
    constants = [mean.constant for mean in means if mean.constant is not None]
    return damping, reduce(add, constants) if constants else torch.zeros_like(damping)


class EnergyTerm(ABC):
    r"""A function V of the state with a quadratic majorant: three functions of a state z [N, H, D] and its graph.

        V(z′) ≤ V(z) + 2⟨g, z′ − z⟩ + 2 Σ_i p_i ‖z′_i − z_i‖²,   g = `half_gradient` (z), p = `bound` (z)

    Every sum of terms with nonnegative weights has such a majorant, so `CertifiedStep` descends it without a step size
    (Theorem T11 of docs/certified.md). A concave term has p = 0 and its gradient. A subclass implements the three
    functions; ``diffusion_mp.testing.check_energy_term`` tests the inequality at adversarial states.

    Examples:
        >>> class Magnet(EnergyTerm):  # ‖z − 1‖²
        ...     def value(self, z, graph):
        ...         return (z.double() - 1).square().sum()
        ...     def half_gradient(self, z, graph):
        ...         return z - 1
        ...     def bound(self, z, graph):
        ...         return 0.5 * torch.ones_like(z[:, :, :1])
        >>> float((2.0 * Magnet()).value(torch.zeros(6, 1, 4), Graph(6)))
        48.0
    """

    quadratic = False  #: Whether V is a convex quadratic, whose half gradient is affine.
    #: Arrays of NumPy leave the arithmetic to this class; they would make an array of terms.
    __array_ufunc__ = None

    @abstractmethod
    def value(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
        """Return V(z), a 0-dimensional float64 tensor."""

    def by_graph(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, " B"]:
        """Return V(z) of every graph of a batch, in float64; V has to be a sum over graphs.

        By default from differences: V with all rows of the other graphs at zero, which takes B values. Override it
        where V is known graph by graph, or is not finite at zero.
        """
        if graph.segments is None:
            return self.value(z, graph).reshape(1)
        nothing = self.value(torch.zeros_like(z), graph)
        bounds = graph.segments.tolist()
        values = []
        for start, end in pairwise(bounds):
            alone = torch.zeros_like(z)
            alone[start:end] = z[start:end]
            values.append(self.value(alone, graph) - nothing)
        if values:
            return torch.stack(values) + nothing / len(values)
        return z.new_zeros(0, dtype=torch.float64)

    @abstractmethod
    def half_gradient(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "N H D"]:
        """Return half of the gradient at z of V, or of a majorant that touches V there."""

    @abstractmethod
    def bound(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "#N #H one"]:
        """Return p ≥ 0, with the matrix of the majorant ⪯ 2 diag(p)."""

    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant:
        """Return the half gradient at z, and the damping: p where the constraint is convex, else 2p.

        Override it where the two share work.
        """
        half = self.half_gradient(z, graph)
        bound = self.bound(z, graph)
        if (flaw := misshapen(self, z, half, bound)) is not None:  # it would be broadcast
            raise ValueError(flaw)
        return majorant_of(half, bound, convex)

    def flaw(self, convex: bool) -> str | None:
        """Return a sentence naming a number or promise for which the term's theorem fails, or ``None``.

        ``convex`` says whether the constraint set is.
        """
        return None

    def weighted_mean(self, z: Float[Tensor, "N H D"]) -> Mean | None:
        """Return the half gradient in the form that makes a step a weighted mean, in the dtype of z, if it has one."""
        return None

    def attention(self, z: Float[Tensor, "N H D"], graph: Graph) -> list[Coupling]:
        """Return how much nodes attend to each other at z, in a term that has attention."""
        return []

    def surrogate(
        self, z: Float[Tensor, "N H D"], at: Float[Tensor, "N H D"], graph: Graph
    ) -> Float[Tensor, ""]:
        """Return the majorant at ``at``, or V where it is quadratic, evaluated at z: at least V(z)."""
        if self.quadratic:
            return self.value(z, graph)
        start = at.double()
        away = z.double() - start
        linear = 2 * self.half_gradient(start, graph) * away
        quadratic = 2 * self.bound(start, graph) * away.square()
        return self.value(at, graph) + (linear + quadratic).sum()

    def __mul__(self, weight: Weight) -> ScaledTerm:
        return ScaledTerm(weight, self)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def sum_by_graph(rows: Float[Tensor, " N"], graph: Graph) -> Float[Tensor, " B"]:
    """Return the sum over the rows of every graph of a batch."""
    if graph.segments is None:
        return rows.sum().unsqueeze(0)
    member, count = members(graph.segments, rows.size(0), rows.device)
    return rows.new_zeros(count.size(0)).index_add(0, member, rows)


def check_weight(weight: float | Tensor, name: str, allow_zero: bool = True) -> None:
    """Raise unless ``weight`` is a nonnegative number or a 0-dimensional tensor, whose value is not looked at."""
    if not isinstance(weight, Tensor):
        check_positive(weight, name, allow_zero=allow_zero)
    elif weight.dim() or not weight.is_floating_point():
        raise ValueError(
            f"{name} must be a number or a 0-dimensional tensor; got {describe(weight)}."
        )


def weight_flaw(weight: float | Tensor, name: str) -> str | None:
    """Return a sentence saying that a weight is not finite and >= 0, or ``None``."""
    number = float(torch.as_tensor(weight))
    if 0 <= number < math.inf:
        return None
    return f"{name} must be finite and >= 0; it is {number:g}."


def norm_flaw(matrix: Tensor, norms: Tensor, name: str) -> str | None:
    """Return a sentence saying that a matrix is longer than the bound on its norm, or ``None``."""
    if not bool(matrix.isfinite().all()):
        return f"the {name} has entries that are not finite: {describe(matrix)}."
    wide = matrix.double()
    if matrix.dim() == 3:
        exact = torch.linalg.matrix_norm(wide, 2)
    else:
        exact = wide.abs().amax(1)
    excess = exact - (1 + 64 * torch.finfo(matrix.dtype).eps) * norms.double()
    if bool((excess <= 0).all()):
        return None
    worst = int(excess.argmax())
    return f"the {name} has norm {float(exact[worst]):.6g}, above the bound {float(norms[worst]):.6g} on it."


def check_projection(projection: Tensor | None) -> None:
    """Raise unless ``projection`` is W [H, D, C] or ``None``."""
    shape = "[heads, head_channels, channels]"
    if projection is not None:
        check_tensor(projection, "projection", shape)
        if projection.dim() != 3:
            raise ValueError(f"projection must be {shape}; got {describe(projection)}.")


def majorant_of(half: Tensor, bound: Tensor, convex: bool) -> Majorant:
    return Majorant(half, bound if convex else 2 * bound)


def affine(term: EnergyTerm, z: Float[Tensor, "N H D"], graph: Graph) -> Mean:
    """Return the half gradient of a quadratic term in the form of `Mean`."""
    nothing = torch.zeros_like(z)
    damping = term.bound(z, graph)
    constant = -term.half_gradient(nothing, graph)
    return Mean(damping, constant, lambda z: damping * z - term.half_gradient(z, graph) - constant)


class SharedTerm(EnergyTerm):
    """Base of terms whose half gradient and bound come from one computation, their `majorant`."""

    @abstractmethod
    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant: ...

    def half_gradient(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "N H D"]:
        return self.majorant(z, graph, True).half_gradient

    def bound(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "#N #H one"]:
        return self.majorant(z, graph, True).damping


class ScaledTerm(SharedTerm):
    """A term V times a weight c ≥ 0, which may be learned.

    Examples:
        >>> ScaledTerm(0.5, SourceTerm(x)).value(torch.zeros(6, 1, 4), graph).shape
        torch.Size([])
    """

    def __init__(self, weight: Weight, term: EnergyTerm) -> None:
        if not isinstance(term, EnergyTerm):
            check_kind(term, "term", EnergyTerm, "an EnergyTerm")
        weight = python_number(weight)
        if not callable(weight):
            check_weight(weight, "weight")
        self.factor = weight
        self.term = term
        self.quadratic = term.quadratic

    @property
    def weight(self) -> float | Tensor:
        """c."""
        return self.factor() if callable(self.factor) else self.factor

    def value(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
        return self.weight * self.term.value(z, graph)

    def by_graph(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, " B"]:
        return self.weight * self.term.by_graph(z, graph)

    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant:
        weight = self.weight
        half, damping = self.term.majorant(z, graph, convex)
        return Majorant(weight * half, weight * damping)

    def bound(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "#N #H one"]:
        return self.weight * self.term.bound(z, graph)

    def flaw(self, convex: bool) -> str | None:
        return weight_flaw(self.weight, f"the weight of {self.term!r}") or self.term.flaw(convex)

    def surrogate(
        self, z: Float[Tensor, "N H D"], at: Float[Tensor, "N H D"], graph: Graph
    ) -> Float[Tensor, ""]:
        return self.weight * self.term.surrogate(z, at, graph)

    def attention(self, z: Float[Tensor, "N H D"], graph: Graph) -> list[Coupling]:
        return self.term.attention(z, graph)

    def weighted_mean(self, z: Float[Tensor, "N H D"]) -> Mean | None:
        found = self.term.weighted_mean(z)
        weight = self.weight
        if found is None:
            return None
        if found.constant is None:
            constant = None
        else:
            constant = weight * found.constant
        return Mean(weight * found.damping, constant, found.pull, weight * found.scale)

    def __repr__(self) -> str:
        return f"{torch.as_tensor(self.weight, dtype=torch.float64).item():g} * {self.term!r}"  # float() warns


class SourceTerm(SharedTerm):
    """The squared distance from a source, ‖Z − H‖²_M = Σ_i m_i ‖z_i − h_i‖².

    Args:
        source, metric: H, [N, C] or [N, H, D], and m [N] or [N, H], by default ones.

    Examples:
        >>> float(SourceTerm(x).value(x.unsqueeze(1), graph))
        0.0
    """

    quadratic = True

    def __init__(self, source: Tensor, metric: Tensor | None = None) -> None:
        strided = (
            isinstance(source, Tensor)
            and source.layout is torch.strided
            and source.is_floating_point()
        )
        if not (strided and (source.dim() == 2 or (source.dim() == 3 and source.size(1)))):
            check_heads(source, "source")
        self.source = source.unsqueeze(1) if source.dim() == 2 else source
        if metric is not None:
            check_metric(metric, self.source)
        if metric is None or metric.dim() == 2:
            self.metric = metric
        else:
            self.metric = metric.unsqueeze(1)

    def value(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
        return self._rows(z).sum()

    def by_graph(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, " B"]:
        return sum_by_graph(self._rows(z), graph)

    def _rows(self, z: Float[Tensor, "N H D"]) -> Float[Tensor, " N"]:
        if z.shape != self.source.shape:
            raise ValueError(
                f"source must have the shape {list(z.shape)} of the state; got {describe(self.source)}."
            )
        check_device(self.source, "source", z.device, "the state")
        squares = (z.double() - self.source.double()).square().sum(2)
        if self.metric is not None:
            squares = self.metric.double() * squares
        return squares.sum(1)

    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant:
        away = z - self.source
        if self.metric is None:
            weight = z.new_ones(1, 1, 1)
        else:
            weight = self.metric.unsqueeze(2)
        half = away if self.metric is None else weight * away
        # V is its own majorant: its matrix is diag(m), and the damping m on every set.
        return Majorant(half, weight)

    def bound(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "#N #H one"]:
        return self.majorant(z, graph, True).damping / 2

    def flaw(self, convex: bool) -> str | None:
        for name, value in (("source", self.source), ("metric", self.metric)):
            if value is not None and not bool(value.isfinite().all()):
                return f"the {name} has entries that are not finite: {describe(value)}."
        if self.metric is not None and not bool((self.metric > 0).all()):
            return f"the metric must be positive; its least entry is {float(self.metric.min()):g}."
        return None

    def weighted_mean(self, z: Float[Tensor, "N H D"]) -> Mean:
        source = self.source.to(z.dtype)
        if self.metric is None:
            weight = z.new_ones(1, 1, 1)
        else:
            weight = self.metric.to(z.dtype).unsqueeze(2)
        return Mean(weight, source if self.metric is None else weight * source)


class CouplingTerm(SharedTerm):
    """The pull ½ Σ_ij s_ij ‖z_i − z_j‖² of a symmetric and nonnegative coupling S, as the adjacency is (Theorem T1).

    Args:
        coupling: S.
        centre: what is subtracted from z first, by default the mean of every graph: differences stay the same, with
            fewer digits lost to cancellation.

    Examples:
        >>> float(CouplingTerm(SparseCoupling(graph)).value(torch.ones(6, 1, 4), graph))
        0.0
    """

    quadratic = True

    def __init__(self, coupling: Coupling, centre: Tensor | None = None) -> None:
        if not isinstance(coupling, Coupling):
            check_kind(coupling, "coupling", Coupling, "a Coupling")
        self.coupling = coupling
        self.centre = centre

    def value(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
        return self.coupling.dirichlet(z.double()).sum() / 2

    def by_graph(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, " B"]:
        wide = z.double()
        near = wide - mean_rows(wide, self.coupling.ptr)
        ends = (
            self.coupling.exact_degree(near.dtype) + self.coupling.T.exact_degree(near.dtype)
        ) / 2
        squares = (ends * near.square().sum(2)).sum(1)
        return sum_by_graph(squares - (near * self.coupling.matmul(near)).sum((1, 2)), graph)

    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant:
        centre = self.centre
        if centre is None and self.coupling.whole:
            centre = mean_rows(z, self.coupling.ptr)
        near = z if centre is None else z - centre
        return Majorant(*self.coupling.majorized(near, convex))

    def flaw(self, convex: bool) -> str | None:
        return not_declared("term's", self.coupling) or not_as_declared(self.coupling, convex)

    def weighted_mean(self, z: Float[Tensor, "N H D"]) -> Mean | None:
        if (
            not self.coupling.whole
        ):  # several processes have to take the same steps, also where one of them rounds
            return None
        damping = self.coupling.majorant(True)
        if not _bounds_are_row_sums(self.coupling):
            damping = damping.unsqueeze(2).to(z.dtype)
            return Mean(damping, None, lambda z: damping * z - self.coupling.laplacian(z))
        if (
            damping.dtype != z.dtype
        ):  # rounded to fewer digits than S z has, D − S would leak constants
            damping = self.coupling.exact_degree(z.dtype)
        return Mean(damping.unsqueeze(2), None, self.coupling.matmul)

    def __repr__(self) -> str:
        return f"CouplingTerm({self.coupling!r})"


def _bounds_are_row_sums(coupling: Coupling) -> bool:
    """Return whether p z − S z is the Laplacian, with p the majorant: not of projected heads, unknown of others."""
    if isinstance(coupling, ProjectedCoupling) or not type(
        coupling
    )._majorized.__module__.startswith("diffusion_mp."):
        return False
    parts = getattr(coupling, "terms", [getattr(coupling, "coupling", None)])
    return all(_bounds_are_row_sums(part) for part in parts if isinstance(part, Coupling))


class PairTerm(SharedTerm):
    """A penalty of all pairs of nodes of the same graph, ½ Σ_ij δ(‖z_i − z_j‖²) (Theorem T1); see `JointEnergy`.

    Args:
        penalty: δ.
        projection: W [H, D, C], by default the identity; a pair then costs Σ_h δ(‖W_h(z_i − z_j)‖²).
        mean: divide the sum of a graph by its number of nodes.
        constraint: the set of the rows of z, within which δ has to be concave.

    Examples:
        >>> float(PairTerm(SimplePenalty()).value(torch.zeros(6, 1, 4), graph))
        0.0
    """

    def __init__(
        self,
        penalty: Penalty,
        projection: Float[Tensor, "heads seen channels"] | None = None,
        *,
        mean: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        check_kind(penalty, "penalty", Penalty, "a Penalty")
        check_flags(mean=mean)
        check_projection(projection)
        self.penalty = penalty
        self.projection = projection
        self.mean = mean
        self.constraint = Unconstrained() if constraint is None else constraint

    def seen(self, z: Float[Tensor, "N H D"]) -> Float[Tensor, "N heads seen"]:
        """Return the state as the penalty is applied to it: projected, and in double precision."""
        if self.projection is None:
            return z.double()
        check_channels(z, "projection", self.projection)
        return torch.einsum("hdc,nc->nhd", self.projection.double(), z.double().squeeze(1))

    def value(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
        return self._sum(graph, lambda penalty, x, ptr: penalty.total(x, ptr), z)

    def by_graph(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, " B"]:
        sizes = graph_sizes(graph.segments, len(z))
        sums = [self.penalty.total(part) / 2 for part in self.seen(z).split(sizes)]
        if self.mean:
            sums = [total / max(size, 1) for total, size in zip(sums, sizes, strict=True)]
        return torch.stack(sums)

    def surrogate(
        self, z: Float[Tensor, "N H D"], at: Float[Tensor, "N H D"], graph: Graph
    ) -> Float[Tensor, ""]:
        """Return the sum with δ replaced by its tangents at the distances of ``at``."""
        return self._sum(graph, tangents, z, at)

    def _sum(self, graph: Graph, cost: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Return ½ Σ ``cost(penalty, *states, ptr)``; for a mean, divided graph by graph."""
        seen = [self.seen(z) for z in states]
        if not self.mean:
            return cost(self.penalty, *seen, graph.segments) / 2
        sizes = graph_sizes(graph.segments, len(seen[0]))
        total = seen[0].new_zeros(())
        for size, *part in zip(sizes, *(z.split(sizes) for z in seen), strict=True):
            total = total + cost(self.penalty, *part, None) / (2 * max(size, 1))
        return total

    def within(self) -> Constraint:
        """Return the constraint on the rows that the penalty is applied to, behind the projection.

        A projection divided by its norm exceeds norm one by rounding, and f at the end of its domain may then lie as
        little below zero. This is harmless: with the loops w_ii = f(0) in W, D_W + W stays positive semi-definite.
        """
        if self.projection is None:
            return self.constraint
        norm = float(spectral_norms(self.projection.double()).max())
        diameter = self.constraint.diameter
        if norm > 0 and diameter == math.inf:
            return self.constraint
        farthest = norm * diameter if norm > 0 else 0.0
        end = self.penalty.domain[1]
        if (
            end
            < farthest * farthest
            <= self.penalty.reach(torch.promote_types(self.projection.dtype, torch.float32))
        ):
            farthest = math.nextafter(math.sqrt(end), 0.0)
        return Ball(max(farthest / 2, torch.finfo(torch.float64).tiny))

    def coupling(self, z: Float[Tensor, "N H D"], graph: Graph) -> Coupling:
        """Return (f(‖z_i − z_j‖²))_ij in double precision, divided by n for a mean."""
        pairs = self.penalty.coupling(self.seen(z), graph.segments, constraint=self.within())
        pairs = averaged(pairs) if self.mean else pairs
        if self.projection is None:
            return pairs
        return ProjectedCoupling(pairs, self.projection.double())

    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant:
        return CouplingTerm(self.coupling(z, graph)).majorant(z.double(), graph, convex)

    def __repr__(self) -> str:
        return repr(self.penalty)


def tangents(penalty: Penalty, z: Tensor, at: Tensor, ptr: Tensor | None) -> Tensor:
    """Return the sum over pairs of the tangents of δ at ‖at_i − at_j‖², evaluated at ‖z_i − z_j‖²."""
    omega = penalty.coupling(at, ptr)
    return penalty.total(at, ptr) + (omega.dirichlet(z) - omega.dirichlet(at)).sum()


def misshapen(
    term: EnergyTerm, z: Float[Tensor, "N H D"], half: Any, bound: Any, *value: Any
) -> str | None:
    """Return a sentence saying which of the three functions has given another shape than it has to give at z."""
    nodes, heads, _ = z.shape
    bounds = [[n, h, 1] for n in (nodes, 1) for h in (heads, 1)]
    values: list[tuple[str, Any, list[list[int]]]] = [("value", found, [[]]) for found in value]
    for name, found, shapes in [
        *values,
        ("half_gradient", half, [list(z.shape)]),
        ("bound", bound, bounds),
    ]:
        if not isinstance(found, Tensor) or list(found.shape) not in shapes:
            return f"the {name} of {term!r} must have the shape {shapes[0]} at this state; got {describe(found)}."
    return None


#: Scales at which terms and energies are looked at: states contracted to points, and spread far apart.
SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)

#: Entries beyond which an exponential overflows, so that a value that is not finite says nothing about its term.
OVERFLOWING = 500.0


def overflows(z: Tensor, *values: Tensor) -> bool:
    """Return whether a value at z is not finite, and z has entries for which that may be overflow."""
    finite = all(bool(value.isfinite().all()) for value in values)
    return not finite and float(z.abs().max()) > OVERFLOWING


def rescaled(z: Float[Tensor, "N H D"], graph: Graph, scale: float) -> Float[Tensor, "N H D"]:
    """Return z contracted or spread about the mean of each graph."""
    centre = mean_rows(z, graph.segments)
    return centre + scale * (z - centre)


def resolution(term: EnergyTerm, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
    """Return what rounding may change of a value by a formula that cancels for small z, such as √(1 + z²) − 1.

    Its error is one of the values at distances of about one, however small the value itself is.
    """
    generator = torch.Generator(z.device).manual_seed(0)
    unit = torch.randn(z.shape, generator=generator, dtype=torch.float64, device=z.device)
    usual = term.value(z.double() + unit, graph).abs()
    return torch.where(usual.isfinite(), 64 * torch.finfo(torch.float64).eps * usual, 0.0)


@torch.no_grad()
def term_flaw(
    term: EnergyTerm, z: Float[Tensor, "N H D"], graph: Graph, moves: Iterable[Tensor] = ()
) -> str | None:
    """Return a sentence saying why a term does not bound itself at z, after the ``moves`` z′ − z and some of its own.

    The moves of its own are a step down the majorant, one up, eight in arbitrary directions from 10⁻² to 10², and some
    where the half gradient changes most.
    """
    z = z.double()
    value = term.value(z, graph)
    half = term.half_gradient(z, graph)
    bound = term.bound(z, graph)
    if (flaw := misshapen(term, z, half, bound, value)) is not None:
        return flaw
    for name, result in (("value", value), ("half gradient", half), ("bound", bound)):
        if not bool(result.isfinite().all()):
            return f"the {name} of {term!r} is not finite at this state: {describe(result)}."
    if bool((bound < 0).any()):
        return (
            f"the bound of {term!r} must be nonnegative; its least entry is {float(bound.min()):g}."
        )
    near = z - mean_rows(z, graph.segments)
    least = resolution(term, z, graph)
    generator = torch.Generator(z.device).manual_seed(0)
    descent = half * reciprocal(bound.expand_as(half))
    lengths = torch.logspace(-2, 2, 8, dtype=z.dtype, device=z.device)
    drawn = (
        length * torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        for length in lengths
    )
    for move in (
        *moves,
        -descent,
        descent,
        *drawn,
        *curved_moves(term, z, graph, bound, generator),
    ):
        after = term.value(z + move, graph)
        linear = 2 * half * move
        quadratic = 2 * bound * move.square()
        if overflows(z + move, after):
            continue
        rounding = least + 1e-10 * (
            value.abs() + after.abs() + linear.abs().sum() + quadratic.sum()
        )
        # A value may be a difference of terms of the size p ‖z‖², as where all neighbours are equal, with z measured
        # from the mean of its graph, from which an isolated node may be far.
        squares = z.square() + (z + move).square() + near.square() + (near + move).square()
        rounding += 64 * torch.finfo(z.dtype).eps * (bound * squares).sum()
        excess = after - value - (linear + quadratic).sum()
        if not bool(excess <= rounding):
            return (
                f"{term!r} exceeds its majorant by {float(excess):.3g} at a state {float(move.norm()):.3g} away: its "
                f"bound is too small, or its half gradient is not half of the gradient of its value."
            )
    return None


def curved_moves(
    term: EnergyTerm,
    z: Float[Tensor, "N H D"],
    graph: Graph,
    bound: Tensor,
    generator: torch.Generator,
) -> Iterator[Float[Tensor, "N H D"]]:
    """Yield moves along the direction in which the half gradient changes most, as a multiple of the bound.

    The bound has to satisfy J ⪯ 2 diag(p) for the Jacobian J of the half gradient. The power method finds the largest
    eigenvalue of diag(p)⁻¹J; random directions, of which there are as many as entries of the state, would miss it.
    """
    if z.numel():
        spread = float((z - mean_rows(z, graph.segments)).square().mean().sqrt())
    else:
        spread = 0.0
    near = 1e-3 * (spread or 1.0)
    weight = bound.expand(*z.shape[:2], 1).clone()
    least = 1e-6 * float(weight.max()) if weight.numel() else 0.0
    weight.clamp_(min=least or 1.0)
    direction = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
    for _ in range(8):
        direction = direction / direction.square().mean().sqrt().clamp(
            min=torch.finfo(z.dtype).tiny
        )
        ahead = term.half_gradient(z + near * direction, graph)
        behind = term.half_gradient(z - near * direction, graph)
        # The shift makes the largest eigenvalue, of which 2 is allowed, also the largest in absolute value.
        direction = (ahead - behind) / (2 * near * weight) + 2 * direction
    direction = direction / direction.square().mean().sqrt().clamp(min=torch.finfo(z.dtype).tiny)
    if not bool(direction.isfinite().all()):
        return
    for length in (near, 1e-1 * spread, spread, 1e-2, 1.0):
        yield length * direction
        yield -length * direction
