"""``commutator``: what changes when diffusion stands behind an attention instead of before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_mp.diagnostics.hooks import tokens
from diffusion_mp.errors import check_finite, check_function, check_kind, check_sequences
from diffusion_mp.layers import PDEDiffusion1d


@dataclass(frozen=True)
class Commutator:
    """Norms over the tokens of all sequences: `‖[S, A](X)‖`, its linearised form, and ‖A(X)‖ to measure them by.

    Attributes:
        exact: `‖[S, A](X)‖` = ‖S(A(X)) − A(S(X))‖ (Zhang & Zhou, Eq. 12).
        linearized: the same with the routing frozen at X (Eq. 13); ``None`` where the attention has no ``frozen``.
        routed: ‖A(X)‖.

    Examples:
        >>> found = commutator(PDEDiffusion1d(4), torch.nn.Identity(), torch.rand(3, 10, 4))
        >>> isinstance(found, Commutator), found.relative  # the identity commutes with everything
        (True, 0.0)
    """

    exact: float
    linearized: float | None
    routed: float

    @property
    def relative(self) -> float:
        """`‖[S, A](X)‖` / ‖A(X)‖; 0 where the attention gives nothing."""
        return self.exact / self.routed if self.routed else 0.0

    @property
    def relative_linearized(self) -> float | None:
        """The linearised form relative to ‖A(X)‖, 0 where that is zero; ``None`` where it was not taken."""
        if self.linearized is None:
            return None
        return self.linearized / self.routed if self.routed else 0.0


@torch.no_grad()
def commutator(
    diffusion: PDEDiffusion1d,
    attention: Callable[..., Any],
    x: Float[Tensor, "B L C"],
    mask: Bool[Tensor, "B L"] | None = None,
) -> Commutator:
    r"""‖S(A(X)) − A(S(X))‖ (Zhang & Zhou, Eq. 12) and ‖S(A_X(X)) − A_X(S(X))‖, with the routing frozen at X.

    The second is Eq. 13: for one head without projections A_X(Y) = A(X) Y, and it is α‖(ΔA(X) − A(X)Δ)X‖. The
    difference between the two is the change of the routing itself. S is the bare step, without the LayerNorm of Eq. 16.

    Args:
        diffusion: S.
        attention: A, called as ``attention(x, mask)`` (or ``attention(x)`` without a mask), in evaluation mode. With a
            method ``frozen(x, mask)`` that gives A_X, as `SelfAttention` has, also the linearised form is taken.
        x: the state that the attention reads.
        mask: true where there is a token; only tokens count.

    Examples:
        >>> attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        >>> result = commutator(PDEDiffusion1d(4), lambda z: attention(z, z, z)[0], torch.rand(3, 10, 4))
        >>> result.exact > 0
        True
    """
    check_kind(diffusion, "diffusion", PDEDiffusion1d, "a PDEDiffusion1d")
    check_function(attention, "attention", "called as attention(x, mask)")
    check_sequences(x, mask, diffusion.in_channels, diffusion)
    check_finite(x, "x")
    if diffusion.norm is not None:  # take it away from a copy: the caller's layer stays as it is
        diffusion = copy.deepcopy(diffusion)
        diffusion.norm = None
    given = (x,) if mask is None else (x, mask)

    def smooth(y: Tensor) -> Tensor:
        return diffusion(y, *given[1:])

    def conflict(route: Callable[[Tensor], Tensor], after: Tensor) -> float:
        """‖S(after) − route(S(x))‖, for ``after`` = route(x)."""
        return float((tokens(smooth(after), mask) - tokens(route(smooth(x)), mask)).norm())

    routed = attention(*given)
    exact = conflict(lambda y: attention(y, *given[1:]), routed)
    linearized = None
    if hasattr(attention, "frozen"):  # the weights of A at x, applied to S(x) as well: A_X is linear
        frozen = attention.frozen(*given)
        linearized = conflict(frozen, frozen(x))
    return Commutator(exact, linearized, float(tokens(routed, mask).norm()))
