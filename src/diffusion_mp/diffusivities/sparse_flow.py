"""Sparse-flow attention over all pairs or along edges (SFi-Former)."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from diffusion_mp.checks import (
    Count,
    NonnegativeNumber,
    check_choice,
    check_positive,
    check_state,
    describe,
)
from diffusion_mp.couplings import (
    Coupling,
    PairwiseCoupling,
    SparseCoupling,
    SparseFlowCoupling,
)
from diffusion_mp.couplings.shapes import State
from diffusion_mp.diffusivities.all_pair import Features, QueryKeyDiffusivity, origin_of
from diffusion_mp.graph import Graph
from diffusion_mp.graph.graph import SelfLoops
from diffusion_mp.graph.ops import members
from diffusion_mp.kernels.sparse_flow import sparse_flow_edges
from diffusion_mp.kernels.spmm import sddmm
from diffusion_mp.runtime.precision import accumulating, wide_dtype
from diffusion_mp.saving import Saved


class FrictionAttention(Saved):
    """Compute learned scores of the frictions of SFi-attention.

    The scores are the inner products of q̃ = W̃_Q x/√d and k̃ = W̃_K (x − o) (SFi-Former, § 3.3). The row o of each
    graph shifts all keys, which does not change the frictions. With the shift, equal rows have exactly equal keys.

    Args:
        channels: number C of channels of the state.
        heads: number H of heads, the number of the diffusivity.
        head_channels: number d of channels of a head.

    Shapes:
        - x: [N, C].
        - output: q̃ and k̃, both [N, H, d].

    Examples:
        >>> SparseFlowDiffusivity(4, friction=FrictionAttention(4, heads=1, head_channels=4))(x).heads
        1
    """

    def __init__(self, channels: int, heads: int, head_channels: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = head_channels**-0.5
        self.query = nn.Linear(channels, heads * head_channels, bias=False)
        self.key = nn.Linear(channels, heads * head_channels, bias=False)

    def forward(self, x: State, graph: Graph) -> Features:
        query = self.query(x).unflatten(1, (self.heads, -1))
        key = self.key(x - origin_of(x, graph)).unflatten(1, (self.heads, -1))
        return self.scale * query, key


class SparseFlowDiffusivity(QueryKeyDiffusivity):
    """Attend sparsely to all nodes, by the flow of least energy, as SFi-Former does.

    Row i of S is the minimiser over z of this energy (SFi-Former, Eqs. 6, 8 and 9):

        ½Σ_j r_ij z_j² + λ Σ_j f_ij|z_j| + (α/2)(Σ_j z_j − 1)²

    Resistances are r_ij = softmax_j(−q_i·k_j/√d) and frictions are f_ij = softmax_j(q̃_i·k̃_j/√d), where j runs over
    the nodes of the graph of i. Row i is the sink; in the paper it is the source (docs/errata.md, S4). The solution is
    exact (docs/errata.md, S3); see :class:`SparseFlowCoupling`. λ* = 0 gives softmax attention (DFi) for any α, without
    frictions.

    Args:
        channels: number C of channels of the state.
        lam: λ* ≥ 0, the strength of the friction, with λ = λ*/n. Larger values give sparser rows.
        lam_scale: the n of λ = λ*/n. ``"own"``, the default: the number of nodes of the node's own graph, so that a
            graph has the same rows in any batch. ``"batch_max"``: the number of nodes of the largest graph of the
            batch, as published.
        alpha: α > 0, the weight of conservation. ``math.inf`` conserves the flow. With a finite α, rows sum to less
            than one.
        friction: ``"attention"``, the default: a :class:`FrictionAttention`, as in the paper. ``"constant"``: f = 1/n.
            Or a module that maps (x, graph) to q̃ and k̃ [N, H, G] with scores q̃_i·k̃_j.

    Options:
        heads: number H of heads. 1 by default. Without projection, H divides C.
        projection: ``"separate"``, the default: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54), for r.
            ``"tied"``: W_Q = W_K, which keeps a score symmetric. ``None``: q = k = x.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55). ``"frobenius"``: one norm per graph, as in
            released code, with which the attention is nearly uniform (docs/errata.md, D1). ``None``, the default: no
            normalisation.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> SparseFlowDiffusivity(4, lam=1.0)(x).density().shape  # the fraction of pairs that attend, by head
        torch.Size([1])
    """

    references = ("sfiformer",)
    why_no_penalty = (
        "sparse flow descends an energy of the flow (coupling.energy()), not of the state: "
        "it reads no distances."
    )

    def __init__(
        self,
        channels: Count,
        *,
        lam: NonnegativeNumber = 1.0,
        lam_scale: Literal["own", "batch_max"] = "own",
        alpha: float = 0.1,
        friction: Literal["attention", "constant"] | nn.Module = "attention",
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        # α = ∞ is allowed, and conserves the flow.
        if not isinstance(alpha, float) or alpha != math.inf:
            check_positive(alpha, "alpha")
        if not isinstance(friction, nn.Module):
            check_choice(friction, "friction", ["attention", "constant"])
        self.lam = lam
        self.lam_scale = lam_scale
        self.alpha = alpha
        # λ is λ*/n, so an entry depends on the number of nodes.
        self.depends_on = "graph"
        # Without friction, λ* = 0, a module would hold parameters that nothing reads.
        self.friction: nn.Module | None = None
        if lam > 0 and isinstance(friction, nn.Module):
            self.friction = friction
        elif lam > 0 and friction == "attention":
            width = cast("int", options.get("head_channels") or self.head_channels)
            self.friction = FrictionAttention(channels, self.heads, width)
        self.row_stochastic = lam == 0 or alpha == math.inf

    def resistance_features(self, x: State, graph: Graph) -> Features:
        """Return q/√d and k, both [N, H, d], whose inner products are the scores of the resistances r.

        Args:
            x: state [N, C].
            graph: graph of the nodes.
        """
        # Unit vectors are small already, and shifted keys would have other unit vectors.
        origin = None if self.normalize else origin_of(x, graph)
        q, k = self.queries_and_keys(x, graph, origin=origin)
        return q.size(2) ** -0.5 * q, k

    def friction_features(self, x: State, graph: Graph) -> Features:
        """Return q̃ and k̃, both [N, H, G].

        Args:
            x: state [N, C].
            graph: graph of the nodes.
        """
        if self.friction is None:
            # Scores of vectors without features are zero, and equal scores are a constant friction.
            nothing = x.new_empty(x.size(0), self.heads, 0)
            return nothing, nothing
        check_state(x, channels=self.channels, module=self.friction)
        query, key = self.friction(x, graph)
        if query.dim() != 3 or query.shape[:2] != (x.size(0), self.heads):
            raise ValueError(
                f"friction must return two tensors [num_nodes, heads, features] with {x.size(0)} nodes and "
                f"{self.heads} heads; got {describe(query)}."
            )
        return query, key

    def couple(self, x: State, graph: Graph) -> Coupling:
        q, k = self.resistance_features(x, graph)
        # Without friction the minimiser is the softmax, which needs no solver.
        if self.lam == 0:
            return PairwiseCoupling(q, k, graph.segments)
        query, key = self.friction_features(x, graph)
        return SparseFlowCoupling(
            q,
            k,
            query,
            key,
            graph.segments,
            lam=self._lam(graph, q),
            alpha=self.alpha,
        )

    def _lam(self, graph: Graph, like: Tensor) -> Tensor:
        """Return λ = λ*/n, [1] for one graph, else [N, 1]."""
        # Half precision would round λ*/n of a large graph to zero.
        wide = wide_dtype(like.dtype)
        lam = like.new_full((1,), self.lam, dtype=wide)
        if graph.is_single:
            return lam / max(1, graph.num_nodes)
        member, count = members(graph.ptr, graph.num_nodes, lam.device)
        size = count.to(lam)[member].unsqueeze(1)
        if self.lam_scale == "batch_max" and graph.num_nodes:
            size = size.amax().expand_as(size)
        return lam / size


class EdgeSparseFlowDiffusivity(SparseFlowDiffusivity):
    """Attend sparsely to observed neighbours, by the flow of least energy, in O(E).

    It is the extension that SFi-Former names at the end of Section 3.2. Row i of S is the minimiser of the energy of
    :class:`SparseFlowDiffusivity`, where j runs over the senders of i. An edge of weight a counts as a parallel edges,
    so the potential μ_i gives

        s_ij = a_ij max(μ_i − λ_i f_ij, 0) / r_ij,  λ_i = λ* / Σ_j a_ij

    r and f are normalised over the senders with these weights. λ* = 0 gives the softmax over the senders with prior a.
    A node without senders has a zero row.

    Args:
        channels: number C of channels of the state.
        hops: the senders of i are the nodes with a walk of 1 to ``hops`` edges to i. For more than one hop, only the
            signs of the weights count. 1 by default: the senders are the neighbours.
        self_loops: ``"keep"``: loops as observed. ``"add"``: one more loop of weight 1 at every node. ``"remaining"``,
            the default: exactly one loop at every node, the mean of its observed loops or of weight 1. ``"remove"``: no
            loops. They are added before walks are counted.

    Options:
        lam: λ* ≥ 0, the strength of the friction. 1 by default. Larger values give sparser rows.
        alpha: α > 0, the weight of conservation. 0.1 by default. ``math.inf`` conserves the flow.
        friction: ``"attention"``, the default: a :class:`FrictionAttention`, as in the paper. ``"constant"``: a
            constant f. Or a module that maps (x, graph) to q̃ and k̃ [N, H, G] with scores q̃_i·k̃_j.
        lam_scale: has no effect, since n is replaced by Σ_j a_ij.
        heads: number H of heads. 1 by default. Without projection, H divides C.
        projection: ``"separate"``, the default: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q
            = W_K, which keeps a score symmetric. ``None``: q = k = x.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55). ``"frobenius"``: one norm per graph, as in
            released code, with which the attention is nearly uniform (docs/errata.md, D1). ``None``, the default: no
            normalisation.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> EdgeSparseFlowDiffusivity(4, hops=2)(x, graph).heads
        1
    """

    needs_graph = True

    def __init__(
        self,
        channels: int,
        *,
        hops: Count = 1,
        self_loops: SelfLoops = "remaining",
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.hops = hops
        self.self_loops = self_loops
        self.depends_on = "edges"

    def couple(self, x: State, graph: Graph) -> Coupling:
        graph = graph.with_self_loops(self.self_loops)
        if self.hops > 1:
            graph = graph.within(self.hops)
        # Scores are exponents. Half precision would round large scores by more than one.
        s = sddmm(graph.pattern, *accumulating(*self.resistance_features(x, graph))[0])
        u = sddmm(graph.pattern, *accumulating(*self.friction_features(x, graph))[0])
        prior = graph.weights(s).unsqueeze(1)
        target = graph.edges[1]
        weight_in = prior.new_zeros(graph.num_nodes, 1).index_add(0, target, prior)
        # λ = 0 instead of 0/0 for a node without senders, whose row is empty.
        lam = self.lam / weight_in.masked_fill(weight_in == 0, math.inf)
        lam = lam.expand(-1, self.heads)
        leak = torch.full_like(lam, 0.0 if self.row_stochastic else 1 / self.alpha)
        weight = sparse_flow_edges(s, u, prior, lam, leak, target).flow.to(x.dtype)
        return SparseCoupling(
            graph,
            weight,
            symmetric=False,
            row_stochastic=self.row_stochastic,
            nonnegative=True,
        )
