"""``CertifiedConv``: attention, graph, source, activation and normalisation in one step that never raises an energy."""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import add
from types import NoneType
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, IdentityCoupling, ProjectedCoupling, ScaledCoupling
from diffusion_mp.couplings.weighted import averaged, contracting
from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity, Positive
from diffusion_mp.diffusivities.base import check_heads_divide
from diffusion_mp.energies import (
    Ball,
    Certificate,
    Constraint,
    JointEnergy,
    Unconstrained,
    certify_step,
)
from diffusion_mp.energies.certification import CERTIFIED_STEPS, broken_parameter, random_input
from diffusion_mp.energies.penalties import Penalty, SoftmaxPenalty, get_penalty
from diffusion_mp.energies.terms import (
    CouplingTerm,
    EnergyTerm,
    Majorant,
    Mean,
    ScaledTerm,
    SharedTerm,
    SourceTerm,
)
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import without_autocast
from diffusion_mp.layers.certified_block import CertifiedBlock
from diffusion_mp.updates import CertifiedStep
from diffusion_mp.updates.derivatives import basis_runs
from diffusion_mp.updates.implicit import shifted_inverse


class CertifiedConv(CertifiedBlock):
    r"""Descent steps on an energy of a source, an attention and a graph.

    z_i ← Proj_C((β h_i + (p_i − w_i) z_i + Σ_j w_ij z_j) / (β + p_i)) with W = (λ/n) (f(‖z_i − z_j‖²))_ij + μA.

    For any learned β, λ, μ > 0 the energy F(Z) = β‖Z − H‖² + (λ/2n) Σ_ij δ(‖z_i − z_j‖²) + (μ/2) Σ_ij a_ij‖z_i − z_j‖²
    + Σ_i ι_C(z_i) does not rise (Theorem T1 of docs/certified.md); :meth:`energy` returns it. n is the number of nodes
    of the graph, H the ``source`` of the call, by default x, δ the penalty with δ′ = f, w_i the row sums of W, p_i the
    majorant of `CertifiedStep`. States outside C are projected onto it first.

    Args:
        channels, heads: of the state; without projections the heads cut it, each with its own constraint and attention.
        penalty: δ or its name; ``None`` leaves out the attention, the sum over δ.
        projection: ``"tied"``: head h measures ‖W_h(z_i − z_j)‖ with a learned W_h [channels / H, channels], divided by
            max(1, ‖W_h‖₂), and all heads move the uncut state together.
        constraint, radius: C, the constraint on every row of a head; see `CertifiedStep`.
        beta, lam, mu: initial β, λ, μ > 0; they are learned.
        graph: A, a symmetric and nonnegative diffusivity, evaluated at the source, so that A is the same in every step.
            ``True``: D^-½AD^-½ of the symmetric part of the graph; ``False``: edges are not read.
        num_layers: number of steps; ``None`` iterates to a stationary point of F, the minimiser where C is convex and
            there is no attention, differentiated implicitly.

    Shapes:
        x, output, source (x by default): [N, channels]; edges and batch as in :class:`DiffusionConv`; beside: a
        symmetric and nonnegative coupling of the same nodes that is added to A.

    Raises:
        CouplingMismatchError: A does not declare that it is symmetric and nonnegative.

    Examples:
        >>> CertifiedConv(4, lam=1.0, mu=1.0)(0.1 * x, edge_index).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        channels: int,
        *,
        penalty: Penalty | str | None = "simple",
        heads: int = 1,
        projection: Literal["tied"] | None = None,
        constraint: Constraint | str | None = "ball",
        radius: float = 1.0,
        beta: float = 1.0,
        lam: float = 1.0,
        mu: float = 1.0,
        graph: bool | Diffusivity = True,
        num_layers: int | None = 1,
    ) -> None:
        super().__init__(channels, (), num_layers, constraint=constraint, radius=radius, beta=beta)
        errors.check_positive(lam, "lam")
        errors.check_positive(mu, "mu")
        errors.check_counts(heads=heads)
        errors.check_choice(projection, "projection", [None, "tied"])
        errors.check_kind(graph, "graph", (bool, Diffusivity), "a Diffusivity, True or False")
        errors.check_kind(
            penalty, "penalty", (Penalty, str, NoneType), "a Penalty, the name of one, or None"
        )
        check_heads_divide(channels, heads)
        self.heads = heads if projection is None else 1
        self.lam = None if penalty is None else Positive(lam)
        self.mu = Positive(mu)
        self.attention: PairAttraction | None = None
        if penalty is not None:
            found = (
                SoftmaxPenalty(channels // heads) if penalty == "softmax" else get_penalty(penalty)
            )
            self.attention = PairAttraction(found, heads, self.update, projection)
        tied = projection is not None and penalty is not None
        self.weight = (
            nn.Parameter(torch.empty(heads, channels // heads, channels)) if tied else None
        )
        self.graph_term: Diffusivity | None = graph if isinstance(graph, Diffusivity) else None
        if graph is True:
            self.graph_term = AdjacencyDiffusivity("sym", direction="undirected")
        self._draw()

    def _draw(self) -> None:
        if self.weight is not None:
            nn.init.uniform_(self.weight, -(self.in_channels**-0.5), self.in_channels**-0.5)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        beside: Coupling | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, Coupling | list[Coupling]]:
        """Return the last state, and with ``return_coupling`` the coupling W, of several steps a list."""
        graph = self.inputs_to_graph(x, edge_index, edge_weight, batch, return_coupling, others)
        if (
            x.device != self.mu.raw.device
        ):  # a layer may have scalar parameters alone, which are not looked at there
            errors.check_device(x, "x", self.mu.raw.device, "the parameters of CertifiedConv")
        if beside is not None:
            errors.check_kind(beside, "beside", Coupling, "a Coupling of the same nodes, or None")
        if source is not None:
            errors.check_state(source, "source", self.in_channels, module=self)
            errors.check_rows(source, "source", x)
        couplings: list[Coupling] | None = [] if return_coupling else None
        source = x if source is None else source
        for state in self.states(source, graph, couplings, x, beside=beside):  # noqa: B007  # only the last one is kept
            pass
        if couplings is None:
            return state
        return state, couplings[0] if self.num_layers == 1 else couplings

    def made(  # type: ignore[override]
        self, source: Float[Tensor, "N C"], graph: Graph, beside: Coupling | None = None
    ) -> list[EnergyTerm]:
        return [AttractionTerm(self, self._fixed(source, graph, beside))]

    def energy(  # type: ignore[override]
        self, source: Float[Tensor, "N C"], graph: Graph, beside: Coupling | None = None
    ) -> JointEnergy:
        """Return F, a function of states by head (:meth:`by_head`)."""
        errors.check_kind(graph, "graph", Graph, "a Graph(num_nodes, edge_index)")
        return self.joint(self._fixed(source, graph, beside), graph, self.by_head(source))

    def joint(
        self, fixed: Coupling | None, graph: Graph, source: Tensor | None = None
    ) -> JointEnergy:
        """Return the energy of all pairs and the graph, and of a source by head if there is one."""
        penalty = None if self.attention is None else self.attention.penalty
        terms: dict[str, Any] = {
            "lam": 1.0 if self.lam is None else self.lam(),
            "graph_term": fixed,
            "mu": self.mu(),
        }
        terms |= {
            "constraint": self.update.constraint,
            "projection": self.projection,
            "ptr": graph.segments,
        }
        return JointEnergy(penalty, **terms, mean=True, source=source, beta=self.beta())

    @torch.no_grad()
    def energies(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        beside: Coupling | None = None,
        by_graph: bool = False,
        **others: Any,
    ) -> Float[Tensor, " states"] | Float[Tensor, "states B"]:
        """Return F of Z⁰ and after every step (or of the limit) of a call with these inputs, in float64.

        With ``by_graph``, F of every graph of a batch: [states, B].
        """
        errors.check_flags(by_graph=by_graph)
        graph = self._graph(x, edge_index, edge_weight, batch, others=others)
        source = x if source is None else source
        energy = self.energy(source, graph, beside)
        states = [
            self.by_head(state) for state in self.states(source, graph, start=x, beside=beside)
        ]
        return torch.stack(
            [energy.by_graph(state) if by_graph else energy(state) for state in states]
        )

    @torch.no_grad()
    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        beside: Coupling | None = None,
        **others: Any,
    ) -> Certificate:
        """Certify that no step raises F from this state (`certify_step`), or without x from a random one."""
        broken = broken_parameter(self)
        if broken is not None:
            return Certificate.refused("Theorem T1", math.nan, broken)
        if x is None:
            x, edge_index, _ = random_input(self.in_channels, self.mu.raw)
        graph = self._graph(x, edge_index, edge_weight, batch, others=others)
        state = self.update.constraint.project(self.by_head(x))
        source = x if source is None else source
        (term,) = cast("list[AttractionTerm]", self.made(source, graph, beside))
        (coupling,), h = term.attention(state, graph), self.by_head(source)
        steps = self.num_layers or CERTIFIED_STEPS
        certificate = certify_step(self.joint(term.fixed, graph, h), coupling, state, steps=steps)
        if not certificate or self.num_layers is None:
            return certificate
        _, first, *later = self.states(source, graph, start=x, beside=beside)
        step = CertifiedStep(float(self.beta()), constraint=self.update.constraint)
        expected = step(state, coupling, source=h).flatten(1)
        last = [first, *later][-1]
        out = cast("Tensor", self.forward(x, graph, source=source, beside=beside))
        # A subclass may compute something else than these states.
        if _close(first, expected) and (_close(out, last) or not bool(last.isfinite().all())):
            return certificate
        reason = "does not move the state as the certified step of its energy does."
        if not bool(first.isfinite().all()):
            reason = f"moves the state where {first.dtype} has no numbers: β, λ, μ or the penalty are too large for it."
        return Certificate.refused("Theorem T1", math.nan, f"{type(self).__name__} {reason}")

    def limit(
        self, state: Float[Tensor, "N H D"], terms: list[EnergyTerm], graph: Graph
    ) -> Float[Tensor, "N H D"]:
        """Return the limit of the steps, without attention and constraint (β + μL)⁻¹ βH."""
        if self.attention is not None or not isinstance(self.update.constraint, Unconstrained):
            return self.iterated(state, terms, graph)
        attraction, source = cast("tuple[AttractionTerm, ScaledTerm]", terms)
        h = cast("SourceTerm", source.term).source
        fixed = attraction.fixed
        if fixed is None:
            return h.clone()  # what a layer returns can be written to
        beta = self.beta()
        mu = self.mu()
        rest = None
        if basis_runs(fixed.heads * fixed.num_nodes**2):
            rest = fixed.laplacian_function(lambda rate: beta / (beta + mu * rate), h)
        if rest is None and fixed.whole:  # a solve needs all rows
            # In double, where the gradient of μ/β is a difference of two large numbers.
            pulls = ScaledCoupling(mu.double() / beta.double(), fixed, nonnegative=True)
            solution = shifted_inverse(
                pulls, "conservative", 1.0, h.double(), h.dtype, what="the state at rest"
            )
            rest = solution.to(h.dtype)
        return self.iterated(state, terms, graph) if rest is None else rest

    @property
    def projection(self) -> Float[Tensor, "H D C"] | None:
        """The projections divided to norm at most one, in float32 or wider, since rounding may lengthen them."""
        return None if self.weight is None else contracting(self.weight)

    def _fixed(
        self, source: Float[Tensor, "N C"], graph: Graph, beside: Coupling | None
    ) -> Coupling | None:
        if self.graph_term is None or (graph.edge_index is None and self.graph_term.needs_graph):
            return beside
        edges: Coupling = self.graph_term(source, graph)
        return edges if beside is None else edges + beside

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, projection={None if self.weight is None else 'tied'!r}"


def _close(x: Tensor, expected: Tensor) -> bool:
    """Return whether two states are the same up to the root of rounding, since an energy sees errors squared."""
    return bool((x - expected).norm() <= torch.finfo(x.dtype).eps ** 0.5 * expected.norm())


class AttractionTerm(SharedTerm):
    """The terms of all pairs and of the graph in one; modules make their W, so also for some of the rows at a time."""

    def __init__(self, layer: CertifiedConv, fixed: Coupling | None) -> None:
        self.layer = layer
        self.fixed = fixed
        self.quadratic = layer.attention is None
        self.mu = layer.mu()
        self.lam = None if layer.lam is None else layer.lam()
        self.projection = layer.projection

    def value(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, ""]:
        return self.layer.joint(self.fixed, graph)(z)

    def by_graph(self, z: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, " B"]:
        return self.layer.joint(self.fixed, graph).by_graph(z)

    def majorant(self, z: Float[Tensor, "N H D"], graph: Graph, convex: bool) -> Majorant:
        near = z - graph.centre(z)
        parts = []
        for weight, coupling in self.weighted(z, graph):
            product, sums = coupling.majorized(near, convex)
            parts.append((weight * product, weight * sums))
        if not parts:
            return Majorant(torch.zeros_like(z), z.new_zeros(1, 1, 1))
        half, damping = map(partial(reduce, add), zip(*parts, strict=True))
        return Majorant(half, damping)

    def weighted_mean(self, z: Float[Tensor, "N H D"]) -> Mean | None:
        if self.fixed is None or not self.quadratic:
            return None
        return ScaledTerm(self.mu, CouplingTerm(self.fixed)).weighted_mean(z)

    def attention(self, z: Float[Tensor, "N H D"], graph: Graph) -> list[Coupling]:
        terms = [
            ScaledCoupling(weight, coupling, nonnegative=True)
            for weight, coupling in self.weighted(z, graph)
        ]
        return [
            reduce(add, terms)
            if terms
            else 0.0 * IdentityCoupling(len(z), dtype=z.dtype, device=z.device)
        ]

    def weighted(self, z: Float[Tensor, "N H D"], graph: Graph) -> list[tuple[Tensor, Coupling]]:
        """Return μ and A, and λ and the coupling of all pairs."""
        found = [] if self.fixed is None else [(self.mu, self.fixed)]
        attention = self.layer.attention
        lam = self.lam
        projection = self.projection
        if attention is None or lam is None:
            return found
        seen = z
        if projection is not None:
            with without_autocast(z):
                seen = torch.einsum("hdc,nc->nhd", projection, z.squeeze(1).to(projection))
        pairs = attention(seen.flatten(1), graph)
        if graph.segments is None:
            lam = lam / max(graph.total_nodes, 1)
        else:
            pairs = averaged(pairs)
        return [
            *found,
            (lam, pairs if projection is None else ProjectedCoupling(pairs, projection)),
        ]


class PairAttraction(Diffusivity):
    """Ω = (f(‖z_i − z_j‖²))_ij of a penalty, head by head, for states in a constraint within its domain."""

    depends_on = "rows"
    symmetric = True

    def __init__(
        self, penalty: Penalty, heads: int, update: CertifiedStep, projection: str | None
    ) -> None:
        super().__init__()
        constraint = update.constraint
        farthest = constraint.diameter**2
        limit = penalty.domain[1]
        if farthest > limit:
            raise ValueError(
                f"penalty={penalty!r} is for squared distances up to {limit:g}, beyond which its weights are negative; "
                f"constraint={constraint!r} lets states be {farthest:g} apart. Pass constraint='ball' or 'sphere' with "
                f"radius <= {limit**0.5 / 2:g}, or another penalty ('gaussian', 'softmax', 'sigmoid', 'quadratic')."
            )
        self.of_pairs = penalty
        self.heads = heads
        self.projected = projection is not None
        self.step = (update,)  # in a tuple, so that its parameters are not registered twice

    @property
    def penalty(self) -> Penalty:  # type: ignore[override]
        """δ. A property, since ``Diffusivity.penalty`` would hide a learned δ, which is a submodule."""
        return self.of_pairs

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        rows = x.unflatten(1, (self.heads, -1))
        constraint = self.step[0].constraint
        if (
            self.projected and not constraint.convex
        ):  # a projection of norm one maps a sphere into its ball
            constraint = Ball(constraint.diameter / 2)
        return self.of_pairs.coupling(
            rows, graph.segments, constraint=constraint, centre=graph.centre(rows)
        )
