"""All-pair diffusivities: queries and keys, attentions by a penalty (Wu, Wipf & Yan 2025, § 5.2), and SGFormer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from diffusion_mp import checks
from diffusion_mp.checks import Count
from diffusion_mp.couplings import Coupling, LinearAttentionCoupling
from diffusion_mp.couplings.features import unit_rows
from diffusion_mp.couplings.shapes import State, Values
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
Features = tuple[Values, Values]


class QueryKeyDiffusivity(Diffusivity):
    """Base of attentions over all nodes of a graph that read queries q and keys k of the state, by head.

    Args:
        channels: number C of channels of the state. ``None`` reads the state as it comes; projections need a number.
        heads: number H of heads. Without projections, H divides C.
        projection: ``"separate"``: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54), the default. ``"tied"``: W_Q
            = W_K, which keeps a score symmetric. ``None``: q = k = x.
        head_channels: number of channels of a projected head. ``None`` is C, as in Eq. 54. The attribute of this name
            is ``None`` if the number is unknown.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55). ``"frobenius"``: one norm per graph, as in
            released code, with which the attention is nearly uniform (docs/errata.md, D1). ``None``: no normalisation.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.
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
                raise ValueError(
                    "bias needs a projection; got bias=True with projection=None. Choose 'separate' or 'tied'."
                )
            self.head_channels: int | None = None
            # Without a number of channels, every call reads it from its state.
            if channels is not None:
                what = "channels when there is no projection"
                check_heads_divide(channels, heads, what)
                self.head_channels = channels // heads
            return
        if channels is None:
            raise ValueError(
                f"channels must be given for {projection=}: W_Q and W_K act on them; got None."
            )
        self.head_channels = head_channels or channels
        # All heads in one product.
        width = heads * self.head_channels
        self.query = nn.Linear(channels, width, bias=bias)
        if projection == "separate":
            self.key = nn.Linear(channels, width, bias=bias)

    def queries_and_keys(
        self,
        x: State,
        graph: Graph,
        *,
        unit: bool = True,
        origin: Tensor | None = None,
    ) -> Features:
        """Return the normalised queries q of x and keys k of x − origin; one object twice if they are equal.

        Args:
            x: state [N, C].
            graph: graph of the nodes, over which ``normalize="frobenius"`` takes its norm.
            unit: divide every query and key by its norm if ``normalize`` is ``"row"``. ``False`` leaves the norms of
                the rows for a later step.
            origin: rows [N, C] or [1, C] to subtract from x for the keys. ``None`` subtracts nothing.

        Returns:
            q and k, both [N, H, D].
        """
        if self.projection is not None or self.channels not in (None, x.size(1)):
            checks.check_state(x, channels=self.channels, module=self)
        elif self.channels is None:
            check_heads_divide(x.size(1), self.heads, "the channels of x")
        # k is q itself where they are equal, so that features are computed once.
        q = k = self._by_head(x, "query")
        # Only the keys: a softmax over keys does not change if all of them are shifted.
        if origin is not None:
            x = x - origin
        if self.projection == "separate":
            k = self._by_head(x, "key")
        elif origin is not None:
            k = self._by_head(x, "query")
        tied = k is q
        if self.normalize == "row" and unit:
            return unit_rows(q, None if tied else k)
        if self.normalize == "frobenius":
            q = frobenius(q, graph)
            k = q if tied else frobenius(k, graph)
        return q, k

    @property
    def mutual(self) -> bool:
        """Whether queries are keys, so that a state attends to itself. A subclass with other queries overrides it."""
        return self.projection != "separate"

    def _by_head(self, x: State, role: Literal["query", "key"]) -> Values:
        if self.projection is not None:
            x = getattr(self, role)(x)
        return x.unflatten(1, (self.heads, -1))


def frobenius(q: Values, graph: Graph) -> Values:
    """Divide q by its Frobenius norm in each graph."""
    # The squares of float32 may overflow in float32.
    square = q.double().square().sum((1, 2))
    if graph.is_single:
        # The sum over all ranks, if this process has only some of the rows.
        total = graph.total(square.sum())
    else:
        batch = graph.batch.to(q.device)
        total = square.new_zeros(graph.num_graphs).index_add(0, batch, square)
        total = total[batch, None, None]
    # √0 has no derivative: zeros are divided by infinity instead.
    norm = torch.where(total == 0, torch.inf, total).sqrt()
    wide = widened(q)
    return (wide / norm.to(wide.dtype)).to(q.dtype)


def origin_of(x: State, graph: Graph) -> Tensor:
    """Return the smallest row of the graph of every node, [N, C], or [1, C] for one graph; without gradient.

    A softmax over keys does not change if all keys are shifted. If a row is subtracted from another row that is no
    smaller, the difference keeps its digits. Equal rows differ by exactly zero, however a matrix product rounds them.
    """
    x = x.detach()
    size = x.abs().amax(1).nan_to_num(nan=math.inf)
    if graph.is_single:
        # Padding instead of a branch: an exported program keeps one branch only, even for graphs without nodes.
        least = pad(size, (0, 1), value=math.inf).argmin(0, keepdim=True)
        return x[least[: x.size(0)]]
    batch = graph.batch.to(x.device)
    number = torch.arange(x.size(0), device=x.device)
    least = size.new_zeros(graph.num_graphs).scatter_reduce(
        0, batch, size, "amin", include_self=False
    )
    # The first of several smallest rows, so that equal graphs have equal origins.
    others = number.masked_fill(size > least[batch], x.size(0))
    first = number.new_zeros(graph.num_graphs).scatter_reduce(
        0, batch, others, "amin", include_self=False
    )
    return x[first[batch]]


class PenaltyDiffusivity(QueryKeyDiffusivity):
    """Attend to all nodes by the derivative f = δ′ of a penalty.

    For all nodes j and l of the graph of i (Wu, Wipf & Yan 2025, Eqs. 15 and 17):

        s_ij = f(q_i, k_j) / Σ_l f(q_i, k_l)

    The energy of δ descends for ``projection=None, normalize=None, measure="distance"``, where f reads the state
    itself. `FunctionPenalty` makes a penalty of any f, in O(N²).

    Args:
        penalty: the penalty δ. The class `SoftmaxPenalty` stands for its penalty with the number of channels of a head.
        channels: number C of channels of the state. ``None`` reads the state as it comes; projections need a number.
        projection: ``"separate"``: q = W_Q x and k = W_K x (Eq. 54), for which no theorem holds (docs/errata.md, D18,
            D20). ``"tied"``: W_Q = W_K. ``None``, the default: q = k = x, so that f reads the state.
        normalize: ``"row"``: every query and key has unit norm (Eq. 55). ``"frobenius"``: one norm per graph, as in
            released code, with which the attention is nearly uniform (docs/errata.md, D1). ``None``, the default: no
            normalisation, so that f reads the state.
        measure: ``"distance"``, the default: f(‖q_i − k_j‖²), as in the energy. ``"inner"``: f as a function of q·k, as
            published, for penalties with such a form. Both agree for unit vectors only (docs/errata.md, D8).
        row_stochastic: divide the rows by their sums (Eq. 15). ``False`` gives Ω = [f], which is symmetric if q = k. An
            exponential f of q·k that nothing normalises, such as e^{(q·k − 1)/σ²}, may leave the range of the dtype.
        constraint: a set that holds the rows of the state, in every head; f must read the state itself. The couplings
            are nonnegative if the set lies within the domain of the penalty (see `Penalty.coupling`). ``None`` is no
            set.

    Options:
        heads: number H of heads. 1 by default. Without projection, H divides C.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

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
        # Not ``penalty``: this property of every diffusivity is None where f does not read the state.
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

        # Within a set, the weights are nonnegative if f is nonnegative up to the diameter of the set.
        if constraint is not None:
            checks.check_kind(constraint, "constraint", Constraint, "a Constraint")
            if not self.reads_the_state:
                raise ValueError(
                    f"constraint needs an f that reads the state; {self.why_no_penalty}"
                )

    @property
    def reads_the_state(self) -> bool:
        """Whether f is a function of distances of the state itself, without projection or normalisation."""
        state = self.projection is None and self.normalize is None
        return state and self.measure == "distance"

    def penalty_of(self, dim: int | None) -> Penalty | None:
        """Return δ for vectors of ``dim`` channels.

        Args:
            dim: number of channels of a head, or ``None`` if it is unknown.

        Returns:
            The penalty, or ``None`` if it depends on an unknown ``dim``.
        """
        # The class stands for one penalty per width, whose temperature is the root of the width.
        if isinstance(self.of_distance, Penalty):
            return self.of_distance
        if dim is None:
            return None
        return self.of_distance(dim)

    @property
    def penalty(self) -> Penalty | None:  # type: ignore[override]
        """The penalty δ if f reads the state itself, else ``None``."""
        if self.reads_the_state:
            return self.penalty_of(self.head_channels)
        return None

    def couple(self, x: State, graph: Graph) -> Coupling:
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
    """`PenaltyDiffusivity` as published, with unit queries and keys and f of their inner product."""

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
    """Attend to all nodes by a linear score in O(N): DIFFormer-s (Wu, Wipf & Yan 2025, Eqs. 18–19, 54–57).

    f = 1 + q·k. With unit vectors q and k, n nodes in a graph and values v:

        (S v)_i = (Σ_j v_j + (Σ_j v_j k_jᵀ) q_i) / (n + q_i·Σ_l k_l)

    With ``measure="distance"``, f = 2 − ½z² of the actual distance z, which is exact for states of any norm. In that
    case f ≥ 0, and the energy descends, as long as all ‖x_i − x_j‖ ≤ 2. The paper omits this condition (docs/errata.md,
    D7).

    Args:
        channels: number C of channels of the state. ``None`` reads the state as it comes; projections need a number.

    Options:
        projection: ``"separate"``: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q = W_K, which
            keeps a score symmetric. ``None``, the default: q = k = x.
        normalize: ``"row"``, the default, as published: every query and key has unit norm (Eq. 55). ``"frobenius"``:
            one norm per graph, as in released code, with which the attention is nearly uniform (docs/errata.md, D1).
            ``None``: no normalisation.
        measure: ``"inner"``, the default, as published: f is a function of q·k. ``"distance"``: f is a function of ‖q_i
            − k_j‖, as in the energy. Both agree for unit vectors only (docs/errata.md, D8).
        row_stochastic: divide the rows by their sums (Eq. 15). ``True`` by default. ``False`` gives Ω = [f], which is
            symmetric if q = k.
        constraint: a set that holds the rows of the state, for ``projection=None, normalize=None, measure="distance"``.
            The couplings are nonnegative if the set lies within the domain of the penalty. ``None``, the default, is no
            set.
        heads: number H of heads. 1 by default. Without projection, H divides C.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> SimpleDiffusivity(4, projection="separate", heads=2)(x).heads
        2
    """

    def __init__(self, channels: int | None = None, **options: Any) -> None:
        super().__init__(SimplePenalty(), channels, **options)


class SigmoidDiffusivity(_Published):
    """Attend to all nodes by a sigmoid of inner products: DIFFormer-a (Wu, Wipf & Yan 2025, Eqs. 20, 58–60).

    f = σ(q·k). With ``measure="distance"``, f = 1/(1 + e^{z²/2 − 1}) of the distance z. A product costs O(N²) time and
    O(N) memory.

    Args:
        channels: number C of channels of the state. ``None`` reads the state as it comes; projections need a number.

    Options:
        projection: ``"separate"``: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q = W_K, which
            keeps a score symmetric. ``None``, the default: q = k = x.
        normalize: ``"row"``, the default, as published: every query and key has unit norm (Eq. 55). ``"frobenius"``:
            one norm per graph, as in released code, with which the attention is nearly uniform (docs/errata.md, D1).
            ``None``: no normalisation, as in the released code (docs/errata.md, D2).
        measure: ``"inner"``, the default, as published: f is a function of q·k. ``"distance"``: f is a function of ‖q_i
            − k_j‖, as in the energy. Both agree for unit vectors only (docs/errata.md, D8).
        row_stochastic: divide the rows by their sums (Eq. 15). ``True`` by default. ``False`` gives Ω = [f], which is
            symmetric if q = k.
        constraint: a set that holds the rows of the state, for ``projection=None, normalize=None, measure="distance"``.
            The couplings are nonnegative if the set lies within the domain of the penalty. ``None``, the default, is no
            set.
        heads: number H of heads. 1 by default. Without projection, H divides C.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> torch.allclose(SigmoidDiffusivity()(x).degree(), torch.ones(6, 1))
        True
    """

    def __init__(self, channels: int | None = None, **options: Any) -> None:
        super().__init__(SigmoidPenalty(), channels, **options)


class SoftmaxDiffusivity(_Published):
    """Attend to all nodes by a softmax of inner products (Wu, Wipf & Yan 2025, Eq. 21).

    f = exp(q·k/√d) for heads of d channels. With ``measure="distance"``, f = exp((1 − z²/2)/√d) of the distance z. The
    printed δ is corrected (docs/errata.md, D9).

    Args:
        channels: number C of channels of the state. ``None`` reads the state as it comes; projections need a number.

    Options:
        projection: ``"separate"``: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q = W_K, which
            keeps a score symmetric. ``None``, the default: q = k = x.
        normalize: ``"row"``, the default, as published: every query and key has unit norm (Eq. 55). ``"frobenius"``:
            one norm per graph, as in released code, with which the attention is nearly uniform (docs/errata.md, D1).
            ``None``: no normalisation.
        measure: ``"inner"``, the default, as published: f is a function of q·k. ``"distance"``: f is a function of ‖q_i
            − k_j‖, as in the energy. Both agree for unit vectors only (docs/errata.md, D8).
        row_stochastic: divide the rows by their sums (Eq. 15). ``True`` by default. ``False`` gives Ω = [f], which is
            symmetric if q = k.
        constraint: a set that holds the rows of the state, for ``projection=None, normalize=None, measure="distance"``.
            The couplings are nonnegative if the set lies within the domain of the penalty. ``None``, the default, is no
            set.
        heads: number H of heads. 1 by default. Without projection, H divides C.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

    Examples:
        >>> SoftmaxDiffusivity(4, projection="separate", heads=2)(x).heads
        2
    """

    def __init__(self, channels: int | None = None, **options: Any) -> None:
        super().__init__(SoftmaxPenalty, channels, **options)


class GaussianDiffusivity(_Published):
    """Attend to all nodes by a Gaussian of their distance.

    f = exp(−z²/2σ²) of the distance z, the *Kernel* ablation of Wu, Wipf & Yan (2025), Fig. 3. With unit vectors it is
    a function of their inner product.

    Args:
        channels: number C of channels of the state. ``None`` reads the state as it comes; projections need a number.
        bandwidth: σ > 0, the distance at which f has fallen to e^-½.

    Options:
        projection: ``"separate"``: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q = W_K, which
            keeps a score symmetric. ``None``, the default: q = k = x.
        normalize: ``"row"``, the default: every query and key has unit norm (Eq. 55). ``"frobenius"``: one norm per
            graph, as in released code, with which the attention is nearly uniform (docs/errata.md, D1). ``None``: no
            normalisation.
        measure: ``"inner"``, the default: f is a function of q·k. ``"distance"``: f is a function of ‖q_i − k_j‖, as in
            the energy. Both agree for unit vectors only (docs/errata.md, D8).
        row_stochastic: divide the rows by their sums (Eq. 15). ``True`` by default. ``False`` gives Ω = [f], which is
            symmetric if q = k.
        constraint: a set that holds the rows of the state, for ``projection=None, normalize=None, measure="distance"``.
            The couplings are nonnegative if the set lies within the domain of the penalty. ``None``, the default, is no
            set.
        heads: number H of heads. 1 by default. Without projection, H divides C.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

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
    """Attend to all nodes by linear attention plus the identity in O(N), as SGFormer does.

    For the n nodes of a graph, with normalised queries Q̃ and keys K̃ (slides, "SGFormer"; Wu et al. 2023b):

        S = D⁻¹ (I + (1/n) Q̃ K̃ᵀ),  D = diag(1 + (1/n) Q̃ (K̃ᵀ 1))

    Rows sum to one because of the identity. The rows that the released code exports do not sum to one. A row with D =
    0, where every k̃_j is −q̃_i, is zero.

    Args:
        channels: number C of channels of the state; projections, the default, need a number.
        normalize: ``"row"``: every query and key has unit norm, as in PyG's ``SGFormerAttention``. ``"frobenius"``: one
            norm per graph, as in the slides. Then ‖(1/n) Q̃K̃ᵀV‖ ≤ ‖V‖/n, too small for float32 at n = 169 000
            (docs/errata.md, G1).

    Options:
        heads: number H of heads. 1 by default. Without projection, H divides C.
        projection: ``"separate"``, the default: q = W_Q x and k = W_K x (Wu, Wipf & Yan 2025, Eq. 54). ``"tied"``: W_Q
            = W_K, which keeps a score symmetric. ``None``: q = k = x.
        head_channels: number of channels of a projected head. ``None``, the default, is C, as in Eq. 54.
        bias: add b_Q and b_K to the projections, as released code does. ``False`` by default, as in Eq. 54.

    Shapes:
        - x: [N, C].
        - output: a coupling of N nodes and H heads.

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

    def couple(self, x: State, graph: Graph) -> Coupling:
        q, k = self.queries_and_keys(x, graph, unit=False)
        # I + (1/n) QKᵀ is (1/n)(n I + QKᵀ), and ``own`` counts in multiples of n.
        return LinearAttentionCoupling(
            q, k, graph.segments, own=1.0, unit=self.normalize == "row", _checked=True
        )
