"""``KernelizedSoftmaxDiffusivity``: NodeFormer's attention, softmax over all pairs in O(N) by random features."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, LogLowRankCoupling, PairwiseCoupling
from diffusion_mp.diffusivities.auxiliary import AuxiliaryLoss, edge_loss
from diffusion_mp.diffusivities.query_key import Features, QueryKeyDiffusivity
from diffusion_mp.diffusivities.random_features import attention_features, orthogonal_directions, stabilized_features
from diffusion_mp.errors import (
    check_choice,
    check_counts,
    check_flags,
    check_generator,
    check_kind,
    check_positive,
    check_state,
)
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.noise import gumbel, take_step
from diffusion_mp.kernels.precision import accumulating

# Seeds that every torch.Generator accepts.
MAX_SEED = 2**62


class KernelizedSoftmaxDiffusivity(QueryKeyDiffusivity):
    r"""Kernelised Gumbel-softmax over all nodes of a graph (Wu et al. 2022; slides, Algorithm 1).

    In training, with g_js ~ Gumbel(0, 1) for every sender, head and sample s:

        s_ij = (1/K) Σ_s φ(q_i/√τ)·φ(k_j/√τ) e^{g_js/τ} / Σ_l φ(q_i/√τ)·φ(k_l/√τ) e^{g_ls/τ}

    and in evaluation, or with ``num_samples=0``, the same without noise. φ are positive orthogonal random features,
    E[φ(a)·φ(b)] = exp(a·b), so s_ij estimates the softmax of (q_i·k_j + g_j)/τ; :func:`kernel_error` measures how
    well. The error grows with the norms of q/√τ and k/√τ, and falls like m^-½ only where m is well above
    e^(‖q_i + k_j‖²/τ): ``normalize="row"`` or ``logits="scaled_dot"`` keep it in bounds.

    Only keys carry the noise; from the queries, which Algorithm 1 multiplies too, it cancels. Everything is computed in
    log space and in at least float32: rows sum to one, for any τ and any norm, where those of the released code
    overflow or lose their mass. Training and evaluation use one τ (docs/errata.md, N1–N4, N8). Time is O(N K m D),
    memory O(N (m + D)): the samples are accumulated.

    The features and the state of the noise are buffers: they move, save and load with the module, and a resumed run
    repeats. The noise is a function of that state, which every training call advances; the global random state is never
    touched. Calls from several threads each take a state of their own, in the order in which they come. A forward pass
    that is repeated (activation checkpointing) draws new noise: do not checkpoint it.

    Args:
        channels: C of the state.
        num_features: m.
        tau: τ, the temperature.
        logits: ``"dot"``, q·k, as in the slides, or ``"scaled_dot"``, q·k/√d with d the channels of a head, as in the
            released code.
        num_samples: K; 0 for no noise at all.
        edge_regularization: weight λ of :func:`edge_loss` of the coupling without noise. It is recorded in training, if
            there is a graph, and collected by :func:`auxiliary_loss`.
        relative_edge_loss: that loss over what uniform attention costs, log n; the slides do not divide
            (docs/errata.md, N11).
        generator: draws the features and the seed of the noise; by default the one that draws all parameters.
        stabilizer: ε that released code (10⁻⁶) adds to every feature once the largest is one. It is for parity only:
            where norms are large, ε is all that is left of most features and attention is uniform (docs/errata.md, N4).
        options: ``heads``, ``projection``, ``head_channels``, ``normalize`` and ``bias`` of
            :class:`QueryKeyDiffusivity`.

    Examples:
        >>> S = KernelizedSoftmaxDiffusivity(4, num_features=16, tau=0.25)(x)
        >>> torch.allclose(S.degree(), torch.ones(6, 1), atol=1e-4)
        True
    """

    directions: Tensor
    noise_state: Tensor
    row_stochastic = True
    why_no_penalty = (
        "softmax attention is normalised by rows, with separate queries and keys, and the features only estimate it: "
        "no energy is known. SoftmaxDiffusivity(channels, normalize=None, measure='distance') is the kind that has one."
    )

    def __init__(
        self,
        channels: int,
        *,
        num_features: int = 32,
        tau: float = 0.25,
        logits: Literal["dot", "scaled_dot"] = "dot",
        num_samples: int = 10,
        edge_regularization: float = 0.0,
        relative_edge_loss: bool = True,
        generator: torch.Generator | None = None,
        stabilizer: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        check_counts(channels=channels, num_features=num_features)
        check_kind(num_samples, "num_samples", int, "an integer, 0 for no noise")
        if num_samples != 0:
            check_counts(num_samples=num_samples)
        check_positive(tau, "tau")
        check_generator(generator)
        check_positive(edge_regularization, "edge_regularization", allow_zero=True)
        check_choice(logits, "logits", ["dot", "scaled_dot"])
        check_positive(stabilizer, "stabilizer", allow_zero=True)
        if stabilizer:
            self.depends_on = "graph"  # the largest feature of all keys is in every entry
        self.dim = cast("int", self.head_channels)
        self.tau, self.logits, self.num_samples = float(tau), logits, num_samples
        check_flags(relative_edge_loss=relative_edge_loss)
        self.edge_regularization, self.relative_edge_loss = edge_regularization, relative_edge_loss
        self.stabilizer = stabilizer
        self.auxiliary = AuxiliaryLoss()
        self.register_buffer("directions", torch.empty(num_features, self.dim))
        self.register_buffer("noise_state", torch.zeros(2, dtype=torch.long))
        self.redraw(generator)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new features, and a new seed for the noise. Nothing else ever does, but ``reset_parameters``."""
        self.directions.copy_(orthogonal_directions(self.directions.size(0), self.dim, generator))
        seed = torch.randint(MAX_SEED, (), generator=generator)
        self.noise_state.copy_(torch.stack([seed, torch.zeros_like(seed)]))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.redraw()

    @property
    def temperature(self) -> float:
        """What q·k is divided by: τ, or τ√d with ``logits="scaled_dot"``."""
        return self.tau if self.logits == "dot" else self.tau * math.sqrt(self.dim)

    def scaled_queries_and_keys(self, x: Float[Tensor, "N C"], graph: Graph) -> Features:
        """q and k over the root of the temperature, in at least float32; the same object where they are equal."""
        q, k = self.queries_and_keys(x, graph)
        (wide_q, wide_k), _ = accumulating(q, k)
        scale = self.temperature**-0.5
        scaled = scale * wide_q
        return scaled, scaled if q is k else scale * wide_k

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        q, k = self.scaled_queries_and_keys(x, graph)
        if self.stabilizer:
            log_query, log_key, log_weight = stabilized_features(q, k, self.directions, self.stabilizer, graph)
        else:
            log_query, log_key, log_weight = attention_features(q, k, self.directions)
        noisy = self.training and self.num_samples > 0
        regularized = self.training and self.edge_regularization > 0 and graph.edge_index is not None
        self.auxiliary.value = None
        if regularized or not noisy:
            coupling = LogLowRankCoupling(log_query, log_key, graph.segments, log_weight)
            if regularized:
                loss = edge_loss(graph.share(coupling), graph, relative=self.relative_edge_loss)
                self.auxiliary.value = self.edge_regularization * loss
        if noisy:
            noise = gumbel(take_step(self.noise_state), k, self.num_samples, graph.first_node) / self.tau
            coupling = LogLowRankCoupling(log_query, log_key, graph.segments, log_weight + noise)
        return coupling

    def exact(self, x: Float[Tensor, "N C"], graph: Graph | None = None) -> PairwiseCoupling:
        """The softmax that the features estimate, exp(q_i·k_j/temperature) / Σ_l exp(q_i·k_l/temperature), O(N²)."""
        check_state(x, channels=self.channels)
        graph = Graph.coerce(x, graph)
        return PairwiseCoupling(*self.scaled_queries_and_keys(x, graph), graph.segments)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_features={self.directions.size(0)}, tau={self.tau:g}, "
            f"logits={self.logits!r}, num_samples={self.num_samples}, stabilizer={self.stabilizer:g}"
        )
