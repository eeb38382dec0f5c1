"""Constraints: what every row of a state is confined to, and the projections that keep it there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import relu

from diffusion_mp.errors import check_choice, check_positive, check_tensor
from diffusion_mp.kernels.unit import unit_vectors


class Constraint(ABC):
    """A closed set C of vectors, to which every row of every head is confined (ι_C of Theorem T1, docs/certified.md).

    A new one writes `project` and `holds`, and says whether it is convex and how far apart two of its vectors may be.

    Examples:
        >>> sphere = get_constraint("sphere")
        >>> isinstance(sphere, Constraint), sphere.convex
        (True, False)
    """

    #: Whether C is convex: a certified step may then be twice as long.
    convex: ClassVar[bool] = True

    @property
    def diameter(self) -> float:
        """The largest distance ‖a − b‖ of two vectors of C; ∞ where it is unbounded."""
        return math.inf

    @abstractmethod
    def project(self, y: Float[Tensor, "*#rows D"], start: Float[Tensor, "*#rows D"] | None = None) -> Tensor:
        """The nearest vector of C for every row of ``y``; where there are several, the one that ``start`` points to."""

    @abstractmethod
    def holds(self, x: Float[Tensor, "*rows D"]) -> Bool[Tensor, ""]:
        """Whether all rows lie in C, up to rounding."""


@dataclass(frozen=True)
class Unconstrained(Constraint):
    """All of space.

    Examples:
        >>> torch.equal(Unconstrained().project(x), x)
        True
    """

    def project(self, y: Float[Tensor, "*#rows D"], start: Float[Tensor, "*#rows D"] | None = None) -> Tensor:
        return y

    def holds(self, x: Float[Tensor, "*rows D"]) -> Bool[Tensor, ""]:
        return torch.ones((), dtype=torch.bool, device=x.device)


@dataclass(frozen=True)
class Nonnegative(Constraint):
    """No entry is negative: the projection is ReLU.

    Examples:
        >>> Nonnegative().project(torch.tensor([[-1.0, 2.0]]))
        tensor([[0., 2.]])
    """

    def project(self, y: Float[Tensor, "*#rows D"], start: Float[Tensor, "*#rows D"] | None = None) -> Tensor:
        return relu(y)

    def holds(self, x: Float[Tensor, "*rows D"]) -> Bool[Tensor, ""]:
        check_tensor(x, "x", "[..., channels]")
        return (x >= 0).all()


@dataclass(frozen=True)
class _Round(Constraint):
    """Base of what a norm bounds."""

    radius: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")

    @property
    def diameter(self) -> float:
        return 2.0 * self.radius

    def _excess(self, x: Tensor) -> tuple[Tensor, float]:
        """‖x‖/radius − 1 of every row, and how much of it may be rounding, of single precision too."""
        check_tensor(x, "x", "[..., channels]")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1)
        return norm / self.radius - 1, max(1e-6, 4 * torch.finfo(x.dtype).eps)


@dataclass(frozen=True)
class Ball(_Round):
    """‖x‖ ≤ radius: the projection clips norms.

    Examples:
        >>> bool((Ball(1.0).project(10 * x).norm(dim=1) <= 1 + 1e-6).all())
        True
    """

    def project(self, y: Float[Tensor, "*#rows D"], start: Float[Tensor, "*#rows D"] | None = None) -> Tensor:
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        outside = norm > self.radius
        return torch.where(outside, self.radius * unit_vectors(y), y)

    def holds(self, x: Float[Tensor, "*rows D"]) -> Bool[Tensor, ""]:
        excess, rounding = self._excess(x)
        return (excess <= rounding).all()


@dataclass(frozen=True)
class Sphere(_Round):
    """‖x‖ = radius: the projection is RMSNorm without a gain (for radius √D). Not convex.

    A row of zeros is equally far from all of the sphere. It keeps the direction of ``start``, which is as near as any
    other, so an energy that nearest vectors make fall does not rise by it; where that is zero too it takes the first
    axis.

    Examples:
        >>> torch.allclose(Sphere(1.0).project(x).norm(dim=1), torch.ones(6))
        True
    """

    convex = False

    def project(self, y: Float[Tensor, "*#rows D"], start: Float[Tensor, "*#rows D"] | None = None) -> Tensor:
        wide = torch.promote_types(y.dtype, torch.float32)
        least = torch.finfo(wide).tiny  # below, `unit_vectors` sees a zero; in half precision it would be one itself
        axis = y.new_zeros(y.size(-1))
        axis[:1] = 1
        for other in (start, axis):
            if other is not None:
                nothing = y.detach().abs().amax(-1, keepdim=True).to(wide) < least
                y = torch.where(nothing, other, y)
        return self.radius * unit_vectors(y)

    def holds(self, x: Float[Tensor, "*rows D"]) -> Bool[Tensor, ""]:
        excess, rounding = self._excess(x)
        return (excess.abs() <= rounding).all()


CONSTRAINTS: dict[str | None, Callable[[float], Constraint]] = {
    None: lambda radius: Unconstrained(),
    "nonnegative": lambda radius: Nonnegative(),
    "ball": Ball,
    "sphere": Sphere,
}


def get_constraint(constraint: str | Constraint | None, radius: float = 1.0) -> Constraint:
    """The constraint of that name (None, ``"nonnegative"``, ``"ball"`` or ``"sphere"`` of ``radius``); or itself.

    Examples:
        >>> get_constraint("ball", radius=2.0)
        Ball(radius=2.0)
    """
    if isinstance(constraint, Constraint):
        return constraint
    check_choice(constraint, "constraint", CONSTRAINTS)
    check_positive(radius, "radius")
    return CONSTRAINTS[constraint](radius)
