"""``CertifiedBlock``: steps down one energy whose terms have weights, and the modules that make its terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.couplings.weighted import contracting
from diffusion_mp.diffusivities import AdjacencyDiffusivity, Positive
from diffusion_mp.diffusivities.base import check_heads_divide
from diffusion_mp.energies import Certificate, Constraint, JointEnergy, Unconstrained, certify_step
from diffusion_mp.energies.certification import CERTIFIED_STEPS, broken_parameter, random_input
from diffusion_mp.energies.matrix_terms import (
    ACTIVATIONS,
    AttentionTerm,
    MatrixTerm,
    MLPTerm,
    norm_bounds,
)
from diffusion_mp.energies.terms import EnergyTerm, ScaledTerm, SourceTerm
from diffusion_mp.graph import Graph
from diffusion_mp.graph.cache import TensorCache, values_only
from diffusion_mp.kernels.precision import without_autocast
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.layers.pyg import refuse_inputs
from diffusion_mp.modules import Resettable
from diffusion_mp.updates import CertifiedStep, fixed_point
from diffusion_mp.updates.derivatives import Operator, on_values, values_needed
from diffusion_mp.updates.minimiser import quadratic_minimiser


class TermModule(Resettable):
    """Base of modules that return the term of an energy for a source [N, C], a graph and features of edges [E, F]."""

    reads: tuple[str, ...] = (
        "edge_attr",
    )  #: Further inputs of a block that :meth:`forward` reads.

    def __init__(self, channels: int, weight: float) -> None:
        super().__init__()
        errors.check_counts(channels=channels)
        errors.check_positive(weight, "weight")
        self.channels = channels
        self.weight = Positive(weight)

    def forward(
        self, source: Float[Tensor, "N C"], graph: Graph, edge_attr: Tensor | None = None
    ) -> EnergyTerm:
        """Return the term, with everything in it that does not change from step to step."""
        raise NotImplementedError


#: The couplings of relations, which the blocks of a model share.
_RELATIONS: TensorCache[SparseCoupling] = TensorCache(room=1 << 22)


def _related(
    num_nodes: int, edge_index: Tensor, weight: Tensor, edge_attr: Tensor
) -> SparseCoupling:
    return SparseCoupling(
        Graph(num_nodes, edge_index, validate=False), weight.unsqueeze(1) * edge_attr.to(weight)
    )


class WeightedGraph(TermModule):
    r"""Learned matrices B_r of norm at most one between neighbours, μ times `MatrixTerm` in a block (Theorem T8).

    Args:
        channels: C.
        weight: initial μ > 0; it is learned.
        edge_dim: R, relations between neighbours, with a matrix each: edge e belongs to relation r by the entry e_r of
            ``edge_attr`` [E, R] (one-hot or soft, of any sign). ``None`` is one relation.
        symmetric: B_r = B_rᵀ. Otherwise edges have a direction: B_r along it and B_rᵀ against it.
        normalization: of the graph, ``"sum"`` or ``"sym"``, see `AdjacencyDiffusivity`.
        gate: multiply a_ij by tanh(⟨w, [h_i + h_j, |h_i − h_j|]⟩ + b), a sign and a strength read from the source.
        hops: number of edges of a walk between interacting nodes.
        matrix: ``"full"``; ``"diagonal"`` (and so symmetric), one number in [−1, 1] for every channel; ``"identity"``,
            nothing to learn: neighbours attract each other, as in T1.

    Examples:
        >>> isinstance(WeightedGraph(4)(x, graph), EnergyTerm)
        True
    """

    def __init__(
        self,
        channels: int,
        weight: float = 1.0,
        *,
        edge_dim: int | None = None,
        symmetric: bool = True,
        normalization: Literal["sum", "sym"] = "sum",
        gate: bool = False,
        hops: int = 1,
        matrix: Literal["full", "diagonal", "identity"] = "full",
    ) -> None:
        super().__init__(channels, weight)
        relations = 1 if edge_dim is None else edge_dim
        errors.check_counts(edge_dim=relations, hops=hops)
        errors.check_flags(symmetric=symmetric, gate=gate)
        errors.check_choice(normalization, "normalization", ["sum", "sym"])
        self.symmetric = symmetric
        self.hops = hops
        self.edge_dim = edge_dim
        self.adjacency = AdjacencyDiffusivity(normalization)
        errors.check_choice(matrix, "matrix", ["full", "diagonal", "identity"])
        shape = (relations, channels, channels) if matrix == "full" else (relations, channels)
        if matrix == "identity":
            self.matrix = None
        else:
            self.matrix = nn.Parameter(torch.empty(shape))
        self.gate = nn.Linear(2 * channels, relations) if gate else None
        self._draw()

    def _draw(self) -> None:
        if self.matrix is not None:
            nn.init.normal_(self.matrix, std=1.0 if self.matrix.dim() == 2 else self.channels**-0.5)

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.edge_dim is None else ("edge_attr",)

    def matrices(self) -> Float[Tensor, "R C C"] | Float[Tensor, "R C"]:
        """Return B, of norm at most one, or the diagonals of diagonal matrices."""
        if self.matrix is None:
            return self.weight.raw.new_ones(self.edge_dim or 1, self.channels)
        turns = self.symmetric and self.matrix.dim() == 3
        return contracting(
            (self.matrix + self.matrix.mT) / 2 if turns else self.matrix, norm_bounds
        )

    def forward(
        self, source: Float[Tensor, "N C"], graph: Graph, edge_attr: Tensor | None = None
    ) -> EnergyTerm:
        coupling = self.adjacency(source, graph)
        if not isinstance(coupling, SparseCoupling):
            kind = type(coupling).__name__
            raise NotImplementedError(
                f"WeightedGraph needs all edges of the graph at once, not a {kind} of some rows. Call the model itself."
            )
        if self.edge_dim is not None:
            if edge_attr is None:
                raise ValueError(
                    f"edge_attr must come, [num_edges, {self.edge_dim}], since edge_dim was given; got none."
                )
            errors.check_edge_rows(edge_attr, graph.num_edges, channels=self.edge_dim)
            tensors = (coupling.graph.edges, coupling.graph.edge_weight, edge_attr)
            coupling = _RELATIONS.get(graph.num_nodes, tensors, partial(_related, graph.num_nodes))
        if self.gate is not None:
            sender, receiver = (source.index_select(0, end) for end in graph.edges)
            ends = torch.cat([sender + receiver, (sender - receiver).abs()], 1)
            gate = self.gate(ends.to(self.gate.weight.dtype)).tanh()
            mutual = values_only(captured=True) and coupling.symmetric  # as the gate itself
            coupling = SparseCoupling(coupling.graph, coupling.weight * gate, symmetric=mutual)
        matrices = None if self.matrix is None else self.matrices()
        if matrices is None:
            norms = None
        else:
            norms = matrices.new_ones(matrices.size(0))
        term = MatrixTerm(coupling, matrices, norms, hops=self.hops, symmetric=self.symmetric)
        return ScaledTerm(self.weight(), term)

    def extra_repr(self) -> str:
        return f"{self.channels}, edge_dim={self.edge_dim}, symmetric={self.symmetric}, hops={self.hops}"


class RowAttention(TermModule):
    r"""Softmax attention with learned queries and keys of norm at most one, λ times `AttentionTerm` (Theorem T9).

    Args:
        channels, heads: C and H; a head has C / H channels.
        weight: initial λ > 0; it is learned.
        gamma: initial γ > 0, the sharpness; it is learned.
        neighbours: attend to neighbours only, by the weights of the edges, instead of all nodes of the graph.

    Examples:
        >>> isinstance(RowAttention(4, heads=2)(x, graph), EnergyTerm)
        True
    """

    reads = ()

    def __init__(
        self,
        channels: int,
        heads: int = 1,
        weight: float = 1.0,
        *,
        gamma: float = 1.0,
        neighbours: bool = False,
    ) -> None:
        super().__init__(channels, weight)
        errors.check_counts(heads=heads)
        errors.check_flags(neighbours=neighbours)
        errors.check_positive(gamma, "gamma")
        check_heads_divide(channels, heads)
        self.heads = heads
        self.neighbours = neighbours
        self.gamma = Positive(gamma)
        self.query, self.key = (
            nn.Parameter(torch.empty(heads, channels // heads, channels)) for _ in range(2)
        )
        self._draw()

    def _draw(self) -> None:
        for matrix in (self.query, self.key):
            nn.init.uniform_(matrix, -(self.channels**-0.5), self.channels**-0.5)

    def forward(
        self, source: Float[Tensor, "N C"], graph: Graph, edge_attr: Tensor | None = None
    ) -> EnergyTerm:
        if graph.num_nodes != graph.total_nodes:
            known = f"{graph.num_nodes} of {graph.total_nodes}"
            raise NotImplementedError(
                f"RowAttention needs all nodes of the graph, not {known}. Use one process."
            )
        query, key = contracting(torch.cat([self.query, self.key]), norm_bounds).chunk(2)
        ones = query.new_ones(self.heads)
        prior = None
        if self.neighbours:
            prior = SparseCoupling(graph, graph.weights(source), symmetric=False, nonnegative=True)
        return ScaledTerm(
            self.weight(), AttentionTerm(query, key, self.gamma(), prior, (ones, ones))
        )

    def extra_repr(self) -> str:
        return f"{self.channels}, heads={self.heads}, neighbours={self.neighbours}"


class TiedMLP(TermModule):
    r"""A hidden layer with tied weights, κ times `MLPTerm`: a step adds ½κ Uᵀ σ(U z + b) (Theorem T10).

    Args:
        channels, hidden_channels: of the state, and of U [hidden_channels, channels].
        weight: initial κ > 0; it is learned.
        activation: σ, ``"relu"``, ``"tanh"`` or ``"sigmoid"``.

    Examples:
        >>> isinstance(TiedMLP(4, 8)(x, graph), EnergyTerm)
        True
    """

    reads = ()

    def __init__(
        self, channels: int, hidden_channels: int, weight: float = 1.0, *, activation: str = "relu"
    ) -> None:
        super().__init__(channels, weight)
        errors.check_counts(hidden_channels=hidden_channels)
        errors.check_choice(activation, "activation", ACTIVATIONS)
        self.linear = nn.Linear(channels, hidden_channels)
        self.activation = activation

    def forward(
        self, source: Float[Tensor, "N C"], graph: Graph, edge_attr: Tensor | None = None
    ) -> EnergyTerm:
        return MLPTerm(self.linear.weight, self.linear.bias, self.activation, self.weight())


class BlockStep(nn.Module):
    """One step of a block, or all of them to its limit: a module, so that hooks see the states before and after it."""

    is_diffusion_layer = True

    def __init__(self, update: CertifiedStep) -> None:
        super().__init__()
        self.__dict__["update"] = (
            update  # not as a submodule: its parameters are those of the block
        )

    def forward(
        self, x: Float[Tensor, "N H D"], graph: Graph, step: Operator
    ) -> Float[Tensor, "N H D"]:
        with without_autocast(x):
            return step(x)


class CertifiedBlock(GraphLayer):
    r"""Descent steps on an energy of a source and learned terms.

    Z⁰ = Proj_C(H), then K certified steps down F(Z) = β‖Z − H‖² + the terms + Σ_i ι_C(z_i) (Theorem T11).

    F does not rise in a step, for any parameters. Matrices, weights of edges and norms are computed once for all steps.

    Args:
        channels: C.
        terms: the modules that make the terms, or terms that do not depend on the graph.
        num_layers: K; ``None`` iterates to the limit, the minimiser of F where all terms and C are convex (the source
            and `WeightedGraph` are), differentiated implicitly. Without a constraint that is a linear system.
        constraint, radius: of every row, see `CertifiedStep`.
        beta: initial β > 0; it is learned.

    Shapes:
        x, output: H and Z^K [N, channels]; edges and batch as in :class:`DiffusionConv`; edge_attr: [E, F], for the
        modules that read it.

    Examples:
        >>> block = CertifiedBlock(4, [WeightedGraph(4), TiedMLP(4, 8)], num_layers=3)
        >>> block(x, graph).shape
        torch.Size([6, 4])
        >>> bool((block.energies(x, graph).diff() <= 0).all()), bool(block.certificate(x, graph))
        (True, True)
    """

    why_uncertified: str | None = None

    def __init__(
        self,
        channels: int,
        terms: Sequence[nn.Module | EnergyTerm],
        num_layers: int | None = 2,
        *,
        constraint: Constraint | str | None = "nonnegative",
        radius: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        # The setter checks num_layers again, but torch would register a module in its place without calling it.
        errors.check_counts(
            channels=channels, **({} if num_layers is None else {"num_layers": num_layers})
        )
        errors.check_positive(beta, "beta")
        errors.check_kind(
            terms, "terms", Sequence, "a list of EnergyTerms and of modules that make them"
        )
        for term in terms:
            errors.check_kind(
                term,
                "every one of terms",
                (nn.Module, EnergyTerm),
                "an EnergyTerm or a module that makes one",
            )
            if getattr(term, "channels", channels) != channels:
                raise ValueError(
                    f"every one of terms must have {channels} channels, as the block; got {term!r}."
                )
        self.in_channels = self.out_channels = channels
        self.num_layers = num_layers
        self.heads = 1
        self.terms = nn.ModuleList(term for term in terms if isinstance(term, nn.Module))
        self.fixed = tuple(term for term in terms if not isinstance(term, nn.Module))
        self.update = CertifiedStep(Positive(beta), constraint=constraint, radius=radius)
        self.step = BlockStep(self.update)

    @property
    def num_layers(self) -> int | None:
        """K, which may be set; ``None`` is the limit."""
        return self._num_layers

    @num_layers.setter
    def num_layers(self, num_layers: int | None) -> None:
        if num_layers is not None:
            errors.check_counts(num_layers=num_layers)
        self._num_layers = num_layers

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, list[Coupling]]:
        """Return Z^K; with ``return_coupling`` also the attention of all terms in every step, or in the limit."""
        graph = self._graph(x, edge_index, edge_weight, batch, edge_attr, others, return_coupling)
        couplings: list[Coupling] | None = [] if return_coupling else None
        for state in self.states(x, graph, couplings, edge_attr=edge_attr):  # noqa: B007  # only the last one is kept
            pass
        return state if couplings is None else (state, couplings)

    def states(
        self,
        source: Tensor,
        graph: Graph,
        couplings: list[Coupling] | None = None,
        start: Tensor | None = None,
        **inputs: Any,
    ) -> Iterator[Float[Tensor, "N C"]]:
        """Yield Z⁰, Z¹, …, Z^K, and append the attention of every step to ``couplings``.

        Z⁰ is the projection of ``start``, by default of the source H; ``inputs`` are those of :meth:`made`.
        """
        first = source if start is None else start
        wide = first.to(
            torch.promote_types(first.dtype, torch.float32)
        )  # half precision is too coarse for an energy
        state = self.update.constraint.project(wide.unflatten(1, (self.heads, -1)))
        yield state.flatten(1).to(first.dtype)
        h = source.to(wide.dtype)
        pull = ScaledTerm(self.beta(), SourceTerm(h.unflatten(1, (self.heads, -1))))
        terms = [*self.made(h, graph, **inputs), pull]
        at_rest = self._num_layers is None
        step = (
            partial(self.limit, terms=terms, graph=graph)
            if at_rest
            else self.update.descent(state, terms, graph)
        )
        for _ in range(self._num_layers or 1):
            state, before = self.step(state, graph, step), state
            if couplings is not None:
                read = state if at_rest else before
                couplings += (
                    coupling for term in terms for coupling in term.attention(read, graph)
                )
            yield state.flatten(1).to(first.dtype)

    def limit(
        self, state: Float[Tensor, "N H D"], terms: list[EnergyTerm], graph: Graph
    ) -> Float[Tensor, "N H D"]:
        """Return the limit of the steps from a state, with the gradient of the implicit function theorem."""
        if isinstance(self.update.constraint, Unconstrained) and all(
            term.quadratic for term in terms
        ):
            return quadratic_minimiser(terms, state, graph, self.beta())
        return self.iterated(state, terms, graph)

    def iterated(
        self, state: Float[Tensor, "N H D"], terms: list[EnergyTerm], graph: Graph
    ) -> Float[Tensor, "N H D"]:
        """Return the limit of the steps, found by taking them."""
        constraint = self.update.constraint
        one_minimiser = constraint.convex and all(term.quadratic for term in terms)
        energy = None
        if not one_minimiser:
            energy = JointEnergy(terms=terms, graph=graph, constraint=constraint).by_graph
        what = "the state at rest"
        with values_needed(what):
            with on_values():
                errors.check_finite(state, "x")
            descent = self.update.descent(state, terms, graph)
            return fixed_point(
                descent, state, energy=energy, ptr=graph.segments, total=graph.total, what=what
            )

    def by_head(self, x: Float[Tensor, "N C"]) -> Float[Tensor, "N H D"]:
        """Reshape a state to [N, H, D], the input of the steps and the energy."""
        return x.unflatten(1, (self.heads, -1))

    @property
    def reads(self) -> tuple[str, ...]:
        """Further inputs of a call that a term reads; a module of your own that declares nothing may read them all."""
        read = {name for module in self.terms for name in getattr(module, "reads", ("edge_attr",))}
        return tuple(sorted(read))

    def _graph(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        edge_attr: Tensor | None = None,
        others: Mapping[str, Any] = MappingProxyType({}),
        return_coupling: bool = False,
    ) -> Graph:
        """Check the inputs of a call, refuse those that no term reads, and return the graph."""
        if edge_attr is not None and "edge_attr" not in self.reads:
            others = {**others, "edge_attr": edge_attr}
        return self.inputs_to_graph(
            x, edge_index, edge_weight, batch, return_coupling, others, edge_attr
        )

    def made(
        self, source: Tensor, graph: Graph, edge_attr: Tensor | None = None
    ) -> list[EnergyTerm]:
        """Return the terms at a source and a graph, without that of the source."""
        if edge_attr is not None and "edge_attr" not in self.reads:
            refuse_inputs(self, {"edge_attr": edge_attr})
        with without_autocast(source):  # bounds on norms have to hold
            made = (
                part if isinstance(part, EnergyTerm) else part(source, graph, edge_attr)
                for part in self.terms
            )
            return [*made, *self.fixed]

    def energy(self, source: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> JointEnergy:
        """Return F, a function of states [N, channels]."""
        errors.check_kind(graph, "graph", Graph, "a Graph(num_nodes, edge_index)")
        return JointEnergy(
            source=source,
            beta=self.beta(),
            constraint=self.update.constraint,
            terms=self.made(source, graph, edge_attr),
            graph=graph,
        )

    @torch.no_grad()
    def energies(
        self,
        x: Tensor,
        edge_index: Tensor | Graph | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_attr: Tensor | None = None,
        by_graph: bool = False,
        **others: Any,
    ) -> Float[Tensor, " states"] | Float[Tensor, "states B"]:
        """Return F of Z⁰ and after every step (or of the limit), in float64; x is H.

        With ``by_graph``, F of every graph of a batch: [states, B].
        """
        errors.check_flags(by_graph=by_graph)
        graph = self._graph(x, edge_index, edge_weight, batch, edge_attr, others)
        energy = self.energy(x, graph, edge_attr)
        states = [self.by_head(state) for state in self.states(x, graph, edge_attr=edge_attr)]
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
        edge_attr: Tensor | None = None,
        **others: Any,
    ) -> Certificate:
        """Return the certificate that no step raises F, checked at Z⁰ (`certify_step`), by default of a random H."""
        if x is None:
            edge_dim = max((getattr(term, "edge_dim", None) or 0 for term in self.terms), default=0)
            x, edge_index, edge_attr = random_input(
                self.in_channels, self.beta.raw, edge_dim or None
            )
        broken = broken_parameter(self)
        if broken is not None:
            return Certificate.refused("Theorem T11", math.nan, broken)
        graph = self._graph(x, edge_index, edge_weight, batch, edge_attr, others)
        first = next(self.states(x, graph, edge_attr=edge_attr))
        return certify_step(
            self.energy(x, graph, edge_attr), None, first, steps=self.num_layers or CERTIFIED_STEPS
        )

    @property
    def beta(self) -> Positive:
        """The module that computes β."""
        return cast("Positive", self.update.beta)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, num_layers={self.num_layers}"
