"""``CertifiedBlock``, which descends an energy whose terms have weights, and the modules that make its terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffusion_mp import checks
from diffusion_mp.checks import Count, PositiveNumber
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.couplings.shapes import State
from diffusion_mp.couplings.weighted import contracting
from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity, Positive
from diffusion_mp.diffusivities.all_pair import PenaltyDiffusivity
from diffusion_mp.diffusivities.base import GraphPart, check_heads_divide
from diffusion_mp.energies import (
    Ball,
    Certificate,
    Constraint,
    CouplingTerm,
    EdgeTerm,
    Energy,
    EnergyTerm,
    PairTerm,
    Penalty,
    ScaledTerm,
    SoftmaxPenalty,
    SourceTerm,
    Unconstrained,
    certify_step,
    get_constraint,
    get_penalty,
)
from diffusion_mp.energies.certification import (
    CERTIFIED_STEPS,
    STEPS,
    broken_parameter,
    random_input,
)
from diffusion_mp.energies.matrix_terms import (
    ACTIVATIONS,
    AttentionTerm,
    MatrixTerm,
    MLPTerm,
    norm_bounds,
)
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import by_edges
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.layers.pyg import refuse_inputs
from diffusion_mp.modules import Resettable
from diffusion_mp.runtime.cache import TensorCache, values_only
from diffusion_mp.runtime.precision import widened, without_autocast
from diffusion_mp.updates import CertifiedStep, fixed_point
from diffusion_mp.updates.derivatives import on_values, values_needed
from diffusion_mp.updates.minimiser import quadratic_minimiser

#: What a call takes as edges.
Edges = Tensor | Graph | None
#: Inputs of a module of the user that does not declare ``reads``.
USUALLY_READ = ("edge_attr",)


class TermModule(Resettable):
    """Base of modules that make the term of an energy: ``module(source, graph, **inputs)`` with the source H [N, C].

    The ``forward`` of a subclass returns an `EnergyTerm` with everything in it that does not change from step to step,
    or ``None`` where there is no term. The subclass declares in ``reads`` which further inputs it takes.

    Args:
        channels: Number of channels C of the state.
        weight: Initial weight of the term, > 0. The weight is learned, and a softplus keeps it positive.

    Shapes:
        source: [N, C].

    Examples:
        >>> isinstance(WeightedGraph(4), TermModule)
        True
    """

    #: Names of the inputs of the block's call that :meth:`forward` reads: ``edge_attr``, ``beside``, or both.
    reads: tuple[str, ...] = ()
    #: What determines a row of the term's half gradient. ``"rows"``: the same row of the state. ``"couplings"``: the
    #: coupling of a `Diffusivity`, which takes heads. ``"edges"``: the term is a sum over the edges of the graph, or
    #: over the nodes at which they arrive. ``"graph"``, the default: anything, so the term needs all rows at once.
    depends_on: Literal["rows", "couplings", "edges", "graph"] = "graph"

    def __init__(self, channels: Count, weight: PositiveNumber) -> None:
        super().__init__()
        self.channels = channels
        # A softplus keeps the weight positive in training, without which the term would be no energy.
        self.weight = Positive(weight)

    def weighted(self, term: EnergyTerm) -> EnergyTerm:
        """Return the term times the weight."""
        return ScaledTerm(self.weight(), term, _checked=True)

    def draw_uniform(self, *matrices: nn.Parameter) -> None:
        """Draw matrices that act on the state as ``nn.Linear`` draws its weight."""
        limit = self.channels**-0.5
        for matrix in matrices:
            nn.init.uniform_(matrix, -limit, limit)


def _penalty_within(
    penalty: Penalty | str, constraint: Constraint, channels: int
) -> Penalty:
    """Return a penalty whose f is nonnegative between states of the constraint; a name is built for ``channels``."""
    # The one name that leaves a number open: its temperature is the root of the channels.
    if isinstance(penalty, str) and penalty == "softmax":
        penalty = SoftmaxPenalty(channels)
    penalty = get_penalty(penalty)
    if not penalty.covers(constraint.diameter):
        limit = penalty.domain[1]
        raise ValueError(
            f"penalty={penalty!r} is for squared distances up to {limit:g}; constraint={constraint!r} lets states be "
            f"{constraint.diameter**2:g} apart. Pass constraint='ball' or 'sphere' with radius <= {limit**0.5 / 2:g}, "
            f"or another penalty ('gaussian', 'softmax', 'sigmoid', 'quadratic')."
        )
    return penalty


class Pairs(TermModule):
    r"""A penalty of all pairs of nodes of a graph, (λ/2n) Σ_ij δ(‖z_i − z_j‖²): λ times `PairTerm` (Theorem T1).

    Args:
        channels: Number of channels C of the state.
        weight: Initial λ > 0; λ is learned.
        penalty: δ, or its name: ``"quadratic"``, ``"simple"``, ``"sigmoid"``, ``"softmax"`` or ``"gaussian"``. The f =
            δ′ of the default is nonnegative at every distance, so any constraint will do.
        heads: Number of heads H. Without projections the channels are cut into H heads, each with its own attention.
        projection: ``"tied"``: head h measures ‖W_h(z_i − z_j)‖ with a learned W_h [C / H, C], divided by max(1,
            ‖W_h‖₂), and all heads move the uncut state together. ``None``: distances of the state itself.
        constraint: The `Constraint` of the block, within which δ has to be concave. ``None`` is no constraint.

    Shapes:
        source: [N, C].

    Examples:
        >>> isinstance(Pairs(4)(x, graph), EnergyTerm)
        True
    """

    depends_on = "couplings"

    def __init__(
        self,
        channels: int,
        weight: float = 1.0,
        *,
        penalty: Penalty | str = "gaussian",
        heads: Count = 1,
        projection: Literal["tied"] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(channels, weight)
        check_heads_divide(channels, heads)
        self.constraint = get_constraint(constraint)
        # A projection of norm one maps a sphere into its ball.
        inside = self.constraint
        if projection == "tied" and not inside.convex:
            inside = Ball(inside.diameter / 2)
        penalty = _penalty_within(penalty, inside, channels // heads)
        # Theorem T1 needs symmetric weights, so rows are not divided by their sums.
        self.attention = PenaltyDiffusivity(
            penalty, heads=heads, row_stochastic=False, constraint=inside
        )
        self.projection = None
        if projection == "tied":
            self.projection = nn.Parameter(
                torch.empty(heads, channels // heads, channels)
            )
        self._draw()

    def _draw(self) -> None:
        if self.projection is not None:
            self.draw_uniform(self.projection)

    def projections(self) -> Float[Tensor, "H D C"] | None:
        """Return the projections W_h, divided so that their norm is at most one, in float32 or wider.

        Narrower types could lengthen them by rounding.
        """
        return None if self.projection is None else contracting(self.projection)

    def forward(self, source: State, graph: Graph) -> EnergyTerm:
        # The mean over pairs, so that λ means the same in small and large graphs.
        term = PairTerm(
            cast("Penalty", self.attention.penalty),
            self.projections(),
            mean=True,
            constraint=self.constraint,
            read=self.attention,
        )
        return self.weighted(term)


class Neighbours(TermModule):
    r"""The Dirichlet energy of a diffusivity, (μ/2) Σ_ij a_ij‖z_i − z_j‖²: μ times `CouplingTerm` (Theorem T1).

    A is evaluated at the source, so that A is the same in every step. With a penalty the term is μ times `EdgeTerm`,

        (μ/2) Σ_ij a_ij δ(‖z_i − z_j‖²)

    for an A of edges.

    Args:
        channels: Number of channels C of the state.
        weight: Initial μ > 0; μ is learned.
        diffusivity: Diffusivity of A, symmetric and nonnegative. ``True`` is D^-½AD^-½ of the symmetric part of the
            graph, which is symmetric whatever the directions of the edges. ``False`` leaves the coupling ``beside`` of
            a call as A; otherwise A is the sum of both.
        penalty: δ, or its name. ``None`` is the squared distance itself.
        constraint: The `Constraint` of the block, within which δ has to be concave. ``None`` is no constraint.

    Shapes:
        source: [N, C].
        beside: A coupling of the N nodes.

    Examples:
        >>> isinstance(Neighbours(4, penalty="sigmoid")(x, graph), EnergyTerm)
        True
    """

    reads = ("beside",)

    def __init__(
        self,
        channels: int,
        weight: float = 1.0,
        diffusivity: Diffusivity | bool = True,
        *,
        penalty: Penalty | str | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(channels, weight)
        self.constraint = get_constraint(constraint)
        self.penalty = None
        if penalty is not None:
            self.penalty = _penalty_within(penalty, self.constraint, channels)
        else:
            # With δ, the differences of all edges are needed.
            self.depends_on = "couplings"
        kinds = (bool, Diffusivity)
        checks.check_kind(
            diffusivity, "diffusivity", kinds, "a Diffusivity, True or False"
        )
        # Symmetric, as the theorem asks, whatever the directions of the edges.
        if diffusivity is True:
            diffusivity = AdjacencyDiffusivity("sym", direction="undirected")
        self.diffusivity = diffusivity or None

    def forward(
        self, source: State, graph: Graph, beside: Coupling | None = None
    ) -> EnergyTerm | None:
        coupling = beside
        read = self.diffusivity
        # Without observed edges there is no term, where a layer of edges alone would raise.
        if read is not None and (graph.edge_index is not None or not read.needs_graph):
            coupling = read(source, graph)
            if beside is not None:
                coupling = coupling + beside
        if coupling is None:
            return None
        term: EnergyTerm = CouplingTerm(coupling)
        if self.penalty is not None:
            term = EdgeTerm(
                self.penalty, cast("SparseCoupling", coupling), self.constraint
            )
        return self.weighted(term)


#: The couplings of relations, which the blocks of a model share: they depend on the batch, and not on the block.
_RELATIONS: TensorCache[SparseCoupling] = TensorCache(room=1 << 22)


def _related(size: int, edges: Tensor, weight: Tensor, kinds: Tensor) -> SparseCoupling:
    """Return the coupling of relations: the weight of an edge times its share in every relation."""
    by_relation = weight.unsqueeze(1) * kinds.to(weight)
    graph = Graph(size, edges, validate=False)
    return SparseCoupling(graph, by_relation, _checked=True)


class WeightedGraph(TermModule):
    r"""Learned matrices B_r of norm at most one between neighbours, μ times `MatrixTerm` in a block (Theorem T8).

        μ (Σ_i k_i ‖z_i‖² − Σ_r ⟨Z, A_r^h Z B_rᵀ⟩)

    A_r^h holds the walks of h edges of relation r. k_i is large enough to make the term convex (see `MatrixTerm`).

    Args:
        channels: Number of channels C of the state.
        weight: Initial μ > 0; μ is learned.
        edge_dim: Number of relations R between neighbours, each with its own matrix. Edge e belongs to relation r by
            the entry e_r of ``edge_attr`` (one-hot or soft, of any sign). ``None`` is one relation without
            ``edge_attr``.
        symmetric: B_r = B_rᵀ. Otherwise edges have a direction: B_r acts along an edge and B_rᵀ against it.
        normalization: Normalisation of the graph, ``"sum"`` or ``"sym"``; see `AdjacencyDiffusivity`.
        gate: Multiply a_ij by tanh(⟨w, [h_i + h_j, |h_i − h_j|]⟩ + b), a sign and a strength read from the source.
        hops: Number of edges h of a walk between interacting nodes.
        matrix: ``"full"``; ``"diagonal"`` (and so symmetric): one number in [−1, 1] for every channel; ``"identity"``:
            nothing is learned, and neighbours attract each other as in Theorem T1.

    Shapes:
        source: [N, C].
        edge_attr: [E, R], required if ``edge_dim`` is given.

    Examples:
        >>> isinstance(WeightedGraph(4)(x, graph), EnergyTerm)
        True
    """

    def __init__(
        self,
        channels: int,
        weight: float = 1.0,
        *,
        edge_dim: Count | None = None,
        symmetric: bool = True,
        normalization: Literal["sum", "sym"] = "sum",
        gate: bool = False,
        hops: Count = 1,
        matrix: Literal["full", "diagonal", "identity"] = "full",
    ) -> None:
        super().__init__(channels, weight)
        # Without features of edges there is one relation, A itself.
        relations = edge_dim or 1
        self.symmetric = symmetric
        self.hops = hops
        self.edge_dim = edge_dim
        # A longer walk is no edge of the graph.
        self.depends_on = "edges" if hops == 1 else "graph"
        if edge_dim is not None:
            self.reads = ("edge_attr",)
        # The energy reads an edge both ways. In-degrees alone would leave out edges from a node that only sends.
        self.adjacency = AdjacencyDiffusivity(normalization, direction="directed")
        # `None` is the identity, with which a product with B is saved.
        self.matrix = None
        if matrix == "full":
            self.matrix = nn.Parameter(torch.empty(relations, channels, channels))
        elif matrix == "diagonal":
            self.matrix = nn.Parameter(torch.empty(relations, channels))
        # One gate for every relation, which may attract where another one repels.
        self.gate = nn.Linear(2 * channels, relations) if gate else None
        self._draw()

    def _draw(self) -> None:
        if self.matrix is None:
            return
        std = 1.0
        # The norm of a full matrix of standard normal numbers is about twice the root of its size.
        if self.matrix.dim() == 3:
            std = self.channels**-0.5
        nn.init.normal_(self.matrix, std=std)

    def matrices(self) -> Float[Tensor, "R C C"] | Float[Tensor, "R C"]:
        """Return B [R, C, C], of norm at most one; or the diagonals [R, C] of diagonal matrices."""
        matrix: Tensor | None = self.matrix
        # `forward` does not multiply by the identity; this tensor is for users who look at the matrices.
        if matrix is None:
            return self.weight.raw.new_ones(self.edge_dim or 1, self.channels)
        if self.symmetric and matrix.dim() == 3:
            matrix = (matrix + matrix.mT) / 2
        return contracting(matrix, norm_bounds)

    def _gates(
        self, source: State, edges: Int[Tensor, "two E"]
    ) -> Float[Tensor, "E R"]:
        """Return tanh(⟨w, [h_i + h_j, |h_i − h_j|]⟩ + b) of every edge and relation."""
        read = cast("nn.Linear", self.gate)

        def gates(edges: Tensor) -> Tensor:
            sender, receiver = (source.index_select(0, end) for end in edges)
            # Both halves stay the same if the ends are exchanged, so that the gated graph is as symmetric as A.
            ends = torch.cat([sender + receiver, (sender - receiver).abs()], 1)
            return read(ends.to(read.weight.dtype)).tanh()

        return by_edges(gates, edges)

    def forward(
        self,
        source: State,
        graph: Graph,
        edge_attr: Tensor | None = None,
    ) -> EnergyTerm:
        coupling = cast("SparseCoupling", self.adjacency(source, graph))
        if self.edge_dim is not None:
            if edge_attr is None:
                raise ValueError(
                    f"edge_attr must come, [num_edges, {self.edge_dim}], since edge_dim was given; got none."
                )
            checks.check_edge_rows(edge_attr, graph.num_edges, channels=self.edge_dim)
            checks.check_device(edge_attr, "edge_attr", source.device, "x")
            tensors = (coupling.graph.edges, coupling.graph.edge_weight, edge_attr)
            coupling = _RELATIONS.get(
                graph.num_nodes, tensors, partial(_related, graph.num_nodes)
            )
        if self.gate is not None:
            gate = self._gates(source, graph.edges)
            # Whether A is symmetric depends on values, which a trace does not have.
            mutual = values_only(captured=True) and coupling.symmetric
            coupling = SparseCoupling(
                coupling.graph, coupling.weight * gate, symmetric=mutual, _checked=True
            )
        matrices = norms = None
        if self.matrix is not None:
            matrices = self.matrices()
            # The matrices are contracted here. A second estimate of their norms would cost as much as the first.
            norms = matrices.new_ones(matrices.size(0))
        term = MatrixTerm(
            coupling,
            matrices,
            norms,
            hops=self.hops,
            symmetric=self.symmetric,
            _checked=True,
        )
        return self.weighted(term)


class RowAttention(TermModule):
    r"""Softmax attention with learned queries and keys of norm at most one, λ times `AttentionTerm` (Theorem T9).

        −(2λ/γ) Σ_h Σ_i log Σ_j b_ij exp(−γ ‖Q_h z_i − K_h z_j‖² / 2)

    The prior b_ij is 1/n for all pairs of the n nodes of a graph.

    Args:
        channels: Number of channels C of the state.
        heads: Number of heads H, a divisor of C. Q_h and K_h are [C / H, C].
        weight: Initial λ > 0; λ is learned.
        gamma: Initial γ > 0, the sharpness of the attention; γ is learned.
        neighbours: Attend to neighbours, by the weights of the edges, instead of all nodes of the graph.

    Shapes:
        source: [N, C].

    Examples:
        >>> isinstance(RowAttention(4, heads=2)(x, graph), EnergyTerm)
        True
    """

    def __init__(
        self,
        channels: int,
        heads: Count = 1,
        weight: float = 1.0,
        *,
        gamma: PositiveNumber = 1.0,
        neighbours: bool = False,
    ) -> None:
        super().__init__(channels, weight)
        check_heads_divide(channels, heads)
        self.heads = heads
        self.neighbours = neighbours
        self.depends_on = "edges" if neighbours else "couplings"
        self.gamma = Positive(gamma)
        shape = (heads, channels // heads, channels)
        self.query = nn.Parameter(torch.empty(shape))
        self.key = nn.Parameter(torch.empty(shape))
        self._draw()

    def _draw(self) -> None:
        self.draw_uniform(self.query, self.key)

    def forward(self, source: State, graph: Graph) -> EnergyTerm:
        # The norms of all matrices are estimated in one batch, at the cost of one matrix.
        both = contracting(torch.cat([self.query, self.key]), norm_bounds)
        query, key = both.chunk(2)
        ones = query.new_ones(self.heads)
        prior = None
        if self.neighbours:
            prior = SparseCoupling(
                graph,
                graph.weights(source),
                # Nobody asks whether it is symmetric, since attention divides its rows by their sums.
                symmetric=False,
                nonnegative=True,
                _checked=True,
            )
        term = AttentionTerm(query, key, self.gamma(), prior, (ones, ones))
        return self.weighted(term)


class TiedMLP(TermModule):
    r"""A hidden layer with tied weights, κ times `MLPTerm`: a step adds ½κ Uᵀ σ(U z + b) (Theorem T10).

        −κ Σ_i Σ_m ρ(⟨u_m, z_i⟩ + b_m),   ρ′ = σ

    Args:
        channels: Number of channels C of the state.
        hidden_channels: Number of hidden units M, the rows of U [M, C].
        weight: Initial κ > 0; κ is learned.
        activation: σ, ``"relu"``, ``"tanh"`` or ``"sigmoid"``.

    Shapes:
        source: [N, C].

    Examples:
        >>> isinstance(TiedMLP(4, 8)(x, graph), EnergyTerm)
        True
    """

    depends_on = "rows"

    def __init__(
        self,
        channels: int,
        hidden_channels: Count,
        weight: float = 1.0,
        *,
        activation: str = "relu",
    ) -> None:
        super().__init__(channels, weight)
        checks.check_choice(activation, "activation", ACTIVATIONS)
        # Any weights will do, since the term is concave: none is divided by its norm.
        self.linear = nn.Linear(channels, hidden_channels)
        self.activation = activation

    def forward(self, source: State, graph: Graph) -> EnergyTerm:
        term = MLPTerm(self.linear.weight, self.linear.bias, self.activation)
        return self.weighted(term)


def _refuse_part(graph: Graph) -> None:
    if isinstance(graph, GraphPart):
        raise NotImplementedError(
            f"an energy is a sum over all nodes, and a {type(graph).__name__} has {graph.num_nodes} of "
            f"{graph.total_nodes}. Take energies and certificates in one process: the state dict is the same."
        )


class BlockStep(nn.Module):
    """One step of a block, or all steps to its limit; a module, so that hooks see the states before and after it."""

    is_diffusion_layer = True

    # The step is an argument, since it depends on the source and the graph of a call.
    def forward(
        self, x: HeadState, graph: Graph, step: Callable[[Tensor], Tensor]
    ) -> HeadState:
        with without_autocast(x):
            return step(x)


class CertifiedBlock(GraphLayer):
    r"""Descent steps on an energy of a source and learned terms.

    A call starts from Z⁰ = Proj_C(H) and takes K certified steps down

        F(Z) = β‖Z − H‖² + Σ_t V_t(Z) + Σ_i ι_C(z_i)

    with the terms V_t and the indicator ι_C of the constraint (Theorem T11 of docs/certified.md). F does not rise in
    any step, for any parameters. Matrices, weights of edges and norms are computed once for all steps.

    Args:
        channels: Number of channels C of the state.
        terms: Modules that make the terms (`TermModule`), or terms that do not depend on the graph (`EnergyTerm`).
        num_layers: Number of steps K. ``None`` iterates to the limit and differentiates it implicitly. The limit is the
            minimiser of F where all terms and C are convex; the source, `Neighbours` and `WeightedGraph` are convex.
            Without a constraint the limit is the solution of a linear system.
        constraint: The set C of every row of the state: ``None``, ``"nonnegative"``, ``"ball"``, ``"sphere"``,
            ``"nonnegative_ball"`` or a `Constraint`. The projection onto the default is a ReLU.
        radius: Radius of a ball or sphere that is given by its name.
        beta: Initial weight β > 0 of the source; β is learned.
        heads: Number of parts of the channels. The constraint acts on every row of each part.

    Shapes:
        x: [N, channels], projected to Z⁰.
        edge_index: [2, E], a sparse CSR tensor, a ``Graph``, or ``None``.
        edge_weight: [E].
        batch: [N], sorted.
        source: [N, channels], H; x by default.
        edge_attr: [E, edge_dim], for terms that read it.
        beside: A coupling of the N nodes, for terms that read it.
        output: [N, channels], Z^K.

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
        channels: Count,
        terms: Sequence[nn.Module | EnergyTerm],
        num_layers: Count | None = 2,
        *,
        constraint: Constraint | str | None = "nonnegative",
        radius: float = 1.0,
        beta: PositiveNumber = 1.0,
        heads: Count = 1,
    ) -> None:
        super().__init__()
        check_heads_divide(channels, heads)
        what = "a list of EnergyTerms and of modules that make them"
        checks.check_kind(terms, "terms", Sequence, what)
        # One by one, since the message names the term.
        for term in terms:
            checks.check_kind(
                term,
                "every one of terms",
                (nn.Module, EnergyTerm),
                "an EnergyTerm or a module that makes one",
            )
            # A module of the user need not declare its channels.
            if getattr(term, "channels", channels) != channels:
                raise ValueError(
                    f"every one of terms must have {channels} channels, as the block; got {term!r}."
                )
            # A matrix of all channels would mix what heads keep apart.
            cut = isinstance(term, TermModule) and term.depends_on != "couplings"
            if heads > 1 and cut:
                raise ValueError(
                    f"heads must be 1 beside a term that reads all channels of a node; got heads={heads} and {term!r}. "
                    "Give heads to the term if it has them, as RowAttention."
                )
        self.in_channels = channels
        self.out_channels = channels
        # Checked by the annotation above, too: torch would register a module of this name, and not call the setter.
        self.num_layers = num_layers
        self.heads = heads
        self.terms = nn.ModuleList(
            term for term in terms if isinstance(term, nn.Module)
        )
        # Terms without parameters are not modules, so torch would not register them.
        self.fixed = tuple(term for term in terms if not isinstance(term, nn.Module))
        reads = [getattr(term, "reads", USUALLY_READ) for term in self.terms]
        #: Further inputs of a call that a term reads.
        self.reads = tuple(sorted(set().union(*reads)))
        # The update holds β and the constraint, and tells certificates what moves the state. `Energy` takes the steps.
        self.update = CertifiedStep(
            Positive(beta), constraint=constraint, radius=radius
        )
        self.step = BlockStep()

    @property
    def num_layers(self) -> int | None:
        """The number of steps K, which may be set; ``None`` is the limit."""
        return self._num_layers

    @num_layers.setter
    def num_layers(self, num_layers: int | None) -> None:
        if num_layers is not None:
            checks.check_counts(num_layers=num_layers)
        self._num_layers = num_layers

    @property
    def beta(self) -> Positive:
        """The module that computes β."""
        return cast("Positive", self.update.source_weight)

    def forward(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        source: Tensor | None = None,
        edge_attr: Tensor | None = None,
        beside: Coupling | None = None,
        return_coupling: bool = False,
        **others: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """Return Z^K; with ``return_coupling`` also the attention of all terms in every step, or in the limit.

        Args:
            x: States of the nodes, which are projected onto C first.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            source: H; x by default.
            edge_attr: Features of the edges, for terms that read them. An input that no term reads is refused.
            beside: A coupling of the nodes, for terms that read it, such as `Neighbours`.
            return_coupling: Return the attention too.
        """
        inputs = {"source": source, "edge_attr": edge_attr, "beside": beside} | others
        graph = self._graph(x, edge_index, edge_weight, batch, inputs, return_coupling)
        couplings: list[Coupling] | None = [] if return_coupling else None
        for state in self.states(x, graph, couplings, **inputs):  # noqa: B007  # only the last one is kept
            pass
        if couplings is None:
            return state
        return state, self.returned(couplings)

    def states(
        self,
        x: Tensor,
        graph: Graph,
        couplings: list[Coupling] | None = None,
        **inputs: Any,
    ) -> Iterator[State]:
        """Yield Z⁰, Z¹, …, Z^K, and append the attention of every step to ``couplings``.

        Z⁰ is the projection of x. ``inputs`` are the ``source`` and the inputs that a term reads.
        """
        state = self.start(x)
        # Z⁰ is a state too: an energy is compared before and after the first step.
        yield state.flatten(1).to(x.dtype)
        energy = self._energy_of(x, graph, **inputs)
        at_rest = self.num_layers is None
        if at_rest:
            step: Callable[[Tensor], Tensor] = partial(self.limit, energy=energy)
        else:
            step = energy.descent(state)
        # The limit counts as one step, which a hook sees as one.
        for _ in range(self.num_layers or 1):
            # A step attends at the state that it reads, the limit at the limit itself.
            before = state
            state = self.step(before, graph, step)
            if couplings is not None:
                couplings += self.attention(state if at_rest else before, energy)
            yield state.flatten(1).to(x.dtype)

    def start(self, x: State) -> HeadState:
        """Return Z⁰ of a checked x, by head."""
        # Half precision is too coarse for an energy.
        return self.update.constraint.project(self.by_head(widened(x)))

    def attention(self, z: HeadState, energy: Energy) -> list[Coupling]:
        """Return how much nodes attend to each other at a state, for every term that has attention."""
        graph = energy.graph_of(z)
        return [
            coupling for term in energy.terms for coupling in term.attention(z, graph)
        ]

    def returned(self, couplings: list[Coupling]) -> Coupling | list[Coupling]:
        """Return the couplings of all steps in the form in which a call returns them."""
        return couplings

    def limit(self, state: HeadState, energy: Energy) -> HeadState:
        """Return the limit of the steps from a state, with the gradient of the implicit function theorem."""
        what = "the state at rest"
        quadratic = all(term.quadratic for term in energy.terms)
        # The gradient of F is then affine in the state, and its zero solves one linear system.
        if quadratic and isinstance(energy.constraint, Unconstrained):
            solution = quadratic_minimiser(energy, state, self.beta())
            if solution is not None:
                return solution
        graph = energy.graph_of(state)
        with values_needed(what):
            with on_values():
                checks.check_finite(state, "x")
            # A unique minimiser is reached from any start; otherwise the acceleration might end above the start.
            unique = quadratic and energy.constraint.convex
            return fixed_point(
                energy.descent(state),
                state,
                energy=None if unique else energy.by_graph,
                ptr=graph.segments,
                total=graph.total,
                what=what,
            )

    def by_head(self, x: State) -> HeadState:
        """Reshape a state to [N, H, D], the input of the steps and the energy."""
        return x.unflatten(1, (self.heads, -1))

    def _graph(
        self,
        x: Tensor,
        edge_index: Edges,
        edge_weight: Tensor | None,
        batch: Tensor | None,
        inputs: dict[str, Any],
        return_coupling: bool = False,
    ) -> Graph:
        """Check the inputs of a call, but for those that no term reads, and return the graph."""
        graph = self.inputs_to_graph(
            x,
            edge_index,
            edge_weight,
            batch,
            return_coupling,
            edge_attr=inputs.get("edge_attr"),
        )
        source = inputs.get("source")
        beside = inputs.get("beside")
        if beside is not None:
            what = "a Coupling of the same nodes, or None"
            checks.check_kind(beside, "beside", Coupling, what)
        if source is not None:
            checks.check_state(source, "source", self.in_channels, module=self)
            checks.check_rows(source, "source", x)
        return graph

    def energy(self, source: Tensor, graph: Graph, **inputs: Any) -> Energy:
        """Return F of a source [N, channels], a graph and the inputs that terms read.

        F is a function of states [N, heads, channels / heads].

        Args:
            source: The source H.
            graph: The ``Graph`` of the nodes.
            inputs: Inputs that terms read, such as ``edge_attr``.
        """
        checks.check_kind(graph, "graph", Graph, "a Graph(num_nodes, edge_index)")
        source = widened(source)
        # An input that no term reads is refused: it would have no effect, and the user would not notice.
        unread = {
            name: value
            for name, value in inputs.items()
            if value is not None and name not in self.reads
        }
        refuse_inputs(self, unread)
        terms: list[EnergyTerm] = []
        with without_autocast(source):  # bounds on norms have to hold
            for module in self.terms:
                if isinstance(module, EnergyTerm):  # a term with parameters of its own
                    terms.append(module)
                    continue
                names = getattr(module, "reads", USUALLY_READ)
                read = {name: inputs.get(name) for name in names}
                if isinstance(graph, GraphPart):
                    term = graph.term(module, source, **read)
                else:
                    term = module(source, graph, **read)
                if term is not None:
                    terms.append(term)
        terms += self.fixed
        if isinstance(graph, GraphPart):
            for term in terms:
                graph.check_term(term)
        source_term = SourceTerm(self.by_head(source), _checked=True)
        terms.append(ScaledTerm(self.beta(), source_term, _checked=True))
        return Energy(terms, self.update.constraint, graph=graph, _checked=True)

    def _energy_of(
        self, x: Tensor, graph: Graph, source: Tensor | None = None, **inputs: Any
    ) -> Energy:
        """Return F of the inputs of a call."""
        if source is None:
            source = x
        return self.energy(source, graph, **inputs)

    @checks.checked
    @torch.no_grad()
    def energies(
        self,
        x: Tensor,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        by_graph: bool = False,
        **inputs: Any,
    ) -> Float[Tensor, " states"] | Float[Tensor, "states B"]:
        """Return F of Z⁰ and after every step of a call with these inputs, in float64; in the limit, F of Z⁰ and Z*.

        Args:
            x: States of the nodes.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            by_graph: Return F of every graph of a batch, [states, B], instead of the sum over graphs, [states].
            inputs: ``source``, and inputs that terms read.
        """
        graph = self._graph(x, edge_index, edge_weight, batch, inputs)
        return self.measured(x, graph, by_graph, **inputs)[0]

    def measured(
        self, x: Tensor, graph: Graph, by_graph: bool, **inputs: Any
    ) -> tuple[Float[Tensor, "*states"], State]:
        """Return F of Z⁰ and after every step (or F of every graph), and the last state."""
        _refuse_part(graph)
        states = list(self.states(x, graph, **inputs))
        energy = self._energy_of(x, graph, **inputs)
        value: Callable[[Tensor], Tensor] = energy
        if by_graph:
            value = energy.by_graph
        return torch.stack([value(self.by_head(state)) for state in states]), states[-1]

    @torch.no_grad()
    def certificate(
        self,
        x: Tensor | None = None,
        edge_index: Edges = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        **inputs: Any,
    ) -> Certificate:
        """Return the certificate that no step raises F, checked from Z⁰ on (`certify_step`).

        Args:
            x: States of the nodes. ``None`` draws a random input with random edges and features.
            edge_index: Observed edges, or a ``Graph``.
            edge_weight: Weights of the edges; 1 by default.
            batch: Number of the graph of every node; by default all nodes belong to one graph.
            inputs: ``source``, and inputs that terms read.
        """
        if x is None:
            edge_dims = [getattr(term, "edge_dim", None) or 0 for term in self.terms]
            # Terms may differ in edge_dim: all but the widest read then features that are too wide, and say so.
            x, edge_index, edge_attr = random_input(
                self.in_channels, self.beta.raw, max(edge_dims, default=0) or None
            )
            inputs |= {"edge_attr": edge_attr}
        # Before any step: with NaN in it no comparison of energies would find a rise.
        broken = broken_parameter(self)
        if broken is not None:
            return Certificate.refused(STEPS, math.nan, broken)
        graph = self._graph(x, edge_index, edge_weight, batch, inputs)
        _refuse_part(graph)
        energy = self._energy_of(x, graph, **inputs)
        start = self.start(x)
        certificate = certify_step(
            energy, start, steps=self.num_layers or CERTIFIED_STEPS
        )
        if not certificate or self.num_layers is None:
            return certificate
        # A subclass may compute something else than the steps of its energy.
        expected = start
        for _ in range(self.num_layers):
            expected = energy.step(expected)
        out = cast("Tensor", self.forward(x, graph, **inputs))
        # Up to the root of rounding, since an energy sees errors squared.
        away = (out - expected.flatten(1)).norm()
        if bool(away <= torch.finfo(out.dtype).eps ** 0.5 * out.norm()):
            return certificate
        reason = f"{type(self).__name__} does not move the state as the certified step of its energy does."
        return Certificate.refused(STEPS, math.nan, reason)
