"""Sparse flow over a given graph: the row problem restricted to observed edges, or to nodes a few hops away."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.diffusivities.sparse_flow import SparseFlowDiffusivity
from diffusion_mp.errors import check_choice, check_counts
from diffusion_mp.graph import Graph, SelfLoops
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.kernels.sparse_flow import sparse_flow_edges
from diffusion_mp.kernels.spmm import sddmm


class EdgeSparseFlowDiffusivity(SparseFlowDiffusivity):
    r"""SFi-attention over the edges of a graph, in O(E): the extension that SFi-Former names at the end of Section 3.2.

    Row i of S solves the problem of :class:`SparseFlowDiffusivity` with j over the senders of i. An edge of weight a
    counts as a parallel ones: s_ij = a_ij max(μ_i − λ_i f_ij, 0)/r_ij, r and f are normalised over the senders with
    these weights, and λ_i = λ*/Σ_j a_ij. On the complete graph with self-loops it is the all-pair form; with λ* = 0 it
    is the softmax over the senders with prior a. A node that nobody sends to has a zero row.

    Args:
        channels: C of the state.
        hops: k; j is every node with a walk of 1 to k edges to i. For k > 1 weights only say which edges exist (a > 0).
        self_loops: policy of ``Graph.with_self_loops``, before the walks are counted.
        options: of :class:`SparseFlowDiffusivity`; ``lam_scale`` has no part, since λ_i is that of row i.
    """

    needs_graph = True

    def __init__(self, channels: int, *, hops: int = 1, self_loops: SelfLoops = "remaining", **options: Any) -> None:
        super().__init__(channels, **options)
        check_counts(hops=hops)
        check_choice(self_loops, "self_loops", ["keep", "add", "remove", "remaining"])
        self.hops = hops
        self.depends_on = "edges"
        self.self_loops: SelfLoops = self_loops

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        graph = graph.with_self_loops(self.self_loops)
        if self.hops > 1:
            graph = graph.within(self.hops)
        (q, k), _ = accumulating(*self.resistance_features(x, graph))
        s = sddmm(graph.pattern, q, k)
        u = self._friction_scores(x, graph, s)
        prior = graph.weights(s).unsqueeze(1)
        target = graph.edges[1]
        weight_in = prior.new_zeros(graph.num_nodes, 1).index_add(0, target, prior)
        lam = self.lam / weight_in.masked_fill(weight_in == 0, math.inf)
        leak = torch.full_like(lam, 0.0 if self.row_stochastic else 1 / self.alpha)
        flow, _ = sparse_flow_edges(s, u, prior, lam.expand(-1, self.heads), leak.expand(-1, self.heads), target)
        return SparseCoupling(
            graph, flow.to(x.dtype), symmetric=False, row_stochastic=self.row_stochastic, nonnegative=True
        )

    def _friction_scores(self, x: Float[Tensor, "N C"], graph: Graph, s: Float[Tensor, "E H"]) -> Float[Tensor, "E H"]:
        query, key = self.friction_features(x, graph)
        if query is None or key is None:
            return torch.zeros_like(s)
        (query, key), _ = accumulating(query, key)
        return sddmm(graph.pattern, query, key).to(s.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hops={self.hops}, self_loops={self.self_loops!r}"
