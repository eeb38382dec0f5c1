"""Scores: functions f of s = −½‖q − k‖² and the couplings they define."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings.algebra import ScaledCoupling, SumCoupling
from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.features import at_least_zero, distance_features, measured_from, unit_rows, with_constant
from diffusion_mp.couplings.low_rank import LinearAttentionCoupling, LowRankCoupling
from diffusion_mp.couplings.pairwise import DistanceCoupling, PairwiseCoupling
from diffusion_mp.couplings.weighted import row_normalized
from diffusion_mp.errors import check_choice
from diffusion_mp.kernels.pairwise import log_score

_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda s: s,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "constant": torch.ones_like,
}
_INVERSE: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda f: f, "exp": torch.log, "sigmoid": torch.logit}


class AnyScore(ABC):
    """f of s = −½z²; a subclass has ``__call__`` and ``_pairs``, the coupling of all pairs of vectors."""

    sharpness: float | Tensor | None = 1.0  #: The a for which f is as sharp as e^{−a·½z²}, see `measured_from`.

    @abstractmethod
    def __call__(self, s: Tensor) -> Tensor:
        """f(s), elementwise."""

    def log(self, s: Tensor) -> Tensor:
        """log f(s), elementwise."""
        return self(s).log()

    def coupling(
        self, q: Float[Tensor, "N H D"], k: Float[Tensor, "N H D"], ptr: Tensor | None = None,
        *, measure: Literal["inner", "distance"] = "distance", unit: bool = False, normalize: bool = False,
        nonnegative: bool = True, centre: Tensor | None = None,
    ) -> Coupling:  # fmt: skip
        """[f(s_ij)] within each graph, or with ``normalize`` each row divided by its sum; symmetric if q is k.

        ``unit`` divides every q_i and k_j by its norm first; for ``centre`` see `distance_features`.
        """
        if unit:
            (q, k), centre = unit_rows(q, k), q.new_zeros(1, 1, 1)  # they lie around the origin
        pairs = self._pairs(q, k, ptr, centre, nonnegative)
        return row_normalized(pairs) if normalize else pairs

    def _pairs(
        self,
        q: Tensor,
        k: Tensor,
        ptr: Tensor | None,
        centre: Tensor | None,
        nonnegative: bool,
    ) -> Coupling:
        raise NotImplementedError


@dataclass(frozen=True)
class Score(AnyScore):
    r"""The function that makes weights of distances: linear, exponential, sigmoid or constant.

    f = g(a (s + c)) with s = −½z² and z = ‖q_i − k_j‖; g is linear, exp, the sigmoid or the constant 1.

    For unit vectors s = q_i·k_j − 1, as Wu, Wipf & Yan (2025), Eqs. 18, 20 and 21 write their scores. For others only
    the distance has the energy of the paper (docs/errata.md, D8), so ``measure`` selects ``"distance"``,
    s = −½‖q_i − k_j‖², or ``"inner"``, s = q_i·k_j − 1. A constant or linear g makes a low-rank coupling.

    Examples:
        >>> Score("sigmoid", scale=2.0, offset=1.0).coupling(q, q).symmetric  # f(z²) = σ(2 − z²) with s = −z²/2
        True
    """

    g: Literal["linear", "exp", "sigmoid", "constant"]
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.g not in _ELEMENTWISE:
            check_choice(self.g, "g", _ELEMENTWISE)

    def __call__(self, s: Tensor) -> Tensor:
        return _ELEMENTWISE[self.g](self.scale * (s + self.offset))

    def log(self, s: Tensor) -> Tensor:
        """log f(s), elementwise, also where f(s) itself underflows; not for a linear f, which may be negative."""
        return torch.zeros_like(s) if self.g == "constant" else log_score(self.scale * (s + self.offset), self.g)

    def inverse(self, f: Tensor) -> Tensor:
        """The s with this f(s), elementwise; not for a constant."""
        return _INVERSE[self.g](f) / self.scale - self.offset

    @property
    def sharpness(self) -> float | None:  # type: ignore[override]
        """The a for which f is as sharp as e^{−a·½z²}, see `measured_from`; ``None`` for a linear or constant f."""
        return abs(self.scale) if self.g in ("exp", "sigmoid") else None

    def on_sphere(self, radius: float) -> Score:
        """The score of unit vectors that equals this one on vectors of norm r: a (r²s + c) = ar² (s + c/r²)."""
        return replace(self, scale=self.scale * radius**2, offset=self.offset / radius**2)

    def coupling(
        self, q: Float[Tensor, "N H D"], k: Float[Tensor, "N H D"], ptr: Tensor | None = None,
        *, measure: Literal["inner", "distance"] = "distance", unit: bool = False, normalize: bool = False,
        nonnegative: bool = True, centre: Tensor | None = None,
    ) -> Coupling:  # fmt: skip
        if measure not in ("inner", "distance"):
            check_choice(measure, "measure", ["inner", "distance"])
        if self.g == "constant":
            one = q.new_ones(q.size(0), q.size(1), 1)
            kind = LinearAttentionCoupling if normalize else LowRankCoupling
            return kind(one, one, ptr, symmetric=True, nonnegative=True)
        offset = self.offset if measure == "distance" else self.offset - 1
        mutual, fused = q is k, self.g == "linear" and normalize
        symmetric = mutual and not normalize
        if unit and (measure == "distance" or not fused):
            (q, k), unit, centre = unit_rows(q, k), False, q.new_zeros(1, 1, 1)  # they lie around the origin
        if measure == "distance":
            q, k = distance_features(q, k, ptr, centre=centre, sharpness=None if self.g == "linear" else self.sharpness)
        if fused:  # the scale cancels
            promises = {"nonnegative": nonnegative, "reversible": mutual}
            return LinearAttentionCoupling(q, k, ptr, constant=offset, unit=unit, **promises)
        if offset and not (self.g == "exp" and normalize):  # a factor of all entries cancels
            # Half of the constant on either side, so that equal queries and keys stay one tensor.
            root = math.sqrt(abs(offset))
            same = q is k and offset > 0
            q = with_constant(q, math.copysign(root, offset))
            k = q if same else with_constant(k, root)
        if self.scale > 0 and q is k:  # half of the scale on either side too
            q = k = math.sqrt(self.scale) * q if self.scale != 1 else q
        elif self.scale != 1:
            q = self.scale * q
        if self.g == "linear":
            return LowRankCoupling(q, k, ptr, symmetric=symmetric, nonnegative=nonnegative)
        # exp(a(s + c)) is a positive-definite function of q_i − q_j, and one of q_i·q_j too.
        definite = symmetric and self.g == "exp" and self.scale > 0
        promises = {"symmetric": symmetric, "positive_semidefinite": definite, "reversible": mutual}
        return PairwiseCoupling(q, k, ptr, self.g, normalize=normalize, **promises)


def _bisected(f: Callable[[Tensor], Tensor], value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The s in [low, high] with f(s) = value for an increasing f, elementwise."""
    for _ in range(100):
        middle = (low + high) / 2
        above = f(middle) > value
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return low


@dataclass(frozen=True, eq=False)
class MixtureScore(AnyScore):
    """f = Σ_m c_m e^{s/σ_m²} with positive widths σ and weights c [M]; the coupling is the sum of the terms'."""

    widths: Float[Tensor, " M"]
    weights: Float[Tensor, " M"]
    g: Literal["mixture"] = "mixture"

    def __call__(self, s: Tensor) -> Tensor:
        return (self.weights.to(s.dtype) * (s.unsqueeze(-1) / self.widths.to(s.dtype).square()).exp()).sum(-1)

    def log(self, s: Tensor) -> Tensor:
        """log f(s), elementwise, also where f(s) itself underflows."""
        return (s.unsqueeze(-1) / self.widths.to(s.dtype).square() + self.weights.to(s.dtype).log()).logsumexp(-1)

    @torch.no_grad()
    def inverse(self, f: Tensor) -> Tensor:
        """The s ≤ 0 with this f(s), elementwise, by bisection; −∞ where f is zero."""
        low = self.widths.max().to(f.dtype) ** 2 * (f / self.weights.sum()).log().clamp(max=0)
        return _bisected(self, f, low, torch.zeros_like(f))

    @property
    def sharpness(self) -> float | Tensor:  # type: ignore[override]
        """1/σ² of the narrowest Gaussian."""
        return self.widths.detach().min() ** -2

    def _pairs(
        self,
        q: Tensor,
        k: Tensor,
        ptr: Tensor | None,
        centre: Tensor | None,
        nonnegative: bool,
    ) -> Coupling:
        q, k = measured_from(q, k, ptr, centre, self.sharpness)
        terms, origin = [], q.new_zeros(1, 1, 1)
        for width, weight in zip(self.widths.unbind(), self.weights.unbind(), strict=True):
            scaled = q / width
            gaussian = Score("exp").coupling(scaled, scaled if k is q else k / width, ptr, centre=origin)
            terms.append(ScaledCoupling(weight, gaussian, nonnegative=True))
        return SumCoupling(terms)


@dataclass(frozen=True)
class FunctionScore(AnyScore):
    """f(z²) for any function of z² = −2s with z² ≤ ``reach``, evaluated tile by tile, O(N²)."""

    function: Callable[[Tensor], Tensor]
    reach: float = math.inf
    g: Literal["function"] = "function"

    def __call__(self, s: Tensor) -> Tensor:
        return self.function(at_least_zero(-2 * s))

    @torch.no_grad()
    def inverse(self, f: Tensor) -> Tensor:
        """The s ≤ 0 with this f(s), elementwise, by bisection of −log(1 − s), for z² up to 10¹²."""
        low = torch.full_like(f, -math.log1p(min(self.reach, 1e12) / 2))
        return -(-_bisected(lambda t: self(-(-t).expm1()), f, low, torch.zeros_like(f))).expm1()

    def _pairs(
        self,
        q: Tensor,
        k: Tensor,
        ptr: Tensor | None,
        centre: Tensor | None,
        nonnegative: bool,
    ) -> Coupling:
        # It measures distances in double precision, from any centre alike.
        return DistanceCoupling(self.function, q, k, ptr, nonnegative=nonnegative)
