"""All-pair diffusivities: queries and keys, attentions by a penalty (Wu, Wipf & Yan 2025, § 5.2), and SGFormer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from diffusion_mp import checks
from diffusion_mp.checks import Count
from diffusion_mp.couplings import Coupling, LinearAttentionCoupling
from diffusion_mp.couplings.features import unit_rows
from diffusion_mp.diffusivities.base import Diffusivity, check_heads_divide
from diffusion_mp.energies.constraints import Constraint
from diffusion_mp.energies.penalties import (
    GaussianPenalty,
    Measure,
    Penalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
)
from diffusion_mp.graph import Graph
from diffusion_mp.runtime.precision import widened

Projection = Literal["separate", "tied"] | None
Normalization = Literal["row", "frobenius"] | None
Features = tuple[Float[Tensor, "N H D"], Float[Tensor, "N H D"]]


class QueryKeyDiffusivity(Diffusivity):
    r"""Base of attentions over all nodes of a graph that read queries q and keys k of the state, by head.

    Args:
        channels, heads: C of the state, required with projections, and H, which divides C without projections.
        projection: ``"separate"``: q = W_Q x, k = W_K x (Wu, Wipf & Yan 2025, Eq. 54); ``"tied"``: W_Q = W_K, which
            keeps a score symmetric; ``None``: q = k = x.
        head_channels: channels of a projected head; C by default, as in Eq. 54. The attribute is ``None`` if unknown.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55); ``"frobenius"``: one norm per graph, as in
            released code, with which the attention is nearly uniform (docs/errata.md, D1); ``None``: neither.
        bias: add b_Q and b_K to the projections, as released code does.
    """

    def __init__(
        self,
        channels: Count | None = None,
        *,
        heads: Count = 1,
        projection: Projection = "separate",
        head_channels: Count | None = None,
        normalize: Normalization = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.heads = heads
        self.projection = projection
        self.normalize = normalize
        # One norm per graph makes every entry depend on all rows.
        self.depends_on = "graph" if normalize == "frobenius" else "rows"
        if projection is None:
            if bias:
                why = "bias needs a projection; got bias=True with projection=None. Choose 'separate' or 'tied'."
                raise ValueError(why)
            self.head_channels: int | None = None
            # Without channels the state says how many there are, in every call.
            if channels is not None:
                check_heads_divide(
                    channels, heads, "channels when there is no projection"
                )
                self.head_channels = channels // heads
            return
        if channels is None:
            raise ValueError(
                f"channels must be given for {projection=}: W_Q and W_K act on them; got None."
            )
        self.head_channels = head_channels or channels
        # All heads in one product.
        self.query = nn.Linear(channels, heads * self.head_channels, bias=bias)
        if projection == "separate":
            self.key = nn.Linear(channels, heads * self.head_channels, bias=bias)

    def queries_and_keys(
        self,
        x: Float[Tensor, "N C"],
        graph: Graph,
        *,
        unit: bool = True,
        origin: Tensor | None = None,
    ) -> Features:
        """Return q, and k of x − origin, one object if equal, normalised; ``unit=False`` leaves the norms of rows."""
        if self.projection is not None or self.channels not in (None, x.size(1)):
            checks.check_state(x, channels=self.channels, module=self)
        elif self.channels is None:
            check_heads_divide(x.size(1), self.heads, "the channels of x")
        # k is q itself where they are equal, so that features are computed once.
        projected = self.projection is not None
        q = k = self._by_head(self.query(x) if projected else x)
        # Only the keys: a softmax over keys does not change if all of them are shifted.
        if origin is not None:
            x = x - origin
        if self.projection == "separate":
            k = self._by_head(self.key(x))
        elif origin is not None:
            k = self._by_head(self.query(x) if projected else x)
        tied = k is q
        if self.normalize == "row" and unit:
            return unit_rows(q, None if tied else k)
        if self.normalize == "frobenius":
            q = frobenius(q, graph)
            k = q if tied else frobenius(k, graph)
        return q, k

    @property
    def mutual(self) -> bool:
        """Whether queries are keys, so that a state attends to itself; a subclass with other ones says so."""
        return self.projection != "separate"

    def _by_head(self, rows: Float[Tensor, "N C"]) -> Float[Tensor, "N H D"]:
        return rows.unflatten(1, (self.heads, -1))


def frobenius(q: Float[Tensor, "N H D"], graph: Graph) -> Float[Tensor, "N H D"]:
    """Divide q by its Frobenius norm in each graph."""
    # The squares of float32 may overflow in float32.
    square = q.double().square().sum((1, 2))
    if graph.is_single:
        # Of all ranks, where this process has some of the rows.
        total = graph.total(square.sum())
    else:
        batch = graph.batch.to(q.device)
        total = square.new_zeros(graph.num_graphs).index_add(0, batch, square)
        total = total[batch, None, None]
    # √0 has no derivative: zeros are divided by infinity instead.
    norm = torch.where(total == 0, torch.inf, total).sqrt()
    wide = widened(q)
    return (wide / norm.to(wide.dtype)).to(q.dtype)


def origin_of(x: Float[Tensor, "N C"], graph: Graph) -> Tensor:
    """Return the smallest row of every node's graph, [N, C], or [1, C] for one graph; without gradient.

    A softmax over keys does not change if all keys are shifted. The difference of a row from one that is no larger
    keeps its digits, and equal rows differ by exactly zero, however a matrix product rounds them.
    """
    x = x.detach()
    size = x.abs().amax(1).nan_to_num(nan=math.inf)
    if graph.is_single:
        # Padded and cut, not branched: an exported program keeps one branch, also for graphs without a node.
        least = pad(size, (0, 1), value=math.inf).argmin(0, keepdim=True)
        return x[least[: x.size(0)]]
    batch = graph.batch.to(x.device)
    number = torch.arange(x.size(0), device=x.device)
    least = size.new_zeros(graph.num_graphs).scatter_reduce(
        0, batch, size, "amin", include_self=False
    )
    # The first of several rows of the least size, so that equal graphs have equal origins.
    others = number.masked_fill(size > least[batch], x.size(0))
    first = number.new_zeros(graph.num_graphs).scatter_reduce(
        0, batch, others, "amin", include_self=False
    )
    return x[first[batch]]


class PenaltyDiffusivity(QueryKeyDiffusivity):
    r"""Attention over all pairs of nodes by f = δ′ of a penalty; `FunctionPenalty` makes one of any f, in O(N²).

    s_ij = f(q_i, k_j) / Σ_l f(q_i, k_l) over all nodes of a graph, f = δ′ (Wu, Wipf & Yan 2025, Eqs. 15 and 17). The
    energy of δ descends for ``projection=None, normalize=None, measure="distance"``, where f reads the state itself.

    Args:
        penalty: δ; or the class `SoftmaxPenalty`, for that of the channels of a head.
        channels, projection, normalize: see :class:`QueryKeyDiffusivity`. No theorem holds for ``"separate"``
            (docs/errata.md, D18, D20).
        measure: ``"distance"``: f(‖q_i − k_j‖²), as in the energy; ``"inner"``: f as a function of q·k, as published,
            for penalties with such a form. They coincide for unit vectors only (docs/errata.md, D8).
        row_stochastic: divide rows by their sums (Eq. 15); ``False`` gives Ω = [f], symmetric if q = k. An exponential
            f of q·k that nothing normalises, e^{(q·k − 1)/σ²} for one, may leave the range of the dtype.
        constraint: the set that holds the rows of the state, in every head; f must read the state itself. Couplings are
            nonnegative if it lies within the domain of the penalty (see `Penalty.coupling`).
        options: ``heads``, ``head_channels`` and ``bias`` of :class:`QueryKeyDiffusivity`.

    Examples:
        >>> PenaltyDiffusivity(FunctionPenalty(lambda z2: 1 / (1 + z2)))(x).heads
        1
    """

    def __init__(
        self,
        penalty: Penalty | type[SoftmaxPenalty],
        channels: int | None = None,
        *,
        projection: Projection = None,
        normalize: Normalization = None,
        measure: Measure = "distance",
        row_stochastic: bool = True,
        constraint: Constraint | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            channels, projection=projection, normalize=normalize, **options
        )
        if penalty is not SoftmaxPenalty:
            checks.check_kind(penalty, "penalty", Penalty, "a Penalty")
        # A penalty may have one of the two forms only.
        checks.check_choice(measure, "measure", penalty.measures)
        # Not ``penalty``: that property of every diffusivity is None where f does not read the state.
        self.of_distance = penalty
        self.measure = measure
        self.constraint = constraint
        self.row_stochastic = row_stochastic
        # Division of rows by different sums breaks symmetry.
        self.symmetric = projection != "separate" and not row_stochastic
        self.why_no_penalty = (
            f"f does not read the state that moves ({projection=}, {normalize=}, {measure=}): an energy is known for "
            f"projection=None, normalize=None, measure='distance', and for the softmax if channels is given."
        )

        # Within a set the weights are nonnegative where f is, up to its diameter.
        if constraint is not None:
            checks.check_kind(constraint, "constraint", Constraint, "a Constraint")
            if not self.reads_the_state:
                raise ValueError(
                    f"constraint needs an f that reads the state; {self.why_no_penalty}"
                )

    @property
    def reads_the_state(self) -> bool:
        """Whether f is a function of distances of the state itself, without projection or normalisation."""
        return (
            self.projection is None
            and self.normalize is None
            and self.measure == "distance"
        )

    def penalty_of(self, dim: int | None) -> Penalty | None:
        """Return δ for vectors of ``dim`` channels, or ``None`` if δ depends on an unknown ``dim``."""
        # The class stands for one penalty for every width: its temperature is the root of that.
        if isinstance(self.of_distance, Penalty):
            return self.of_distance
        if dim is None:
            return None
        return self.of_distance(dim)

    @property
    def penalty(self) -> Penalty | None:  # type: ignore[override]
        """δ if f reads the state itself, else ``None``."""
        if self.reads_the_state:
            return self.penalty_of(self.head_channels)
        return None

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        # A penalty may have parameters where there is no projection.
        checks.check_place(x, self)
        # Norms are divided out in the product, without a copy of the queries and keys.
        q, k = self.queries_and_keys(x, graph, unit=False)
        penalty = cast(Penalty, self.penalty_of(q.size(2)))
        unit = self.normalize == "row"
        centre = None
        if self.measure == "distance" and not unit:
            # All rows of a graph share one centre, though this process may hold only some of them.
            centre = graph.centre(k)
        if self.constraint is not None:
            return penalty.coupling(
                q, graph.segments, self.row_stochastic, self.constraint, centre
            )
        return penalty.attention(
            q,
            None if self.mutual else k,
            graph.segments,
            centre=centre,
            measure=self.measure,
            radius=1.0 if unit else None,
            normalize=self.row_stochastic,
            nonnegative=self.normalize is not None,
        )


class _Published(PenaltyDiffusivity):
    """`PenaltyDiffusivity` as it is published: unit queries and keys, and f of their inner product."""

    def __init__(
        self,
        penalty: Penalty | type[SoftmaxPenalty],
        channels: int | None = None,
        *,
        normalize: Normalization = "row",
        measure: Measure = "inner",
        **options: Any,
    ) -> None:
        super().__init__(
            penalty, channels, normalize=normalize, measure=measure, **options
        )


class SimpleDiffusivity(_Published):
    r"""DIFFormer-s: f = 1 + q·k, or 2 − ½z² of the actual distance, in O(N) (Wu, Wipf & Yan 2025, Eqs. 18–19, 54–57).

    (S v)_i = (Σ_j v_j + (Σ_j v_j k_jᵀ) q_i) / (n + q_i·Σ_l k_l) with unit vectors q, k. With ``measure="distance"`` it
    is exact for states of any norm. Then f ≥ 0, and the energy descends, while all ‖x_i − x_j‖ ≤ 2, a condition that
    the paper omits (docs/errata.md, D7). Arguments are those of :class:`PenaltyDiffusivity`,
    by default ``normalize="row"`` and ``measure="inner"``.

    Examples:
        >>> SimpleDiffusivity(4, projection="separate", heads=2)(x).heads
        2
    """

    def __init__(self, channels: int | None = None, **options: Any) -> None:
        super().__init__(SimplePenalty(), channels, **options)


class SigmoidDiffusivity(_Published):
    """DIFFormer-a: f = σ(q·k), or 1/(1 + e^{z²/2 − 1}) (Wu, Wipf & Yan 2025, Eqs. 20, 58–60); O(N²) time, O(N) memory.

    Arguments and defaults are those of :class:`SimpleDiffusivity`; the released code has ``normalize=None``
    (docs/errata.md, D2).

    Examples:
        >>> torch.allclose(SigmoidDiffusivity()(x).degree(), torch.ones(6, 1))
        True
    """

    def __init__(self, channels: int | None = None, **options: Any) -> None:
        super().__init__(SigmoidPenalty(), channels, **options)


class SoftmaxDiffusivity(_Published):
    """Softmax attention: f = exp(q·k/√d), or exp((1 − z²/2)/√d), of d channels a head (Wu, Wipf & Yan 2025, Eq. 21).

    Arguments and defaults are those of :class:`SimpleDiffusivity`. The printed δ is corrected (docs/errata.md, D9).

    Examples:
        >>> SoftmaxDiffusivity(4, projection="separate", heads=2)(x).heads
        2
    """

    def __init__(self, channels: int | None = None, **options: Any) -> None:
        super().__init__(SoftmaxPenalty, channels, **options)


class GaussianDiffusivity(_Published):
    """Attention by a Gaussian of distances, f = exp(−z²/2σ²): the *Kernel* ablation of Wu, Wipf & Yan (2025), Fig. 3.

    σ > 0 is ``bandwidth``; further arguments and defaults are those of :class:`SimpleDiffusivity`.

    Examples:
        >>> GaussianDiffusivity(bandwidth=0.5)(x).row_stochastic
        True
    """

    def __init__(
        self, channels: int | None = None, *, bandwidth: float = 1.0, **options: Any
    ) -> None:
        super().__init__(GaussianPenalty(bandwidth), channels, **options)


#: The published attentions by the names of their penalties: kernels of `DIFFormerConv`.
KERNELS: dict[str, Callable[..., PenaltyDiffusivity]] = {
    "simple": SimpleDiffusivity,
    "sigmoid": SigmoidDiffusivity,
    "softmax": SoftmaxDiffusivity,
    "gaussian": GaussianDiffusivity,
}


class SGFormerDiffusivity(QueryKeyDiffusivity):
    r"""SGFormer's attention: linear attention over all pairs plus the identity.

    D⁻¹(I + (1/n) Q̃K̃ᵀ), D = diag(1 + (1/n) Q̃(K̃ᵀ1)), in O(N) (slides, "SGFormer"; Wu et al. 2023b).

    n is the number of nodes of a graph. With the identity rows sum to one; those that the released code exports do not.
    A row with D = 0 (every k̃_j is −q̃_i) is zero.

    Args:
        channels, options: see :class:`QueryKeyDiffusivity`.
        normalize: ``"row"``: every q and k has unit norm, as in PyG's ``SGFormerAttention``; ``"frobenius"``: one norm
            per graph, as in the slides. Then ‖(1/n) Q̃K̃ᵀV‖ ≤ ‖V‖/n, too small for float32 at n = 169 000
            (docs/errata.md, G1).

    Examples:
        >>> SGFormerDiffusivity(4, projection="separate")(x).row_stochastic
        True
    """

    row_stochastic = True
    why_no_penalty = (
        "SGFormer's attention, an identity plus inner products of which some are negative, is no function of distances "
        "of the state, so no theorem names an energy that it descends. SimpleDiffusivity is low-rank and has one."
    )

    def __init__(
        self,
        channels: int | None = None,
        *,
        normalize: Literal["row", "frobenius"] = "row",
        **options: Any,
    ) -> None:
        super().__init__(channels, normalize=normalize, **options)

    def couple(self, x: Float[Tensor, "N C"], graph: Graph) -> Coupling:
        q, k = self.queries_and_keys(x, graph, unit=False)
        # The identity beside (1/n) QKᵀ is a diagonal n beside QKᵀ: ``own`` counts in multiples of n.
        return LinearAttentionCoupling(
            q, k, graph.segments, own=1.0, unit=self.normalize == "row", _checked=True
        )
