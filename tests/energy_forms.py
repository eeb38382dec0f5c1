"""Energies by the names of their parts, as theorems write them; each is a sum of terms of the library."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies import (
    Constraint,
    CouplingTerm,
    EdgeTerm,
    Energy,
    EnergyTerm,
    LinearTerm,
    PairTerm,
    Penalty,
    ProximalTerm,
    QuadraticPenalty,
    SourceTerm,
    get_constraint,
    get_penalty,
)
from diffusion_mp.graph import Graph


class Joint(Energy):
    """F of Theorem T1: β‖Z − H‖²_M + (λ/2) Σ δ + (μ/2) Σ a_ij‖z_i − z_j‖², and further terms."""

    def __init__(
        self,
        penalty: Penalty | str | None = None,
        lam: float | Tensor = 1.0,
        *,
        graph_term: Coupling | None = None,
        mu: float | Tensor = 1.0,
        source: Tensor | None = None,
        beta: float | Tensor = 1.0,
        metric: Tensor | None = None,
        constraint: str | Constraint | None = None,
        radius: float = 1.0,
        projection: Tensor | None = None,
        ptr: Tensor | None = None,
        mean: bool = False,
        terms: tuple[EnergyTerm, ...] | list[EnergyTerm] = (),
        graph: Graph | None = None,
    ) -> None:
        self.penalty = None if penalty is None else get_penalty(penalty)
        self.lam = lam
        self.graph_term = graph_term
        self.mu = mu
        self.source = source
        self.beta = beta
        self.metric = metric
        self.constraint = get_constraint(constraint, radius)
        self.projection = projection
        self.ptr = ptr
        self.mean = mean
        self.further = tuple(terms)
        self.graph = graph

    @property
    def terms(self) -> tuple[EnergyTerm, ...]:
        terms: list[EnergyTerm] = []
        if self.penalty is not None:
            pairs = PairTerm(
                self.penalty,
                self.projection,
                mean=self.mean,
                constraint=self.constraint,
            )
            terms.append(self.lam * pairs)
        if self.graph_term is not None:
            terms.append(self.mu * CouplingTerm(self.graph_term))
        if self.source is not None:
            terms.append(self.beta * SourceTerm(self.source, self.metric))
        return (*terms, *self.further)

    def graph_of(self, z: Tensor) -> Graph:
        return Graph(len(z), ptr=self.ptr) if self.graph is None else self.graph


@dataclass(eq=False)
class Explicit(Energy):
    """E(Z, k) of an explicit step (Wu, Wipf & Yan 2025, Eqs. 8, 13, 25), where λ multiplies Σ_ij.

    ``printed`` has the source of Eqs. 11 and 26, ‖Z − (Z_k + ηMH)‖² with η = 2λβ, in place of −4λβ⟨MH, Z⟩, with which
    the energy falls from layer to layer (D21 of docs/errata.md). ``residual`` takes tr Zᵀ(I − S)Z.
    """

    penalty: Penalty | str
    lam: float = 1.0
    _: KW_ONLY
    coupling: Coupling | None = None
    source: Tensor | None = None
    beta: float = 1.0
    leak: float = 0.0
    metric: Tensor | None = None
    graph_term: Coupling | None = None
    constraint: str | None = None
    printed: bool = False
    residual: bool = False
    ptr: Tensor | None = None

    def __post_init__(self) -> None:
        self.penalty = get_penalty(self.penalty)
        self.constraint = get_constraint(self.constraint)

    def pairs(self) -> EnergyTerm:
        if self.coupling is None:
            return PairTerm(self.penalty)
        if isinstance(self.penalty, QuadraticPenalty):
            return CouplingTerm(self.coupling)
        assert isinstance(self.coupling, SparseCoupling)
        return EdgeTerm(self.penalty, self.coupling)

    def __call__(self, x: Tensor, x_prev: Tensor | None = None) -> Tensor:
        pairs = self.pairs()
        terms = [pairs]
        if self.graph_term is not None:
            terms = [0.5 * pairs, 0.5 * CouplingTerm(self.graph_term)]
        nothing = torch.zeros_like(x)
        if self.residual:
            assert self.coupling is not None
            terms.append(SourceTerm(nothing, 1 - self.coupling.degree()))
        terms.append(self.leak * SourceTerm(nothing, self.metric))
        if self.source is not None:
            pull = self.beta * self.weighted(self.source)
            if self.printed:
                x_prev = x_prev + 2 * self.lam * pull
            else:
                terms.append(LinearTerm(pull))
        energy = Energy(
            [ProximalTerm(), *(2 * self.lam * term for term in terms)],
            self.constraint,
            graph=Graph(len(x), ptr=self.ptr),
        )
        return energy(x, x_prev)

    def weighted(self, source: Tensor) -> Tensor:
        if self.metric is None:
            return source
        shape = [*self.metric.shape, *[1] * (source.dim() - self.metric.dim())]
        return self.metric.view(shape) * source

    def surrogate(self, x: Tensor, x_prev: Tensor | None, at: Tensor) -> Tensor:
        """Ẽ of Eq. 14: with δ replaced by its tangents at the distances of another state."""
        value = self(x, x_prev)
        pairs = self.pairs()
        if isinstance(pairs, CouplingTerm):
            return value
        graph = Graph(len(x), ptr=self.ptr)
        states = [
            z if z.dim() == 3 else z.unsqueeze(1) for z in (x.double(), at.double())
        ]
        omega = CouplingTerm(pairs.pull(states[1], graph))
        tangent = pairs.value(states[1], graph)
        for sign, z in zip((1, -1), states, strict=True):
            seen = pairs.projected(z) if isinstance(pairs, PairTerm) else z
            tangent = tangent + sign * omega.value(seen, graph)
        return value + 2 * self.lam * (tangent - pairs.value(states[0], graph))
