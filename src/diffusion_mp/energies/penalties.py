"""Penalties δ and the diffusivities f = δ′ they induce (Wu, Wipf & Yan, 2025, "Transformers from Diffusion": TfD)."""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, Score
from diffusion_mp.couplings.scores import FunctionScore, MixtureScore
from diffusion_mp.energies import pairs
from diffusion_mp.energies.constraints import Constraint, Sphere
from diffusion_mp.graph.cache import values_only
from diffusion_mp.graph.checks import as_ptr, row_bounds
from diffusion_mp.saving import Described

SCORES = (Score, MixtureScore, FunctionScore)
WITHOUT_SCORE = "Couplings are made of f = δ′ as a Score of −½z²; FunctionPenalty(f) takes f as a function of z²."
FARTHEST = 1e8  # largest squared distance at which `Penalty.flaw` evaluates f


class Penalty(Described, ABC):
    """Cost δ(z²) of a pair of nodes at squared distance z², concave and non-decreasing on ``domain`` (TfD, Eq. 13).

    Its derivative f = δ′ is the diffusivity of the model that descends the energy (Theorem 7). Subclasses define
    ``delta`` and ``score`` (f = δ′).

    Examples:
        >>> isinstance(SimplePenalty(), Penalty), SimplePenalty().coupling(x, normalize=True).row_stochastic
        (True, True)
    """

    #: Interval of z² where δ is concave and non-decreasing and f ≥ 0. The theorems hold for states within it.
    domain: tuple[float, float] = (0.0, math.inf)

    @abstractmethod
    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return δ(z²), elementwise."""

    @property
    @abstractmethod
    def score(self) -> Score | MixtureScore | FunctionScore:
        """f as a score of s = −½z², from which couplings are built."""

    def reach(self, dtype: torch.dtype) -> float:
        """Return the upper end of ``domain``, widened by the rounding of unit vectors in ``dtype``."""
        return self.domain[1] * (1 + 16 * torch.finfo(dtype).eps)

    def covers(self, distance: float) -> bool:
        """Return whether ``domain`` reaches as far as two vectors at this distance."""
        return (
            distance * distance <= self.domain[1]
        )  # where distance**2 overflows Python raises an error

    @torch.no_grad()
    def flaw(self) -> str | None:
        """Return a sentence saying where f is negative, increases or is not δ′ at points of ``domain``, or ``None``."""
        if not isinstance(self.score, SCORES):
            return f"its score is {errors.describe(self.score)}. {WITHOUT_SCORE}"
        z2 = self._points()
        if z2.is_meta:
            return None
        return find_flaw(z2, self.f(z2), self.delta(z2))

    def f(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return f(z²) = δ′(z²), the derivative with respect to z² (not z)."""
        errors.check_tensor(z2, "z2", "of squared distances")
        self._check_place(z2, "z2")
        errors.check_kind(self.score, f"the score of {self!r}", SCORES, f"a Score. {WITHOUT_SCORE}")
        return self.score(-z2 / 2)

    def coupling(
        self,
        x: pairs.State,
        ptr: Tensor | None = None,
        normalize: bool = False,
        constraint: Constraint | None = None,
        centre: Tensor | None = None,
    ) -> Coupling:
        """Return Ω = [f(‖x_i − x_j‖²)], symmetric and matrix-free; with ``normalize`` D̄⁻¹Ω, Eq. 15's Ŝ, not symmetric.

        Ω is declared nonnegative if the ``constraint`` on rows of x keeps distances within ``domain``. On a sphere a
        linear f is computed from inner products, which makes the Ω of the simple penalty positive semi-definite.
        ``ptr`` [B + 1] bounds the graphs of a ragged batch; ``centre`` is the origin of `distance_features`.
        """
        if not (isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() and x.size(1)):
            pairs.check_heads(x)
        if type(normalize) is not bool:
            errors.check_flags(normalize=normalize)
        if constraint is not None and not isinstance(constraint, Constraint):
            errors.check_kind(
                constraint, "constraint", Constraint, "a Constraint (see get_constraint) or None"
            )
        values = x if x.dim() == 3 else x.unsqueeze(1)
        if ptr is not None:
            if centre is None:
                ptr = row_bounds(ptr, x.size(0))
            else:
                ptr = as_ptr(ptr)
        diameter = math.inf if constraint is None else constraint.diameter
        options: dict[str, Any] = {"normalize": normalize, "nonnegative": self.covers(diameter)}
        score = self.score
        if not isinstance(score, SCORES):  # torch.compile does not trace the name of a penalty
            errors.check_kind(score, f"the score of {self!r}", SCORES, f"a Score. {WITHOUT_SCORE}")
        if isinstance(self, nn.Module):
            self._check_place(x)
        if isinstance(constraint, Sphere) and isinstance(score, Score) and score.g == "linear":
            score = score.on_sphere(constraint.radius)
            return score.coupling(values, None, ptr, measure="inner", unit=True, **options)
        return score.coupling(values, None, ptr, centre=centre, **options)

    def conjugate(self, omega: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the concave conjugate δ̃(ω) = min_{s ≥ 0} ωs − δ(s) of Proposition 6: δ(s) = min_{ω ≥ 0} ωs − δ̃(ω).

        Beyond the upper end of ``domain``, δ is taken as constant. δ̃(ω) is −∞ for ω < 0 and −δ(0) for ω ≥ f(0).
        """
        errors.check_tensor(omega, "omega", "of values of f")
        self._check_place(omega, "omega")
        steepest = self.f(torch.zeros_like(omega))
        slope = omega.clamp(min=0).minimum(steepest)
        s = (-2 * self.score.inverse(slope)).clamp(min=0)
        product = torch.where(slope > 0, slope * s, 0)  # s = ∞ where f never reaches zero
        return torch.where(omega < 0, -math.inf, product - self.delta(s))

    def total(self, x: pairs.State, ptr: Tensor | None = None) -> Float[Tensor, ""]:
        """Return P(x) = Σ_ij δ(‖x_i − x_j‖²) over ordered pairs of a graph (and head), in float64, in O(N² d) time."""
        self._check_place(x)
        return pairs.sum_over_pairs(self.delta, x, ptr)

    def _check_place(self, x: Tensor, name: str = "x") -> None:
        """Raise unless ``x`` is on the device of the parameters, if there are any."""
        if isinstance(self, nn.Module) and isinstance(x, Tensor):
            errors.check_place(x, self, name)

    def _points(self) -> Float[Tensor, " points"]:
        """Squared distances at which `flaw` evaluates f and δ, on the device of the parameters."""
        if isinstance(self, nn.Module):
            parameters = self.parameters()
        else:
            parameters = iter(())
        device = next((parameter.device for parameter in parameters), None)
        end = min(self.domain[1], FARTHEST)
        near = torch.linspace(0, min(end, 64.0), 400)
        far = torch.logspace(-6, math.log10(end), 400)
        return torch.cat([near, far.clamp(max=end)]).double().unique().to(device)


@dataclass(frozen=True)
class QuadraticPenalty(Penalty):
    """The penalty of uniform attention over all pairs, δ(z²) = z² and f = 1 (Theorem 1). ``total`` is O(N d).

    Examples:
        >>> QuadraticPenalty().f(torch.tensor([0.0, 9.0]))
        tensor([1., 1.])
    """

    score = Score("constant")

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        return z2.clone()

    def conjugate(self, omega: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return 0 for ω ≥ 1 and −∞ below, since f is constant."""
        errors.check_tensor(omega, "omega", "of values of f")
        return torch.where(omega < 1, -math.inf, torch.zeros_like(omega))

    def total(self, x: pairs.State, ptr: Tensor | None = None) -> Float[Tensor, ""]:
        return pairs.sum_squared_distances(x, ptr)


@dataclass(frozen=True)
class SimplePenalty(Penalty):
    """The penalty of DIFFormer-s, δ(z²) = 2z² − z⁴/4, f = 2 − z²/2 (TfD, Eq. 18; 1 + x_iᵀx_j for unit vectors).

    Valid for z² ∈ [0, 4], that is within a unit ball (the paper prints [0, 2], the range of z). δ is a polynomial in
    inner products, so ``total`` is exact in O(N d²) and Ω has low rank.

    Examples:
        >>> SimplePenalty().f(torch.tensor([0.0, 4.0]))  # 0 at the end of the domain
        tensor([2., 0.])
    """

    domain = (0.0, 4.0)
    score = Score("linear", scale=1.0, offset=2.0)

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        return z2 * (2 - z2 / 4)

    def total(self, x: pairs.State, ptr: Tensor | None = None) -> Float[Tensor, ""]:
        second, fourth = pairs.sum_distance_powers(x, ptr)
        return 2 * second - fourth / 4

    def along(self, x: pairs.State, direction: pairs.State) -> Float[Tensor, " five"]:
        """Return P(x + τ·direction) of one graph as the coefficients of 1, τ, … τ⁴, exact in O(N d²)."""
        second, fourth = pairs.distance_powers_along(x, direction)
        return 2 * torch.nn.functional.pad(second, (0, 2)) - fourth / 4


@dataclass(frozen=True)
class SigmoidPenalty(Penalty):
    """The penalty of DIFFormer-a, δ(z²) = z² − 2 log(1 + e^{z²/2 − 1}), f = 1/(1 + e^{z²/2 − 1}) (TfD, Eq. 20).

    Examples:
        >>> SigmoidPenalty().total(x).shape  # the sum over all pairs
        torch.Size([])
    """

    score = Score("sigmoid", scale=1.0, offset=1.0)

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        # z² − 2 softplus(z²/2 − 1), rewritten to avoid cancellation for distant pairs.
        return 2 - 2 * torch.nn.functional.softplus(1 - z2 / 2)


@dataclass(frozen=True)
class SoftmaxPenalty(Penalty):
    """The penalty of softmax attention (TfD, Eq. 21), f = exp(x_iᵀx_j/√d) for unit vectors.

    δ(z²) = 2√d (e^{1/√d} − e^{(1 − z²/2)/√d}), f = e^{(1 − z²/2)/√d}. (The paper prints e^{1 − z²/2} e^{1/√d}, a
    different function.) ``dim`` is d, the channels per head.

    Examples:
        >>> bool(SoftmaxPenalty(dim=4).f(torch.zeros(1)) > 1)
        True
    """

    dim: int

    def __post_init__(self) -> None:
        errors.check_counts(dim=self.dim)

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        root = math.sqrt(self.dim)
        return -2 * root * math.exp(1 / root) * torch.expm1(-z2 / (2 * root))

    @property
    def score(self) -> Score:
        return Score("exp", scale=1 / math.sqrt(self.dim), offset=1.0)


@dataclass(frozen=True)
class GaussianPenalty(Penalty):
    """The penalty of the Gaussian kernel f = e^{−z²/(2σ²)} (TfD, Figure 3), δ(z²) = 2σ² (1 − f); σ is ``bandwidth``.

    Examples:
        >>> GaussianPenalty(bandwidth=0.5).f(torch.zeros(1))
        tensor([1.])
    """

    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        errors.check_positive(self.bandwidth, "bandwidth")
        if not 1e-18 <= self.bandwidth <= 1e18:  # its square would be none of single precision
            raise ValueError(
                f"bandwidth must lie in [1e-18, 1e18]; got {self.bandwidth:g}. Rescale the state."
            )

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        scale = 2 * self.bandwidth**2
        return -scale * torch.expm1(-z2 / scale)

    @property
    def score(self) -> Score:
        return Score("exp", scale=1 / self.bandwidth**2, offset=0.0)


def warn_beyond_domain(
    penalty: Penalty, energy: object, x: Tensor, distance: Callable[[], float]
) -> None:
    """Warn if ``distance()``, a squared distance between two rows of ``x``, exceeds the domain of ``penalty``."""
    end = penalty.domain[1]
    if end == math.inf or x.is_meta or not values_only():
        return
    z2 = distance()
    if z2 > penalty.reach(x.dtype):
        warnings.warn(
            f"{type(energy).__name__} of a state that leaves the domain of {penalty!r}: two nodes are at squared "
            f"distance {z2:.6g}. Beyond {end:g} the cost of a pair is no penalty any more, and a low energy means "
            f"nothing. Scale the state into a ball of radius {math.sqrt(end) / 2:g}, or take another penalty "
            f"('gaussian', 'sigmoid').",
            stacklevel=3,
        )


def find_flaw(z2: Tensor, f: Tensor, delta: Tensor | None) -> str | None:
    """Return a sentence saying where f is not finite, negative, increasing or not δ′; ``None`` if nowhere."""
    eps = torch.finfo(f.dtype).eps
    rounding = max(1e-9, 16 * eps) * float(f[0].abs())
    for wrong, what in ((~f.isfinite(), "is not finite"), (f < -rounding, "is negative")):
        if bool(wrong.any()):
            where = int(wrong.int().argmax())
            return f"f({float(z2[where]):g}) = {float(f[where]):g} {what}."
    lowest, place = f.cummin(0)
    rise = f - lowest
    if bool((rise > rounding).any()):
        then = int(rise.argmax())
        low, high = (
            f"f({float(z2[at]):.6g}) = {float(f[at]):.6g}" for at in (int(place[then]), then)
        )
        return f"f rises from {low} to {high}."
    if delta is None:
        return None
    # The slope of a chord of a concave δ lies between f at its ends. The room covers the rounding of a δ that is a
    # difference of large terms, as z² − log(1 + e^z²), and the 2e-9 by which torch's softplus is off at its threshold.
    chord = delta.diff() / z2.diff()
    size = delta.abs() + f[0].abs() * z2
    room = (16 * eps * (size[:-1] + size[1:]) + 4e-9 * f[0].abs()) / z2.diff()
    off = torch.maximum(chord - f[:-1], f[1:] - chord) - rounding - room
    if not bool((off <= 0).all()):
        where = int(off.nan_to_num(torch.inf).argmax())
        ends = f"{float(z2[where]):.6g} and {float(z2[where + 1]):.6g}"
        return f"f is not the derivative of δ, which rises by {float(chord[where]):.6g} per z² between {ends}."
    return None


#: Interaction functions by name: δ (``delta``), f = δ′ (``score``) and, as fields, their parameters.
PENALTIES: dict[str, Callable[..., Penalty]] = {
    "quadratic": QuadraticPenalty,
    "simple": SimplePenalty,
    "sigmoid": SigmoidPenalty,
    "softmax": SoftmaxPenalty,
    "gaussian": GaussianPenalty,
}


def get_penalty(penalty: str | Penalty, **options: Any) -> Penalty:
    """Return the penalty named ``penalty``, built with ``options`` (``dim``, ``bandwidth``); or a `Penalty` unchanged.

    Examples:
        >>> get_penalty("simple")
        SimplePenalty()
    """
    if isinstance(penalty, Penalty):
        return penalty
    errors.check_choice(penalty, "penalty", PENALTIES)
    signature = inspect.signature(PENALTIES[penalty])
    try:
        signature.bind(**options)
    except TypeError as error:
        example = "for instance SoftmaxPenalty(dim=4)"
        raise TypeError(
            f"penalty={penalty!r} takes {signature}: {error}. Pass a Penalty, {example}."
        ) from error
    return PENALTIES[penalty](**options)
