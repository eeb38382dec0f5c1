"""Local Lipschitz constants, and how one diffusion layer changes a model's output (Zhang & Zhou, Theorem 4.7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_mp import checks, errors
from diffusion_mp.diagnostics.hooks import Call, hooked, recorded, tokens
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.modules import evaluating
from diffusion_mp.updates import ExplicitEuler


def lipschitz(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tol: float = 1e-4,
    max_iter: int = 1000,
    generator: torch.Generator | None = None,
) -> float:
    r"""Return how much a function stretches small changes of its input: ‖J‖₂, where J is the Jacobian of f at x.

    This largest singular value is the local Lipschitz constant of Zhang & Zhou, Eq. 8. Lanczos bidiagonalisation (Golub
    & Kahan, 1965) finds it from below, starting in a random direction. An iteration takes two backward passes: one for
    Jᵀw, and one for Jv as the derivative of Jᵀw with respect to w.

    Args:
        f: a function of one tensor, twice differentiable. A model should be in evaluation mode.
        x: the point at which the Jacobian is taken, a tensor of any shape.
        tol: tolerance of the residual ‖JᵀJ v − ‖J‖² v‖, relative to ‖J‖²/√n for n entries of x.
        max_iter: number of iterations after which the search gives up.
        generator: random generator of the initial direction. By default a new one with seed 0, so that the result
            repeats.

    Raises:
        ConvergenceError: the tolerance was not reached within ``max_iter`` iterations.
        RuntimeError: a part of f can be differentiated only once.

    Examples:
        >>> round(lipschitz(lambda z: 3 * z, torch.rand(5)), 3)
        3.0
    """
    from scipy.linalg import eigh_tridiagonal

    checks.check_positive(tol, "tol")
    checks.check_counts(max_iter=max_iter)
    checks.check_function(f, "f", "of one tensor")
    checks.check_tensor(x, "x", "that f takes")
    checks.check_finite(x, "x")
    checks.check_generator(generator)
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        point = x.detach().clone().requires_grad_()
        # Only the plain formula of attention can be differentiated twice; its fused kernels cannot.
        value = f(point)
        checks.check_kind(value, "f(x)", Tensor, "a tensor")
        if value.is_complex():
            raise TypeError(
                f"f(x) must be real; got {checks.describe(value)}. Take torch.view_as_real of it."
            )
        # A constant function has no derivative that torch knows of.
        if not value.requires_grad or not value.numel() or not x.numel():
            return 0.0
        # Forward mode would give Jv at once, but many operations have no formula for it; the derivative of a derivative
        # with respect to w, in which Jᵀw is linear, needs the backward pass alone.
        pull = torch.zeros_like(value, requires_grad=True)
        (pulled,) = torch.autograd.grad(
            value, point, pull, create_graph=True, allow_unused=True
        )
        if pulled is None:
            return 0.0
        # Not the global state: a measurement must not change the training that goes on after it.
        generator = generator or torch.Generator().manual_seed(0)
        right = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        right = (right / right.norm()).to(x)
        left = torch.zeros_like(value)
        # Any singular direction has about 1/√n of the start, so a larger singular value would show in the residual.
        enough = max(tol / math.sqrt(x.numel()), 8 * torch.finfo(x.dtype).eps)
        # The diagonal and the off-diagonal of JᵀJ, which is tridiagonal in the Lanczos basis. The basis is not kept:
        # lost orthogonality makes copies of the largest eigenvalue, and no larger one.
        main = list[float]()
        side = list[float]()
        beta = 0.0
        for _ in range(max_iter):
            (image,) = torch.autograd.grad(pulled, pull, right, retain_graph=True)
            left = image - beta * left
            # Squares may overflow in float32.
            alpha = float(left.norm(dtype=torch.float64))
            main.append(alpha * alpha + beta * beta)
            if not math.isfinite(main[-1]):
                raise ValueError(
                    f"f must have a finite derivative at x, below 1e150; its norm there is {alpha:.3g}."
                )
            if alpha:
                left = left / alpha
                (image,) = torch.autograd.grad(value, point, left, retain_graph=True)
                right = image - alpha * right
                beta = float(right.norm(dtype=torch.float64))
            last = len(main) - 1
            (top,), vector = eigh_tridiagonal(
                main, side, select="i", select_range=(last, last)
            )
            # Rounding may make the eigenvalue of a zero matrix negative.
            square = max(float(top), 0.0)
            residual = alpha * beta * abs(float(vector[-1, 0]))
            if residual <= enough * square:
                return math.sqrt(square)
            side.append(alpha * beta)
            # Not zero: the residual would be zero too, and have ended the loop.
            right = right / beta
    raise errors.ConvergenceError(
        f"the residual of ‖J‖² is {residual / square:.3g} of it, above tol={tol:g} over √n = {x.numel() ** 0.5:.4g}, "
        f"after {max_iter} iterations, at ‖J‖ = {math.sqrt(square):.6g}. Raise max_iter or tol."
    )


@dataclass(frozen=True)
class Perturbation:
    r"""How much a layer S in front of the rest T of a model changes the output, with first-order estimates.

    Z is the state in front of the layer. If T is not linear, the estimates may fail to be bounds, since ``lipschitz``
    is measured at a few points only.

    Attributes:
        truth: ‖T(SZ) − T(Z)‖, the change of the output.
        lipschitz: Lip(T), the largest value at points between Z and SZ.
        step: ‖(S − I)Z‖, the change of the state.
        step_bound: √(8 Σα_k Σα_k 𝓔_{h_k}(Z)) ≥ ``step``, or ``None`` if the bound is unknown for the layer.
        roughness: 𝓔(Z), see `roughness`.
        size: ‖Z‖.

    Examples:
        >>> layer = PDEDiffusion1d(4)
        >>> isinstance(perturbation_bound(torch.nn.Sequential(layer), layer, torch.rand(2, 5, 4)), Perturbation)
        True
    """

    truth: float
    lipschitz: float
    step: float
    step_bound: float | None
    roughness: float
    size: float

    @property
    def relative_roughness(self) -> float:
        """𝓔(Z)/‖Z‖², at most 2; it is 0 if Z is zero."""
        return self.roughness / (self.size**2 or 1.0)

    @property
    def estimate(self) -> float:
        """Lip(T) ‖(S − I)Z‖, the first line of Theorem 4.7, with the measured Lip(T)."""
        return self.lipschitz * self.step

    @property
    def roughness_estimate(self) -> float | None:
        """Lip(T) √(8 Σα_k Σα_k 𝓔_{h_k}(Z)), the corrected second line of Theorem 4.7; ``None`` if unknown."""
        if self.step_bound is None:
            return None
        return self.lipschitz * self.step_bound


def perturbation_bound(
    model: nn.Module,
    site: nn.Module,
    *inputs: Any,
    diffusion: PDEDiffusion1d | None = None,
    points: int = 5,
    tol: float = 1e-4,
    **named: Any,
) -> Perturbation:
    r"""Measure how much a diffusion layer changes the output of a network, ‖F⁽ʲ⁾(X) − F(X)‖, and estimates of it.

    F⁽ʲ⁾ is the network with the diffusion layer S at ``site``, and F is the network without it (Zhang & Zhou, Theorem
    4.7, corrected). Let Z be the state at the site and T the rest of the model. Then ‖T(SZ) − T(Z)‖ ≤ max_s ‖J_T(Z +
    s(S − I)Z)‖ ‖(S − I)Z‖.

    For symmetric boundaries and the explicit step without LayerNorm, ‖(S − I)Z‖ ≤ √(8 Σ_k α_k Σ_k α_k 𝓔_{h_k}(Z)),
    where 𝓔_h is the energy of neighbours at stride h. The printed α√(2𝓔(Z)) is half of this bound (P3 in
    docs/errata.md).

    Args:
        model: a module whose output is a tensor. It runs in evaluation mode.
        site: a module inside the model, called as ``site(x, mask)``. Several calls, as in two towers, are taken
            together.
        inputs: positional inputs of the model.
        diffusion: the layer to insert behind ``site``. By default ``site`` is itself the diffusion layer and is
            bypassed.
        points: number of points between Z and SZ, ends included, at which ‖J_T‖ is measured.
        tol: tolerance of `lipschitz`.
        named: keyword inputs of the model.

    Raises:
        ValueError: the model does not call ``site``, or ``site`` is not a diffusion layer and ``diffusion`` is missing.
        ConvergenceError: `lipschitz` did not reach its tolerance.

    Examples:
        >>> model = PDETransformer(4, 8, 2, num_layers=1, heads=2, max_length=5, placement="P1")
        >>> perturbation_bound(model, model.after_embedding, torch.rand(2, 5, 4)).truth >= 0
        True
    """
    checks.check_counts(points=points)
    checks.check_kind(model, "model", nn.Module, "a torch.nn.Module")
    checks.check_kind(site, "site", nn.Module, "a module of the model")
    checks.check_kind(
        diffusion, "diffusion", (nn.Module, NoneType), "a diffusion layer or None"
    )
    layer = site if diffusion is None else diffusion
    if not getattr(layer, "is_diffusion_layer", False):
        raise ValueError(
            f"diffusion must be given where site is not a diffusion layer; got {checks.describe(layer)}."
        )
    with evaluating(model), evaluating(layer):
        with torch.no_grad(), recorded({"site": site}) as records:
            model(*inputs, **named)
            calls = records["site"]
            if not calls:
                raise ValueError(
                    "site must be a module of the model that these inputs reach; it was not called."
                )
            if diffusion is not None:
                calls = [
                    Call(call.out, call.mask, diffusion(call.out, call.mask))
                    for call in calls
                ]
        for call in calls:
            checks.check_finite(call.moved(), "the state that inputs give at site")

        def tail(states: Tensor) -> Tensor:
            """Return T of the flattened outputs of all calls, which replace those of ``site``."""
            pieces = states.split([call.out.numel() for call in calls])
            outputs = (
                piece.view(call.out.shape)
                for piece, call in zip(pieces, calls, strict=True)
            )
            # The model runs as a whole, so whatever its code does between modules is part of the tail.
            with hooked({"site": site}, lambda *_: next(outputs)):
                out: Tensor = model(*inputs, **named)
            return out

        # Of all calls at once, since they may read one another, as two towers do.
        before = torch.cat([call.x.flatten() for call in calls])
        after = torch.cat([call.out.flatten() for call in calls])
        with torch.no_grad():
            # In double precision: the two outputs may agree in most digits.
            truth = float((tail(after).double() - tail(before).double()).norm())
        # The mean value theorem asks for the largest ‖J_T‖ on the segment; some points of it are taken.
        segment = [
            torch.lerp(before, after, float(s)) for s in torch.linspace(0, 1, points)
        ]
        steepest = max(lipschitz(tail, point, tol=tol) for point in segment)
        step = sum(float(call.moved().square().sum()) for call in calls) ** 0.5
        rough = sum(call.roughness() for call in calls)
        size = sum(call.square() for call in calls) ** 0.5
        return Perturbation(
            truth, steepest, step, _step_bound(layer, calls), rough, size
        )


@torch.no_grad()
def _step_bound(layer: nn.Module, calls: list[Call]) -> float | None:
    """Return √(Σ_heads 4 Σα_k ⟨Z, (I − S)Z⟩) ≥ ‖(S − I)Z‖, or ``None`` if the bound is unknown for the layer.

    It holds since 0 ≤ I − S ≤ 4 Σα_k; and ⟨Z, (I − S)Z⟩ = 2 Σα_k 𝓔_{h_k}(Z).
    """
    if not isinstance(layer, PDEDiffusion1d) or layer.norm is not None:
        return None
    update = layer.update
    if not (layer.diffusivity.symmetric and isinstance(update, ExplicitEuler)):
        return None
    # The bound holds for S = I + ΣαΔ, one step of size one.
    if (update.tau, update.form, update.leak) != (1.0, "conservative", 0.0):
        return None
    top = 4 * layer.alpha.sum(0)
    square = 0.0
    for call in calls:
        products = -tokens(call.x, call.mask) * call.moved()
        by_head = products.unflatten(1, (top.numel(), -1)).sum((0, 2))
        square += float((top * by_head).sum())
    # Rounding may make the energy of a constant state negative.
    return max(square, 0.0) ** 0.5
