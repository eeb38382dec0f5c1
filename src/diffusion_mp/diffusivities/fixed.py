"""Diffusivities that do not read the state, and those that add or normalise by an observed graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

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
from diffusion_mp.diffusivities.base import Composed, Diffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.kernels.neumann import Boundary
from diffusion_mp.runtime.cache import cached_property
from diffusion_mp.runtime.precision import inverse_root, reciprocal, widened


class IdentityDiffusivity(Diffusivity):
    """S = I: no messages between nodes, an MLP (Wu, Wipf & Yan 2025, Table 1).

    Examples:
        >>> torch.equal(IdentityDiffusivity()(x) @ x.unsqueeze(1), x.unsqueeze(1))
        True
    """

    depends_on = "nothing"
    symmetric = row_stochastic = True
    why_no_penalty = (
        "the identity coupling moves nothing, so every energy of pairs stays as it is."
    )

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        return IdentityCoupling(graph.num_nodes, dtype=x.dtype, device=x.device)


class UniformDiffusivity(Diffusivity):
    """The mean over all nodes of a graph, whatever the state: the *All One* ablation of Wu, Wipf & Yan (2025), Fig. 3.

    Examples:
        >>> torch.allclose((UniformDiffusivity()(x) @ x.unsqueeze(1))[0, 0], x.mean(0))
        True
    """

    depends_on = "nothing"
    symmetric = row_stochastic = True
    why_no_penalty = (
        "the all-one coupling is fixed: certify the coupling itself (Theorem 1)."
    )

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        return UniformCoupling(
            graph.num_nodes, graph.segments, dtype=x.dtype, device=x.device
        )


class NeumannDiffusivity(Diffusivity):
    r"""Diffusion along a sequence, with a learned strength for every stride.

    α_k = budget · σ(η) softmax(θ)_k for every head, whatever the state (Zhang & Zhou, § 3.4).

    Thus Σ_k α_k < budget throughout training. With ½, as in the paper, the spectrum of the explicit step
    I + Σ_k α_k Δ_{h_k} lies in [−1, 1], with ¼ in [0, 1]; above, the highest modes may change sign (docs/errata.md,
    P2). ``budget=None`` is α_k = exp(θ_k), for updates that are stable at any α: `ImplicitEuler`, `CrankNicolson`,
    `HeatKernel`. Rows are ordered positions, and the sequences of a batch are its graphs; edges are not read.

    Args:
        heads, strides: H, each with its own α, and h_k ≥ 1.
        boundary: neighbours of the ends of a sequence, see `NeumannCoupling`.
        alpha, budget: initial Σ_k α_k, divided equally between the strides, below the budget > 0 or ``None``.

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
        """α_k of every stride and head, in at least float32."""
        # Half precision would round α above its budget, beyond which the explicit step may be unstable.
        theta = widened(self.theta)
        # Without a budget every α is free by itself; with one, θ divides it and η says how much of it is used.
        if self.eta is None or self.budget is None:
            return theta.exp()
        return self.budget * self.eta.to(theta.dtype).sigmoid() * theta.softmax(0)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        alpha = self.alpha.to(torch.promote_types(x.dtype, torch.float32))
        return NeumannCoupling(
            graph.num_nodes,
            alpha,
            self.strides,
            self.boundary,
            graph.segments,
            nonnegative=True,
        )


class AdjacencyDiffusivity(Diffusivity):
    r"""The observed graph (GCN, SGC, GIN, APPNP, GCNII; Examples 1–3, Eq. 24), with weighted degrees d.

    ``degrees="count", direction="pyg"`` is the released code (docs/errata.md, D17). In a part of a graph with
    ``full_degree``, entries are those of the whole graph; rows of ``"row"`` then sum to the fraction of their edges in
    the part.

    Args:
        normalization: ``"sym"``: a_ij / √(d_i d_j); ``"row"``: a_ij / d_i; ``"sum"``: a_ij. A node of degree zero has a
            zero row.
        self_loops: ``"keep"`` (as observed), ``"add"``, ``"remaining"`` (PyG's GCN) or ``"remove"``; see ``Graph``.
        direction: ``"directed"``: in-degree of the receiver, out-degree of the sender; ``"undirected"``: first replace
            A by ½(A + Aᵀ); ``"pyg"``: in-degrees at both ends, as in PyG's ``GCNConv``. All agree if A is symmetric.
        degrees: ``"weighted"``: d is the sum of edge weights; ``"count"``: the number of edges with a positive weight,
            unavailable in a part of a weighted graph, whose ``full_degree`` holds sums.

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
        direction: Literal["directed", "undirected", "pyg"] = "directed",
        degrees: Literal["weighted", "count"] = "weighted",
    ) -> None:
        super().__init__()
        self.normalization = normalization
        self.direction = direction
        self.degrees = degrees
        self.self_loops = self_loops
        self.row_stochastic = normalization == "row" and degrees == "weighted"
        self.symmetric = direction == "undirected" and normalization != "row"

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        # A degree in half precision would end at 65 504, and count single edges up to 2 048 only.
        dtype = torch.promote_types(x.dtype, torch.float32)
        options = (self.normalization, self.direction, self.self_loops, self.degrees)
        # Kept with the graph, and shared by all layers with these options.
        normalized = graph.derived(
            (options, dtype),
            lambda: self._normalized(graph, x.new_empty(0, dtype=dtype)),
        )
        if self.row_stochastic:
            adjacency = _prepared(graph, self.direction, self.self_loops)
            # Within a part of a graph, degrees are those of the whole, and rows sum to less.
            return _RowNormalizedAdjacency(
                normalized, adjacency, row_stochastic=graph.full_degree is None
            )
        # A directed rule may still give a symmetric matrix, which the coupling finds out if it is asked.
        return SparseCoupling(
            normalized,
            symmetric=self.symmetric or None,
            nonnegative=True,
            _checked=True,
        )

    def _normalized(self, graph: Graph, like: Tensor) -> Graph:
        # Degrees may count edges where entries weigh them, so there are two graphs with the same self-loops.
        observed = graph
        graph = _prepared(observed, self.direction, self.self_loops)
        counted = graph
        if self.degrees == "count":
            counted = _prepared(_ones(observed), self.direction, self.self_loops)
        weight = graph.weights(like)
        source, target = graph.edges
        received = counted.degree("in", weight.dtype)
        if self.normalization == "sum":
            return graph.with_weights(weight)
        if self.normalization == "row":
            return graph.with_weights(
                weight * reciprocal(received).index_select(0, target)
            )
        sent = received
        # PyG divides by in-degrees at both ends, also where edges go one way.
        if self.direction != "pyg":
            sent = counted.degree("out", weight.dtype)
        # Two products of two factors: d_i d_j may overflow where its root does not.
        weight = weight * inverse_root(received).index_select(0, target)
        weight = weight * inverse_root(sent).index_select(0, source)
        return graph.with_weights(weight)


def _prepared(graph: Graph, direction: str, self_loops: SelfLoops) -> Graph:
    """Return the graph of A: undirected if so named, and with self-loops."""
    if direction == "undirected":
        graph = graph.to_undirected()
    return graph.with_self_loops(self_loops)


def _ones(graph: Graph) -> Graph:
    """Replace positive weights by 1 and others by 0."""
    weight = graph.edge_weight
    # Without weights all edges count one already.
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
    """D⁻¹A, which is self-adjoint in the degrees of an undirected graph ``adjacency``, that of A."""

    parts = ("graph", "weight", "adjacency")

    def __init__(self, graph: Graph, adjacency: Graph, *, row_stochastic: bool) -> None:
        super().__init__(graph, row_stochastic=row_stochastic, nonnegative=True)
        self.adjacency = adjacency

    @cached_property
    def _metric(self) -> Float[Tensor, "N one"] | None:
        # d, for which diag(d) (a_ij / d_i) is symmetric; 1 for a zero row.
        degree = self.adjacency.degree(dtype=torch.float64).unsqueeze(1)
        return degree.where(degree > 0, 1.0) if self.adjacency.is_symmetric else None


class SymmetricDiffusivity(Composed):
    r"""An attention divided by the square roots of its row sums, D^-½ΩD^-½; see :func:`symmetric_normalized`.

    The normalisation of GCN for any nonnegative symmetric Ω. Rows do not sum to one. The spectral radius is at most
    one, so label propagation and ``Equilibrium`` of the residual form are well posed for any leak.

    Args:
        diffusivity: the diffusivity of Ω, with ``row_stochastic=False``.
        diagonal: whether ω_ii counts; it can be left out of an adjacency, and of sigmoid and Gaussian attention.

    Examples:
        >>> SymmetricDiffusivity(GaussianDiffusivity(row_stochastic=False), diagonal=False)(x).symmetric
        True
    """

    why_no_penalty = "D^-½ΩD^-½ divides by degrees, which are not a function of a distance: certify Ω itself."

    def __init__(self, diffusivity: Diffusivity, diagonal: bool = True) -> None:
        super().__init__()
        # D would be the identity, and the result no normalisation at all.
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
    r"""An all-pair attention Ŝ with a graph term Ã (Wu, Wipf & Yan 2025, Section 5.3.2).

    Unlike ``attention + graph_term``, it is Ŝ alone for a graph without observed edges. With a row-normalised Ŝ no
    weight descends Eq. 25 (docs/errata.md, D24); `CertifiedStep` on an unnormalised sum does.

    Args:
        attention, graph_term: the diffusivities of Ŝ and Ã.
        graph_weight: ``None``: Ŝ + Ã, Eq. (61), for the residual update (Eq. 63); or w in [0, 1]: (1 − w) Ŝ + w Ã, with
            w = ½ Eq. (24), for the conservative one, which moves the state differently (docs/errata.md, D3).

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
        # Without edges the attention is left, so the graph term may miss them.
        self.needs_graph = attention.needs_graph

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        if graph.edge_index is None:
            return self.attention(x, graph)
        return self.combine(self.attention(x, graph), self.graph_term(x, graph))

    def combine(self, *parts: Coupling) -> Coupling:
        attention, graph_term = parts
        weight = self.graph_weight
        # Not 1.0 times each, which would be two more products by a number.
        if weight is None:
            return SumCoupling(parts, _checked=True)
        shares = [
            ScaledCoupling(1 - weight, attention, _checked=True),
            ScaledCoupling(weight, graph_term, _checked=True),
        ]
        return SumCoupling(shares, _checked=True)


class AdjacencyEnhancedCoupling(SumCoupling):
    """w S + (1 − w) Ã with 0 < w < 1; ``attention`` is S."""

    def __init__(self, attention: Coupling, adjacency: Coupling, share: Tensor) -> None:
        # Not ``share * attention``: torch.compile would call the tensor's product, which does not know couplings.
        super().__init__(
            [
                ScaledCoupling(share, attention, nonnegative=True, _checked=True),
                ScaledCoupling(1 - share, adjacency, nonnegative=True, _checked=True),
            ],
            _checked=True,
        )
        # For those who look at S alone, such as `coupling.attention.density()`.
        self.attention = attention


class AdjacencyEnhancedDiffusivity(GraphAugmentedDiffusivity):
    r"""An attention S beside Ã = D^-½ (A + I) D^-½ with a learned weight, (1 + γ)⁻¹ [γ S + Ã] (SFi-Former, Eq. 11).

    γ = e^g with a learnable g, at first ``gamma``, so the weights σ(g) and σ(−g) form a convex combination. For
    ``self_loops`` of Ã see :class:`AdjacencyDiffusivity`.

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
    ) -> None:
        super().__init__(attention, AdjacencyDiffusivity("sym", self_loops=self_loops))
        # A logarithm keeps γ > 0 in training.
        self.initial = math.log(gamma)
        self.log_gamma = nn.Parameter(torch.tensor(self.initial))

    def _draw(self) -> None:
        nn.init.constant_(self.log_gamma, self.initial)

    def combine(self, *parts: Coupling) -> Coupling:
        attention, adjacency = parts
        return AdjacencyEnhancedCoupling(attention, adjacency, self.log_gamma.sigmoid())
