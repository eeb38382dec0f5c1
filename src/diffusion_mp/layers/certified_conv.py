"""``CertifiedConv``: attention, graph, source, activation and normalisation in one step that never raises an energy."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, IdentityCoupling, ProjectedCoupling, ScaledCoupling, SumCoupling
from diffusion_mp.couplings.weighted import averaged, contracting
from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity, Positive
from diffusion_mp.diffusivities.base import check_heads_divide
from diffusion_mp.energies import Ball, Certificate, Constraint, JointEnergy, Unconstrained, certify_step
from diffusion_mp.energies.certification import broken_parameter, random_input
from diffusion_mp.energies.penalties import Penalty, SoftmaxPenalty, get_penalty
from diffusion_mp.energies.terms import CouplingTerm, ScaledTerm, SourceTerm
from diffusion_mp.errors import check_choice, check_counts, check_device, check_kind, check_positive, check_state
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import without_autocast
from diffusion_mp.layers.diffusion_conv import CertifiableLayer
from diffusion_mp.updates import CertifiedStep, Equilibrium


class CertifiedConv(CertifiableLayer):
    r"""One step down an energy of source, attention and graph.

    z_i ← Proj_C((β h_i + (p_i − w_i) z_i + Σ_j w_ij z_j) / (β + p_i)) with W = (λ/n) (f(‖z_i − z_j‖²))_ij + μA.

    For any learned β, λ, μ > 0 the energy F(Z) = β‖Z − H‖² + (λ/2n) Σ_ij δ(‖z_i − z_j‖²) + (μ/2) Σ_ij a_ij‖z_i − z_j‖²
    + Σ_i ι_C(z_i) does not rise (Theorem T1 of docs/certified.md); :meth:`energy` returns it. n is the number of nodes
    of the graph, H the ``source`` of the call, δ the penalty with δ′ = f, w_i the row sums of W, p_i the majorant of
    `CertifiedStep`. States outside C are projected onto it first.

    Args:
        channels, heads: of the state; without projections the heads cut it, each with its own constraint and attention.
        penalty: δ or its name; ``None`` leaves out the attention, the sum over δ.
        projection: ``"tied"``: head h measures ‖W_h(z_i − z_j)‖ with a learned W_h [channels / H, channels], divided by
            max(1, ‖W_h‖₂), and all heads move the uncut state together.
        constraint, radius: C, the constraint on every row of a head; see `CertifiedStep`.
        beta, lam, mu: initial β, λ, μ > 0; they are learned.
        graph: A, a symmetric and nonnegative diffusivity, evaluated at the source, so that A is the same in every step.
            ``True``: D^-½AD^-½ of the symmetric part of the graph; ``False``: edges are not read.

    Shapes:
        x, output, source (x by default): [N, channels]; edges and batch as in :class:`DiffusionConv`; beside: a
        symmetric and nonnegative coupling of the same nodes that is added to A.

    Raises:
        CouplingMismatchError: A does not declare that it is symmetric and nonnegative.

    Examples:
        >>> CertifiedConv(4, lam=1.0, mu=1.0)(0.1 * x, edge_index).shape
        torch.Size([6, 4])
    """

    is_diffusion_layer = True
    why_uncertified: str | None = None

    def __init__(
        self, channels: int,
        *, penalty: Penalty | str | None = "simple", heads: int = 1, projection: Literal["tied"] | None = None,
        constraint: Constraint | str | None = "ball", radius: float = 1.0, beta: float = 1.0, lam: float = 1.0,
        mu: float = 1.0, graph: bool | Diffusivity = True,
    ) -> None:  # fmt: skip
        super().__init__()
        check_counts(channels=channels, heads=heads)
        for name, weight in (("beta", beta), ("lam", lam), ("mu", mu)):
            check_positive(weight, name)
        check_choice(projection, "projection", [None, "tied"])
        check_kind(graph, "graph", (bool, Diffusivity), "a Diffusivity, True or False")
        check_kind(penalty, "penalty", (Penalty, str, NoneType), "a Penalty, the name of one, or None")
        check_heads_divide(channels, heads)
        self.in_channels = self.out_channels = channels
        self.heads = heads if projection is None else 1
        self.update = CertifiedStep(Positive(beta), constraint=constraint, radius=radius)
        self.lam, self.mu = None if penalty is None else Positive(lam), Positive(mu)
        self.attention: PairAttraction | None = None
        self.weight: nn.Parameter | None = None
        if penalty is not None:
            found = SoftmaxPenalty(channels // heads) if penalty == "softmax" else get_penalty(penalty)
            self.attention = PairAttraction(found, heads, self.update, projection)
            if projection is not None:
                self.weight = nn.Parameter(torch.empty(heads, channels // heads, channels))
        self.graph_term: Diffusivity | None = graph if isinstance(graph, Diffusivity) else None
        if graph is True:
            self.graph_term = AdjacencyDiffusivity("sym", direction="undirected")
        self._draw()

    def _draw(self) -> None:
        if self.weight is not None:
            nn.init.uniform_(self.weight, -(self.in_channels**-0.5), self.in_channels**-0.5)

    def forward(
        self, x: Tensor, edge_index: Tensor | Graph | None = None, edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *, source: Tensor | None = None, beside: Coupling | None = None, return_coupling: bool = False, **others: Any,
    ) -> Tensor | tuple[Tensor, Coupling]:  # fmt: skip
        """Return the next state, and with ``return_coupling`` the coupling W."""
        graph = self.inputs_to_graph(x, edge_index, edge_weight, batch, return_coupling, others)
        if x.device != self.mu.raw.device:  # a layer may have scalar parameters alone, which are not looked at there
            check_device(x, "x", self.mu.raw.device, "the parameters of CertifiedConv")
        if beside is not None:
            check_kind(beside, "beside", Coupling, "a Coupling of the same nodes, or None")
        if source is not None:
            check_state(source, "source", self.in_channels, module=self)
            check_device(source, "source", x.device, "x")
        state, source = self._begin(x, source)
        weighted, centre = self._couplings(state, graph, source, beside), graph.centre(state)
        terms = [ScaledTerm(weight, CouplingTerm(coupling, centre)) for weight, coupling in weighted]
        beta = cast("Positive", self.update.source_weight)()
        terms.append(ScaledTerm(beta, SourceTerm(source.unflatten(1, (self.heads, -1)))))
        out = self.update.descend(state, terms, graph).flatten(1)
        return (out, self._sum(weighted, state)) if return_coupling else out

    def _begin(self, x: Float[Tensor, "N C"], source: Tensor | None) -> tuple[Float[Tensor, "N H D"], Tensor]:
        """The projected state by head, and the source, by default the projected state."""
        state = self.update.constraint.project(x.unflatten(1, (self.heads, -1)))
        return state, state.flatten(1) if source is None else source

    def coupling(
        self, state: Float[Tensor, "N H D"], graph: Graph, source: Float[Tensor, "N C"], beside: Coupling | None = None
    ) -> Coupling:
        """Return W at a state by head (:meth:`by_head`)."""
        return self._sum(self._couplings(state, graph, source, beside), state)

    def _sum(self, weighted: list[tuple[Tensor, Coupling]], state: Tensor) -> Coupling:
        terms = [ScaledCoupling(weight, coupling, nonnegative=True) for weight, coupling in weighted]
        if not terms:
            return 0.0 * IdentityCoupling(len(state), dtype=state.dtype, device=state.device)
        return terms[0] if len(terms) == 1 else SumCoupling(terms)

    def _couplings(
        self, state: Float[Tensor, "N H D"], graph: Graph, source: Float[Tensor, "N C"], beside: Coupling | None
    ) -> list[tuple[Tensor, Coupling]]:
        """Return μ and A, and λ and the coupling of all pairs."""
        fixed = self._fixed(source, graph, beside)
        found = [] if fixed is None else [(self.mu(), fixed)]
        if self.attention is not None and self.lam is not None:
            projection = None if self.weight is None else self.projection
            seen = state
            if projection is not None:
                with without_autocast(state):
                    seen = torch.einsum("hdc,nc->nhd", projection, state.squeeze(1).to(projection))
            pairs = self.attention(seen.flatten(1), graph)
            lam = self.lam()
            if graph.segments is None:
                lam = lam / max(graph.total_nodes, 1)
            else:
                pairs = averaged(pairs)
            if projection is not None:
                pairs = ProjectedCoupling(pairs, projection)
            found.append((lam, pairs))
        return found

    def energy(self, graph: Graph, source: Float[Tensor, "N C"], beside: Coupling | None = None) -> JointEnergy:
        """Return F, a function of states by head (:meth:`by_head`)."""
        penalty = None if self.attention is None else self.attention.penalty
        lam = 1.0 if self.lam is None else self.lam()
        terms: dict[str, Any] = {"graph_term": self._fixed(source, graph, beside), "mu": self.mu()}
        terms |= {"source": self.by_head(source), "beta": self.beta(), "constraint": self.update.constraint}
        return JointEnergy(penalty, lam, **terms, projection=self.projection, ptr=graph.segments, mean=True)

    def _certificate(  # type: ignore[override]
        self, x: Tensor | None, graph: Graph | None, source: Tensor | None, *, beside: Coupling | None = None
    ) -> Certificate:
        """Certify that no step raises F from this state (`certify_step`), or without x from a random one."""
        broken = broken_parameter(self)
        if broken is not None:
            return Certificate.refused("Theorem T1", math.nan, broken)
        if x is None or graph is None:
            x, edge_index, _ = random_input(self.in_channels, self.mu.raw)
            graph = Graph.coerce(x, edge_index)
        state, given = self._begin(x, source)
        coupling = self.coupling(state, graph, given, beside)
        certificate = certify_step(self.energy(graph, given, beside), coupling, state)
        if not certificate:
            return certificate
        out = self.forward(x, graph, source=source, beside=beside)
        assert isinstance(out, Tensor)
        step = CertifiedStep(float(self.beta()), constraint=self.update.constraint)
        expected = step(state, coupling, source=self.by_head(given)).flatten(1)
        if bool((out - expected).norm() <= torch.finfo(out.dtype).eps ** 0.5 * expected.norm()):
            return certificate
        reason = "does not move the state as the certified step of its energy does."
        if not bool(out.isfinite().all()):
            reason = f"moves the state where {out.dtype} has no numbers: β, λ, μ or the penalty are too large for it."
        return Certificate.refused("Theorem T1", math.nan, f"{type(self).__name__} {reason}")

    def at_rest(
        self, graph: Graph, source: Float[Tensor, "N C"], beside: Coupling | None = None
    ) -> Float[Tensor, "N C"] | None:
        """Return the limit of the steps, (β + μL)⁻¹ βH, without attention and constraint; otherwise ``None``.

        It uses ``Coupling.laplacian_function`` where there is one, else `Equilibrium`, which needs all rows.
        """
        if self.attention is not None or not isinstance(self.update.constraint, Unconstrained):
            return None
        fixed = self._fixed(source, graph, beside)
        if fixed is None:
            return source
        beta, mu, h = self.beta(), self.mu(), self.by_head(source)
        rest = fixed.laplacian_function(lambda rate: beta / (beta + mu * rate), h)
        if rest is None and fixed.whole:
            rest = Equilibrium(leak=1.0).step(h, ScaledCoupling(mu / beta, fixed, nonnegative=True))
        return None if rest is None else rest.flatten(1)

    def by_head(self, x: Float[Tensor, "N C"]) -> Float[Tensor, "N H D"]:
        """Reshape a state to [N, H, D], the input of the step and the energy; H = 1 with projections."""
        return x.unflatten(1, (self.heads, -1))

    @property
    def beta(self) -> Positive:
        """The module that computes β."""
        return cast("Positive", self.update.beta)

    @property
    def projection(self) -> Float[Tensor, "H D C"] | None:
        """The projections divided to norm at most one, in float32 or wider, since rounding may lengthen them."""
        return None if self.weight is None else contracting(self.weight)

    def _fixed(self, source: Float[Tensor, "N C"], graph: Graph, beside: Coupling | None) -> Coupling | None:
        """A, ``beside``, or their sum."""
        if self.graph_term is None or graph.edge_index is None:
            return beside
        edges: Coupling = self.graph_term(source, graph)
        return edges if beside is None else edges + beside

    def extra_repr(self) -> str:
        return f"{self.in_channels}, heads={self.heads}, projection={None if self.weight is None else 'tied'!r}"


class PairAttraction(Diffusivity):
    """Ω = (f(‖z_i − z_j‖²))_ij of a penalty, head by head, for states in a constraint within its domain."""

    depends_on = "rows"
    symmetric = True

    def __init__(self, penalty: Penalty, heads: int, update: CertifiedStep, projection: str | None) -> None:
        super().__init__()
        constraint = update.constraint
        farthest, limit = constraint.diameter**2, penalty.domain[1]
        if farthest > limit:
            raise ValueError(
                f"penalty={penalty!r} is for squared distances up to {limit:g}, beyond which its weights are negative; "
                f"constraint={constraint!r} lets states be {farthest:g} apart. Pass constraint='ball' or 'sphere' with "
                f"radius <= {limit**0.5 / 2:g}, or another penalty ('gaussian', 'softmax', 'sigmoid', 'quadratic')."
            )
        self.of_pairs, self.heads, self.projected = penalty, heads, projection is not None
        self.step = (update,)  # in a tuple, so that its parameters are not registered twice

    @property
    def penalty(self) -> Penalty:  # type: ignore[override]
        """δ. A property, since ``Diffusivity.penalty`` would hide a learned δ, which is a submodule."""
        return self.of_pairs

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        rows = x.unflatten(1, (self.heads, -1))
        return self.of_pairs.coupling(rows, graph.segments, constraint=self.within, centre=graph.centre(rows))

    @property
    def within(self) -> Constraint:
        """The constraint on the input of the penalty: a projection of norm one maps a sphere into its ball."""
        constraint = self.step[0].constraint
        return Ball(constraint.diameter / 2) if self.projected and not constraint.convex else constraint
