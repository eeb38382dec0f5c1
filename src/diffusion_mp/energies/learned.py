"""Penalties whose f is learned or given: ``MixturePenalty`` and ``FunctionPenalty``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling, ScaledCoupling, SumCoupling
from diffusion_mp.couplings.features import at_least_zero, measured_from
from diffusion_mp.energies.pairs import HeadState
from diffusion_mp.energies.penalties import (
    GaussianPenalty,
    Penalty,
    Squares,
    find_flaw,
    one_minus_exp,
)
from diffusion_mp.runtime.precision import exp_limit
from diffusion_mp.saving import Saved

#: Nodes and weights on [0, 1] of the Gauss–Legendre rule for δ.
NODES, WEIGHTS = (
    numbers.tolist()
    for numbers in np.polynomial.legendre.leggauss(48) / np.array(2) + [[0.5], [0.0]]
)


class MixturePenalty(Saved, Penalty):
    """A learned penalty: a mixture of Gaussians in the distance.

    With learned weights c > 0 and widths σ > 0:

        f(z²) = Σ_m c_m e^{−z²/(2σ_m²)},  δ(z²) = Σ_m 2 c_m σ_m² (1 − e^{−z²/(2σ_m²)})

    f is completely monotone (Bernstein 1928) and positive definite, so δ is concave and increasing. Certificates
    therefore hold throughout training (Theorem T5 of docs/certified.md). The parameters are log c and log σ, clamped to
    ±40 and ±20, so that cσ² stays within single precision.

    Args:
        widths: the initial σ of the Gaussians. By default ¼, ½, 1 and 2.
        weights: the initial c of the Gaussians. ``None`` gives all the same weight, with f(0) = 1.

    Examples:
        >>> MixturePenalty(widths=(0.5, 1.0)).total(x).shape
        torch.Size([])
    """

    positive = True

    def __init__(
        self,
        widths: Sequence[float] = (0.25, 0.5, 1.0, 2.0),
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        checks.check_kind(widths, "widths", (list, tuple), "a list of numbers")
        if weights is None:
            weights = [1 / max(len(widths), 1)] * len(widths)
        kinds = "a list of numbers, or None"
        checks.check_kind(weights, "weights", (list, tuple), kinds)
        if not widths or len(weights) != len(widths):
            raise ValueError(
                f"widths must hold a number at least, and weights as many; got {len(widths)} and {len(weights)}."
            )
        for name, numbers in (("widths", widths), ("weights", weights)):
            for number in numbers:
                checks.check_positive(number, f"every one of {name}")
        # Numbers, not tensors: a model is first built on the meta device when it is
        # loaded.
        self.initial = (
            [float(width) for width in widths],
            [float(weight) for weight in weights],
        )
        self.log_widths = nn.Parameter(torch.empty(len(widths)))
        self.log_weights = nn.Parameter(torch.empty(len(weights)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for parameter, numbers in zip(
            (self.log_widths, self.log_weights), self.initial, strict=True
        ):
            parameter.copy_(torch.tensor(numbers, dtype=torch.float64).log())

    @property
    def widths(self) -> Float[Tensor, " M"]:
        """The widths σ, [M]."""
        return _exp(self.log_widths, 20.0)

    @property
    def weights(self) -> Float[Tensor, " M"]:
        """The weights c, [M]."""
        return _exp(self.log_weights, 40.0)

    @property
    def sharpness(self) -> Tensor:  # type: ignore[override]
        """1/σ² of the narrowest Gaussian."""
        return self.widths.detach().min() ** -2

    def delta(self, z2: Squares) -> Squares:
        scale = 2 * self.widths.to(z2.dtype).square()
        # Values that rounding takes below zero are large relative to a narrow width.
        ratio = at_least_zero(z2).unsqueeze(-1) / scale
        return (scale * self.weights.to(z2.dtype) * one_minus_exp(ratio)).sum(-1)

    def f(self, z2: Squares) -> Squares:
        return (self.weights.to(z2.dtype) * self._exponents(z2).exp()).sum(-1)

    def log_f(self, z2: Squares) -> Squares:
        return (self._exponents(z2) + self.weights.to(z2.dtype).log()).logsumexp(-1)

    def _exponents(self, z2: Squares) -> Float[Tensor, "*shape M"]:
        return -z2.unsqueeze(-1) / (2 * self.widths.to(z2.dtype).square())

    def _pairs(
        self,
        query: HeadState,
        key: HeadState | None,
        ptr: Tensor | None,
        centre: Tensor | None,
        nonnegative: bool,
    ) -> Coupling:
        # Once for all terms, in the precision that the narrowest term needs.
        q, senders = measured_from(query, key, ptr, centre, self.sharpness)
        origin = q.new_zeros(1, 1, 1)
        terms = []
        for width, weight in zip(
            self.widths.unbind(), self.weights.unbind(), strict=True
        ):
            keys = None if key is None else senders / width
            gaussian = GaussianPenalty().attention(q / width, keys, ptr, centre=origin)
            terms.append(ScaledCoupling(weight, gaussian, nonnegative=True))
        return SumCoupling(terms)

    def extra_repr(self) -> str:
        widths = [round(width, 6) for width in self.widths.tolist()]
        weights = [round(weight, 6) for weight in self.weights.tolist()]
        return f"{widths=}, {weights=}"


def _exp(logarithms: Float[Tensor, " M"], limit: float) -> Float[Tensor, " M"]:
    # Without a bound an optimiser may take c or σ to infinity, and NaN stays.
    limit = min(limit, exp_limit(logarithms.dtype))
    return logarithms.clamp(-limit, limit).exp()


class FunctionPenalty(Saved, Penalty):
    """The penalty of any given f ≥ 0 that does not increase, such as ``lambda z2: 1 / (1 + z2)``.

        δ(z²) = ∫₀^{z²} f(s) ds

    It serves wherever a `Penalty` does, in O(N²) (`DistanceCoupling`). `flaw` checks f at some hundred points, at
    construction and in certificates. Without ``delta``, an energy takes 48 evaluations of f per pair, by Gauss–Legendre
    quadrature in v with z² = e^{v²} − 1. The quadrature has about nine digits for a smooth f, and two for an f with a
    kink.

    Args:
        f: function of a tensor of squared distances z² (not z), elementwise, in single and double precision,
            differentiable at 0. A module must cast its parameters to the dtype of z² itself.
        delta: δ with δ′ = f, a function of the same kind. ``None`` integrates f numerically.
        domain: (0, end), the interval of z² in which f is nonnegative and does not increase. By default all distances.

    Raises:
        ValueError: f is negative, not finite or increases at a checked point, or is not the derivative of ``delta``.

    Examples:
        >>> cauchy = FunctionPenalty(lambda z2: 1 / (1 + z2))
        >>> torch.allclose(cauchy.delta(x), x.log1p())
        True
        >>> FunctionPenalty(lambda z2: z2)
        Traceback (most recent call last):
        ValueError: ...does not increase on its domain (0.0, inf).
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        delta: Callable[[Tensor], Tensor] | None = None,
        *,
        domain: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        checks.check_function(f, "f", "of a tensor of squared distances")
        if delta is not None:
            checks.check_function(delta, "delta", "of a tensor of squared distances")
        checks.check_kind(
            domain, "domain", (tuple, list), "a pair (0, the largest squared distance)"
        )
        if len(domain) != 2 or domain[0] != 0:
            raise ValueError(
                f"domain must be (0, the largest squared distance); got {checks.describe(domain)}."
            )
        if domain[1] != math.inf:
            checks.check_positive(domain[1], "the end of domain")
        self.domain = 0.0, float(domain[1])
        # Not "f" and "delta", the methods of a penalty.
        self.slope = f
        self.integral = delta
        flaw = self.flaw()
        if flaw is not None:
            raise ValueError(
                f"{flaw} A penalty's f is nonnegative and does not increase on its domain {self.domain}."
            )

    def f(self, z2: Squares) -> Squares:
        # Rounding may be negative, where a function of a distance need not be defined.
        return self.slope(at_least_zero(z2))

    def delta(self, z2: Squares) -> Squares:
        if self.integral is not None:
            return self.integral(z2)
        reach = at_least_zero(z2).log1p()
        total = torch.zeros_like(reach)
        for node, weight in zip(NODES, WEIGHTS, strict=True):
            total = total + checkpoint(
                self._part,
                reach,
                node,
                weight,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return total

    @property
    def _function(self) -> Callable[[Tensor], Tensor]:
        # The module itself, so that its parameters follow a coupling that is moved or detached.
        return self.slope

    def _part(self, reach: Tensor, node: float, weight: float) -> Tensor:
        """Return one term of the rule: with r = log(1 + z²) and v = t√r, δ = ∫₀¹ f(e^{t²r} − 1) 2t r e^{t²r} dt."""
        # In v = t√r the rule resolves an f that falls within any scale, and √z² has no
        # infinite slope at zero.
        exponent = node**2 * reach
        return 2 * weight * node * reach * exponent.exp() * self.slope(exponent.expm1())

    @torch.no_grad()
    def flaw(self) -> str | None:
        z2 = self._points()
        if z2.is_meta:
            return None
        # An error of a user's function is about an argument that the user has never
        # seen.
        try:
            values = self.slope(z2)
            total = self.delta(z2)
        except Exception as error:
            raise TypeError(
                f"f must take a tensor of squared distances, here {checks.describe(z2)}, and give one of its "
                f"shape; it raised {type(error).__name__}: {error}"
            ) from error
        for what, got in (("f", values), ("delta", total)):
            if not isinstance(got, Tensor) or got.shape != z2.shape:
                shape = list(z2.shape)
                raise ValueError(
                    f"{what} must give a tensor of the shape of z², {shape}; got {checks.describe(got)}."
                )
        return find_flaw(z2, values, total if self.integral is not None else None)

    def __repr__(self) -> str:
        # In one line, since a certificate names the penalty within a sentence. The tree of a module f takes several.
        named = [
            f"{name}={getattr(function, '__name__', type(function).__name__)}"
            for name, function in (("f", self.slope), ("delta", self.integral))
            if function is not None
        ]
        return f"FunctionPenalty({', '.join(named)}, domain={self.domain})"
