"""``lipschitz``: how much a function stretches the space around a point."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_mp.errors import (
    ConvergenceError,
    check_counts,
    check_finite,
    check_function,
    check_generator,
    check_kind,
    check_positive,
    check_tensor,
    describe,
)


def lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tol: float = 1e-4,
    max_iter: int = 1000,
    generator: torch.Generator | None = None,
) -> float:
    r"""‖J‖₂, the largest singular value of the Jacobian of f at x: the local Lipschitz constant of Assumption 4.6
    (Zhang & Zhou, Eq. 8).

    From below, by Lanczos bidiagonalisation (Golub & Kahan, 1965) from a random direction. It ends when the residual
    ‖JᵀJ v − ‖J‖² v‖ is below ``tol`` ‖J‖²/√n for x of n numbers: a steeper direction has about 1/√n of the start, and
    would show in the residual. One forward pass; then Jᵀw is a backward pass, and Jv the derivative of Jᵀw in w,
    another. J is never formed.

    Args:
        f: a function of one tensor, twice differentiable by autograd; a module should be in evaluation mode. Its
            parameters get no gradients. Fused attention is replaced by plain one, which can be differentiated twice and
            holds its [B, H, L, L] weights.
        x: the point.
        tol: relative.
        max_iter: iterations, two passes each, before it gives up.
        generator: of the direction that it starts from; by default one with seed 0, and no global state is read.

    Raises:
        TypeError, ValueError: an argument does not fit, or f gives no real tensor, or has no finite derivative at x.
        ConvergenceError: the tolerance was not reached.
        RuntimeError: a part of f can be differentiated only once.

    Examples:
        >>> round(lipschitz(lambda z: 3 * z, torch.rand(5)), 3)
        3.0
    """
    check_positive(tol, "tol")
    check_counts(max_iter=max_iter)
    check_function(f, "f", "of one tensor")
    check_tensor(x, "x", "that f takes")
    check_finite(x, "x")
    check_generator(generator)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        point = x.detach().requires_grad_()
        value = f(point)
        check_kind(value, "f(x)", Tensor, "a tensor")
        if value.is_complex():
            raise TypeError(f"f(x) must be real; got {describe(value)}. Take torch.view_as_real of it.")
        if not value.requires_grad or not value.numel() or not x.numel():
            return 0.0
        pull = torch.zeros_like(value, requires_grad=True)
        (pulled,) = torch.autograd.grad(value, point, pull, create_graph=True, allow_unused=True)
        if pulled is None:
            return 0.0
        right = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        right, left = (right / right.norm()).to(x), torch.zeros_like(value)
        enough = max(tol / math.sqrt(x.numel()), 8 * torch.finfo(x.dtype).eps)
        main: list[float] = []  # JᵀJ is tridiagonal in the directions so far: its diagonal, and what stands beside it
        side: list[float] = []
        beta = 0.0
        for _ in range(max_iter):
            (image,) = torch.autograd.grad(pulled, pull, right, retain_graph=True)
            left = image - beta * left
            alpha = float(left.norm(dtype=torch.float64))  # a square may leave the range of single precision
            main.append(alpha * alpha + beta * beta)
            if not math.isfinite(main[-1]):
                raise ValueError(f"f must have a finite derivative at x, below 1e150; its norm there is {alpha:.3g}.")
            if alpha:
                left = left / alpha
                (image,) = torch.autograd.grad(value, point, left, retain_graph=True)
                right = image - alpha * right
                beta = float(right.norm(dtype=torch.float64))
            square, residual = _top(main, side, alpha * beta)
            if residual <= enough * square:
                return math.sqrt(square)
            side.append(alpha * beta)
            right = right / beta
    raise ConvergenceError(
        f"the residual of ‖J‖² is {residual / square:.3g} of it, above tol={tol:g} over √n = {x.numel() ** 0.5:.4g}, "
        f"after {max_iter} iterations, at ‖J‖ = {math.sqrt(square):.6g}. Raise max_iter or tol."
    )


def _top(main: list[float], side: list[float], beyond: float) -> tuple[float, float]:
    """The largest eigenvalue of a tridiagonal matrix, and its residual in the one that goes on with ``beyond``."""
    from scipy.linalg import eigh_tridiagonal

    last = len(main) - 1
    (value,), vector = eigh_tridiagonal(main, side, select="i", select_range=(last, last))
    return max(float(value), 0.0), beyond * abs(float(vector[-1, 0]))
