"""NodeFormer: softmax attention in O(N) by random features, its edge loss, and its relational bias (Wu et al. 2022)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp import checks, couplings
from diffusion_mp.checks import Count, CountOrZero, NonnegativeNumber, PositiveNumber
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.diffusivities.all_pair import (
    Features,
    Normalization,
    Projection,
    QueryKeyDiffusivity,
)
from diffusion_mp.diffusivities.base import Diffusivity, GraphPart
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import max_rows
from diffusion_mp.modules import AuxiliaryLoss
from diffusion_mp.runtime.noise import gumbel, take_step
from diffusion_mp.runtime.precision import accumulating, quotient, without_autocast

Rows = Float[Tensor, "N H D"]
Directions = Float[Tensor, "m D"]
LogFeatures = tuple[
    Float[Tensor, "N H m"], Float[Tensor, "N H m"], Float[Tensor, "N H one"]
]


def orthogonal_directions(
    num_features: int, dim: int, generator: torch.Generator | None = None
) -> Directions:
    """Return m directions w_r ~ N(0, I), orthogonal and Haar-distributed in blocks (Choromanski et al. 2021)."""
    gaussian = torch.randn(
        -(-num_features // dim), dim, dim, generator=generator, dtype=torch.float64
    )
    # Haar-distributed only if R has a positive diagonal, which LAPACK does not promise (Mezzadri 2007).
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
    # Rows of Q have norm one; lengths of independent Gaussian vectors make every direction Gaussian by itself.
    lengths = torch.randn(
        num_features, dim, generator=generator, dtype=torch.float64
    ).norm(dim=1, keepdim=True)
    return (q.reshape(-1, dim)[:num_features] * lengths).to(torch.get_default_dtype())


def attention_features(q: Rows, k: Rows, directions: Directions) -> LogFeatures:
    r"""Return log features w_r·q of queries and w_r·k of keys, and log weights −½‖k‖² of keys, in at least float32.

    log φ(a)_r is w_r·a − ½‖a‖² − ½ log m, and E[φ(a)·φ(b)] = exp(a·b); the other terms cancel in a row.
    """
    tied = q is k
    (q, k, directions), _ = accumulating(q, k, directions)
    # Exponents: what half precision rounds off here would be a factor of a feature.
    with without_autocast(k):
        log_key = k @ directions.t()
        log_query = log_key if tied else q @ directions.t()
        return log_query, log_key, -0.5 * k.square().sum(2, keepdim=True)


def stabilized_features(
    q: Rows, k: Rows, directions: Directions, eps: float, graph: Graph
) -> LogFeatures:
    r"""Return log features log(e^{w_r·a − ½‖a‖² − M} + ε) and zero log weights, as released code computes them.

    M is the largest w_r·q of a query, or the largest w_r·k over all keys of a graph. With ε > 0 it does not cancel.
    """
    if graph.num_nodes != graph.total_nodes:
        raise ValueError(
            "stabilizer must be 0 on several ranks: it needs the largest feature of all keys of a graph. Set "
            "stabilizer=0, or use one process."
        )
    along_q, along_k, half_k = attention_features(q, k, directions)
    half_q = -0.5 * q.to(along_q.dtype).square().sum(2, keepdim=True)
    floor = torch.full_like(half_q, math.log(eps))
    largest_q = along_q.amax(2, keepdim=True)
    # One number for all keys of a graph: another for every key would weigh them anew.
    largest_k = max_rows(along_k.amax(2, keepdim=True), graph.segments)
    log_query = torch.logaddexp(along_q + half_q - largest_q, floor)
    return (
        log_query,
        torch.logaddexp(along_k + half_k - largest_k, floor),
        torch.zeros_like(half_k),
    )


def edge_loss(
    coupling: couplings.Coupling, graph: Graph, *, relative: bool = False
) -> Tensor:
    r"""Negative log-likelihood of observed edges under attention π, −(1/N) Σ_{(u,v) ∈ E} (a_uv/d_u) log π_uv, in O(E).

    Slides, "Input Graphs as Regularization Loss" (Wu et al. 2022). d_u = Σ_v a_uv is the weighted degree of the node
    u. The mean is over all N nodes of a batch and over heads; the released code takes it over edges (docs/errata.md,
    N5). The result is a 0-dimensional tensor of at least float32, and zero without observed edges.

    Edges of weight zero do not count, and rows of π should sum to one. ``relative`` divides the part of every graph of
    n nodes by log n, the loss of uniform attention.

    Examples:
        >>> edge_loss(SoftmaxDiffusivity()(x), graph).shape
        torch.Size([])
    """
    check_coupling_kind(coupling)
    checks.check_kind(graph, "graph", Graph, "a Graph")
    checks.check_flags(relative=relative)
    if graph.edge_index is None:
        why = "edge_loss compares the coupling with observed edges; got a graph without edge_index. Pass one."
        raise ValueError(why)
    if coupling.num_nodes != graph.num_nodes:
        nodes = f"{coupling.num_nodes} and {graph.num_nodes} nodes"
        raise ValueError(f"coupling and graph must have the same nodes; got {nodes}.")
    target = graph.edge_index[1]
    (log_entries,), _ = accumulating(coupling.log_at(graph.edge_index))
    weight = graph.weights(log_entries)
    degree = weight.new_zeros(graph.num_nodes).index_add(0, target, weight)
    # A node whose edges all have weight zero has degree zero: its share is zero, not 0/0.
    share = quotient(weight, degree[target])
    if relative:
        if graph.is_single:
            sizes = weight.new_full((1,), graph.total_nodes)
        else:
            sizes = graph.ptr.diff().to(weight)[graph.batch[target]]
        # A graph of one node has no loss, whatever divides it.
        share = share / sizes.clamp(min=2).log()
    share = share.unsqueeze(1)
    # 0 log 0 = 0.
    nothing = (share == 0) & log_entries.isneginf()
    log_entries = log_entries.masked_fill(nothing, 0.0)
    return -(share * log_entries).sum() / max(graph.total_nodes * coupling.heads, 1)


# Every torch.Generator accepts smaller ones.
MAX_SEED = 2**62


class KernelOptions(TypedDict, total=False):
    """Further options of `KernelizedSoftmaxDiffusivity`: of `QueryKeyDiffusivity`, and of the released code."""

    heads: Count
    projection: Projection
    head_channels: Count | None
    normalize: Normalization
    bias: bool
    stabilizer: NonnegativeNumber


class KernelizedSoftmaxDiffusivity(QueryKeyDiffusivity):
    r"""Kernelised Gumbel-softmax over all nodes of a graph (Wu et al. 2022; slides, Algorithm 1).

    In training, with g_js ~ Gumbel(0, 1) for every sender, head and sample s:

        s_ij = (1/K) Σ_s φ(q_i/√τ)·φ(k_j/√τ) e^{g_js/τ} / Σ_l φ(q_i/√τ)·φ(k_l/√τ) e^{g_ls/τ}

    and in evaluation, or with ``num_samples=0``, the same without noise. φ are positive orthogonal random features,
    E[φ(a)·φ(b)] = exp(a·b), so s_ij estimates the softmax of (q_i·k_j + g_j)/τ. The error (:func:`kernel_error`) falls
    like m^-½ only if m is well above e^(‖q_i + k_j‖²/τ); ``normalize="row"`` bounds it.

    Only keys carry noise; that of the queries in Algorithm 1 cancels. Computed in log space and in at least float32, so
    that rows sum to one for any τ and any norm (docs/errata.md, N1–N4, N8). Time is O(N K m D), memory O(N (m + D)).

    The features and the state of the noise, which every training call advances, are buffers: a run resumed from a state
    dict repeats. Concurrent threads draw distinct noise. Do not checkpoint activations: the repeated forward pass would
    draw new noise.

    Args:
        channels, num_features, tau: C of the state, m, and the temperature τ.
        logits: ``"dot"``, q·k, as in the slides; ``"scaled_dot"``, q·k/√d for heads of d channels, as in released code.
        num_samples: K; 0 for no noise.
        edge_regularization, relative_edge_loss: weight λ of :func:`edge_loss` without noise, in training, for
            :func:`auxiliary_loss`, and whether it is divided by log n; in the slides it is not (docs/errata.md, N11).
        generator: draws the features and the seed of the noise; by default the global one, as for parameters.

    Options:
        heads, projection, head_channels, normalize, bias: of :class:`QueryKeyDiffusivity`.
        stabilizer: ε (10⁻⁶ in the released code), added to features whose maximum is one; 0 by default. For parity
            only: attention becomes uniform for large norms (docs/errata.md, N4).

    Examples:
        >>> KernelizedSoftmaxDiffusivity(4, num_features=16, tau=0.25)(x).row_stochastic
        True
    """

    directions: Tensor
    noise_state: Tensor
    row_stochastic = True
    why_no_penalty = (
        "the features only estimate a softmax with separate queries and keys: no energy is known. "
        "SoftmaxDiffusivity(channels, normalize=None, measure='distance') is the kind that has one."
    )

    def __init__(
        self,
        channels: Count,
        *,
        num_features: Count = 32,
        tau: PositiveNumber = 0.25,
        logits: Literal["dot", "scaled_dot"] = "dot",
        num_samples: CountOrZero = 10,
        edge_regularization: NonnegativeNumber = 0.0,
        relative_edge_loss: bool = True,
        generator: torch.Generator | None = None,
        **options: Unpack[KernelOptions],
    ) -> None:
        features: dict[str, Any] = dict(options)
        stabilizer = features.pop("stabilizer", 0.0)
        super().__init__(channels, **features)
        self.stabilizer = stabilizer
        if self.stabilizer:
            # Every entry depends on the largest feature of all keys.
            self.depends_on = "graph"
        # `channels` are required here, with which the base class always knows those of a head.
        self.dim = cast("int", self.head_channels)
        self.tau = float(tau)
        self.logits = logits
        self.num_samples = num_samples
        self.edge_regularization = edge_regularization
        self.relative_edge_loss = relative_edge_loss
        self.auxiliary = AuxiliaryLoss()
        self.register_buffer("directions", torch.empty(num_features, self.dim))
        self.register_buffer("noise_state", torch.zeros(2, dtype=torch.long))
        self.redraw(generator)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new features and a new seed for the noise, as ``reset_parameters`` does."""
        # In place: the buffers stay those that a captured graph or an optimiser may hold.
        self.directions.copy_(
            orthogonal_directions(self.directions.size(0), self.dim, generator)
        )
        seed = torch.randint(MAX_SEED, (), generator=generator)
        self.noise_state.copy_(torch.stack([seed, torch.zeros_like(seed)]))

    _draw = redraw

    @property
    def temperature(self) -> float:
        """The divisor of q·k: τ, or τ√d with ``logits="scaled_dot"``."""
        if self.logits == "dot":
            return self.tau
        return self.tau * math.sqrt(self.dim)

    def scaled_queries_and_keys(
        self, x: Float[Tensor, "N C"], graph: Graph
    ) -> Features:
        """Return q and k over the root of the temperature, in at least float32; one object if they are equal."""
        q, k = self.queries_and_keys(x, graph)
        (wide_q, wide_k), _ = accumulating(q, k)
        scale = self.temperature**-0.5
        scaled = scale * wide_q
        return scaled, scaled if q is k else scale * wide_k

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> couplings.Coupling:
        q, k = self.scaled_queries_and_keys(x, graph)
        if self.stabilizer:
            log_query, log_key, log_weight = stabilized_features(
                q, k, self.directions, self.stabilizer, graph
            )
        else:
            log_query, log_key, log_weight = attention_features(q, k, self.directions)
        weighted = partial(
            couplings.LogLowRankCoupling, log_query, log_key, graph.segments
        )
        attention: couplings.Coupling = weighted(log_weight)
        # A value of the last training step must not outlive an evaluation.
        self.auxiliary.value = None
        # The loss and the noise belong to training; predictions repeat.
        if not self.training:
            return attention
        if self.edge_regularization > 0 and graph.edge_index is not None:
            # The loss looks at edges whose senders other ranks hold.
            everywhere = attention
            if isinstance(graph, GraphPart):
                everywhere = graph.share(attention)
            loss = edge_loss(everywhere, graph, relative=self.relative_edge_loss)
            self.auxiliary.value = self.edge_regularization * loss
        # Noise is added to log weights of keys, where that of a query would cancel in its row.
        if self.num_samples > 0:
            state = take_step(self.noise_state)
            noise = gumbel(state, k, self.num_samples, graph.first_node)
            return weighted(log_weight + noise / self.tau)
        return attention

    def exact(
        self, x: Float[Tensor, "N C"], graph: Graph | None = None
    ) -> couplings.PairwiseCoupling:
        """Return the softmax exp(q_i·k_j/temperature) / Σ_l exp(q_i·k_l/temperature) that is estimated, in O(N²)."""
        checks.check_state(x, channels=self.channels)
        graph = Graph.coerce(x, graph)
        return couplings.PairwiseCoupling(
            *self.scaled_queries_and_keys(x, graph), graph.segments, mutual=self.mutual
        )


class RelationalBias(Diffusivity):
    r"""Walks along the observed graph with learned weights, Σ_p σ(b_p) Aᵖ with b = 0 at first, beside an attention.

    Wu et al. 2022; slides, "Input Graphs as Relational Bias". The released code divides by degrees, as ``"sym"`` and
    ``"row"`` do.

    Args:
        heads, hops: H, one bias b [P] per head, and P.
        normalization, options: of A, see :class:`AdjacencyDiffusivity` (``self_loops``, ``direction``).
        powers: ``"walks"``: hop p counts walks of length p, A v, A(A v), …, in O(pE). ``"reach"``, as released code:
            hop p joins all pairs at most 2ᵖ⁻¹ steps apart, without weights and normalised by its own degrees.
        gate: ``"sigmoid"``, σ(b), or ``None``, b itself, as in the released code on some data sets.

    Examples:
        >>> RelationalBias(heads=2, hops=2, normalization="sym")(x, graph).heads
        2
    """

    depends_on = "parts"
    needs_graph = True
    why_no_penalty = (
        "the graph and b fix the relational bias: certify the coupling itself (Theorem 1) "
        "if A is symmetric."
    )

    def __init__(
        self,
        heads: Count = 1,
        *,
        hops: Count = 1,
        normalization: Literal["sum", "sym", "row"] = "sum",
        powers: Literal["walks", "reach"] = "walks",
        gate: Literal["sigmoid"] | None = "sigmoid",
        **options: Any,
    ) -> None:
        super().__init__()
        self.adjacency: Diffusivity = AdjacencyDiffusivity(normalization, **options)
        self.heads = heads
        self.powers = powers
        self.gate = gate
        self.symmetric = self.adjacency.symmetric
        self.bias = nn.Parameter(torch.zeros(hops, heads))

    def _draw(self) -> None:
        nn.init.zeros_(self.bias)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> couplings.Coupling:
        gates: Tensor = self.bias
        # A bias as it is may turn negative in training.
        nonnegative = self.gate is not None
        if nonnegative:
            gates = gates.sigmoid()
        # Powers are never formed: A is applied hop by hop.
        if self.powers == "walks":
            return couplings.PolynomialCoupling(
                self.adjacency(x, graph), gates, nonnegative=nonnegative
            )
        # Who is at most 2ᵖ⁻¹ steps away, as an unweighted graph of its own with its own degrees (docs/errata.md, N7).
        reached = (
            self.adjacency.couple(x, graph.within(1 << p)) for p in range(len(gates))
        )
        terms = zip(gates, reached, strict=True)
        return couplings.SumCoupling(
            [couplings.ScaledCoupling(*term, nonnegative=nonnegative) for term in terms]
        )
