"""``Energy`` of an explicit step, and ``JointEnergy``, which certified steps descend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies.constraints import Constraint, get_constraint
from diffusion_mp.energies.pairs import (
    Metric,
    State,
    by_head,
    check_heads,
    check_metric,
    edge_distance,
    large_distance,
)
from diffusion_mp.energies.penalties import (
    Penalty,
    QuadraticPenalty,
    get_penalty,
    warn_beyond_domain,
)
from diffusion_mp.energies.spectrum import Form
from diffusion_mp.energies.terms import (
    CouplingTerm,
    EnergyTerm,
    PairTerm,
    ScaledTerm,
    SourceTerm,
    check_projection,
    check_weight,
    tangents,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.checks import as_ptr, check_ptr
from diffusion_mp.graph.ops import graph_sizes


class Energy:
    r"""The energy E(Z, k) = ‖Z − Z_k‖² + λ P(Z) of a step of TfD (Wu, Wipf & Yan, 2025), in a form that descends.

    P(Z) = Σ_ij δ(‖z_i − z_j‖²) over all ordered pairs of the same graph (Eq. 13), or Σ_ij s_ij δ(‖z_i − z_j‖²) for a
    ``coupling`` S (Eq. 8). The paper's proofs write λ tr ZᵀΔZ, where λ is twice this one.

    Optional terms, with M = diag(``metric``); D21 to D24 are entries of docs/errata.md:

    * ``graph_term`` Ã (Eq. 25): λ P becomes ½λ P + ½λ Σ_ij ã_ij‖z_i − z_j‖². The step with ½Ω + ½Ã descends it for
      τ and λ of Theorem 1; that of Eq. 24, which normalises Ŝ separately, does not (D24).
    * ``source`` H with weight ``beta``, and ``leak`` κ: + λ [2κ⟨Z, MZ⟩ − 4β⟨MH, Z⟩], whose gradient step is
      z − τ(Δ + κ)z + τβh. For the row-normalised step of Theorem 7 the metric is d̄, the degrees of Ω at its start.
      Without ``x_prev`` this is F(Z), which falls from layer to layer for every τ < 2/(λ₁ + κ). Propositions 5 and 10
      print ‖Z − (Z_k + ηH)‖² + λP (``version="printed"`` with η = 2λβ), which falls within a step only (D21).
    * ``activation="relu"`` (Eq. 23): ∞ where an entry is negative. Proposition 9 holds for the step from h(Z_k) with ω
      evaluated there: pass h(Z_k) as ``x_prev``. From Z_k, as printed, it fails (D23).
    * ``laplacian="residual"``: tr Zᵀ(I − S)Z in place of tr Zᵀ(D̄ − S)Z, the energy of the residual step
      (1 − τ)z + τSz (GCN as Example 1 prints it); needs the quadratic penalty and a symmetric coupling.

    Args:
        penalty: a `Penalty` or its name.
        lam: λ > 0, for instance ``certify(...).lam``.
        coupling: S [N, N], a `SparseCoupling` for a penalty other than the quadratic one, or all pairs.
        source, metric: of the shape of x, and [N] or [N, H], by default ones; see above, as for the other terms.
        ptr: bounds [B + 1] of the graphs of a ragged batch, for the sums over all pairs.

    Shapes: x, x_prev [N, C], or [N, H, D] for H heads, whose energies add up. The result is a 0-dimensional float64
    tensor, since differences between layers are below the rounding of float32.

    Warns:
        UserWarning: two nodes are farther apart than the penalty's ``domain``, where the energy is not meaningful.

    Raises:
        CouplingMismatchError: a coupling for which the energy is not defined.

    Examples:
        >>> S = AdjacencyDiffusivity("sym")(x, graph)
        >>> energy = Energy("quadratic", lam=certify(S, tau=0.5).lam, coupling=S)
        >>> bool(energy(ExplicitEuler(tau=0.5)(x, S), x) <= energy(x, x))
        True
    """

    def __init__(
        self,
        penalty: Penalty | str,
        lam: float = 1.0,
        *,
        coupling: Coupling | None = None,
        source: State | None = None,
        beta: float = 1.0,
        leak: float = 0.0,
        metric: Metric | None = None,
        graph_term: Coupling | None = None,
        activation: Literal["relu"] | None = None,
        version: Literal["falling", "printed"] = "falling",
        laplacian: Form = "conservative",
        ptr: Tensor | None = None,
    ) -> None:
        errors.check_positive(lam, "lam")
        errors.check_positive(leak, "leak", allow_zero=True)
        errors.check_choice(version, "version", ["falling", "printed"])
        errors.check_choice(laplacian, "laplacian", ["conservative", "residual"])
        errors.check_choice(activation, "activation", ["relu", None])
        errors.check_number(beta, "beta")
        for name, other in (("coupling", coupling), ("graph_term", graph_term)):
            errors.check_kind(other, name, (Coupling, NoneType), "a Coupling or None")
        _check_terms(source, metric)
        self.penalty = get_penalty(penalty)
        self.lam = lam
        self.ptr = None if ptr is None else as_ptr(ptr)
        self.coupling = coupling
        self.graph_term = graph_term
        self.laplacian = laplacian
        self.source = source
        self.beta = beta
        self.leak = leak
        self.metric = metric
        self.activation = activation
        self.version = version
        quadratic = isinstance(self.penalty, QuadraticPenalty)
        if coupling is not None and not quadratic and not isinstance(coupling, SparseCoupling):
            raise errors.CouplingMismatchError(
                f"{type(self.penalty).__name__} over the entries of a coupling needs a SparseCoupling; got "
                f"{type(coupling).__name__}. Leave `coupling` out to sum over all pairs."
            )
        if laplacian == "residual" and not (
            coupling is not None and quadratic and coupling.symmetric
        ):
            raise errors.CouplingMismatchError(
                f"laplacian='residual' needs the quadratic penalty and a symmetric coupling; got {self.penalty!r} and "
                f"{coupling!r}."
            )

    def __call__(self, x: State, x_prev: State | None = None) -> Float[Tensor, ""]:
        """Return E(x, k) with x_prev = Z_k; without ``x_prev`` the first term is omitted."""
        self._check(x, x_prev)
        if isinstance(self.coupling, SparseCoupling):
            edges = self.coupling.graph
        else:
            edges = None
        warn_beyond_domain(self.penalty, self, x, lambda: large_distance(x, self.ptr, edges))
        return self._assemble(x, x_prev, self._pairs(x))

    def surrogate(self, x: State, x_prev: State | None, at: State) -> Float[Tensor, ""]:
        """Return Ẽ(x, k; Ω) of Eq. 14 with ω_ij = f(‖at_i − at_j‖²): at least E (Proposition 6), equal where at = x."""
        self._check(x, x_prev)
        _check_like(x, by_head, at=at)
        return self._assemble(x, x_prev, self._majorant(x, at))

    def __repr__(self) -> str:
        names = ("coupling", "source", "metric", "graph_term", "ptr")
        given = "".join(f", {name}" for name in names if getattr(self, name) is not None)
        return f"Energy({self.penalty!r}, lam={self.lam:g}, version={self.version!r}{given})"

    def _assemble(self, x: Tensor, x_prev: Tensor | None, pairs: Tensor) -> Tensor:
        energy = self.lam * pairs
        if self.graph_term is not None:
            energy = energy / 2 + self.lam / 2 * self.graph_term.dirichlet(x).double().sum()
        if self.leak:
            energy = energy + 2 * self.lam * self.leak * _inner(self._weigh(x), x)
        if self.source is not None:
            pull = 2 * self.lam * self.beta * self._weigh(self.source)
            if self.version == "falling":
                energy = energy - 2 * _inner(pull, x)
            elif x_prev is not None:
                x_prev = x_prev + pull  # completes the square around Z_k + ηMH with η = 2λβ
            else:
                raise ValueError(
                    "x_prev must be given for version='printed' with a source: Eqs. 11 and 26 measure the distance to "
                    "x_prev + ηH. Use version='falling' for an energy of x alone."
                )
        if x_prev is not None:
            energy = energy + _inner(x - x_prev, x - x_prev)
        if self.activation == "relu":
            energy = torch.where((x < 0).any(), math.inf, energy)
        return energy

    def _pairs(self, x: Tensor) -> Tensor:
        """Return P(x)."""
        if self.coupling is None:
            return self.penalty.total(x, self.ptr)
        if isinstance(self.penalty, QuadraticPenalty):
            dirichlet = self.coupling.dirichlet(x).double().sum()
            if (
                self.laplacian == "residual"
            ):  # 2 tr Zᵀ(I − S)Z = Σ s_ij‖z_i − z_j‖² + 2 Σ (1 − d_i)‖z_i‖²
                squares = by_head(x).square().sum(2, dtype=torch.float64)
                dirichlet = dirichlet + 2 * ((1 - self.coupling.degree()) * squares).sum()
            return dirichlet
        weight, z2 = self._edges(x)
        return (weight * self.penalty.delta(z2)).sum()

    def _majorant(self, x: Tensor, at: Tensor) -> Tensor:
        """Return Σ ω_ij z_ij² − δ̃(ω_ij) = Σ ω_ij(z_ij² − s_ij) + δ(s_ij), s and ω those of ``at``."""
        if isinstance(self.penalty, QuadraticPenalty):
            return self._pairs(x)
        if self.coupling is None:
            return tangents(self.penalty, x.double(), at.double(), self.ptr)
        weight, z2 = self._edges(x)
        s = self._edges(at)[1]
        return (weight * (self.penalty.f(s) * (z2 - s) + self.penalty.delta(s))).sum()

    def _edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries [E, H] of the sparse coupling and the squared distances of their nodes."""
        coupling = cast(SparseCoupling, self.coupling)  # checked at construction
        return coupling.weight.double(), edge_distance(x, coupling.graph)

    def _weigh(self, x: Tensor) -> Tensor:
        if self.metric is None:
            return x
        if self.metric.dim() == 2:
            metric = self.metric
        else:
            metric = self.metric.unsqueeze(1)
        return (metric if x.dim() == 2 else metric.unsqueeze(2)) * x

    def _check(self, x: Tensor, x_prev: Tensor | None) -> None:
        _check_state(self, x)
        _check_like(x, x_prev=x_prev, source=self.source)
        for what, coupling in (("coupling", self.coupling), ("graph_term", self.graph_term)):
            if coupling is None:
                continue
            errors.check_device(x, "x", coupling.device, what)
            if coupling.num_nodes != x.size(0):
                raise ValueError(
                    f"{what} must have {x.size(0)} nodes as the state does; got {coupling!r}."
                )
            if coupling.heads > 1 and (x.dim() == 2 or x.size(1) != coupling.heads):
                raise ValueError(
                    f"{what} has {coupling.heads} heads, so the state must be [num_nodes, {coupling.heads}, channels]; "
                    f"got {errors.describe(x)}."
                )


class JointEnergy:
    r"""The energy of certified steps: source, pairs, graph and constraint in one.

    F(Z) = β‖Z − H‖²_M + (λ/2) Σ_ij δ(‖z_i − z_j‖²) + (μ/2) Σ_ij a_ij‖z_i − z_j‖² + Σ_i ι_C(z_i).

    A `CertifiedStep` never raises it (Theorems T1, T11 of docs/certified.md). Pairs lie in the same graph, and F is ∞
    outside of C, up to rounding. With a ``projection`` W [H, D, C] a pair costs Σ_h δ(‖W_h(z_i − z_j)‖²). O(N d²) for
    the simple and the quadratic penalty, O(N² d) time and O(N d) memory for others.

    Args:
        penalty: δ, a `Penalty` or its name; None omits the term, as for A and H.
        lam, mu, beta: λ, μ, β ≥ 0, numbers or 0-dimensional tensors.
        graph_term, source, metric: A, a coupling; H, of the shape of the state; M, [N] or [N, H], by default ones.
        constraint, radius: C, as `CertifiedStep` takes it.
        projection: W [H, D, C], for a state of one head.
        ptr: bounds [B + 1] of the graphs of a ragged batch.
        mean: divide the penalty of a graph, and the Ω of the step, by its number of nodes.
        terms: further terms of F, each an `EnergyTerm` (Theorem T11).
        graph: what the terms read, by default the nodes without edges; its batch replaces ``ptr``.

    Shapes: x [N, C] or [N, H, D], heads add up; the result is a 0-dimensional float64 tensor.

    Examples:
        >>> energy = JointEnergy("simple", graph_term=AdjacencyDiffusivity("sum")(x, graph), source=0.1 * x)
        >>> energy(0.1 * x).shape
        torch.Size([])
    """

    def __init__(
        self,
        penalty: Penalty | str | None = None,
        lam: float | Tensor = 1.0,
        *,
        graph_term: Coupling | None = None,
        mu: float | Tensor = 1.0,
        source: State | None = None,
        beta: float | Tensor = 1.0,
        metric: Metric | None = None,
        constraint: str | Constraint | None = None,
        radius: float = 1.0,
        projection: Float[Tensor, "heads seen channels"] | None = None,
        ptr: Tensor | None = None,
        mean: bool = False,
        terms: Sequence[EnergyTerm] = (),
        graph: Graph | None = None,
    ) -> None:
        errors.check_flags(mean=mean)
        for name, number in (("lam", lam), ("mu", mu), ("beta", beta)):
            check_weight(number, name)
            errors.check_positive(_number(number), name, allow_zero=True)
        errors.check_kind(graph_term, "graph_term", (Coupling, NoneType), "a Coupling or None")
        _check_terms(source, metric)
        check_projection(projection)
        self.lam = lam
        self.mu = mu
        self.beta = beta
        self.graph_term = graph_term
        self.source = source
        self.metric = metric
        self.constraint = get_constraint(constraint, radius)
        self.projection = projection
        self.penalty = None if penalty is None else get_penalty(penalty)
        self.pairs: PairTerm | None = None  #: The term of all pairs, without λ.
        if self.penalty is not None:
            self.pairs = PairTerm(self.penalty, projection, mean=mean, constraint=self.constraint)
        errors.check_kind(graph, "graph", (Graph, NoneType), "a Graph or None")
        ptr = ptr if graph is None else graph.segments
        self.ptr = None if ptr is None else as_ptr(ptr)
        self.mean = mean
        self.given = graph
        errors.check_kind(terms, "terms", Sequence, "a list of terms, each an EnergyTerm")
        for term in terms:
            errors.check_kind(term, "every one of terms", EnergyTerm, "an EnergyTerm")
        self.further = tuple(terms)

    @property
    def terms(self) -> list[EnergyTerm]:
        """All terms of F, with their weights, as `CertifiedStep.descend` takes them."""
        terms: list[EnergyTerm] = [] if self.pairs is None else [ScaledTerm(self.lam, self.pairs)]
        if self.graph_term is not None:
            terms.append(ScaledTerm(self.mu, CouplingTerm(self.graph_term)))
        if self.source is not None:
            terms.append(ScaledTerm(self.beta, SourceTerm(self.source, self.metric)))
        return [*terms, *self.further]

    def graph(self, x: State) -> Graph:
        if self.given is None:
            return Graph(x.size(0), ptr=self.ptr, validate=False)
        return self.given

    def __call__(self, x: State, x_prev: State | None = None) -> Float[Tensor, ""]:
        """Return F(x). ``x_prev`` is ignored; it is accepted so that the signature is that of `Energy`."""
        self._check(x)
        if self.pairs is not None and not self.pairs.penalty.covers(
            self.constraint.diameter
        ):  # F is ∞ otherwise
            seen = self.pairs.seen
            warn_beyond_domain(
                self.pairs.penalty, self, x, lambda: large_distance(seen(by_head(x)), self.ptr)
            )
        return self._confined(x, (term.value(by_head(x), self.graph(x)) for term in self.terms))

    def by_graph(self, x: State) -> Float[Tensor, " B"]:
        """Return F(x) of every graph of the batch, in float64; of one graph [1]. Their sum is F(x)."""
        self._check(x)
        z = by_head(x)
        graph = self.graph(x)
        values = x.new_zeros(graph.num_graphs, dtype=torch.float64)
        for term in self.terms:
            values = values + term.by_graph(z, graph)
        if bool(self.constraint.holds(z)):
            return values
        parts = z.split(graph_sizes(graph.segments, len(z)))
        inside = torch.stack([self.constraint.holds(part) for part in parts])
        return torch.where(inside, values, math.inf)

    def surrogate(self, x: State, at: State) -> Float[Tensor, ""]:
        """Return the majoriser Q(x) ≥ F(x), with δ replaced by its tangents at the distances of ``at``."""
        self._check(x)
        _check_like(x, by_head, at=at)
        z = by_head(x)
        start = by_head(at)
        graph = self.graph(x)
        return self._confined(x, (term.surrogate(z, start, graph) for term in self.terms))

    def _confined(self, x: Tensor, values: Iterable[Tensor]) -> Tensor:
        total = sum(values, x.new_zeros((), dtype=torch.float64))
        return torch.where(self.constraint.holds(by_head(x)), total, math.inf)

    def __repr__(self) -> str:
        if self.penalty is None and self.further:
            terms = []
        else:
            terms = [repr(self.penalty), f"lam={_number(self.lam):g}"]
        terms += [] if self.graph_term is None else [f"mu={_number(self.mu):g}"]
        terms += [] if self.source is None else [f"beta={_number(self.beta):g}"]
        given = [
            name for name in ("metric", "projection", "ptr") if getattr(self, name) is not None
        ]
        given += ["mean"] if self.mean else []
        terms += map(repr, self.further)
        return f"JointEnergy({', '.join([*terms, f'constraint={self.constraint}', *given])})"

    def _check(self, x: Tensor) -> None:
        _check_state(self, x)
        if self.given is not None and self.given.num_nodes != len(x):
            raise ValueError(
                f"x must have {self.given.num_nodes} rows, one per node of the graph; got {len(x)}."
            )
        _check_like(x, by_head, source=self.source)


def _check_terms(source: State | None, metric: Tensor | None) -> None:
    if source is not None:
        check_heads(source, "source")
    if metric is not None:
        errors.check_tensor(metric, "metric", "[num_nodes] or [num_nodes, heads]")


def _check_state(energy: Energy | JointEnergy, x: Tensor) -> None:
    """Raise unless ``x`` is a state of the graphs, and with a node for every entry of the metric, of an energy."""
    check_heads(x)
    if energy.ptr is not None:
        check_ptr(x.size(0), energy.ptr)
    if energy.metric is not None:
        check_metric(energy.metric, x)


def _check_like(
    x: Tensor, layout: Callable[[Tensor], Tensor] = lambda t: t, **others: Tensor | None
) -> None:
    """Raise unless the other states, in this layout, have the shape of the state ``x``, and its device."""
    for name, other in others.items():
        if other is None:
            continue
        check_heads(other, name)
        if layout(other).shape != layout(x).shape:
            raise ValueError(
                f"{name} must have the shape {list(x.shape)} of the state; got {errors.describe(other)}."
            )
        errors.check_device(other, name, x.device, "the state")


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else value
