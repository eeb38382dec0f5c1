"""``perturbation_bound``: what a diffusion layer does to the output of a model, and what the theory allows it to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from diffusion_mp.diagnostics.hooks import Call, evaluating, hooked, recorded, tokens
from diffusion_mp.diagnostics.lipschitz import lipschitz
from diffusion_mp.errors import check_counts, check_finite, check_kind, check_positive, describe
from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.updates import ExplicitEuler


@dataclass(frozen=True)
class Perturbation:
    r"""One insertion of S in front of the tail T, at the state Z: ‖T(SZ) − T(Z)‖ and a first-order estimate of it.

    ``estimate`` = ``lipschitz`` · ``step`` ≤ ``roughness_estimate`` = ``lipschitz`` · ``step_bound``. They bound
    ``truth`` where T is linear; where it is not, ``lipschitz`` knows a few points only, and a tail that is steep
    between them goes farther. Norms are over all sequences; ``roughness`` is 𝓔(Z), summed over them, and ``size`` ‖Z‖.

    Attributes:
        truth: ‖T(SZ) − T(Z)‖, as it is.
        lipschitz: Lip(T), the largest of some points between Z and SZ.
        step: ‖(S − I)Z‖.
        step_bound: √(8 Σα_k Σα_k 𝓔_{h_k}(Z)) ≥ ``step``; ``None`` where the layer is not covered.
        roughness: 𝓔(Z).
        size: ‖Z‖.

    Examples:
        >>> layer = PDEDiffusion1d(4)
        >>> found = perturbation_bound(torch.nn.Sequential(layer, torch.nn.Linear(4, 2)), layer, torch.rand(2, 5, 4))
        >>> isinstance(found, Perturbation)
        True
        >>> found.truth <= found.estimate <= found.roughness_estimate  # the tail is linear
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
        """𝓔(Z)/‖Z‖², at most 2; 0 where Z is zero."""
        return self.roughness / self.size**2 if self.size else 0.0

    @property
    def estimate(self) -> float:
        """Lip(T) ‖(S − I)Z‖, the first line of Theorem 4.7, with Lip(T) as measured."""
        return self.lipschitz * self.step

    @property
    def roughness_estimate(self) -> float | None:
        """Lip(T) √(8 Σα_k Σα_k 𝓔_{h_k}(Z)), the second line, corrected; ``None`` where the layer is not covered."""
        return None if self.step_bound is None else self.lipschitz * self.step_bound


def perturbation_bound(
    model: nn.Module,
    site: nn.Module,
    *inputs: Any,
    diffusion: PDEDiffusion1d | None = None,
    points: int = 5,
    tol: float = 1e-4,
    **named: Any,
) -> Perturbation:
    r"""‖F⁽ʲ⁾(X) − F(X)‖ beside its first-order estimates (Zhang & Zhou, Theorem 4.7, corrected).

    F⁽ʲ⁾ has the diffusion layer at ``site`` and F has not. With T the model behind it and Z the state there,
    ‖T(SZ) − T(Z)‖ ≤ max_s ‖J_T(Z + s(S − I)Z)‖ ‖(S − I)Z‖, the mean value theorem. ``lipschitz`` is that maximum over
    ``points`` of the segment, each by `lipschitz`: an estimate from below, so no bound where T bends. And
    ‖(S − I)Z‖ ≤ √(8 Σ_k α_k Σ_k α_k 𝓔_{h_k}(Z)), which for one stride is α√(8𝓔(Z)): the printed α√(2𝓔(Z)) is too small
    by a factor of two (P3 in docs/errata.md). This second bound is for symmetric boundaries and the explicit step
    without LayerNorm; 𝓔_h is the energy of neighbours at stride h.

    Args:
        model: anything whose output is a tensor; it is run in evaluation mode and left as it was.
        site: a module inside it, called as ``site(x, mask)``. If it is called more than once, as in two towers, all
            calls are taken together.
        inputs, named: of the model.
        diffusion: the layer to insert behind ``site``; ``None``: ``site`` is the diffusion layer, and is bypassed.
        points: of the segment, its ends among them (one point: its beginning).
        tol: of `lipschitz`.

    Raises:
        TypeError, ValueError: ``site`` is not called, or is no diffusion layer while none is given.
        ConvergenceError, RuntimeError: see `lipschitz`.

    Examples:
        >>> model = PDETransformer(4, 8, 2, num_layers=1, heads=2, max_length=5, placement="P1")
        >>> site = next(module for module in model.modules() if isinstance(module, PDEDiffusion1d))
        >>> perturbation_bound(model, site, torch.rand(2, 5, 4)).truth >= 0
        True
    """
    check_counts(points=points)
    check_positive(tol, "tol")
    check_kind(model, "model", nn.Module, "a torch.nn.Module")
    check_kind(site, "site", nn.Module, "a module of the model")
    check_kind(diffusion, "diffusion", (nn.Module, NoneType), "a diffusion layer or None")
    layer = site if diffusion is None else diffusion
    if not getattr(layer, "is_diffusion_layer", False):
        raise ValueError(f"diffusion must be given where site is not a diffusion layer; got {describe(layer)}.")
    with evaluating(model), evaluating(layer):
        with torch.no_grad(), recorded({"site": site}) as found:
            model(*inputs, **named)
        calls = found["site"]
        if not calls:
            raise ValueError("site must be a module of the model that these inputs reach; it was not called.")
        if diffusion is not None:
            with torch.no_grad():
                calls = [Call(call.out, call.mask, diffusion(call.out, call.mask)) for call in calls]
        for call in calls:
            check_finite(call.moved(), "the state that inputs give at site")
        tail = _tail(model, site, inputs, named, [call.out.shape for call in calls])
        before = torch.cat([call.x.flatten() for call in calls])
        after = torch.cat([call.out.flatten() for call in calls])
        with torch.no_grad():
            truth = float((tail(after).double() - tail(before).double()).norm())
        segment = [torch.lerp(before, after, float(s)) for s in torch.linspace(0, 1, points)]
        stretch = max(lipschitz(tail, point, tol=tol) for point in segment)
        return Perturbation(
            truth,
            stretch,
            step=sum(float(call.moved().square().sum()) for call in calls) ** 0.5,
            step_bound=_step_bound(layer, calls),
            roughness=sum(call.roughness() for call in calls),
            size=sum(call.square() for call in calls) ** 0.5,
        )


def _tail(
    model: nn.Module, site: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], shapes: list[torch.Size]
) -> Callable[[Tensor], Tensor]:
    """T: the output of the model as a function of what the calls of one module give, flat and one after the other.

    The model runs again from its inputs, and a hook replaces what the module gives.
    """

    def tail(states: Tensor) -> Tensor:
        pieces = states.split([shape.numel() for shape in shapes])
        given = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        with hooked({"site": site}, lambda *_: next(given)):
            out: Tensor = model(*inputs, **named)
        return out

    return tail


@torch.no_grad()
def _step_bound(layer: nn.Module, calls: list[Call]) -> float | None:
    """√(Σ_heads 4 Σα_k ⟨Z, (I − S)Z⟩) ≥ ‖(S − I)Z‖, since 0 ≤ I − S ≤ 4 Σα_k; ⟨Z, (I − S)Z⟩ = 2 Σα_k 𝓔_{h_k}(Z)."""
    if not isinstance(layer, PDEDiffusion1d) or layer.norm is not None or not layer.diffusivity.symmetric:
        return None
    update = layer.update
    if not isinstance(update, ExplicitEuler) or (update.tau, update.form, update.leak) != (1.0, "conservative", 0.0):
        return None
    top = 4 * layer.alpha.sum(0)
    square = 0.0
    for call in calls:
        products = -tokens(call.x, call.mask) * call.moved()
        square += float((top * products.unflatten(1, (top.numel(), -1)).sum((0, 2))).sum())
    return max(square, 0.0) ** 0.5
