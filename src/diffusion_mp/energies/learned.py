"""Penalties whose f is learned or given: ``MixturePenalty`` and ``FunctionPenalty``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusion_mp import errors
from diffusion_mp.couplings.features import at_least_zero
from diffusion_mp.couplings.scores import FunctionScore, MixtureScore
from diffusion_mp.energies.penalties import Penalty, find_flaw
from diffusion_mp.kernels.precision import exp_limit
from diffusion_mp.saving import Saved

#: Nodes and weights on [0, 1] of the Gauss–Legendre rule for δ.
NODES, WEIGHTS = (numbers.tolist() for numbers in np.polynomial.legendre.leggauss(48) / np.array(2) + [[0.5], [0.0]])


class MixturePenalty(Saved, Penalty):
    r"""A learned penalty, f(z²) = Σ_m c_m e^{−z²/(2σ_m²)} and δ(z²) = Σ_m 2c_mσ_m² (1 − e^{−z²/(2σ_m²)}) for c, σ > 0.

    f is completely monotone (Bernstein, 1928) and positive definite, so δ is concave and increasing and certificates
    hold throughout training (Theorem T5 of docs/certified.md). The parameters are log c and log σ, clamped to ±40 and
    ±20, so that cσ² stays within single precision. Initial values are ``widths`` and ``weights`` (equal, f(0) = 1).

    Examples:
        >>> MixturePenalty(widths=(0.5, 1.0)).total(x).shape
        torch.Size([])
    """

    def __init__(self, widths: Sequence[float] = (0.25, 0.5, 1.0, 2.0), weights: Sequence[float] | None = None) -> None:
        super().__init__()
        errors.check_kind(widths, "widths", (list, tuple), "a list of numbers")
        weights = [1 / max(len(widths), 1)] * len(widths) if weights is None else weights
        errors.check_kind(weights, "weights", (list, tuple), "a list of numbers, or None")
        if not widths or len(weights) != len(widths):
            counts = f"{len(widths)} and {len(weights)}"
            raise ValueError(f"widths must hold a number at least, and weights as many; got {counts}.")
        for name, numbers in (("widths", widths), ("weights", weights)):
            for number in numbers:
                errors.check_positive(number, f"every one of {name}")
        self.initial = [float(width) for width in widths], [float(weight) for weight in weights]
        self.log_widths = nn.Parameter(torch.empty(len(widths)))
        self.log_weights = nn.Parameter(torch.empty(len(weights)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for parameter, numbers in zip((self.log_widths, self.log_weights), self.initial, strict=True):
            parameter.copy_(torch.tensor(numbers, dtype=torch.float64).log())

    @property
    def widths(self) -> Float[Tensor, " M"]:
        """σ."""
        return _exp(self.log_widths, 20.0)

    @property
    def weights(self) -> Float[Tensor, " M"]:
        """c."""
        return _exp(self.log_weights, 40.0)

    @property
    def score(self) -> MixtureScore:
        return MixtureScore(self.widths, self.weights)

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        self._check_place(z2, "z2")
        scale = 2 * self.widths.to(z2.dtype).square()
        z2 = at_least_zero(z2)  # rounding below zero is large relative to a narrow width
        return -(scale * self.weights.to(z2.dtype) * torch.expm1(-z2.unsqueeze(-1) / scale)).sum(-1)

    def extra_repr(self) -> str:
        numbers = ([round(value, 6) for value in values.tolist()] for values in (self.widths, self.weights))
        return "widths={}, weights={}".format(*numbers)


def _exp(logarithms: Float[Tensor, " M"], limit: float) -> Float[Tensor, " M"]:
    limit = min(limit, exp_limit(logarithms.dtype))
    return logarithms.clamp(-limit, limit).exp()


class FunctionPenalty(Saved, Penalty):
    r"""The penalty δ(z²) = ∫₀^{z²} f of any f ≥ 0 that does not increase: ``FunctionPenalty(lambda z2: 1 / (1 + z2))``.

    Usable wherever a `Penalty` is, in O(N²) (`DistanceCoupling`). At construction and in certificates `flaw` checks f
    at some hundred points. Without ``delta`` an energy takes 48 evaluations of f per pair, by Gauss–Legendre quadrature
    in v with z² = e^{v²} − 1: about nine digits for a smooth f, two for one with a kink. Without ``f`` it is the
    derivative of ``delta``.

    Args:
        f: elementwise function of a tensor of squared distances z² (not z), in single and double precision,
            differentiable at 0. It may be a module, which casts its parameters to the dtype of z² itself.
        delta: δ with δ′ = f, called in the same way.
        domain: (0, end), the interval of z² where f is nonnegative and does not increase.

    Examples:
        >>> cauchy = FunctionPenalty(lambda z2: 1 / (1 + z2))
        >>> torch.allclose(cauchy.delta(x), x.log1p())
        True
        >>> FunctionPenalty(lambda z2: z2)
        Traceback (most recent call last):
        ValueError: ...does not increase on its domain (0.0, inf).
    """

    def __init__(
        self, f: Callable[[Tensor], Tensor] | None = None, delta: Callable[[Tensor], Tensor] | None = None,
        *, domain: tuple[float, float] = (0.0, math.inf),
    ) -> None:  # fmt: skip
        super().__init__()
        if f is None and delta is None:
            raise ValueError("f or delta must be given, for instance FunctionPenalty(lambda z2: 1 / (1 + z2)).")
        for name, function in (("f", f), ("delta", delta)):
            if function is not None:
                errors.check_function(function, name, "of a tensor of squared distances")
        errors.check_kind(domain, "domain", (tuple, list), "a pair (0, the largest squared distance)")
        numbers = all(isinstance(end, (int, float)) for end in domain)
        if not numbers or len(domain) != 2 or domain[0] != 0 or not domain[1] > 0:
            raise ValueError(f"domain must be (0, the largest squared distance); got {errors.describe(domain)}.")
        if domain[1] != math.inf:
            errors.check_number(domain[1], "domain[1]")
        self.domain = 0.0, float(domain[1])
        self.slope, self.integral = f, delta
        flaw = self.flaw()
        if flaw is not None:
            raise ValueError(f"{flaw} A penalty's f is nonnegative and does not increase on its domain {self.domain}.")

    @property
    def score(self) -> FunctionScore:
        return FunctionScore(self._slope, reach=self.reach(torch.float64))

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        errors.check_tensor(z2, "z2", "of squared distances")
        if self.integral is not None:
            return self.integral(z2)
        reach = at_least_zero(z2).log1p()
        total = torch.zeros_like(reach)
        for node, weight in zip(NODES, WEIGHTS, strict=True):
            total = total + checkpoint(self._part, reach, node, weight, use_reentrant=False, preserve_rng_state=False)
        return total

    def _part(self, reach: Tensor, node: float, weight: float) -> Tensor:
        """Return one term of the rule: with r = log(1 + z²) and v = t√r, δ = ∫₀¹ f(e^{t²r} − 1) 2t r e^{t²r} dt."""
        exponent = node**2 * reach
        return 2 * weight * node * reach * exponent.exp() * self._slope(exponent.expm1())

    def _slope(self, z2: Tensor) -> Tensor:
        """Return f, or the forward-mode derivative of δ, which autograd can differentiate again."""
        if self.slope is not None:
            return self.slope(z2)
        assert self.integral is not None
        return torch.func.jvp(self.integral, (z2,), (torch.ones_like(z2),))[1]

    @torch.no_grad()
    def flaw(self) -> str | None:
        z2 = self._points()
        if z2.is_meta:
            return None
        name = "f" if self.slope is not None else "delta"
        try:
            values, total = self._slope(z2), self.delta(z2)
        except Exception as error:
            raise TypeError(
                f"{name} must take a tensor of squared distances, here {errors.describe(z2)}, and give one of its "
                f"shape; it raised {type(error).__name__}: {error}"
            ) from error
        for what, got in (("f", values), ("delta", total)):
            if not isinstance(got, Tensor) or got.shape != z2.shape:
                shape = list(z2.shape)
                raise ValueError(f"{what} must give a tensor of the shape of z², {shape}; got {errors.describe(got)}.")
        return find_flaw(z2, values, total if self.integral is not None else None)

    def extra_repr(self) -> str:
        named = [
            f"{name}={getattr(function, '__name__', type(function).__name__)}"
            for name, function in (("f", self.slope), ("delta", self.integral))
            if function is not None and not isinstance(function, nn.Module)
        ]
        return ", ".join([*named, f"domain={self.domain}"])
