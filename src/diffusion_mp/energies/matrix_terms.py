"""Terms with weights: matrices between neighbours (Theorem T8), softmax attention (T9) and a tied MLP (T10)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling, PairwiseCoupling, SparseCoupling
from diffusion_mp.energies.constraints import Constraint
from diffusion_mp.energies.pairs import HeadState, PerNode, check_channels
from diffusion_mp.energies.terms import (
    ConcaveTerm,
    Majorant,
    Mean,
    RowTerm,
    SharedTerm,
    check_weight,
    norm_flaw,
    weight_flaw,
)
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import by_edges
from diffusion_mp.kernels.spmm import at_rows, edge_softmax, trained
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import accumulating, without_autocast


class MatrixTerm(RowTerm, SharedTerm):
    """Add matrices between neighbours to an energy, one per relation r (Theorem T8 of docs/certified.md).

        V(Z) = Σ_i k_i ‖z_i‖² − Σ_r ⟨Z, A_r^h Z B_rᵀ⟩,  k_i = ½ Σ_r ‖B_r‖₂ ((|A_r|^h 1)_i + (|A_rᵀ|^h 1)_i)

    V is convex, with a matrix G of 0 ⪯ G ⪯ 2 diag(k), for weights of any sign, and for matrices and graphs that need
    not be symmetric. G sees their symmetric part: B_r acts along an edge and B_rᵀ against it. An eigenvalue 1 of B
    makes neighbours agree in a direction of the state. An eigenvalue −1 makes them differ.

    Args:
        coupling: A, one head per relation r. It promises to be nonnegative, or is a `SparseCoupling`.
        matrix: B [R, C, C], or the diagonals [R, C] of diagonal matrices, for a state of one head [N, 1, C]. ``None``
            is the identity for every relation.
        norms: upper bounds on ‖B_r‖₂, [R]. ``None`` takes `norm_bounds`, or one for the identity.
        hops: h, the length of the walks. 1 by default: direct neighbours.
        symmetric: the promise that B_r = B_rᵀ. If A is symmetric too, one product is enough instead of two. ``False``
            by default, since the matrices are not examined.

    Examples:
        >>> term = MatrixTerm(SparseCoupling(graph), torch.eye(4).neg().unsqueeze(0))
        >>> bool(term.value(x.unsqueeze(1), graph) >= 0)
        True
    """

    quadratic = True
    depends_on = "couplings"

    def __init__(
        self,
        coupling: Coupling,
        matrix: Float[Tensor, "R C C"] | Float[Tensor, "R C"] | None,
        norms: Float[Tensor, " R"] | None = None,
        *,
        hops: int = 1,
        symmetric: bool = False,
        _checked: bool = False,
    ) -> None:
        if not _checked:
            checks.check_counts(hops=hops)
            checks.check_flags(symmetric=symmetric)
            checks.check_kind(coupling, "coupling", Coupling, "a Coupling")
            heads = coupling.heads
            if matrix is not None:
                shape = f"[{heads}, channels, channels], as many as the coupling has heads, or their diagonals"
                device = coupling.device
                checks.check_tensor(matrix, "matrix", shape, device, "the coupling")
                square = matrix.dim() in (2, 3) and matrix.size(1) == matrix.size(-1)
                if not square or matrix.size(0) != heads:
                    raise ValueError(
                        f"matrix must be {shape}; got {checks.describe(matrix)}."
                    )
            if not (coupling.nonnegative or isinstance(coupling, SparseCoupling)):
                raise ValueError(
                    f"coupling must promise to be nonnegative, or be a SparseCoupling, to know the sizes of its "
                    f"entries; got {coupling!r}."
                )
            if norms is not None and norms.shape != (heads,):
                raise ValueError(
                    f"norms must be [{heads}], one per relation; got {checks.describe(norms)}."
                )
        self.matrix = matrix
        self.hops = hops
        symmetric = symmetric or matrix is None or matrix.dim() == 2
        # A subclass may multiply in its own way.
        weights_of_graph = type(coupling) is SparseCoupling and coupling.own
        if symmetric and hops == 1 and weights_of_graph:
            # One product with the symmetric part takes less time than two.
            coupling = SparseCoupling(
                cast("SparseCoupling", coupling).graph.symmetric_part(),
                symmetric=True,
                nonnegative=coupling.nonnegative,
                _checked=True,
            )
        # Entries cannot be examined while torch traces: without a promise, both products
        # are taken.
        mutual = symmetric and (
            coupling.symmetric if values_only(captured=True) else coupling.T is coupling
        )
        self.forward = coupling
        self.backward = None if mutual else coupling.T
        reach = self._reach(coupling)
        if self.backward is not None:
            # The energy sees the symmetric part of A alone, whose bound is the mean of both.
            reach = (reach + self._reach(self.backward)) / 2
        if norms is None and matrix is not None:
            norms = norm_bounds(matrix)
        self.norms = norms
        weighted = reach if norms is None else reach * norms
        #: k [N, 1, 1].
        self.degree = weighted.sum(1)[:, None, None]

    def _reach(self, coupling: Coupling) -> Float[Tensor, "N R"]:
        """Return |A|^h 1 in double, since a limit is solved there. If it were rounded, D − A would leak constants."""
        if not isinstance(coupling, SparseCoupling):
            return self._row_sums(coupling)
        sizes = partial(self._sizes, coupling)
        if coupling.own:
            return coupling.graph.derived(("reach", self.hops), sizes)
        return sizes()

    def _sizes(self, coupling: SparseCoupling) -> Float[Tensor, "N R"]:
        weight = coupling.weight.double()
        # A graph that was not validated may break the promise, but promised zeros
        # keep their one-sided gradient.
        if coupling.nonnegative:
            weight = torch.where(weight < 0, -weight, weight)
        else:
            weight = weight.abs()
        return self._row_sums(
            SparseCoupling(coupling.graph, weight, nonnegative=True, _checked=True)
        )

    def _row_sums(self, coupling: Coupling) -> Float[Tensor, "N R"]:
        # Row sums of the power, by a product for each further hop: no power of A is stored.
        reached = coupling.exact_degree(torch.float64)
        for _ in range(self.hops - 1):
            reached = coupling.received(reached.unsqueeze(2)).squeeze(2)
        return reached

    def _received(self, z: Float[Tensor, "N one C"]) -> Float[Tensor, "N one C"]:
        """Return Σ_r of the symmetric part of A_r^h Z B_rᵀ."""
        v = z.squeeze(1)
        matrix = None if self.matrix is None else self.matrix.to(z.dtype)
        along = self.forward.transformed(v, matrix, self.hops)
        if self.backward is not None:
            if matrix is not None and matrix.dim() == 3:
                # Against an edge B acts transposed; a diagonal is its own transpose.
                matrix = matrix.mT
            along = (along + self.backward.transformed(v, matrix, self.hops)) / 2
        return along.unsqueeze(1)

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        wide = z.double()
        check_channels(z, "matrix", self.matrix)
        half = self.degree.double() * wide - self._received(wide)
        return (wide * half).sum((1, 2))

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        degree = self.degree.to(z.dtype)
        half = degree * z - self._received(z)
        return Majorant(half, degree if convex else 2 * degree)

    def flaw(self, constraint: Constraint) -> str | None:
        if self.matrix is None or self.norms is None:
            return None
        return norm_flaw(self.matrix, self.norms, "matrix")

    def weighted_mean(self, z: HeadState) -> Mean:
        return Mean(self.degree.to(z.dtype), None, self._received)


class AttentionTerm(RowTerm, SharedTerm):
    """Add softmax attention to an energy (Theorem T9 of docs/certified.md).

        V(Z) = −(2/γ) Σ_h Σ_i log Σ_j b_ij exp(−γ ‖Q_h z_i − K_h z_j‖² / 2)

    The attention is ω_ij = softmax_j(log b_ij − γ s_ij / 2) with s_ij = ‖Q z_i − K z_j‖². With its column sums c_j =
    Σ_i ω_ij, q = Q z and k = K z, the half gradient and the bound are

        g_i = Qᵀ(q_i − Σ_j ω_ij k_j) + Kᵀ(c_i k_i − Σ_j ω_ji q_j),  p_i = ‖Q‖² + c_i ‖K‖²

    without the parts of Q at a node that attends to no other one.

    They take one product with ω and one with its transpose, for all pairs in O(N²) time and O(N) memory.

    Args:
        query: the matrices Q [H, D, C], for a state of one head [N, 1, C].
        key: the matrices K [H, D, C].
        gamma: γ > 0, a number or a 0-dimensional tensor. 1 by default.
        prior: b ≥ 0 at the observed edges, and zero elsewhere; a `SparseCoupling` with one head or H. ``None`` is b =
            1/n for all pairs of nodes of a graph.
        norms: upper bounds on ‖Q_h‖₂ and on ‖K_h‖₂, two tensors [H]. ``None`` takes `norm_bounds`.

    Examples:
        >>> AttentionTerm(torch.eye(4)[None], torch.eye(4)[None]).half_gradient(x.unsqueeze(1), graph).shape
        torch.Size([6, 1, 4])
    """

    depends_on = "couplings"

    def __init__(
        self,
        query: Float[Tensor, "heads D C"],
        key: Float[Tensor, "heads D C"],
        gamma: float | Tensor = 1.0,
        prior: SparseCoupling | None = None,
        norms: tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]] | None = None,
    ) -> None:
        checks.check_kind(
            prior,
            "prior",
            (SparseCoupling, NoneType),
            "a nonnegative SparseCoupling, or None",
        )
        shape = "[heads, head_channels, channels]"
        for name, matrix in (("query", query), ("key", key)):
            checks.check_tensor(
                matrix, name, shape, getattr(query, "device", None), "query"
            )
            if matrix.dim() != 3 or matrix.shape != query.shape:
                raise ValueError(
                    f"{name} must be {shape}, like query; got {checks.describe(matrix)}."
                )
        check_weight(gamma, "gamma", allow_zero=False)
        if prior is not None and prior.heads not in (1, query.size(0)):
            raise ValueError(
                f"prior must have one head, or {query.size(0)} as query does; got {prior!r}."
            )
        self.query = query
        self.key = key
        self.gamma = gamma
        self.prior = prior
        if norms is None:
            norms = (norm_bounds(query), norm_bounds(key))
        self.norms = norms

    def _ends(self, z: Float[Tensor, "N one C"], graph: Graph) -> tuple[Tensor, Tensor]:
        """Return q and k [N, H, D], both without the mean of k, which no difference depends on."""
        flat = z.squeeze(1)
        q, k = (
            torch.einsum("hdc,nc->nhd", matrix.to(z.dtype), flat)
            for matrix in (self.query, self.key)
        )
        # Far from the origin, squared distances would lose their digits.
        centre = graph.centre(k)
        return q - centre, k - centre

    def _logits(self, q: Tensor, k: Tensor, graph: Graph) -> Tensor:
        if trained(q):
            # The gradients of these are sums along compressed rows.
            receivers = at_rows(graph.csr, q.flatten(1))
            senders = at_rows(graph.csc, k.flatten(1))
            away = (receivers - senders).unflatten(1, q.shape[1:])
            squares = away.square().sum(2)
        else:
            (wide_q, wide_k), _ = accumulating(q, k)

            def distances(edges: Tensor) -> Tensor:
                source, target = edges
                return (wide_q[target] - wide_k[source]).square().sum(2)

            squares = by_edges(distances, graph.edges)
        return -self.gamma / 2 * squares

    def _attention(self, q: Tensor, k: Tensor, graph: Graph) -> Coupling:
        if self.prior is not None:
            edges = self.prior.graph
            prior = self.prior.weight.to(q.dtype)
            weight = edge_softmax(edges.csr, self._logits(q, k, edges), prior)
            return SparseCoupling(edges, weight, row_stochastic=True, nonnegative=True)
        # −γ s_ij / 2 is γ q·k − γ ‖k‖² / 2 up to a number of row i, which cancels: one
        # more channel makes it an inner product.
        minus = q.new_full((*q.shape[:2], 1), -1.0)
        shift = self.gamma / 2 * k.square().sum(2, keepdim=True)
        receivers = torch.cat([self.gamma * q, minus], 2)
        senders = torch.cat([k, shift], 2)
        return graph.share(PairwiseCoupling(receivers, senders, graph.segments))

    def _log_sums(self, q: Tensor, k: Tensor, graph: Graph) -> PerNode:
        """Return Σ_h log Σ_j b_ij exp(−γ s_ij / 2) of every row i."""
        if self.prior is not None:
            edges = self.prior.graph
            weight = cast("SparseCoupling", self._attention(q, k, edges)).weight
            # It is Σ_j ω_ij (log b_ij + l_ij − log ω_ij). Edges whose ω underflows have
            # no part: 1/ω, by which the gradient of the logarithm multiplies, is
            # infinite there.
            counts = weight >= torch.finfo(weight.dtype).tiny
            prior = torch.where(counts, self.prior.weight.to(q.dtype), 1.0)
            logarithm = prior.log() - torch.where(counts, weight, 1.0).log()
            shares = weight * (self._logits(q, k, edges) + logarithm)
            return q.new_zeros(len(q)).index_add(0, edges.edges[1], shares.sum(1))
        coupling = cast("PairwiseCoupling", self._attention(q, k, graph))
        # With b = 1/n every head has log n less.
        member = graph.batch.to(q.device)
        nodes = member.bincount()[member].to(q)
        return (
            -coupling.shifts[0].sum(1)
            - self.gamma / 2 * q.square().sum((1, 2))
            - q.size(1) * nodes.log()
        )

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        check_channels(z, "query", self.query)
        if self.prior is not None:
            checks.check_values(z, self.prior.num_nodes, 1, "z")
        q, k = self._ends(z.double(), graph)
        return -2 / self.gamma * self._log_sums(q, k, graph)

    def flaw(self, constraint: Constraint) -> str | None:
        gamma = weight_flaw(self.gamma, "gamma")
        by_query = norm_flaw(self.query, self.norms[0], "query")
        return gamma or by_query or norm_flaw(self.key, self.norms[1], "key")

    def attention(self, z: HeadState, graph: Graph) -> list[Coupling]:
        with without_autocast(z):
            return [self._attention(*self._ends(z, graph), graph)]

    def majorant(self, z: HeadState, graph: Graph, convex: bool) -> Majorant:
        with without_autocast(z):
            q, k = self._ends(z, graph)
            attention = self._attention(q, k, graph)
            # One pass for both products; the column of ones gives the sums c of the columns.
            ones = q.new_ones(*q.shape[:2], 1)
            received, back = attention.both(k, torch.cat([q, ones], 2))
            column = back[:, :, -1:]
            at_key = column * k - back[:, :, :-1]
            at_query = q - received
            rows = q.new_ones(1, 1)
            if self.prior is not None:  # a node without neighbours has no row
                degree = attention.degree()
                at_query = degree.unsqueeze(2) * q - received
                rows = (degree > 0).to(q)
            half = torch.einsum("hdc,nhd->nc", self.query.to(z.dtype), at_query)
            half = half + torch.einsum("hdc,nhd->nc", self.key.to(z.dtype), at_key)
            by_query, by_key = (norm.to(z.dtype).square() for norm in self.norms)
            bound = rows * by_query + column.squeeze(2) * by_key
            bound = bound.sum(1)[:, None, None]
            return Majorant(half.unsqueeze(1), bound if convex else 2 * bound)


#: Squarings of BᵀB in a bound on ‖B‖₂; each takes the square root of its relative
#: error.
SQUARINGS = 5

#: Convex ρ and its derivative σ = ρ′, by name.
ACTIVATIONS: dict[
    str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
] = {
    "relu": (lambda t: torch.relu(t).square() / 2, torch.relu),
    "tanh": (
        # log cosh, which overflows where it is written with exponentials of both signs.
        lambda t: t.abs() + functional.softplus(-2 * t.abs()) - math.log(2),
        torch.tanh,
    ),
    "sigmoid": (functional.softplus, torch.sigmoid),
}


class MLPTerm(ConcaveTerm):
    """Add a hidden layer with tied weights to an energy (Theorem T10 of docs/certified.md).

    With a convex ρ and its derivative σ = ρ′:

        V(Z) = −Σ_i Σ_m ρ(⟨u_m, z_i⟩ + b_m)

    V is concave, so its bound is p = 0. Its gradient step adds ½ Uᵀ σ(U z + b).

    Args:
        matrix: U [M, C], for a state of one head [N, 1, C].
        bias: b [M].
        activation: σ, ``"relu"``, ``"tanh"`` or ``"sigmoid"``.

    Examples:
        >>> float(MLPTerm(torch.eye(4), torch.zeros(4)).value(torch.ones(6, 1, 4), graph))
        -12.0
    """

    def __init__(
        self,
        matrix: Float[Tensor, "M C"],
        bias: Float[Tensor, " M"],
        activation: str = "relu",
    ) -> None:
        checks.check_tensor(matrix, "matrix", "[hidden_channels, channels]")
        checks.check_tensor(bias, "bias", "[hidden_channels]", matrix.device, "matrix")
        if matrix.dim() != 2 or bias.shape != matrix.shape[:1]:
            raise ValueError(
                f"matrix must be [hidden_channels, channels] and bias [hidden_channels]; "
                f"got {checks.describe(matrix)}, {checks.describe(bias)}."
            )
        checks.check_choice(activation, "activation", ACTIVATIONS)
        self.matrix = matrix
        self.bias = bias
        self.activation = activation

    def _hidden(self, z: Tensor) -> Tensor:
        return functional.linear(z, self.matrix.to(z.dtype), self.bias.to(z.dtype))

    def rows(self, z: HeadState, graph: Graph) -> PerNode:
        check_channels(z, "matrix", self.matrix)
        integral, _ = ACTIVATIONS[self.activation]
        return -integral(self._hidden(z.double())).sum((1, 2))

    def _pull(self, z: Tensor) -> Tensor:
        _, slope = ACTIVATIONS[self.activation]
        return slope(self._hidden(z)) @ self.matrix.to(z.dtype) / 2

    def half_gradient(self, z: HeadState, graph: Graph) -> HeadState:
        return -self._pull(z)

    def weighted_mean(self, z: HeadState) -> Mean:
        return Mean(z.new_zeros(1, 1, 1), None, self._pull)


def norm_bounds(
    matrix: Float[Tensor, "R D C"] | Float[Tensor, "R C"],
) -> Float[Tensor, " R"]:
    """Return ‖B_r‖₂ of diagonals, or upper bounds on ‖B_r‖₂ of matrices, by squaring S = BᵀB.

    The bounds are at most C^(1/128) times too large. They use ‖B‖₂² = ‖S‖₂ ≤ ‖S^(2^k)‖_F^(1/2^k), which holds for any
    k, while a power iteration gives an estimate from below. Every power is divided by its Frobenius norm, so that no
    power overflows or underflows.

    Examples:
        >>> bool(norm_bounds(torch.eye(4).unsqueeze(0)) >= 1)
        True
    """
    if matrix.dim() == 2:
        return matrix.abs().amax(1)
    tiny = torch.finfo(matrix.dtype).tiny
    with without_autocast(matrix):
        # The scales of B and of its powers cancel in the bound, so they need no
        # gradient.
        bound = matrix.detach().abs().amax((1, 2)).clamp(min=tiny)
        scaled = matrix / bound[:, None, None]
        # The smaller of BᵀB and BBᵀ, which have the same norm.
        if matrix.size(1) < matrix.size(2):
            scaled = scaled.mT
        power = scaled.mT @ scaled
        for number in range(SQUARINGS):
            # Every third time is enough: between, norms fall to C⁻⁴ at least, far above
            # the smallest number.
            if number % 3 == 0:
                size = torch.linalg.matrix_norm(power.detach()).clamp(min=tiny)
                power = power / size[:, None, None]
                bound = bound * size.pow(0.5 ** (number + 1))
            power = power @ power
        size = torch.linalg.matrix_norm(power).clamp(min=tiny)
        # The rounding of a product of C terms may lower the bound.
        rounding = 8 * matrix.size(2) * torch.finfo(matrix.dtype).eps
        return bound * size.pow(0.5 ** (SQUARINGS + 1)) * (1 + rounding)
