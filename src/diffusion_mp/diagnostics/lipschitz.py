"""``lipschitz``: how much a function stretches the space around a point."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_mp.errors import (
    ConvergenceError,
    check_counts,
    check_function,
    check_generator,
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

    Power iteration v ← JᵀJ v / ‖JᵀJ v‖ until ‖J v‖ grows by less than ``tol`` of itself in a step, so from below. One
    forward pass; then Jᵀw is a backward pass, and Jv the derivative of Jᵀw in w, another. J is never formed.

    Args:
        f: a function of one tensor, twice differentiable by autograd; a module should be in evaluation mode. Its
            parameters get no gradients. Fused attention is replaced by plain one, which can be differentiated twice and
            holds its [B, H, L, L] weights.
        x: the point.
        tol: relative.
        max_iter: iterations before it gives up.
        generator: of the direction that it starts from; by default one with seed 0, and no global state is read.

    Raises:
        ConvergenceError: the tolerance was not reached.
        RuntimeError: a part of f can be differentiated only once.
    """
    check_positive(tol, "tol")
    check_counts(max_iter=max_iter)
    check_function(f, "f", "of one tensor")
    check_tensor(x, "x", "that f takes")
    if x.is_meta:
        raise ValueError(f"x must have values, at which f is differentiated; got {describe(x)}.")
    check_generator(generator)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        point = x.detach().requires_grad_()
        value = f(point)
        if not value.requires_grad or not value.numel():
            return 0.0
        pull = torch.zeros_like(value, requires_grad=True)
        (pulled,) = torch.autograd.grad(value, point, pull, create_graph=True, allow_unused=True)
        if pulled is None:
            return 0.0
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        stretch = 0.0
        for _ in range(max_iter):
            before = stretch
            (image,) = torch.autograd.grad(pulled, pull, direction / direction.norm(), retain_graph=True)
            stretch = float(image.norm())
            if stretch - before <= tol * stretch:
                return stretch
            (direction,) = torch.autograd.grad(value, point, image, retain_graph=True)
    raise ConvergenceError(
        f"‖J‖ was still growing by more than tol={tol:g} of itself after {max_iter} iterations, at {stretch:.6g}. "
        f"Raise max_iter or tol."
    )
