"""Penalties δ and the diffusivities f = δ′ that they induce (Wu, Wipf & Yan 2025)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from diffusion_mp import checks
from diffusion_mp.couplings import (
    Coupling,
    DistanceCoupling,
    LinearAttentionCoupling,
    LowRankCoupling,
    PairwiseCoupling,
    distance_features,
    row_normalized,
    with_constant,
)
from diffusion_mp.energies import pairs
from diffusion_mp.energies.constraints import Constraint, Sphere, get_constraint
from diffusion_mp.energies.pairs import HeadState, Scalar
from diffusion_mp.graph.arguments import as_ptr, row_bounds
from diffusion_mp.kernels.pairwise import log_score
from diffusion_mp.runtime.precision import unit_vectors
from diffusion_mp.saving import Described

Measure = Literal["inner", "distance"]
#: Squared distances, and functions of them, elementwise.
Squares = Float[Tensor, "*shape"]

FARTHEST = 1e8  # largest squared distance at which `Penalty.flaw` evaluates f


class Penalty(Described, ABC):
    """Base of penalties: the cost δ(z²) of a pair of nodes at squared distance z² (Wu, Wipf & Yan 2025, Eq. 13).

    δ is concave and non-decreasing on ``domain``. Its derivative f = δ′ is the diffusivity of the model that descends
    the energy (Theorem 7). A subclass defines :meth:`delta` and :meth:`f`, elementwise functions of a tensor of squared
    distances. From these follow

    - :meth:`total`, P(x) = Σ_ij δ(‖x_i − x_j‖²), in O(N²). Override it if the sum has a closed form.
    - :meth:`coupling`, Ω = [f(‖x_i − x_j‖²)] of a state, and :meth:`attention`, the same of queries and keys, in O(N²).
      If f is an elementary function of an inner product, subclass :class:`ScorePenalty`, whose couplings are fast.
    - :meth:`log_f` and :meth:`flaw`.

    Attributes:
        domain: interval of z² where δ is concave and non-decreasing and f ≥ 0. The theorems hold for states within it.
            By default all distances.
        sharpness: the a for which f is as sharp as e^{−a·z²/2}. Distances are in double precision where single
            precision does not resolve f. 1 by default.
        positive: whether f > 0 everywhere. If so, `log_f` is finite, and rows are normalised in log space.
        linear: whether f is linear in z², so that Ω has low rank.
        measures: what `attention` may read: ``"distance"``, or ``"inner"``, inner products, as well.

    Examples:
        >>> isinstance(SimplePenalty(), Penalty), SimplePenalty().coupling(x, normalize=True).row_stochastic
        (True, True)
    """

    #: Interval of z² where δ is concave and non-decreasing and f ≥ 0. The theorems hold
    #: for states within it.
    domain: tuple[float, float] = (0.0, math.inf)
    #: The a for which f is as sharp as e^{−a·z²/2}. Distances are in double precision
    #: where single precision does not resolve f.
    sharpness: float | Tensor = 1.0
    #: Whether f > 0 everywhere, so that `log_f` is finite and rows are normalised in
    #: log space.
    positive: bool = False
    #: Whether f is linear in z², so that Ω has low rank.
    linear: bool = False
    #: What `attention` may read: squared distances, or inner products as well.
    measures: tuple[Measure, ...] = ("distance",)

    @abstractmethod
    def delta(self, z2: Squares) -> Squares:
        """Return δ(z²), elementwise.

        Args:
            z2: squared distances, of any shape.
        """

    @abstractmethod
    def f(self, z2: Squares) -> Squares:
        """Return f(z²) = δ′(z²), the derivative with respect to z² (not z), elementwise.

        Args:
            z2: squared distances, of any shape.
        """

    def log_f(self, z2: Squares) -> Squares:
        """Return log f(z²); if f is ``positive``, also for distances at which f itself underflows.

        Args:
            z2: squared distances, of any shape.
        """
        return self.f(z2).log()

    def reach(self, dtype: torch.dtype) -> float:
        """Return the upper end of ``domain``, widened by the rounding of unit vectors in ``dtype``."""
        return self.domain[1] * (1 + 16 * torch.finfo(dtype).eps)

    def covers(self, distance: float) -> bool:
        """Return whether ``domain`` contains the square of a distance.

        Args:
            distance: distance z of two vectors.
        """
        # A product, not a power: where distance**2 overflows Python raises an error.
        return distance * distance <= self.domain[1]

    @torch.no_grad()
    def flaw(self) -> str | None:
        """Return a sentence saying where f is negative, increases or is not δ′ at points of ``domain``, or ``None``."""
        z2 = self._points()
        if z2.is_meta:
            return None
        return find_flaw(z2, self.f(z2), self.delta(z2))

    def coupling(
        self,
        x: pairs.State,
        ptr: Tensor | None = None,
        normalize: bool = False,
        constraint: Constraint | None = None,
        centre: Tensor | None = None,
    ) -> Coupling:
        """Return the coupling Ω = [f(‖x_i − x_j‖²)] of a state, symmetric and matrix-free.

        On a sphere, a linear f is computed from inner products, which makes the Ω of the simple penalty positive
        semi-definite.

        Args:
            x: state [N, C] or [N, H, D].
            ptr: row boundaries [B+1] of a ragged batch, on the CPU. ``None`` is one graph.
            normalize: return D̄⁻¹Ω instead, which is Ŝ of Eq. 15 and not symmetric. ``False`` by default.
            constraint: a set that contains the rows of x. Ω is declared nonnegative if the set keeps distances within
                ``domain``. ``None`` is no set, so only a ``domain`` of all distances makes Ω nonnegative.
            centre: points [1 or N, H, D] that are subtracted from x before distances are taken. ``None`` is the mean of
                every graph.
        """
        self._check_state(x)
        checks.check_flags(normalize=normalize)
        within = get_constraint(constraint)
        if ptr is not None:
            # A caller with a centre has a graph, whose boundaries were checked.
            ptr = row_bounds(ptr, x.size(0)) if centre is None else as_ptr(ptr)
        radius = None
        if self.linear and isinstance(within, Sphere):
            radius = within.radius
        return self.attention(
            pairs.by_head(x),
            ptr=ptr,
            centre=centre,
            radius=radius,
            normalize=normalize,
            nonnegative=self.covers(within.diameter),
        )

    def attention(
        self,
        query: HeadState,
        key: HeadState | None = None,
        ptr: Tensor | None = None,
        *,
        centre: Tensor | None = None,
        measure: Measure = "distance",
        radius: float | None = None,
        normalize: bool = False,
        nonnegative: bool = True,
    ) -> Coupling:
        """Return the coupling [f(‖q_i − k_j‖²)] of queries and keys within each graph.

        Args:
            query: the queries q [N, H, D].
            key: the keys k [N, H, D]. ``None`` takes the queries, and [f] is then symmetric.
            ptr: row boundaries [B+1] of a ragged batch, on the CPU. ``None`` is one graph.
            centre: points [1 or N, H, D] that are subtracted from q and k before distances are taken. ``None`` is the
                mean of the keys of every graph.
            measure: ``"distance"``, the default: f at z² = ‖q_i − k_j‖². ``"inner"``: f at z² = 2 − 2 q_i·k_j, as
                published, for penalties whose ``measures`` contain it. Both agree for unit vectors. For others only the
                distance has the energy of the paper (docs/errata.md, D8).
            radius: first give all vectors this norm. ``None`` leaves the norms.
            normalize: divide each row by its sum. ``False`` by default.
            nonnegative: the promise that no entry is negative.
        """
        if radius is not None:
            query = radius * unit_vectors(query)
            if key is not None:
                key = radius * unit_vectors(key)
        coupling = self._pairs(query, key, ptr, centre, nonnegative)
        return row_normalized(coupling) if normalize else coupling

    def _pairs(
        self,
        query: HeadState,
        key: HeadState | None,
        ptr: Tensor | None,
        centre: Tensor | None,
        nonnegative: bool,
    ) -> Coupling:
        """Return [f(‖q_i − k_j‖²)] within each graph."""
        # Distances are measured in double precision, so their origin does not matter.
        return DistanceCoupling(
            self._function,
            query,
            query if key is None else key,
            ptr,
            nonnegative=nonnegative,
            mutual=key is None,
        )

    @property
    def _function(self) -> Callable[[Tensor], Tensor]:
        """f as a coupling of all pairs calls it, for squared distances that are not negative."""
        return self.f

    def total(self, x: pairs.State, ptr: Tensor | None = None) -> Scalar:
        """Return P(x) = Σ_ij δ(‖x_i − x_j‖²) over the ordered pairs of every graph and head, in float64.

        It takes O(N² d) time, unless a subclass has a closed form.

        Args:
            x: state [N, C] or [N, H, D].
            ptr: row boundaries [B+1] of a ragged batch, on the CPU. ``None`` is one graph.
        """
        self._check_state(x)
        return pairs.sum_over_pairs(self.delta, x, ptr)

    def _check_state(self, x: pairs.State) -> None:
        """Raise unless ``x`` is a state, on the device of the parameters if f is learned."""
        pairs.check_heads(x)
        if isinstance(self, nn.Module):
            checks.check_place(x, self)

    def _points(self) -> Float[Tensor, " points"]:
        """Squared distances at which `flaw` evaluates f and δ, on the device of the parameters."""
        parameters = self.parameters() if isinstance(self, nn.Module) else iter(())
        device = next((parameter.device for parameter in parameters), None)
        end = min(self.domain[1], FARTHEST)
        # Evenly where penalties of unit vectors change, and by decades for narrow and
        # wide ones.
        near = torch.linspace(0, min(end, 64.0), 400)
        far = torch.logspace(-6, math.log10(end), 400)
        return torch.cat([near, far.clamp(max=end)]).double().unique().to(device)


@dataclass(frozen=True)
class QuadraticPenalty(Penalty):
    """The penalty of uniform attention over all pairs, δ(z²) = z² with f = 1 (Wu, Wipf & Yan 2025, Theorem 1).

    ``total`` takes O(N d).

    Examples:
        >>> QuadraticPenalty().f(torch.tensor([0.0, 9.0]))
        tensor([1., 1.])
    """

    positive = True

    def delta(self, z2: Squares) -> Squares:
        return z2.clone()

    def f(self, z2: Squares) -> Squares:
        return torch.ones_like(z2)

    def attention(
        self,
        query: HeadState,
        key: HeadState | None = None,
        ptr: Tensor | None = None,
        *,
        normalize: bool = False,
        **_: Any,
    ) -> Coupling:
        # With the heads of the queries, so that a diffusivity has the heads that it
        # declares.
        one = query.new_ones(*query.shape[:2], 1)
        if normalize:
            return LinearAttentionCoupling(
                one,
                one,
                ptr,
                symmetric=True,
                nonnegative=True,
                mutual=True,
                _checked=True,
            )
        return LowRankCoupling(
            one,
            one,
            ptr,
            nonnegative=True,
            positive_semidefinite=True,
            _checked=True,
        )

    def total(self, x: pairs.State, ptr: Tensor | None = None) -> Scalar:
        return pairs.sum_squared_distances(x, ptr)


class ScorePenalty(Penalty):
    """Base of penalties whose f is an elementary function g of an inner product.

        f(z²) = g(a (c − z²/2))

    −z²/2 = −½‖q − k‖² is the inner product of the vectors that `distance_features` returns. For unit vectors it is q·k
    − 1. The kernels of published attentions therefore serve all of these penalties. A subclass sets the attributes and
    defines ``delta``.

    Attributes:
        g: ``"linear"``, g(u) = u, has couplings in O(N): a `LowRankCoupling`, or a `LinearAttentionCoupling` if rows
            are divided by their sums. ``"exp"`` and ``"sigmoid"`` have a `PairwiseCoupling`, in O(N²) time and O(N)
            memory.
        scale: a > 0. 1 by default.
        offset: c. 0 by default.

    Examples:
        >>> isinstance(GaussianPenalty(), ScorePenalty), GaussianPenalty().g, GaussianPenalty(bandwidth=0.5).scale
        (True, 'exp', 4.0)
    """

    g: ClassVar[Literal["linear", "exp", "sigmoid"]]
    scale: float = 1.0
    offset: float = 0.0
    measures = ("inner", "distance")

    @property
    def sharpness(self) -> float:  # type: ignore[override]
        return self.scale

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.g != "linear"

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.g == "linear"

    def f(self, z2: Squares) -> Squares:
        score = self.scale * (self.offset - z2 / 2)
        if self.g == "exp":
            return score.exp()
        if self.g == "sigmoid":
            return score.sigmoid()
        return score

    def log_f(self, z2: Squares) -> Squares:
        if self.g == "linear":
            return super().log_f(z2)
        return log_score(self.scale * (self.offset - z2 / 2), self.g)

    def attention(
        self,
        query: HeadState,
        key: HeadState | None = None,
        ptr: Tensor | None = None,
        *,
        centre: Tensor | None = None,
        measure: Measure = "distance",
        radius: float | None = None,
        normalize: bool = False,
        nonnegative: bool = True,
    ) -> Coupling:
        mutual = key is None
        scale = self.scale
        offset = self.offset
        if radius is not None:
            # a (c − ½‖r u − r v‖²) = ar² (c/r² − ½‖u − v‖²) for unit vectors u and v
            scale = scale * radius**2
            offset = offset / radius**2
            if self.linear:
                measure = "inner"
        if measure == "inner":
            # ½‖u − v‖² = 1 − u·v for unit vectors
            offset = offset - 1
        if self.linear and normalize:
            # It divides by norms and by row sums in the passes that compute the product, and the scale cancels in a
            # row.
            q, k = self._features(query, key, ptr, centre, measure, scale)
            return LinearAttentionCoupling(
                q,
                k,
                ptr,
                constant=offset,
                unit=radius is not None,
                nonnegative=nonnegative,
                mutual=mutual,
                _checked=True,
            )
        if radius is not None:
            query = unit_vectors(query)
            key = None if key is None else unit_vectors(key)
            centre = query.new_zeros(1, 1, 1)  # unit vectors lie around the origin
        q, k = self._features(query, key, ptr, centre, measure, scale)
        if self.g == "exp" and normalize:
            offset = 0.0  # a factor of all entries cancels in a row
        # Then the features of both sides are equal: a negative constant has no square root for both.
        equal = mutual and measure == "inner" and offset >= 0
        q, k = _affine(q, k, scale, offset, equal)
        symmetric = mutual and not normalize
        if self.g == "linear":
            return LowRankCoupling(
                q,
                k,
                ptr,
                symmetric=symmetric,
                nonnegative=nonnegative,
                positive_semidefinite=equal,
                _checked=True,
            )
        return PairwiseCoupling(
            q,
            k,
            ptr,
            self.g,
            normalize=normalize,
            symmetric=symmetric,
            # exp(a(s + c)) is a positive-definite function of q_i − q_j, and one of
            # q_i·q_j too.
            positive_semidefinite=symmetric and self.g == "exp",
            mutual=mutual,
            _checked=True,
        )

    def _features(
        self,
        query: HeadState,
        key: HeadState | None,
        ptr: Tensor | None,
        centre: Tensor | None,
        measure: Measure,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return features [N, H, F] of receivers and senders whose inner product is q·k, or −½‖q − k‖²."""
        if measure == "inner":
            return query, query if key is None else key
        # All pairs cancel the rounding of a linear f in their sums.
        sharpness = None if self.linear else scale
        return distance_features(query, key, ptr, centre=centre, sharpness=sharpness)


def _affine(
    q: Tensor, k: Tensor, scale: float, offset: float, one: bool
) -> tuple[Tensor, Tensor]:
    """Return features with the inner product a (q·k + c); ``one`` tensor for both if q is k."""
    # Half of a and of c on either side, so that the product of one tensor with itself
    # is exactly symmetric.
    if offset:
        root = math.sqrt(abs(offset))
        q = with_constant(q, math.copysign(root, offset))
        k = q if one else with_constant(k, root)
    if scale == 1:
        return q, k
    if one:
        q = math.sqrt(scale) * q
        return q, q
    return scale * q, k


@dataclass(frozen=True)
class SimplePenalty(ScorePenalty):
    """The penalty of DIFFormer-s, δ(z²) = 2z² − z⁴/4 with f = 2 − z²/2 (Wu, Wipf & Yan 2025, Eq. 18).

    f is 1 + x_iᵀx_j for unit vectors. The penalty is valid for z² ∈ [0, 4], that is, within a unit ball. (The paper
    prints [0, 2], the range of z.) δ is a polynomial in inner products, so ``total`` is exact in O(N d²) and Ω has low
    rank.

    Examples:
        >>> SimplePenalty().f(torch.tensor([0.0, 4.0]))  # 0 at the end of the domain
        tensor([2., 0.])
    """

    g = "linear"
    offset = 2.0
    domain = (0.0, 4.0)

    def delta(self, z2: Squares) -> Squares:
        return z2 * (2 - z2 / 4)

    def total(self, x: pairs.State, ptr: Tensor | None = None) -> Scalar:
        squares = pairs.sum_squared_distances(x, ptr)
        return 2 * squares - pairs.sum_fourth_powers(x, ptr) / 4


@dataclass(frozen=True)
class SigmoidPenalty(ScorePenalty):
    """The penalty of DIFFormer-a, whose f is a sigmoid (Wu, Wipf & Yan 2025, Eq. 20).

        δ(z²) = z² − 2 log(1 + e^{z²/2 − 1}),  f(z²) = 1/(1 + e^{z²/2 − 1})

    Examples:
        >>> SigmoidPenalty().total(x).shape  # the sum over all pairs
        torch.Size([])
    """

    g = "sigmoid"
    offset = 1.0

    def delta(self, z2: Squares) -> Squares:
        # z² − 2 softplus(z²/2 − 1), rewritten to avoid cancellation for distant pairs.
        return 2 - 2 * softplus(1 - z2 / 2)


@dataclass(frozen=True)
class SoftmaxPenalty(ScorePenalty):
    """The penalty of softmax attention, whose f is an exponential (Wu, Wipf & Yan 2025, Eq. 21).

        δ(z²) = 2√d (e^{1/√d} − e^{(1 − z²/2)/√d}),  f(z²) = e^{(1 − z²/2)/√d}

    f is exp(x_iᵀx_j/√d) for unit vectors. (The paper prints e^{1 − z²/2} e^{1/√d}, a different function.)

    Args:
        dim: d, the number of channels of a head.

    Examples:
        >>> bool(SoftmaxPenalty(dim=4).f(torch.zeros(1)) > 1)
        True
    """

    g = "exp"
    offset = 1.0

    dim: int

    def __post_init__(self) -> None:
        checks.check_counts(dim=self.dim)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return 1 / math.sqrt(self.dim)

    def delta(self, z2: Squares) -> Squares:
        root = math.sqrt(self.dim)
        return 2 * root * math.exp(1 / root) * one_minus_exp(z2 / (2 * root))


@dataclass(frozen=True)
class GaussianPenalty(ScorePenalty):
    """The penalty of the Gaussian kernel (Wu, Wipf & Yan 2025, Figure 3).

        δ(z²) = 2σ² (1 − f(z²)),  f(z²) = e^{−z²/(2σ²)}

    Args:
        bandwidth: σ, between 1e-18 and 1e18. 1 by default.

    Examples:
        >>> GaussianPenalty(bandwidth=0.5).f(torch.zeros(1))
        tensor([1.])
    """

    g = "exp"

    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        checks.check_positive(self.bandwidth, "bandwidth")
        if (
            not 1e-18 <= self.bandwidth <= 1e18
        ):  # single precision cannot hold the square of others
            raise ValueError(
                f"bandwidth must lie in [1e-18, 1e18]; got {self.bandwidth:g}. Rescale the state."
            )

    @property
    def scale(self) -> float:  # type: ignore[override]
        return 1 / self.bandwidth**2

    def delta(self, z2: Squares) -> Squares:
        scale = 2 * self.bandwidth**2
        return scale * one_minus_exp(z2 / scale)


def one_minus_exp(x: Tensor) -> Tensor:
    """Return 1 − e^{−x} for x ≥ 0, with all digits of a small result, and of a small derivative.

    ``expm1`` has the digits of close pairs. Its derivative is its value plus one, which is rounded where e^{−x} is
    small.
    """
    return torch.where(x < 0.5, -torch.expm1(-x), 1 - torch.exp(-x))


def find_flaw(z2: Tensor, f: Tensor, delta: Tensor | None) -> str | None:
    """Return a sentence saying where f is not finite, negative, increasing or not δ′; ``None`` if nowhere."""
    eps = torch.finfo(f.dtype).eps
    rounding = max(1e-9, 16 * eps) * float(f[0].abs())
    wrongs = {"is not finite": ~f.isfinite(), "is negative": f < -rounding}
    for what, wrong in wrongs.items():
        if bool(wrong.any()):
            at = int(wrong.int().argmax())
            return f"f({float(z2[at]):g}) = {float(f[at]):g} {what}."
    lowest, index = f.cummin(0)
    rise = f - lowest
    if bool((rise > rounding).any()):
        high = int(rise.argmax())
        low = int(index[high])
        return (
            f"f rises from f({float(z2[low]):.6g}) = {float(f[low]):.6g} "
            f"to f({float(z2[high]):.6g}) = {float(f[high]):.6g}."
        )
    if delta is None:
        return None
    # The slope of a chord of a concave δ lies between f at its ends. The room covers
    # the rounding of a δ that is a difference of large terms, as z² − log(1 + e^z²),
    # and the 2e-9 by which torch's softplus is off at its threshold.
    chord = delta.diff() / z2.diff()
    first = f[0].abs()
    size = delta.abs() + first * z2
    error = 16 * eps * (size[:-1] + size[1:]) + 4e-9 * first
    room = rounding + error / z2.diff()
    off = torch.maximum(chord - f[:-1], f[1:] - chord) - room
    if bool((off <= 0).all()):
        return None
    at = int(off.nan_to_num(torch.inf).argmax())
    return (
        f"f is not the derivative of δ, which rises by {float(chord[at]):.6g} per z² "
        f"between {float(z2[at]):.6g} and {float(z2[at + 1]):.6g}."
    )


#: The penalties by their names.
PENALTIES: dict[str, Callable[..., Penalty]] = {
    "quadratic": QuadraticPenalty,
    "simple": SimplePenalty,
    "sigmoid": SigmoidPenalty,
    "softmax": SoftmaxPenalty,
    "gaussian": GaussianPenalty,
}


def get_penalty(penalty: str | Penalty, **options: Any) -> Penalty:
    """Return the penalty with a name.

    Args:
        penalty: ``"quadratic"``, ``"simple"``, ``"sigmoid"``, ``"softmax"`` or ``"gaussian"``. A `Penalty` is returned
            unchanged.

    Options:
        dim: number of channels of a head, which ``"softmax"`` requires.
        bandwidth: σ of ``"gaussian"``. 1 by default.

    Examples:
        >>> get_penalty("simple")
        SimplePenalty()
    """
    if isinstance(penalty, Penalty):
        return penalty
    checks.check_choice(penalty, "penalty", PENALTIES)
    return PENALTIES[penalty](**options)
