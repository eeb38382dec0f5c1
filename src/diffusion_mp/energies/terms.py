"""``EnergyTerm``, a part of an energy that certified steps descend (Theorem T11), and the terms of Theorem T1."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import (
    check_device,
    check_flags,
    check_kind,
    check_positive,
    check_tensor,
    describe,
    python_number,
)
from diffusion_mp.couplings import (
    Coupling,
    ScaledCoupling,
    SparseCoupling,
)
from diffusion_mp.couplings.weighted import averaged, spectral_norms
from diffusion_mp.energies.constraints import (
    Ball,
    Constraint,
    Sphere,
    Unconstrained,
    get_constraint,
)
from diffusion_mp.energies.pairs import (
    Bound,
    HeadState,
    PerGraph,
    PerNode,
    Scalar,
    by_head,
    check_channels,
    check_heads,
    check_metric,
    edge_distance,
    large_distance,
)
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.promises import coupling_flaw
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import detached_mean_rows, graph_sizes
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import wide_dtype, without_autocast

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
    return damping, reduce(add, constants, torch.zeros_like(damping))


class EnergyTerm(ABC):
    """Base of terms of an energy: functions V of the state with a quadratic majorant.

    A term consists of three functions of a state z [N, H, D] and its graph: `value`, V(z), `half_gradient`, g, and
    `bound`, p. They satisfy for all z and z′

        V(z′) ≤ V(z) + 2⟨g, z′ − z⟩ + 2 Σ_i p_i ‖z′_i − z_i‖²

    Every sum of terms with nonnegative weights has such a majorant. A certified step of an `Energy` therefore descends
    it without a step size (Theorem T11 of docs/certified.md). A concave term has p = 0 and its gradient. A subclass
    implements the three functions. ``diffusion_mp.testing.check_energy_term`` tests the inequality at adversarial
    states.

    Attributes:
        quadratic: whether V is a convex quadratic, whose half gradient is affine. ``False`` by default.
        depends_on: what else than z_i the row i of the half gradient and of the bound reads. ``"rows"``: nothing, so
            that V is a sum over rows. ``"couplings"``: products with couplings. ``"edges"``: the other ends of edges.
            ``"graph"``, the default: anything. `full_graph_inference` computes a term of ``"rows"`` block by block, and
            a `ShardedGraph` refuses a term of ``"graph"``.

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

    quadratic: bool = False
    depends_on: Literal["rows", "couplings", "edges", "graph"] = "graph"
    #: NumPy arrays leave the arithmetic to this class. Otherwise they would make an array of terms.
    __array_ufunc__ = None

    @abstractmethod
    def value(self, z: HeadState, graph: Graph) -> Scalar:
        """Return V(z), a 0-dimensional float64 tensor.

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """

    def by_graph(self, z: HeadState, graph: Graph) -> PerGraph:
        """Return V(z) of every graph of a batch, [B] in float64; V has to be a sum over graphs.

        By default it takes differences of B values, in which the rows of all other graphs are zero. Override it if V is
        known graph by graph, or is not finite at zero.

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """
        if graph.segments is None:
            return self.value(z, graph).reshape(1)
        # All other graphs have zeros for rows, and what V gives to zeros is subtracted.
        nothing = self.value(torch.zeros_like(z), graph)
        member = graph.batch.to(z.device)[:, None, None]
        values = nothing.new_zeros(graph.num_graphs)
        for number in range(graph.num_graphs):
            alone = z.masked_fill(member != number, 0)
            values[number] = self.value(alone, graph) - nothing
        # What all graphs have at zero cannot be told apart, and is shared equally.
        return values + nothing / max(len(values), 1)

    @abstractmethod
    def half_gradient(self, z: HeadState, graph: Graph) -> HeadState:
        """Return half of the gradient at z of V, or of a majorant that touches V there, [N, H, D].

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """

    @abstractmethod
    def bound(self, z: HeadState, graph: Graph) -> Bound:
        """Return p ≥ 0, [N or 1, H or 1, 1]; the matrix of the majorant is ⪯ 2 diag(p).

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        """Return the half gradient and the damping of a step at z. Override it if the two share work.

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
            convex: whether the constraint is convex. The damping is then p, else 2p.
        """
        half = self.half_gradient(z, graph)
        bound = self.bound(z, graph)
        # A wrong shape would be broadcast and give another step.
        for name, result in (("half_gradient", half), ("bound", bound)):
            if (flaw := wrong_shape(self, name, result, z)) is not None:
                raise ValueError(flaw)
        return Majorant(half, bound if convex else 2 * bound)

    def flaw(self, constraint: Constraint) -> str | None:
        """Return a sentence naming a number or promise for which the theorem of the term fails in C, or ``None``.

        Args:
            constraint: the set C.
        """
        return None

    def block(self, rows: slice) -> EnergyTerm:
        """Return the term of some of the rows, for a term of ``"rows"``: itself, unless it holds tensors of all nodes.

        Args:
            rows: the rows.
        """
        return self

    def weighted_mean(self, z: HeadState) -> Mean | None:
        """Return the half gradient in the form that makes a step a weighted mean, in the dtype of z, or ``None``.

        Args:
            z: state [N, H, D].
        """
        return None

    def attention(self, z: HeadState, graph: Graph) -> list[Coupling]:
        """Return the couplings that tell how much nodes attend to each other at z; none if the term has no attention.

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """
        return []

    def __mul__(self, weight: Weight) -> ScaledTerm:
        return ScaledTerm(weight, self)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def wrong_shape(
    term: EnergyTerm, name: str, result: object, z: HeadState
) -> str | None:
    """Return a sentence saying that a function of a term returned a wrong shape at z, or ``None``."""
    nodes, heads, _ = z.shape
    shapes: dict[str, list[list[int]]] = {
        "value": [[]],
        "half_gradient": [list(z.shape)],
        "bound": [[n, h, 1] for n in (nodes, 1) for h in (heads, 1)],
    }
    if isinstance(result, Tensor) and list(result.shape) in shapes[name]:
        return None
    return f"the {name} of {term!r} must have the shape {shapes[name][0]} at this state; got {describe(result)}."


def sum_by_graph(rows: PerNode, graph: Graph) -> PerGraph:
    """Return the sum over the rows of every graph of a batch."""
    if graph.segments is None:
        return rows.sum().unsqueeze(0)
    member = graph.batch.to(rows.device)
    return rows.new_zeros(graph.num_graphs).index_add(0, member, rows)


def check_weight(weight: float | Tensor, name: str, allow_zero: bool = True) -> None:
    """Raise unless ``weight`` is a nonnegative number or a 0-dimensional tensor, whose value is not examined."""
    # The value of a tensor is left to the certificate, since reading it would wait for a GPU.
    if not isinstance(weight, Tensor):
        check_positive(weight, name, allow_zero=allow_zero)
    elif weight.dim() or not weight.is_floating_point():
        raise ValueError(
            f"{name} must be a number or a 0-dimensional tensor; got {describe(weight)}."
        )


def check_source(source: Tensor, z: HeadState) -> None:
    """Raise unless a source has the shape of a state. Other shapes would be broadcast."""
    if z.shape != source.shape:
        raise ValueError(
            f"source must have the shape {list(z.shape)} of the state; got {describe(source)}."
        )
    check_device(source, "source", z.device, "the state")


def weight_flaw(weight: float | Tensor, name: str) -> str | None:
    """Return a sentence saying that a weight is not finite and >= 0, or ``None``."""
    number = float(torch.as_tensor(weight))
    if 0 <= number < math.inf:
        return None
    return f"{name} must be finite and >= 0; it is {number:g}."


def values_flaw(value: Tensor | None, name: str) -> str | None:
    """Return a sentence saying that a tensor has entries that are not finite, or ``None``."""
    if value is None or bool(value.isfinite().all()):
        return None
    return f"the {name} has entries that are not finite: {describe(value)}."


def norm_flaw(matrix: Tensor, norms: Tensor, name: str) -> str | None:
    """Return a sentence saying that a matrix is longer than the bound on its norm, or ``None``."""
    if (flaw := values_flaw(matrix, name)) is not None:
        return flaw
    wide = matrix.double()
    if matrix.dim() == 3:
        exact = torch.linalg.matrix_norm(wide, 2)
    else:
        # A diagonal: its norm is its largest entry.
        exact = wide.abs().amax(1)
    # A matrix that was divided by its norm exceeds norm one by rounding.
    rounding = 64 * torch.finfo(matrix.dtype).eps
    excess = exact - (1 + rounding) * norms.double()
    if bool((excess <= 0).all()):
        return None
    worst = int(excess.argmax())
    return f"the {name} has norm {float(exact[worst]):.6g}, above the bound {float(norms[worst]):.6g} on it."


class RowTerm(EnergyTerm):
    """Base of terms that are a sum over rows. A subclass defines `rows`, which gives the value graph by graph."""

    @abstractmethod
    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        """Return the contribution of every row to V, [N] in float64."""

    def value(self, z: HeadState, graph: Graph) -> Scalar:
        return self.rows(z, graph).sum()

    def by_graph(self, z: HeadState, graph: Graph) -> PerGraph:
        return sum_by_graph(self.rows(z, graph), graph)


class ConcaveTerm(RowTerm):
    """Base of sums of concave functions of a row, which lie below their tangents: p = 0."""

    depends_on = "rows"

    def bound(self, z: HeadState, graph: Graph) -> Bound:
        return z.new_zeros(1, 1, 1)


class SharedTerm(EnergyTerm):
    """Base of terms whose half gradient and bound come from one computation, their `majorant`."""

    @abstractmethod
    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant: ...

    def half_gradient(self, z: HeadState, graph: Graph) -> HeadState:
        return self.majorant(z, graph, True).half_gradient

    def bound(self, z: HeadState, graph: Graph) -> Bound:
        return self.majorant(z, graph, True).damping


class ScaledTerm(EnergyTerm):
    """Multiply a term V by a weight c ≥ 0, which may be learned.

    Args:
        weight: c: a number, a 0-dimensional tensor, or a module such as ``Positive`` that computes such a tensor.
        term: the term V.

    Examples:
        >>> ScaledTerm(0.5, SourceTerm(x)).value(torch.zeros(6, 1, 4), graph).shape
        torch.Size([])
    """

    def __init__(
        self, weight: Weight, term: EnergyTerm, *, _checked: bool = False
    ) -> None:
        if not _checked:
            check_kind(term, "term", EnergyTerm, "an EnergyTerm")
            weight = python_number(weight)
            if not callable(weight):
                check_weight(weight, "weight")
        self.factor = weight
        self.term = term
        self.quadratic = term.quadratic
        self.depends_on = term.depends_on

    @property
    def weight(self) -> float | Tensor:
        """The weight c."""
        return self.factor() if callable(self.factor) else self.factor

    def value(self, z: HeadState, graph: Graph) -> Scalar:
        return self.weight * self.term.value(z, graph)

    def by_graph(self, z: HeadState, graph: Graph) -> PerGraph:
        return self.weight * self.term.by_graph(z, graph)

    def half_gradient(self, z: HeadState, graph: Graph) -> HeadState:
        return self.weight * self.term.half_gradient(z, graph)

    def bound(self, z: HeadState, graph: Graph) -> Bound:
        return self.weight * self.term.bound(z, graph)

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        # Once, since a weight may be a module that computes it.
        weight = self.weight
        half, damping = self.term.majorant(z, graph, convex)
        return Majorant(weight * half, weight * damping)

    def flaw(self, constraint: Constraint) -> str | None:
        weight = weight_flaw(self.weight, f"the weight of {self.term!r}")
        return weight or self.term.flaw(constraint)

    def attention(self, z: HeadState, graph: Graph) -> list[Coupling]:
        return self.term.attention(z, graph)

    def block(self, rows: slice) -> EnergyTerm:
        return ScaledTerm(self.factor, self.term.block(rows))

    def weighted_mean(self, z: HeadState) -> Mean | None:
        mean = self.term.weighted_mean(z)
        if mean is None:
            return None
        weight = self.weight
        constant = None if mean.constant is None else weight * mean.constant
        return Mean(weight * mean.damping, constant, mean.pull, weight * mean.scale)

    def __repr__(self) -> str:
        return f"{torch.as_tensor(self.weight, dtype=torch.float64).item():g} * {self.term!r}"  # float() warns


class SourceTerm(RowTerm, SharedTerm):
    """Penalise the squared distance of the state from a source.

        ‖Z − H‖²_M = Σ_i m_i ‖z_i − h_i‖²

    Args:
        source: H, [N, C] or [N, H, D].
        metric: positive weights m of the nodes, [N] or [N, H]. ``None`` is ones.

    Examples:
        >>> float(SourceTerm(x).value(x.unsqueeze(1), graph))
        0.0
    """

    quadratic = True
    depends_on = "rows"

    def __init__(
        self, source: Tensor, metric: Tensor | None = None, *, _checked: bool = False
    ) -> None:
        if not _checked:
            check_heads(source, "source")
            if metric is not None:
                check_metric(metric, source)
        self.source = by_head(source)
        self.metric = metric
        if metric is not None and metric.dim() == 1:
            self.metric = metric.unsqueeze(1)

    def _weight(self, z: HeadState) -> Float[Tensor, "#N #H one"]:
        """Return m in the dtype of z."""
        if self.metric is None:
            return z.new_ones(1, 1, 1)
        return self.metric.to(z.dtype).unsqueeze(2)

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        check_source(self.source, z)
        # In double precision before the difference, which may be small beside both.
        wide = z.double()
        squares = (wide - self.source.double()).square()
        return (self._weight(wide) * squares).sum((1, 2))

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        # V is its own majorant with the matrix diag(m), so the damping m suffices on every set. On a convex set, m/2
        # would suffice too. But the step of a source and neighbours is their weighted mean only with m.
        weight = self._weight(z)
        return Majorant(weight * (z - self.source), weight)

    def bound(self, z: HeadState, graph: Graph) -> Bound:
        return self.majorant(z, graph, True).damping / 2

    def flaw(self, constraint: Constraint) -> str | None:
        flaw = values_flaw(self.source, "source") or values_flaw(self.metric, "metric")
        if flaw is None and self.metric is not None and bool((self.metric <= 0).any()):
            return f"the metric must be positive; its least entry is {float(self.metric.min()):g}."
        return flaw

    def block(self, rows: slice) -> SourceTerm:
        metric = None if self.metric is None else self.metric[rows]
        return SourceTerm(self.source[rows], metric)

    def weighted_mean(self, z: HeadState) -> Mean:
        weight = self._weight(z)
        return Mean(weight, weight * self.source.to(z.dtype))


class ProximalTerm(ConcaveTerm):
    """Penalise the squared distance ‖Z − Z_k‖² from the state Z_k before a step (Wu, Wipf & Yan 2025, Eq. 8).

    It is the first term of the energy E(Z, k). The call of an `Energy` passes Z_k. Without Z_k the term is zero.

    Examples:
        >>> energy = Energy([ProximalTerm(), PairTerm(SimplePenalty())])
        >>> bool(energy(x, x) <= energy(x, 2 * x))
        True
    """

    quadratic = True

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        return z.new_zeros(len(z), dtype=torch.float64)

    def half_gradient(self, z: HeadState, graph: Graph) -> HeadState:
        return torch.zeros_like(z)


class LinearTerm(ConcaveTerm):
    """Add the linear function −2⟨H, Z⟩, the source of an explicit step, to an energy.

    The step is z − τΔz + τβh, whose energy contains no square of the source.

    Args:
        source: H, [N, C] or [N, H, D].

    Examples:
        >>> float(LinearTerm(torch.ones(6, 4)).value(torch.ones(6, 1, 4), graph))
        -48.0
    """

    def __init__(self, source: Tensor) -> None:
        check_heads(source, "source")
        self.source = by_head(source)

    def block(self, rows: slice) -> LinearTerm:
        return LinearTerm(self.source[rows])

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        check_source(self.source, z)
        return -2 * (self.source.double() * z.double()).sum((1, 2))

    def half_gradient(self, z: HeadState, graph: Graph) -> HeadState:
        return -self.source.to(z.dtype).expand_as(z)

    def flaw(self, constraint: Constraint) -> str | None:
        return values_flaw(self.source, "source")


class CouplingTerm(RowTerm, SharedTerm):
    """Pull coupled nodes together: the Dirichlet energy of a coupling (Theorem T1 of docs/certified.md).

        ½ Σ_ij s_ij ‖z_i − z_j‖²

    Args:
        coupling: S, which promises to be symmetric and nonnegative, such as an adjacency.
        centre: a point that is subtracted from z first. The differences stay the same, and fewer digits cancel.
            ``None`` is the mean of every graph.

    Examples:
        >>> float(CouplingTerm(SparseCoupling(graph)).value(torch.ones(6, 1, 4), graph))
        0.0
    """

    quadratic = True
    depends_on = "couplings"

    def __init__(self, coupling: Coupling, centre: Tensor | None = None) -> None:
        check_kind(coupling, "coupling", Coupling, "a Coupling")
        self.coupling = coupling
        self.centre = centre

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        self.coupling.check(z, "x")
        wide = z.double()
        # Differences stay the same, and the two sums below cancel fewer digits.
        near = wide - detached_mean_rows(wide, self.coupling.ptr)
        # Row and column sums, which differ where S is not symmetric.
        ends = self.coupling.exact_degree(near.dtype)
        ends = (ends + self.coupling.T.exact_degree(near.dtype)) / 2
        squares = ends * near.square().sum(2)
        products = near * self.coupling.received(near)
        return squares.sum(1) - products.sum((1, 2))

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        self.coupling.check(z, "x")
        near = z
        if self.centre is not None:
            near = z - self.centre
        # Not if this process has only some of the rows and no graph of all: the mean would differ between processes.
        elif graph.total_nodes != graph.num_nodes:
            near = z - graph.centre(z)
        elif self.coupling.whole:
            # By the graphs of the coupling: it may couple nodes of several graphs of the energy's batch.
            near = z - detached_mean_rows(z, self.coupling.ptr)
        half, degree = self.coupling.laplacian_and_degree(near)
        bound = self.coupling.majorant(convex, degree)
        return Majorant(half, bound.unsqueeze(2))

    def flaw(self, constraint: Constraint) -> str | None:
        return coupling_flaw(self.coupling, constraint.convex)

    def weighted_mean(self, z: HeadState) -> Mean | None:
        # Several processes have to take the same steps, even where one of them rounds.
        if not self.coupling.whole:
            return None
        # Rounded to fewer digits than S z has, D − S would leak constants.
        damping = self.coupling.majorant(True, self.coupling.exact_degree(z.dtype))
        return Mean(damping.unsqueeze(2), None, self.coupling.received)

    def pull(self, z: HeadState, graph: Graph) -> Coupling:
        """Return S."""
        return self.coupling

    def __repr__(self) -> str:
        return f"CouplingTerm({self.coupling!r})"


class PenaltyTerm(SharedTerm):
    """Base of terms of a penalty δ. A concave δ lies below its tangents, which are pulls of a coupling (`pull`)."""

    depends_on = "couplings"

    def __init__(self, penalty: Penalty, constraint: Constraint | None) -> None:
        check_kind(penalty, "penalty", Penalty, "a Penalty")
        self.penalty = penalty
        self.constraint = get_constraint(constraint)

    @abstractmethod
    def pull(self, z: HeadState, graph: Graph) -> Coupling:
        """Return the coupling whose entries are f of the squared distances at z.

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        return CouplingTerm(self.pull(z, graph)).majorant(z, graph, convex)

    def warn_beyond_domain(self, z: HeadState, largest: Callable[[], float]) -> None:
        """Warn if the ``largest`` squared distance at a state is beyond the domain of δ."""
        # Neither a tensor without values nor a compiled program can be asked.
        asked = values_only() and not z.is_meta
        if self.penalty.covers(self.constraint.diameter) or not asked:
            return
        z2 = largest()
        end = self.penalty.domain[1]
        if z2 > self.penalty.reach(z.dtype):
            warnings.warn(
                f"{type(self).__name__} of a state that leaves the domain of {self.penalty!r}: two nodes are at "
                f"squared distance {z2:.6g}. Beyond {end:g} the cost of a pair is no penalty any more, and a low "
                f"energy means nothing. Scale the state into a ball of radius {math.sqrt(end) / 2:g}, or take another "
                f"penalty ('gaussian', 'sigmoid').",
                stacklevel=3,
            )


class EdgeTerm(PenaltyTerm):
    """Penalise the distances along the edges of a graph (Wu, Wipf & Yan 2025, Eq. 8).

        ½ Σ_ij s_ij δ(‖z_i − z_j‖²)

    δ is concave, so its tangents bound it, as in Theorem T1. `EdgeDiffusivity` is the diffusivity of this energy.

    Args:
        penalty: δ.
        coupling: S, a `SparseCoupling` that promises to be symmetric and nonnegative.
        constraint: the set that contains the rows of z, within which δ has to be concave. ``None`` is no constraint.

    Examples:
        >>> float(EdgeTerm(SimplePenalty(), SparseCoupling(graph)).value(torch.zeros(6, 1, 4), graph))
        0.0
    """

    def __init__(
        self,
        penalty: Penalty,
        coupling: SparseCoupling,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(penalty, constraint)
        check_kind(coupling, "coupling", SparseCoupling, "a SparseCoupling")
        self.coupling = coupling

    def value(self, z: HeadState, graph: Graph) -> Scalar:
        squares = edge_distance(z.double(), self.coupling.graph)
        self.warn_beyond_domain(
            z, lambda: float(squares.max()) if squares.numel() else 0.0
        )
        costs = self.coupling.weight.double() * self.penalty.delta(squares)
        return costs.sum() / 2

    def pull(self, z: HeadState, graph: Graph) -> SparseCoupling:
        """Return the coupling (s_ij f(‖z_i − z_j‖²))_ij.

        Args:
            z: state [N, H, D].
            graph: the graph of the state, which the term does not read.
        """
        squares = edge_distance(z, self.coupling.graph)
        weight = self.coupling.weight.to(z.dtype) * self.penalty.f(squares)
        return SparseCoupling(
            self.coupling.graph, weight, symmetric=True, nonnegative=True
        )

    def flaw(self, constraint: Constraint) -> str | None:
        flaw = coupling_flaw(self.coupling, constraint.convex)
        return flaw or penalty_flaw_in(self.penalty, constraint, constraint.diameter)

    def __repr__(self) -> str:
        return f"EdgeTerm({self.penalty!r}, {self.coupling!r})"


class PairTerm(PenaltyTerm):
    """Penalise the distances of all pairs of nodes of the same graph (Theorem T1 of docs/certified.md).

        ½ Σ_ij δ(‖z_i − z_j‖²)

    It takes O(N d²) for the simple and the quadratic penalty, and O(N² d) time and O(N d) memory for others.

    Args:
        penalty: δ.
        projection: W [H, D, C], for a state of one head. A pair then costs Σ_h δ(‖W_h(z_i − z_j)‖²). ``None`` is the
            identity.
        mean: divide the sum of a graph by its number of nodes. ``False`` by default.
        constraint: the set that contains the rows of z, within which δ has to be concave. ``None`` is no constraint.
        read: computes the coupling (f(‖x_i − x_j‖²))_ij of a projected state x [N, H · D] and a graph. ``None`` takes
            the coupling of the penalty. The module `Pairs` passes its diffusivity, so that it can compute some of the
            rows at a time.

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
        read: Callable[[Float[Tensor, "N C"], Graph], Coupling] | None = None,
    ) -> None:
        super().__init__(penalty, constraint)
        check_flags(mean=mean)
        if projection is not None:
            shape = "[heads, head_channels, channels]"
            check_tensor(projection, "projection", shape)
            if projection.dim() != 3:
                raise ValueError(
                    f"projection must be {shape}; got {describe(projection)}."
                )
        self.projection = projection
        self.mean = mean
        self.read = read

    def projected(self, z: HeadState) -> Float[Tensor, "N heads seen"]:
        """Return the projected state to which the penalty is applied, in the dtype of z."""
        if self.projection is None:
            return z
        check_channels(z, "projection", self.projection)
        with without_autocast(z):
            return torch.einsum(
                "hdc,nc->nhd", self.projection.to(z.dtype), z.squeeze(1)
            )

    def value(self, z: HeadState, graph: Graph) -> Scalar:
        wide = z.double()
        self.warn_beyond_domain(
            wide, lambda: large_distance(self.projected(wide), graph.segments)
        )
        return self.by_graph(wide, graph).sum()

    def by_graph(self, z: HeadState, graph: Graph) -> PerGraph:
        sizes = graph_sizes(graph.segments, len(z))
        # Energies of two steps may differ by less than the rounding of float32.
        parts = self.projected(z.double()).split(sizes)
        sums = [self.penalty.total(part) / 2 for part in parts]
        # torch stacks no empty list, as of a batch without graphs.
        total = torch.stack(sums) if sums else z.new_zeros(0, dtype=torch.float64)
        return total / total.new_tensor(sizes).clamp(min=1) if self.mean else total

    def diameter(self, constraint: Constraint) -> float:
        """Return the largest possible distance of two projected rows.

        A projection that was divided by its norm exceeds norm one by rounding, and f at the end of its domain may then
        lie equally little below zero. This is harmless: with the loops w_ii = f(0) in W, D_W + W stays positive
        semi-definite.

        Args:
            constraint: the set that contains the rows of the state.
        """
        if self.projection is None:
            return constraint.diameter
        norm = float(spectral_norms(self.projection.detach().double()).max())
        # Not 0 · ∞, which is NaN, where a projection of zero meets an unbounded set.
        farthest = norm * constraint.diameter if norm > 0 else 0.0
        wide = wide_dtype(self.projection.dtype)
        if self.penalty.domain[1] < farthest * farthest <= self.penalty.reach(wide):
            return math.nextafter(math.sqrt(self.penalty.domain[1]), 0.0)
        return farthest

    def pull(self, z: HeadState, graph: Graph) -> Coupling:
        """Return the coupling Ω = (f(‖W_h(z_i − z_j)‖²))_ij, divided by n for a mean, in the dtype of z.

        Args:
            z: state [N, H, D].
            graph: the graph of the state.
        """
        x = self.projected(z)
        if self.read is not None:
            pairs = self.read(x.flatten(1), graph)
        else:
            within = self.constraint
            if self.projection is not None:
                # Not the radius of a sphere: a projection maps a sphere into a ball.
                radius = max(self.diameter(within) / 2, torch.finfo(torch.float64).tiny)
                within = Ball(radius) if math.isfinite(radius) else Unconstrained()
            pairs = self.penalty.coupling(x, graph.segments, constraint=within)
        if not self.mean:
            return pairs
        if graph.segments is None:
            # The rows of other processes count, too. The number is a tensor, since torch.export simplifies max(n, 1)
            # to n and fails at n = 0.
            nodes = torch.full((), graph.total_nodes).to(pairs.device, z.dtype)
            share = nodes.clamp(min=1).reciprocal()
            return ScaledCoupling(share, pairs, nonnegative=True)
        return averaged(pairs, graph.segments)

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        if self.projection is None:
            return super().majorant(z, graph, convex)
        # Before the projection, so that its products have the size of differences.
        near = self.projected(z - graph.centre(z))
        # Measured from zero, since the state is centred already.
        pull = CouplingTerm(self.pull(z, graph), near.new_zeros(()))
        half, bound = pull.majorant(near, graph, convex)
        # The Laplacian of Σ_h Σ_ij s^h_ij ‖W_h(z_i − z_j)‖² is Σ_h W_hᵀ(D_h − S_h)W_h (Remark c of Theorem T1).
        with without_autocast(z):
            w = self.projection.to(z.dtype)
            back = torch.einsum("hdc,nhd->nc", w, half)
            squares = spectral_norms(w).square().view(1, -1, 1)
            damping = (squares * bound).sum(1, keepdim=True)
            return Majorant(back.unsqueeze(1), damping)

    def flaw(self, constraint: Constraint) -> str | None:
        flaw = values_flaw(self.projection, "projection")
        flaw = flaw or penalty_flaw_in(
            self.penalty, constraint, self.diameter(constraint)
        )
        # On a sphere f is computed from angles, which are not distances anywhere else.
        if (
            flaw is None
            and isinstance(self.constraint, Sphere)
            and constraint != self.constraint
        ):
            return f"the pairs are those of states in {self.constraint}, and rows stay in {constraint}."
        return flaw

    def __repr__(self) -> str:
        return f"PairTerm({self.penalty!r})"


def penalty_flaw(penalty: Penalty) -> str | None:
    """Return a sentence saying where δ fails to be a penalty on its domain; ``None`` if nowhere."""
    flaw = penalty.flaw()
    if flaw is None:
        return None
    return f"{penalty!r} is no penalty on {penalty.domain}: {flaw}"


def penalty_flaw_in(
    penalty: Penalty, constraint: Constraint, diameter: float
) -> str | None:
    """Return a sentence saying that δ fails to be a penalty, or has a domain too small for C, or ``None``."""
    flaw = penalty_flaw(penalty)
    if flaw is not None or penalty.covers(diameter):
        return flaw
    limit = penalty.domain[1]
    return (
        f"{penalty!r} is concave up to squared distance {limit:g}, and {constraint} lets rows be "
        f"{diameter * diameter:g} apart. Take a ball or sphere of radius <= {limit**0.5 / 2:g}, or another penalty."
    )
