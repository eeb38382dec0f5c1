"""Diffusivities that do not read the state, and diffusivities that add an observed graph or normalise by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp.checks import (
    Count,
    PositiveNumber,
    Share,
)
from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    NeumannCoupling,
    ScaledCoupling,
    SparseCoupling,
    SumCoupling,
    UniformCoupling,
    symmetric_normalized,
)
from diffusion_mp.couplings.neumann import check_stencil
from diffusion_mp.couplings.shapes import State
from diffusion_mp.diffusivities.base import Composed, Diffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.kernels.neumann import Boundary
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import inverse_root, reciprocal, wide_dtype, widened

Direction = Literal["directed", "undirected", "pyg"]


class IdentityDiffusivity(Diffusivity):
    """Couple every node with itself only, S = I, as an MLP does (Wu, Wipf & Yan 2025, Table 1).

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and one head.

    Examples:
        >>> torch.equal(IdentityDiffusivity()(x) @ x.unsqueeze(1), x.unsqueeze(1))
        True
    """

    depends_on = "nothing"
    symmetric = row_stochastic = True
    why_no_penalty = (
        "the identity coupling moves nothing, so every energy of pairs stays as it is."
    )

    def couple(self, x: State, graph: Graph) -> Coupling:
        return IdentityCoupling(graph.num_nodes, dtype=x.dtype, device=x.device)


class UniformDiffusivity(Diffusivity):
    """Average over all nodes of a graph, for any state.

    It is the *All One* ablation of Wu, Wipf & Yan (2025), Fig. 3.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and one head.

    Examples:
        >>> torch.allclose((UniformDiffusivity()(x) @ x.unsqueeze(1))[0, 0], x.mean(0))
        True
    """

    depends_on = "nothing"
    symmetric = row_stochastic = True
    why_no_penalty = (
        "the all-one coupling is fixed: certify the coupling itself (Theorem 1)."
    )

    def couple(self, x: State, graph: Graph) -> Coupling:
        return UniformCoupling(
            graph.num_nodes, graph.segments, dtype=x.dtype, device=x.device
        )


class NeumannDiffusivity(Diffusivity):
    """Couple neighbours along a sequence, with a learned strength for every stride.

    The strengths do not depend on the state (Zhang & Zhou, § 3.4). For every head, with the learned parameters η and θ:

        α_k = budget · σ(η) softmax(θ)_k

    Thus Σ_k α_k < budget throughout training. The explicit step is I + Σ_k α_k Δ_{h_k}. With a budget of ½, as in the
    paper, the spectrum of the step lies in [−1, 1]. With ¼ the spectrum lies in [0, 1]. Above ½, the highest modes may
    change sign (docs/errata.md, P2).

    Rows are ordered positions, and the sequences of a batch are its graphs. The diffusivity does not read edges.

    Args:
        heads: number H of heads, each with its own α.
        strides: the distances h_k ≥ 1 of the neighbours. Only direct neighbours by default.
        boundary: the neighbours beyond the ends of a sequence: ``"symmetric"``, the default, for which all guarantees
            hold, ``"replicate"``, ``"drop"``, ``"periodic"`` or ``"causal"``; see `NeumannCoupling`.
        alpha: the initial Σ_k α_k, divided equally between the strides. It lies below the budget.
        budget: the bound of Σ_k α_k; ½ by default, as in the paper. ``None`` is α_k = exp(θ_k), for updates that are
            stable at any α: `ImplicitEuler`, `CrankNicolson` and `HeatKernel`.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Raises:
        ValueError: ``alpha`` is not below the budget.

    Examples:
        >>> NeumannDiffusivity(strides=(1, 2), alpha=0.1)(x).symmetric  # the rows are positions of a sequence
        True
    """

    positional = True
    why_no_penalty = "the stencil does not look at the state: certify the coupling itself (Theorem 1)."

    def __init__(
        self,
        heads: Count = 1,
        *,
        strides: Sequence[int] = (1,),
        boundary: Boundary = "symmetric",
        alpha: PositiveNumber = 0.1,
        budget: PositiveNumber | None = 0.5,
    ) -> None:
        super().__init__()
        self.symmetric = check_stencil(strides, boundary)
        if budget is not None and alpha >= budget:
            raise ValueError(
                f"alpha must be below the budget {budget:g}; got {alpha:g}. Raise the budget."
            )
        self.heads = heads
        self.strides = tuple(strides)
        self.boundary = boundary
        self.initial_alpha = float(alpha)
        self.budget = budget
        self.theta = nn.Parameter(torch.empty(len(self.strides), heads))
        if budget is None:
            self.eta = None
        else:
            self.eta = nn.Parameter(torch.empty(heads))
        self._draw()

    def _draw(self) -> None:
        # The parameters at which α is ``initial_alpha``, divided equally: the inverse of `alpha`.
        if self.eta is None or self.budget is None:
            each = self.initial_alpha / len(self.strides)
            nn.init.constant_(self.theta, math.log(each))
        else:
            odds = self.initial_alpha / (self.budget - self.initial_alpha)
            nn.init.constant_(self.eta, math.log(odds))
            nn.init.zeros_(self.theta)

    @property
    def alpha(self) -> Float[Tensor, "K heads"]:
        """The strength α_k of every stride and head, [K, H], in at least float32."""
        # Half precision would round α above its budget, beyond which the explicit step may be unstable.
        theta = widened(self.theta)
        # Without a budget, every α is free. With a budget, θ divides it and η sets how much of it is used.
        if self.eta is None or self.budget is None:
            return theta.exp()
        return self.budget * self.eta.to(theta.dtype).sigmoid() * theta.softmax(0)

    def couple(self, x: State, graph: Graph) -> Coupling:
        alpha = self.alpha.to(wide_dtype(x.dtype))
        return NeumannCoupling(
            graph.num_nodes,
            alpha,
            self.strides,
            self.boundary,
            graph.segments,
            nonnegative=True,
        )


class AdjacencyDiffusivity(Diffusivity):
    """Couple neighbours of the observed graph, with weights normalised by degrees.

    GCN, SGC, GIN, APPNP and GCNII use it (Wu, Wipf & Yan 2025, Examples 1–3, Eq. 24). By default, with degrees d:

        s_ij = a_ij / √(d_i d_j)

    DIFFormer's released code has ``degrees="count"`` (docs/errata.md, D17). In a part of a graph with
    ``full_degree``, the entries are the entries of the whole graph. Rows of ``"row"`` then sum to the fraction of their
    edges that lie in the part.

    Args:
        normalization: ``"sym"``, the default: a_ij / √(d_i d_j), as in GCN. ``"row"``: a_ij / d_i. ``"sum"``: a_ij. A
            node of degree zero has a zero row.
        self_loops: ``"keep"``, the default: loops as observed. ``"add"``: one more loop of weight 1 at every node.
            ``"remaining"``: exactly one loop at every node, the mean of its observed loops or of weight 1, as in PyG's
            GCN. ``"remove"``: no loops.
        direction: which degrees divide an edge j → i, if A is not symmetric; otherwise all agree. ``"pyg"``, the
            default: the in-degrees of i and j, as in PyG's ``GCNConv``; a node that receives no edge then has degree
            zero and sends nothing, unless it has a loop. ``"directed"``: the in-degree of i and the out-degree of j.
            ``"undirected"``: first replace A by ½(A + Aᵀ), for energies, which need a symmetric coupling.
        degrees: ``"weighted"``, the default: d is the sum of edge weights. ``"count"``: d is the number of edges with a
            positive weight. A part of a weighted graph does not have these numbers, since its ``full_degree`` holds
            sums.

    Shapes:
        - x: [N, C], of which only the dtype and the device are read.
        - output: a coupling of N nodes and one head.

    Examples:
        >>> torch.allclose(AdjacencyDiffusivity("row")(x, graph).degree(), torch.ones(6, 1))  # rows sum to one
        True
    """

    depends_on = "nothing"
    needs_graph = True
    why_no_penalty = "the adjacency is fixed: certify the coupling itself (Theorem 1)."

    def __init__(
        self,
        normalization: Literal["sym", "row", "sum"] = "sym",
        *,
        self_loops: SelfLoops = "keep",
        direction: Direction = "pyg",
        degrees: Literal["weighted", "count"] = "weighted",
    ) -> None:
        super().__init__()
        self.normalization = normalization
        self.direction = direction
        self.degrees = degrees
        self.self_loops = self_loops
        self.row_stochastic = normalization == "row" and degrees == "weighted"
        self.symmetric = direction == "undirected" and normalization != "row"

    def couple(self, x: State, graph: Graph) -> Coupling:
        # Half precision ends at 65 504, and counts single edges up to 2 048 only.
        dtype = wide_dtype(x.dtype)
        options = (self.normalization, self.direction, self.self_loops, self.degrees)
        # Kept with the graph, and shared by all layers with these options.
        normalized = graph.derived(
            (options, dtype),
            lambda: self._normalized(graph, x.new_empty(0, dtype=dtype)),
        )
        if self.row_stochastic:
            # In a part of a graph, degrees are the degrees of the whole graph, and rows sum to less than one.
            return _RowNormalizedAdjacency(
                normalized,
                self._prepared(graph),
                row_stochastic=graph.full_degree is None,
            )
        # A directed rule may still give a symmetric matrix, which the coupling finds on first access.
        return SparseCoupling(
            normalized,
            symmetric=self.symmetric or None,
            nonnegative=True,
            _checked=True,
        )

    def _normalized(self, graph: Graph, like: Tensor) -> Graph:
        # Degrees may count edges while entries weigh them, so there are two graphs with the same self-loops.
        looped = self._prepared(graph)
        counted = looped
        if self.degrees == "count":
            counted = self._prepared(_ones(graph))
        weight = looped.weights(like)
        source, target = looped.edges
        received = counted.degree("in", weight.dtype)
        if self.normalization == "row":
            # By receivers, also where edges go one way: a row is what a node receives.
            weight = weight * reciprocal(received).index_select(0, target)
        elif self.normalization == "sym":
            sent = received
            # PyG divides by in-degrees at both ends, even where edges go one way.
            if self.direction != "pyg":
                sent = counted.degree("out", weight.dtype)
            # Two products of two factors: d_i d_j may overflow where its root does not.
            weight = weight * inverse_root(received).index_select(0, target)
            weight = weight * inverse_root(sent).index_select(0, source)
        return looped.with_weights(weight)

    def _prepared(self, graph: Graph) -> Graph:
        """Return the graph of A, undirected if ``direction`` says so, and with self-loops."""
        if self.direction == "undirected":
            # Merging parallel edges would change the mean of the loops of a node.
            keep = self.self_loops == "keep"
            graph = graph.symmetric_part() if keep else graph.to_undirected()
        return graph.with_self_loops(self.self_loops)


def _ones(graph: Graph) -> Graph:
    """Replace positive weights by 1 and other weights by 0."""
    weight = graph.edge_weight
    # Without weights every edge counts one already.
    if weight is None:
        return graph
    if graph.full_degree is not None:
        raise ValueError(
            "degrees='count' needs the number of edges in the whole graph; got a part, whose full_degree holds sums of "
            "weights. Take degrees='weighted', or the whole graph."
        )
    return graph.derived(
        "ones", lambda: graph.with_weights((weight > 0).to(weight.dtype))
    )


class _RowNormalizedAdjacency(SparseCoupling):
    """The coupling D⁻¹A, which is self-adjoint in the degrees of A if the graph ``adjacency`` of A is undirected."""

    parts = ("graph", "weight", "adjacency")

    def __init__(self, graph: Graph, adjacency: Graph, *, row_stochastic: bool) -> None:
        super().__init__(
            graph, row_stochastic=row_stochastic, nonnegative=True, _checked=True
        )
        self.adjacency = adjacency

    @cached_property
    def _metric(self) -> Float[Tensor, "N one"] | None:
        # d, for which diag(d) (a_ij / d_i) is symmetric; 1 for a zero row.
        degree = self.adjacency.degree(dtype=torch.float64).unsqueeze(1)
        return degree.where(degree > 0, 1.0) if self.adjacency.is_symmetric else None


class SymmetricDiffusivity(Composed):
    """Divide an attention by the square roots of its row sums, D^-½ΩD^-½.

    It is the normalisation of GCN, for any nonnegative symmetric Ω; see :func:`symmetric_normalized`. Rows do not sum
    to one. The spectral radius is at most one. Label propagation and ``Equilibrium`` of the residual form are therefore
    well posed for any leak.

    Args:
        diffusivity: the diffusivity of Ω, with ``row_stochastic=False``.
        diagonal: keep ω_ii. ``False`` leaves it out of an adjacency, or of a sigmoid or Gaussian attention.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and the heads of Ω.

    Raises:
        ValueError: the diffusivity divides its rows by their sums already.

    Examples:
        >>> SymmetricDiffusivity(GaussianDiffusivity(row_stochastic=False), diagonal=False)(x).symmetric
        True
    """

    why_no_penalty = "D^-½ΩD^-½ divides by degrees, which are not a function of a distance: certify Ω itself."

    def __init__(self, diffusivity: Diffusivity, diagonal: bool = True) -> None:
        super().__init__()
        # D would be the identity, and nothing would be normalised.
        if diffusivity.row_stochastic and not diffusivity.symmetric:
            raise ValueError(
                f"diffusivity must give Ω itself; {type(diffusivity).__name__} has divided its rows by their sums. "
                f"Take row_stochastic=False, or normalization='sum' for an adjacency."
            )
        self.diffusivity = diffusivity
        self.diagonal = diagonal
        self.declare()

    def combine(self, *parts: Coupling) -> Coupling:
        (omega,) = parts
        return symmetric_normalized(omega, diagonal=self.diagonal)


class GraphAugmentedDiffusivity(Composed):
    """Add a graph term Ã to an all-pair attention Ŝ (Wu, Wipf & Yan 2025, Section 5.3.2).

    For a graph without observed edges it is Ŝ only, unlike ``attention + graph_term``. With a row-normalised Ŝ, no
    weight descends Eq. 25 (docs/errata.md, D24). `CertifiedStep` on an unnormalised sum descends it.

    Args:
        attention: the diffusivity of Ŝ.
        graph_term: the diffusivity of Ã.
        graph_weight: ``None``, the default: Ŝ + Ã, Eq. 61, for the residual update (Eq. 63). A number w in [0, 1]: (1 −
            w) Ŝ + w Ã, for the conservative update, which moves the state differently (docs/errata.md, D3). w = ½ is
            Eq. 24.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and the larger number of heads of the two terms.

    Examples:
        >>> GraphAugmentedDiffusivity(SimpleDiffusivity(), AdjacencyDiffusivity("row"), 0.5)(x, graph).heads
        1
    """

    why_no_penalty = (
        "attention and a graph term that are normalised one by one do not descend Eq. 25, the energy that is printed "
        "for them (D24 in docs/errata.md). CertifiedStep on the unnormalised sum descends an Energy of them."
    )

    def __init__(
        self,
        attention: Diffusivity,
        graph_term: Diffusivity,
        graph_weight: Share | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.graph_term = graph_term
        self.graph_weight = graph_weight
        self.declare()
        # Without edges only the attention is used, so the graph term may need them.
        self.needs_graph = attention.needs_graph

    def couple(self, x: State, graph: Graph) -> Coupling:
        if graph.edge_index is None:
            return self.attention(x, graph)
        return self.combine(self.attention(x, graph), self.graph_term(x, graph))

    def combine(self, *parts: Coupling) -> Coupling:
        weight = self.graph_weight
        # Not 1.0 times each term, which would cost two more products by a number.
        if weight is None:
            return SumCoupling(parts, _checked=True)
        return SumCoupling(_scaled((1 - weight, weight), parts), _checked=True)


def _scaled(
    shares: Sequence[float | Tensor], parts: Sequence[Coupling]
) -> list[Coupling]:
    """Return couplings multiplied by nonnegative numbers."""
    # Not ``share * part``: torch.compile would call the product of a tensor, which fails for couplings.
    return [
        ScaledCoupling(share, part, nonnegative=True, _checked=True)
        for share, part in zip(shares, parts, strict=True)
    ]


class AdjacencyEnhancedCoupling(SumCoupling):
    """The coupling w S + (1 − w) Ã with 0 < w < 1."""

    @property
    def attention(self) -> Coupling:
        """S, for callers that need it only, such as ``coupling.attention.density()``."""
        return cast("ScaledCoupling", self.terms[0]).coupling


class AdjacencyEnhancedDiffusivity(GraphAugmentedDiffusivity):
    """Mix an attention with the normalised adjacency by a learned weight (SFi-Former, Eq. 11).

    The coupling is (1 + γ)⁻¹ [γ S + Ã] of the attention S and the adjacency Ã = D^-½ (A + I) D^-½. γ = e^g with a
    learnable g, so the two weights σ(g) and σ(−g) are positive and sum to one. For a graph without observed edges the
    coupling is S.

    Args:
        attention: the diffusivity of S.
        gamma: the initial γ > 0. 1 by default: both terms have the weight ½ at first.
        self_loops: the loops of A + I: ``"remaining"``, the default: exactly one loop at every node, the mean of its
            observed loops or of weight 1, as in PyG's GCN. ``"add"``: one more loop of weight 1 at every node.
            ``"keep"``: loops as observed. ``"remove"``: no loops.
        direction: the degrees of Ã, as in :class:`AdjacencyDiffusivity`. ``"pyg"``, the default: in-degrees at both
            ends, as in PyG. ``"directed"``: the in-degree of the receiver and the out-degree of the sender.
            ``"undirected"``: first replace A by ½(A + Aᵀ).

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and the heads of S.

    Examples:
        >>> AdjacencyEnhancedDiffusivity(SparseFlowDiffusivity(4), gamma=1.0)(x, graph).heads
        1
    """

    why_no_penalty = "attention plus a graph term, with a learnable balance: no theorem names an energy it descends."

    def __init__(
        self,
        attention: Diffusivity,
        *,
        gamma: PositiveNumber = 1.0,
        self_loops: SelfLoops = "remaining",
        direction: Direction = "pyg",
    ) -> None:
        adjacency = AdjacencyDiffusivity(
            "sym", self_loops=self_loops, direction=direction
        )
        super().__init__(attention, adjacency)
        # A logarithm keeps γ > 0 in training.
        self.initial = math.log(gamma)
        self.log_gamma = nn.Parameter(torch.tensor(self.initial))

    def _draw(self) -> None:
        nn.init.constant_(self.log_gamma, self.initial)

    def combine(self, *parts: Coupling) -> Coupling:
        share = self.log_gamma.sigmoid()
        return AdjacencyEnhancedCoupling(
            _scaled((share, 1 - share), parts), _checked=True
        )
