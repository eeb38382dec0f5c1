"""Sparse-flow attention: each row is the flow of least energy into its node, with mostly zero entries."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling, feature_sizes
from diffusion_mp.couplings.features import all_products, listed_products
from diffusion_mp.couplings.pairwise import PairwiseCoupling
from diffusion_mp.couplings.stored import SparseCoupling
from diffusion_mp.errors import check_positive, describe
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.kernels.sparse_flow import (
    Features,
    RowTerms,
    entries,
    log_entries,
    sparse_flow_potentials,
    sparse_flow_product,
    support,
)


class SparseFlowCoupling(Coupling):
    r"""Row i is argmin_z ½Σ_j r_ij z_j² + λ_i Σ_j f_ij|z_j| + (α/2)(Σ_j z_j − 1)² (SFi-Former, Eqs. 6, 8 and 9).

    Resistances are r = softmax_j(−q_i·k_j) and frictions f = softmax_j(q̃_i·k̃_j), over the nodes j of i's graph. With
    thresholds θ = λf, Ohm's law gives s_ij = max(μ_i − θ_ij, 0)/r_ij, where the potential μ_i solves
    Σ_j s_ij + μ_i/α = 1. Solving for μ_i directly replaces the iteration of the paper, which states that no closed form
    exists (docs/errata.md, S3). Nothing has to converge, and no iteration is differentiated.

    For α = ∞ the flow is conserved and rows sum to one. For finite α they sum to 1 − μ_i/α, and a row with θ_ij ≥ α for
    all j is zero. λ = 0 and α = ∞ is softmax. A product costs O(N² D) time and O(N) memory, forward and backward.

    The potential of a row is measured from the threshold of its best conductor that carries flow, so rows sum to one
    (to 1 − μ_i/α) for any spread of the scores. Entries are as accurate as those of softmax. Only between senders with
    nearly equal frictions, the division of a flow is as uncertain as the difference of these frictions.

    Args:
        query, key: features q and k of receivers and senders [N, H, F], including a scale such as 1/√d.
        friction_query, friction_key: q̃ and k̃ [N, H, G]; without both, the friction is constant, f = 1/n.
        ptr: row boundaries of a ragged batch on the CPU (``Graph.segments``); ``None`` is one graph.
        lam: λ ≥ 0, a number or a tensor that broadcasts to [N, H].
        alpha: α > 0, a number (``math.inf`` for conservation) or a tensor that broadcasts to [N, H].

    Gradients flow to every tensor among the arguments.

    Raises:
        ValueError: features that do not match, one friction feature without the other, λ < 0 or α ≤ 0.

    Examples:
        >>> S = SparseFlowCoupling(q, k, k, q, lam=0.5, alpha=0.1)
        >>> S.density().shape  # the fraction of pairs that attend, by head
        torch.Size([2])
    """

    def __init__(
        self,
        query: Float[Tensor, "N H F"],
        key: Float[Tensor, "N H F"],
        friction_query: Float[Tensor, "N H G"] | None = None,
        friction_key: Float[Tensor, "N H G"] | None = None,
        ptr: Tensor | None = None,
        *,
        lam: float | Tensor,
        alpha: float | Tensor = math.inf,
    ) -> None:
        sizes = feature_sizes(query, key)
        if (friction_query is None) != (friction_key is None):
            raise ValueError("friction_query and friction_key come together; got one of them. Neither: f = 1/n.")
        if friction_query is None or friction_key is None:
            friction_query = friction_key = query[:, :, :0]
        feature_sizes(friction_query, friction_key, "friction_")
        if friction_query.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"friction_query must have the nodes and heads of query, {list(query.shape[:2])}; "
                f"got {describe(friction_query)}."
            )
        conserved = not isinstance(alpha, Tensor) and alpha == math.inf
        if not torch.compiler.is_compiling():  # numbers may be symbolic while tracing
            if not isinstance(lam, Tensor):
                check_positive(lam, "lam", allow_zero=True)
            if not isinstance(alpha, Tensor) and not conserved:
                check_positive(alpha, "alpha")
        super().__init__(*sizes, ptr=ptr, row_stochastic=conserved, nonnegative=True)
        (q, k, friction_q, friction_k), _ = accumulating(query, key, friction_query, friction_key)
        self._features = (q, k, friction_q, friction_k)
        self.lam = self._by_row(lam, "lam", q)
        leak = self._by_row(1 / alpha, "alpha", q)
        solved = sparse_flow_potentials(q, k, friction_q, friction_k, self.lam, leak, self.ptr)
        self._terms, self.log_potentials = solved.terms, solved.log_mu
        self._work, self._support = solved.work, solved.support

    def _by_row(self, value: float | Tensor, name: str, like: Tensor) -> Tensor:
        """Expand a number or tensor to [N, H]."""
        shape = (self.num_nodes, self.heads)
        if not isinstance(value, Tensor):
            return like.new_full(shape, value)
        sizes = value.shape[::-1]  # broadcasting aligns the last dimensions
        if len(sizes) > 2 or any(size not in (1, full) for size, full in zip(sizes, shape[::-1], strict=False)):
            raise ValueError(
                f"{name} must be a number or broadcast to [num_nodes, heads] = {list(shape)}; got {describe(value)}."
            )
        return value.to(like).expand(shape)

    def moved(self, v: Float[Tensor, "N H D"], *, transpose: bool = False) -> Float[Tensor, "N H D"]:
        """S v or Sᵀ v, for values with the heads of S, or with any number of heads if S has one."""
        heads = v.size(1)
        q, k, friction_q, friction_k = (t.expand(-1, heads, -1) for t in self._features)
        terms = RowTerms(*(t.expand(-1, heads) for t in self._terms))
        return sparse_flow_product(q, k, friction_q, friction_k, v, terms, self.ptr, transpose=transpose)

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.moved(v)

    def _transpose(self) -> Coupling:
        return _Transposed(self)

    def degree(self) -> Float[Tensor, "N heads"]:
        return self._ones(self.dtype) if self.row_stochastic else super().degree()

    def _listed(self, edge_index: Int[Tensor, "two E"]) -> tuple[Tensor, Tensor, RowTerms, Tensor]:
        """s and u of listed pairs, the terms of their rows, and whether the source is the best conductor of the row."""
        source, target = edge_index
        q, k, friction_q, friction_k = self._features
        s = listed_products(q, k, edge_index, self.ptr, across=-math.inf)
        u = listed_products(friction_q, friction_k, edge_index, self.ptr, across=0.0)
        terms = RowTerms(*(t[target] for t in self._terms))
        return s, u, terms, terms.best == source.unsqueeze(1)

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return entries(*self._listed(edge_index)).to(self.dtype)

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return log_entries(*self._listed(edge_index)).to(self.dtype)

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        self._warn_if_large()
        q, k, friction_q, friction_k = self._features
        s = all_products(q, k, self.ptr, across=-math.inf)
        u = all_products(friction_q, friction_k, self.ptr, across=0.0)
        terms = RowTerms(*(t.t().unsqueeze(2) for t in self._terms))
        return entries(s, u, terms, terms.best == torch.arange(self.num_nodes, device=s.device)).to(self.dtype)

    @property
    def potentials(self) -> Float[Tensor, "N heads"]:
        """μ [N, H], the potential at which a unit of flow enters every node (SFi-Former, Eq. 7)."""
        return self.log_potentials.exp()

    def energy(self) -> Float[Tensor, " heads"]:
        """Total energy of the rows at their minimum, Eq. 6 or for finite α Eq. 9: Σ_i ½(μ_i + Σ_j θ_ij s_ij).

        It follows from r s = μ − θ on the support, and has no gradient.
        """
        return 0.5 * (self.potentials.detach() + self._work).sum(0)

    def density(self) -> Float[Tensor, " heads"]:
        """The fraction of nonzero entries among the pairs within graphs."""
        sizes = torch.tensor([self.num_nodes]) if self.ptr is None else self.ptr.diff()
        return self._support.sum(0) / max(1, int(sizes.square().sum()))

    def without_friction(self) -> PairwiseCoupling:
        """Softmax attention: the conserved flow through the same resistances without friction (λ = 0, α = ∞)."""
        query, key, *_ = self._features
        return PairwiseCoupling(query, key, self.ptr)

    def to_sparse(self) -> SparseCoupling:
        """The same operator with stored entries: E per head for E pairs with a flow in some head.

        A product then costs O(E D) instead of O(N² D), which pays for several products if :meth:`density` is well below
        one tenth. Gradients flow through the stored entries.
        """
        with torch.no_grad():
            edge_index = support(Features(*self._features), self._terms, self.ptr)
        graph = Graph(self.num_nodes, edge_index, ptr=self.ptr, validate=False)
        weight = self._at(edge_index)
        return SparseCoupling(graph, weight, symmetric=False, row_stochastic=self.row_stochastic, nonnegative=True)


class _Transposed(Coupling):
    """Sᵀ of a sparse flow, with the potentials of the rows of S."""

    def __init__(self, flow: SparseFlowCoupling) -> None:
        super().__init__(flow.num_nodes, flow.heads, flow, nonnegative=True)
        self.flow = flow

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        return self.flow.moved(v, transpose=True)

    def _transpose(self) -> Coupling:
        return self.flow

    def _at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self.flow._at(edge_index.flip(0))

    def _log_at(self, edge_index: Int[Tensor, "two E"]) -> Float[Tensor, "E heads"]:
        return self.flow._log_at(edge_index.flip(0))

    def to_dense(self) -> Float[Tensor, "heads N N"]:
        return self.flow.to_dense().transpose(1, 2)
