"""Constraint sets for the rows of a state, and the projections onto them."""

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

from diffusion_mp.checks import check_choice, check_positive, check_tensor
from diffusion_mp.runtime.precision import lies_in, unit_vectors, wide_dtype, widened
from diffusion_mp.saving import Described

#: Vectors of C, as many as there are.
Rows = Float[Tensor, "*#rows D"]


class Constraint(Described, ABC):
    """Base of closed sets C that contain every row of every head (ι_C in Theorem T1 of docs/certified.md).

    A subclass implements :meth:`project` and :meth:`holds`.

    Attributes:
        convex: whether C is convex. A certified step may then be twice as long. ``True`` by default.
        diameter: the largest distance ‖a − b‖ of two vectors of C. ∞ by default.

    Examples:
        >>> isinstance(get_constraint("sphere"), Constraint)
        True
    """

    convex: ClassVar[bool] = (
        True  #: Whether C is convex; a certified step may then be twice as long.
    )

    diameter = math.inf  #: Largest distance ‖a − b‖ of two vectors of C.

    @abstractmethod
    def project(self, y: Rows, start: Rows | None = None) -> Tensor:
        """Return the vector of C nearest to every row of ``y``.

        Args:
            y: rows [..., D].
            start: rows [..., D] whose directions break ties. ``None`` leaves ties to the subclass.
        """

    @abstractmethod
    def holds(self, x: Rows) -> Bool[Tensor, ""]:
        """Return whether all rows lie in C, up to rounding, as a 0-dimensional tensor.

        Args:
            x: rows [..., D].
        """


@dataclass(frozen=True)
class Unconstrained(Constraint):
    """Leave vectors as they are, without a constraint.

    Examples:
        >>> torch.equal(Unconstrained().project(x), x)
        True
    """

    def project(self, y: Rows, start: Rows | None = None) -> Tensor:
        return y

    def holds(self, x: Rows) -> Bool[Tensor, ""]:
        # A tensor like those of the other sets, so that no caller asks which it got.
        return torch.ones((), dtype=torch.bool, device=x.device)


@dataclass(frozen=True)
class Nonnegative(Constraint):
    """Keep entries nonnegative; the projection is ReLU.

    Examples:
        >>> Nonnegative().project(torch.tensor([[-1.0, 2.0]]))
        tensor([[0., 2.]])
    """

    def project(self, y: Rows, start: Rows | None = None) -> Tensor:
        return relu(y)

    def holds(self, x: Rows) -> Bool[Tensor, ""]:
        check_tensor(x, "x", "[..., channels]")
        return (x >= 0).all()


@dataclass(frozen=True)
class _Round(Constraint):
    """Base of constraints on the norm."""

    radius: float = 1.0

    orthant: ClassVar[bool] = False  #: Whether entries are nonnegative, too.

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")
        # Opposite points of a ball, or two axes of the orthant.
        apart = math.sqrt(2) if self.orthant else 2.0
        object.__setattr__(self, "diameter", apart * self.radius)

    def holds(self, x: Rows) -> Bool[Tensor, ""]:
        """Return whether no row is longer than the radius; on a sphere, whether every row is as long as the radius.

        Args:
            x: rows [..., D].
        """
        check_tensor(x, "x", "[..., channels]")
        wide = widened(x)
        norm = torch.linalg.vector_norm(wide, dim=-1)
        if self.orthant:
            # A negative entry counts as infinitely long, so that one comparison decides.
            norm = norm.masked_fill(~(x >= 0).all(-1), math.inf)
        excess = norm / self.radius - 1
        if not self.convex:
            excess = excess.abs()
        return (excess <= max(1e-6, 4 * torch.finfo(x.dtype).eps)).all()


@dataclass(frozen=True)
class Ball(_Round):
    """Keep vectors within a ball, ‖x‖ ≤ radius; the projection clips norms.

    Args:
        radius: the radius, positive. 1 by default.

    Examples:
        >>> bool((Ball(1.0).project(10 * x).norm(dim=1) <= 1 + 1e-6).all())
        True
    """

    def project(self, y: Rows, start: Rows | None = None) -> Tensor:
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        # Most steps stay inside, and then there is nothing to copy.
        if lies_in(norm, -1.0, self.radius):
            return y
        return torch.where(norm > self.radius, self.radius * unit_vectors(y), y)


@dataclass(frozen=True)
class Sphere(_Round):
    """Keep vectors on a sphere, ‖x‖ = radius; the projection is RMSNorm without a gain for radius √D.

    A sphere is not convex. All of its points are equally far from a row of zeros. The projection of such a row has the
    direction of ``start``, or of the first axis if ``start`` is zero too.

    Args:
        radius: the radius, positive. 1 by default.

    Examples:
        >>> torch.allclose(Sphere(1.0).project(x).norm(dim=1), torch.ones(6))
        True
    """

    convex = False

    def project(self, y: Rows, start: Rows | None = None) -> Tensor:
        if not y.is_floating_point():
            check_tensor(y, "y", "[..., channels]")
        wide = wide_dtype(y.dtype)
        least = torch.finfo(wide).tiny  # of wide numbers, since it underflows in half
        axis = y.new_zeros(y.size(-1))
        axis[:1] = 1
        for other in (start, axis):
            if other is not None:
                # A row without a direction keeps the one it had, or takes the first axis.
                nothing = y.detach().abs().amax(-1, keepdim=True).to(wide) < least
                y = torch.where(nothing, other, y)
        return self.radius * unit_vectors(y)


@dataclass(frozen=True)
class NonnegativeBall(Ball):
    """Keep entries nonnegative and ‖x‖ ≤ radius; the projection is ReLU, then clips norms.

    Args:
        radius: the radius, positive. 1 by default.

    Examples:
        >>> NonnegativeBall(1.0).project(torch.tensor([[-1.0, 2.0]]))
        tensor([[0., 1.]])
    """

    orthant = True

    def project(self, y: Rows, start: Rows | None = None) -> Tensor:
        # Clipping a norm keeps signs, so the two projections in a row are the projection onto both.
        return super().project(relu(y))


CONSTRAINTS: dict[str | None, Callable[[float], Constraint]] = {
    None: lambda radius: Unconstrained(),
    "nonnegative": lambda radius: Nonnegative(),
    "ball": Ball,
    "sphere": Sphere,
    "nonnegative_ball": NonnegativeBall,
}


def get_constraint(
    constraint: str | Constraint | None, radius: float = 1.0
) -> Constraint:
    """Return the constraint with a name.

    Args:
        constraint: ``"nonnegative"`` (ReLU), ``"ball"`` (clipped norms), ``"sphere"`` (RMSNorm without a gain),
            ``"nonnegative_ball"``, or ``None``, no constraint. A `Constraint` is returned unchanged.
        radius: the radius of balls and spheres. 1 by default.

    Examples:
        >>> get_constraint("ball", radius=2.0)
        Ball(radius=2.0)
    """
    if isinstance(constraint, Constraint):
        return constraint
    check_choice(constraint, "constraint", CONSTRAINTS)
    check_positive(radius, "radius")
    return CONSTRAINTS[constraint](radius)
