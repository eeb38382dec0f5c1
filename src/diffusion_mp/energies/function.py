"""``FunctionPenalty``: a penalty of any f that does not increase."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusion_mp.couplings.scores import FunctionScore
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.errors import check_function, check_kind, check_number, check_tensor, describe

#: Nodes and weights on [0, 1] of the Gauss–Legendre rule for δ.
NODES, WEIGHTS = (numbers.tolist() for numbers in np.polynomial.legendre.leggauss(48) / np.array(2) + [[0.5], [0.0]])
#: Where f is looked at, up to the end of the domain.
FARTHEST = 1e8


class FunctionPenalty(nn.Module, Penalty):
    r"""δ(z²) = ∫₀^{z²} f of any f ≥ 0 that does not increase: ``FunctionPenalty(lambda z2: 1 / (1 + z2))``.

    It serves wherever a `Penalty` does: as attention (:class:`PenaltyDiffusivity`), in an `Energy`, in the certified
    models, whose theorems ask nothing else of f. That f is nonnegative and does not increase is looked at in some
    hundred points of the domain, when it is made and when a step is certified: what a function does between them is
    its author's promise.

    Products with its couplings cost O(N²) and go tile by tile (`DistanceCoupling`). Without ``delta`` an energy costs
    48 evaluations of f for every pair, by Gauss and Legendre in v with z² = e^{v²} − 1: about nine digits for a smooth
    f, two for one with a kink, whose δ should be given. Without ``f`` it is the derivative of ``delta``.

    Args:
        f: of a tensor of squared distances z² (not of z), element by element, in single and double precision; it needs
            a derivative at 0. A module is trained like any other; its parameters are brought to the dtype of z² by
            itself.
        delta: δ with δ′ = f, called in the same way.
        domain: (0, the z² up to which f is as it should be).

    Raises:
        TypeError, ValueError: neither f nor δ; a function that gives other shapes; an f that is negative somewhere,
            rises or is not finite; the sentence says where.

    Examples:
        >>> cauchy = FunctionPenalty(lambda z2: 1 / (1 + z2))
        >>> torch.allclose(cauchy.delta(x), x.log1p())  # δ is found by itself
        True
        >>> FunctionPenalty(lambda z2: z2)
        Traceback (most recent call last):
        ValueError: ...does not increase on its domain (0.0, inf).
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor] | None = None,
        delta: Callable[[Tensor], Tensor] | None = None,
        *,
        domain: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        if f is None and delta is None:
            raise ValueError("f or delta must be given, for instance FunctionPenalty(lambda z2: 1 / (1 + z2)).")
        for name, function in (("f", f), ("delta", delta)):
            if function is not None:
                check_function(function, name, "of a tensor of squared distances")
        check_kind(domain, "domain", (tuple, list), "a pair (0, the largest squared distance)")
        if len(domain) != 2 or domain[0] != 0 or not domain[1] > 0:
            raise ValueError(f"domain must be (0, the largest squared distance); got {describe(domain)}.")
        if domain[1] != math.inf:
            check_number(domain[1], "domain[1]")
        self.domain = 0.0, float(domain[1])
        self.slope, self.integral = f, delta
        flaw = self.flaw()
        if flaw is not None:
            raise ValueError(f"{flaw} A penalty's f is nonnegative and does not increase on its domain {self.domain}.")

    @property
    def score(self) -> FunctionScore:
        return FunctionScore(self._slope, reach=self.reach(torch.float64))

    def delta(self, z2: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        check_tensor(z2, "z2", "of squared distances")
        if self.integral is not None:
            return self.integral(z2)
        reach = z2.clamp(min=0).log1p()
        total = torch.zeros_like(reach)
        for node, weight in zip(NODES, WEIGHTS, strict=True):
            total = total + checkpoint(self._part, reach, node, weight, use_reentrant=False, preserve_rng_state=False)
        return total

    def _part(self, reach: Tensor, node: float, weight: float) -> Tensor:
        """One node of the rule: with r = log(1 + z²) and v = t√r, δ = ∫₀¹ f(e^{t²r} − 1) 2tr e^{t²r} dt."""
        exponent = node**2 * reach
        return 2 * weight * node * reach * exponent.exp() * self._slope(exponent.expm1())

    def _slope(self, z2: Tensor) -> Tensor:
        """f, or the derivative of δ in forward mode, which autograd differentiates again."""
        if self.slope is not None:
            return self.slope(z2)
        assert self.integral is not None
        derivative: Tensor = torch.func.jvp(self.integral, (z2,), (torch.ones_like(z2),))[1]
        return derivative

    @torch.no_grad()
    def flaw(self) -> str | None:
        z2 = _points(self)
        if z2.is_meta:
            return None
        name = "f" if self.slope is not None else "delta"
        try:
            values, total = self._slope(z2), self.delta(z2)
        except Exception as error:
            raise TypeError(
                f"{name} must take a tensor of squared distances, here {describe(z2)}, and give one of its shape; it "
                f"raised {type(error).__name__}: {error}"
            ) from error
        for what, got in (("f", values), ("delta", total)):
            if not isinstance(got, Tensor) or got.shape != z2.shape:
                raise ValueError(
                    f"{what} must give a tensor of the shape of z², {list(z2.shape)}; got {describe(got)}."
                )
        return _flaw(z2, values, total if self.integral is not None else None)

    def extra_repr(self) -> str:
        given = {"f": self.slope, "delta": self.integral}
        named = [
            f"{name}={getattr(function, '__name__', type(function).__name__)}"
            for name, function in given.items()
            if function is not None and not isinstance(function, nn.Module)
        ]
        return ", ".join([*named, f"domain={self.domain}"])


@torch.no_grad()
def find_flaw(penalty: Penalty) -> str | None:
    """Why a penalty is none on its domain, as a sentence: what it says of itself, or what f and δ show."""
    flaw = penalty.flaw()
    if flaw is not None or isinstance(penalty, FunctionPenalty):
        return flaw
    z2 = _points(penalty)
    return None if z2.is_meta else _flaw(z2, penalty.f(z2), penalty.delta(z2))


def _points(penalty: Penalty) -> Float[Tensor, " points"]:
    """Where a penalty is looked at: squared distances in its domain, on the device of what it learns."""
    learned = penalty.parameters() if isinstance(penalty, nn.Module) else iter(())
    place = next((parameter.device for parameter in learned), None)
    end = min(penalty.domain[1], FARTHEST)
    near, far = torch.linspace(0, min(end, 64.0), 400), torch.logspace(-6, math.log10(end), 400)
    return torch.cat([near, far.clamp(max=end)]).double().unique().to(place)


def _flaw(z2: Tensor, f: Tensor, delta: Tensor | None) -> str | None:
    """Where f is no penalty's or not the slope of δ, as a sentence."""
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
        at = int(place[then])
        return (
            f"f rises from f({float(z2[at]):.6g}) = {float(f[at]):.6g} to "
            f"f({float(z2[then]):.6g}) = {float(f[then]):.6g}."
        )
    if delta is None:
        return None
    # The slope of a chord of a concave δ lies between those at its ends. A δ that is a difference of large terms, as
    # z² − log(1 + e^z²), rounds as these do, and torch's softplus is off by 2e-9 where it becomes linear.
    chord, size = delta.diff() / z2.diff(), delta.abs() + f[0].abs() * z2
    room = (16 * eps * (size[:-1] + size[1:]) + 4e-9 * f[0].abs()) / z2.diff()
    off = torch.maximum(chord - f[:-1], f[1:] - chord) - rounding - room
    if not bool((off <= 0).all()):
        where = int(off.nan_to_num(torch.inf).argmax())
        ends = f"{float(z2[where]):.6g} and {float(z2[where + 1]):.6g}"
        return f"f is not the derivative of δ, which rises by {float(chord[where]):.6g} per z² between {ends}."
    return None
