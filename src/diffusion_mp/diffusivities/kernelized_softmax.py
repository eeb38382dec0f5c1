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
from diffusion_mp.couplings.shapes import State, Values
from diffusion_mp.diffusivities.all_pair import (
    Features,
    Normalization,
    Projection,
    QueryKeyDiffusivity,
)
from diffusion_mp.diffusivities.base import Diffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import max_rows
from diffusion_mp.modules import AuxiliaryLoss
from diffusion_mp.runtime.noise import gumbel, take_step
from diffusion_mp.runtime.precision import accumulating, quotient, without_autocast

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


def attention_features(q: Values, k: Values, directions: Directions) -> LogFeatures:
    """Return log features w_r·q of queries and w_r·k of keys, and log weights −½‖k‖² of keys, in at least float32.

    log φ(a)_r is w_r·a − ½‖a‖² − ½ log m, and E[φ(a)·φ(b)] = exp(a·b). The other terms cancel in a row.
    """
    # Asked before they are widened, which would make two tensors of one.
    tied = q is k
    (q, k, directions), _ = accumulating(q, k, directions)
    # These are exponents: a rounding error of half precision would become a factor of a feature.
    with without_autocast(k):
        log_key = k @ directions.t()
        log_query = log_key if tied else q @ directions.t()
        return log_query, log_key, -0.5 * k.square().sum(2, keepdim=True)


def stabilized_features(
    q: Values, features: LogFeatures, eps: float, graph: Graph
) -> LogFeatures:
    """Return log features log(e^{w_r·a − ½‖a‖² − M} + ε) and zero log weights, as released code computes them.

    M is the largest w_r·q of a query, or the largest w_r·k over all keys of a graph. With ε > 0, M does not cancel.
    """
    if graph.num_nodes != graph.total_nodes:
        raise ValueError(
            "stabilizer must be 0 on several ranks: it needs the largest feature of all keys of a graph. Set "
            "stabilizer=0, or use one process."
        )
    along_q, along_k, half_k = features
    half_q = -0.5 * q.to(along_q.dtype).square().sum(2, keepdim=True)
    floor = torch.full_like(half_q, math.log(eps))
    largest_q = along_q.amax(2, keepdim=True)
    # One number for all keys of a graph: a number per key would change their weights.
    largest_k = max_rows(along_k.amax(2, keepdim=True), graph.segments)
    log_query = torch.logaddexp(along_q + half_q - largest_q, floor)
    log_key = torch.logaddexp(along_k + half_k - largest_k, floor)
    return log_query, log_key, torch.zeros_like(half_k)


def edge_loss(
    coupling: couplings.Coupling, graph: Graph, *, relative: bool = False
) -> Tensor:
    """Return the negative log-likelihood of the observed edges under an attention, in O(E).

    With the attention π, edge weights a and weighted degrees d_u = Σ_v a_uv (Wu et al. 2022; slides, "Input Graphs as
    Regularization Loss"):

        −(1/N) Σ_{uv ∈ E} (a_uv/d_u) log π_uv

    The mean is over all N nodes of a batch and over heads. The released code takes the mean over edges (docs/errata.md,
    N5). Edges of weight zero do not count.

    Args:
        coupling: the attention π, whose rows should sum to one.
        graph: the graph of the observed edges.
        relative: divide the part of every graph of n nodes by log n, the loss of uniform attention. ``False`` by
            default, as in the slides.

    Returns:
        A 0-dimensional tensor of at least float32; zero if there are no edges.

    Raises:
        ValueError: the graph has no ``edge_index``, or other nodes than the coupling.

    Examples:
        >>> edge_loss(SoftmaxDiffusivity()(x), graph).shape
        torch.Size([])
    """
    check_coupling_kind(coupling)
    checks.check_kind(graph, "graph", Graph, "a Graph")
    checks.check_flags(relative=relative)
    if graph.edge_index is None:
        raise ValueError(
            "edge_loss compares the coupling with observed edges; got a graph without edge_index. Pass one."
        )
    if coupling.num_nodes != graph.num_nodes:
        raise ValueError(
            f"coupling and graph must have the same nodes; got {coupling.num_nodes} and {graph.num_nodes} nodes."
        )
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
        # A graph of one node has no loss, whatever the divisor.
        share = share / sizes.clamp(min=2).log()
    share = share.unsqueeze(1)
    # 0 log 0 = 0.
    nothing = (share == 0) & log_entries.isneginf()
    log_entries = log_entries.masked_fill(nothing, 0.0)
    return -(share * log_entries).sum() / max(graph.total_nodes * coupling.heads, 1)


# Every torch.Generator accepts smaller ones.
MAX_SEED = 2**62


class KernelOptions(TypedDict, total=False):
    """Further options of `KernelizedSoftmaxDiffusivity`: options of `QueryKeyDiffusivity`, and of the released code."""

    heads: Count
    projection: Projection
    head_channels: Count | None
    normalize: Normalization
    bias: bool
    stabilizer: NonnegativeNumber


class KernelizedSoftmaxDiffusivity(QueryKeyDiffusivity):
    """Attend to all nodes by NodeFormer's kernelised Gumbel-softmax (Wu et al. 2022; slides, Algorithm 1).

    In training, with g_js ~ Gumbel(0, 1) for every sender, head and sample s:

        s_ij = (1/K) Σ_s φ(q_i/√τ)·φ(k_j/√τ) e^{g_js/τ} / Σ_l φ(q_i/√τ)·φ(k_l/√τ) e^{g_ls/τ}

    In evaluation, or with ``num_samples=0``, the same without noise. The features φ are m positive orthogonal random
    features with E[φ(a)·φ(b)] = exp(a·b), so s_ij estimates the softmax of (q_i·k_j + g_j)/τ. The error of the estimate
    (:func:`kernel_error`) falls like m^-½ only if m is well above e^(‖q_i + k_j‖²/τ). ``normalize="row"`` bounds the
    error.

    Only keys carry noise, since the noise of the queries in Algorithm 1 cancels. The coupling is computed in log space
    and in at least float32, so rows sum to one for any τ and any norm (docs/errata.md, N1–N4, N8). A product costs O(N
    K m D) time and O(N (m + D)) memory.

    The features and the state of the noise are buffers, and every training call advances the state. A run resumed from
    a state dict therefore repeats. Concurrent threads draw distinct noise. Do not checkpoint activations: the repeated
    forward pass would draw new noise.

    Args:
        channels: number C of channels of the state.
        num_features: number m of random features.
        tau: temperature τ > 0.
        logits: ``"dot"``, the default: q·k, as in the slides. ``"scaled_dot"``: q·k/√d for heads of d channels, as in
            released code.
        num_samples: number K of samples of the noise. 0 is without noise.
        edge_regularization: weight λ of :func:`edge_loss`, which a training call computes without noise and
            :func:`auxiliary_loss` returns. 0, the default, computes no loss.
        relative_edge_loss: divide the loss of a graph of n nodes by log n, so that uniform attention costs 1 on any
            graph. The slides do not divide (docs/errata.md, N11).
        generator: draws the features and the seed of the noise. ``None`` is the global generator, as for parameters.

    Options:
        heads: number H of heads. 1 by default. Without projection, H divides C.
        projection: ``"separate"``, the default: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q
            = W_K, which keeps a score symmetric. ``None``: q = k = x.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55), which bounds the error of the estimate.
            ``"frobenius"``: one norm per graph, as in released code, with which the attention is nearly uniform
            (docs/errata.md, D1). ``None``, the default: no normalisation.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.
        stabilizer: ε, added to features whose maximum is one. 0 by default, 10⁻⁶ in the released code. It is for parity
            only, since attention becomes uniform for large norms (docs/errata.md, N4).

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

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
        # `channels` is required here, so the base class always knows the channels of a head.
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
        """Draw new features and a new seed for the noise, as ``reset_parameters`` does.

        Args:
            generator: draws both. ``None`` is the global generator.
        """
        # In place, since a captured graph or an optimiser may hold these buffers.
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

    def scaled_queries_and_keys(self, x: State, graph: Graph) -> Features:
        """Return q and k divided by the root of the temperature, in at least float32; one object if they are equal.

        Args:
            x: state [N, C].
            graph: graph of the nodes.
        """
        q, k = self.queries_and_keys(x, graph)
        (wide_q, wide_k), _ = accumulating(q, k)
        scale = self.temperature**-0.5
        scaled = scale * wide_q
        return scaled, scaled if q is k else scale * wide_k

    def couple(self, x: State, graph: Graph) -> couplings.Coupling:
        q, k = self.scaled_queries_and_keys(x, graph)
        features = attention_features(q, k, self.directions)
        if self.stabilizer:
            features = stabilized_features(q, features, self.stabilizer, graph)
        log_query, log_key, log_weight = features
        weighted = partial(
            couplings.LogLowRankCoupling, log_query, log_key, graph.segments
        )
        attention: couplings.Coupling = weighted(log_weight)
        # A value of the last training step must not outlive an evaluation.
        self.auxiliary.value = None
        # The loss and the noise belong to training, so predictions repeat.
        if not self.training:
            return attention
        if self.edge_regularization > 0 and graph.edge_index is not None:
            # The loss reads edges whose senders other ranks hold.
            loss = edge_loss(
                graph.share(attention), graph, relative=self.relative_edge_loss
            )
            self.auxiliary.value = self.edge_regularization * loss
        # Noise is added to the log weights of keys. The noise of a query would cancel in its row.
        if self.num_samples > 0:
            state = take_step(self.noise_state)
            noise = gumbel(state, k, self.num_samples, graph.first_node)
            # The Gumbel-softmax divides its noise by the temperature, like the logits.
            return weighted(log_weight + noise / self.tau)
        return attention

    def exact(self, x: State, graph: Graph | None = None) -> couplings.PairwiseCoupling:
        """Return the softmax that the features estimate, in O(N²).

            s_ij = exp(q_i·k_j/t) / Σ_l exp(q_i·k_l/t)

        t is the :attr:`temperature`.

        Args:
            x: state [N, C].
            graph: graph of the nodes. ``None`` is one graph.
        """
        checks.check_state(x, channels=self.channels)
        graph = Graph.coerce(x, graph)
        return couplings.PairwiseCoupling(
            *self.scaled_queries_and_keys(x, graph), graph.segments, mutual=self.mutual
        )


class RelationalBias(Diffusivity):
    """Couple nodes along walks on the observed graph, with a learned weight for every length.

    NodeFormer adds this coupling to an attention. With the adjacency A and learned biases b, at first 0 (Wu et al.
    2022; slides, "Input Graphs as Relational Bias"):

        Σ_p σ(b_p) A^p

    Args:
        heads: number H of heads. Every head has its own biases.
        hops: number P of hops, p = 1, …, P. 1 by default: direct neighbours.
        normalization: normalisation of A, as in :class:`AdjacencyDiffusivity`. ``"sum"``, the default: a_ij. ``"sym"``:
            a_ij / √(d_i d_j). ``"row"``: a_ij / d_i. The released code divides by degrees, as ``"sym"`` and ``"row"``
            do.
        powers: ``"walks"``, the default: hop p counts walks of length p, A v, A(A v), …, in O(pE). ``"reach"``, as
            released code: hop p joins all pairs at most 2ᵖ⁻¹ steps apart, without weights and normalised by its own
            degrees.
        gate: ``"sigmoid"``, the default: weights σ(b). ``None``: weights b, as in the released code on some data sets.

    Options:
        self_loops: ``"keep"``, the default: loops as observed. ``"add"``: one more loop of weight 1 at every node.
            ``"remaining"``: exactly one loop at every node, the mean of its observed loops or of weight 1.
            ``"remove"``: no loops.
        direction: ``"pyg"``, the default: in-degrees at both ends, as in PyG. ``"directed"``, as released code: the
            in-degree of the receiver and the out-degree of the sender. ``"undirected"``: first replace A by ½(A + Aᵀ).
        degrees: ``"weighted"``, the default: d is the sum of edge weights. ``"count"``: d is the number of edges with a
            positive weight.

    Shapes:
        - x: [N, C], of which only the dtype and the device are read.
        - output: a coupling of N nodes and H heads.

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

    def couple(self, x: State, graph: Graph) -> couplings.Coupling:
        gates: Tensor = self.bias
        # Without a gate, a bias may turn negative in training.
        nonnegative = self.gate is not None
        if nonnegative:
            gates = gates.sigmoid()
        # Powers are never formed: A is applied hop by hop.
        if self.powers == "walks":
            return couplings.PolynomialCoupling(
                self.adjacency(x, graph), gates, nonnegative=nonnegative
            )
        # The pairs at most 2ᵖ⁻¹ steps apart, as an unweighted graph with its own degrees (docs/errata.md, N7).
        reached = (
            self.adjacency.couple(x, graph.within(1 << p)) for p in range(len(gates))
        )
        terms = zip(gates, reached, strict=True)
        return couplings.SumCoupling(
            [couplings.ScaledCoupling(*term, nonnegative=nonnegative) for term in terms]
        )
