"""``certify``: does this step descend its energy, from which λ on, and if nothing is known, why not."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.certificate import Certificate
from diffusion_mp.energies.function import find_flaw
from diffusion_mp.energies.joint import JointEnergy
from diffusion_mp.energies.joint_certificate import certify_step
from diffusion_mp.energies.pairs import State, check_heads, find_distance_above
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.spectrum import Form
from diffusion_mp.energies.theorems import theorem1, theorem7
from diffusion_mp.errors import check_choice, check_positive, describe


def certify(
    subject: Coupling | Penalty | JointEnergy | Any,
    x: State | Any = None,
    tau: float | None = None,
    *,
    form: Form = "conservative",
    leak: float = 0.0,
    ptr: Tensor | None = None,
) -> Certificate:
    """Certify a step from state ``x``: that it descends its energy, and which.

    What has no step size, Theorem T1 of docs/certified.md:

    * A `JointEnergy`: `certify_step` for the certified step down it, and for any number of them.
    * A model or a layer, anything with a method ``certificate(x, edge_index, edge_weight, batch)``, at ``x``: PyG's
      ``Data`` (or what has attributes of these names), or the features alone. Without ``x`` a certified model is looked
      at with a random input, and of others what no input changes is said. A model whose layers are not certified steps
      is refused, and told which of its parts no energy knows; ``layers`` of the certificate says what a theorem knows
      of each of its layers alone. So is any other module that has layers of this package.

    The explicit step of size ``tau`` (TfD: Wu, Wipf & Yan, 2025; bounds as corrected here):

    * A `Coupling` S: `theorem1` for x − τ(Δ + κ)x, Δ = D̄ − S or, with ``form="residual"``, I − S. The state plays no
      part and may be None.
    * A `Penalty`: `theorem7` for the row-normalised step x − τ(I − D̄⁻¹Ω + κ)x with Ω = ``penalty.coupling(x)``,
      provided that the state lies within the penalty's domain.
    * A diffusivity, anything with an attribute ``penalty``: certified through that penalty, or refused with its
      ``why_no_penalty``, since no theorem covers couplings that are not symmetric functions of distance.

    With a source the bounds stay the same; the energy is then the falling form of `Energy`, for Theorem 7 with the
    metric d̄ = Ω.degree().

    Shapes:
        x [N, C] or [N, H, D]; ptr [B + 1]. With H heads the certificate is that of the worst head.

    Raises:
        ValueError: τ ≤ 0, not finite or missing, negative leak. TypeError: a subject of another kind.

    Examples:
        >>> bool(certify(SimplePenalty(), torch.nn.functional.normalize(x, dim=1), tau=0.5))
        True
        >>> bool(certify(AdjacencyDiffusivity("sym")(x, graph), tau=5.0))  # beyond the largest step
        False
    """
    if isinstance(subject, JointEnergy):
        return certify_step(subject, None, x)
    if isinstance(subject, nn.Module) and hasattr(subject, "certificate"):
        return _certify_model(subject, x)
    if isinstance(subject, nn.Module) and not hasattr(subject, "penalty") and not isinstance(subject, Penalty):
        return _certify_parts(subject, x)
    if not isinstance(subject, (Coupling, Penalty)) and not hasattr(subject, "penalty"):
        raise TypeError(
            f"subject must be a Coupling, a Penalty, a diffusivity (anything with a `penalty`), a JointEnergy, a layer "
            f"or a model; got {describe(subject)}."
        )
    if tau is None:
        raise ValueError(f"tau must be given, the size of the explicit step; got None for {describe(subject)}.")
    check_positive(tau, "tau")
    check_positive(leak, "leak", allow_zero=True)
    check_choice(form, "form", ["conservative", "residual"])
    broken = broken_parameter(subject) if isinstance(subject, nn.Module) else None
    if broken is not None:
        return Certificate.refused("Theorem 7", tau, broken)
    if isinstance(subject, Coupling):
        return theorem1(subject, tau, form=form, leak=leak)
    if isinstance(subject, Penalty):
        return _certify_penalty(subject, x, tau, leak, ptr)
    uncovered = _why_uncovered(subject, form)
    if uncovered is not None:
        return Certificate.refused("Theorem 7", tau, f"{type(subject).__name__}{uncovered}")
    heads = getattr(subject, "heads", 1)
    if x is not None and x.dim() == 2 and heads > 1:
        x = x.unflatten(1, (heads, -1))
    penalty: Any = subject.penalty
    return _certify_penalty(penalty, x, tau, leak, ptr, bool(getattr(subject, "row_stochastic", True)))


def _certify_model(model: Any, data: Any) -> Certificate:
    """What a model says of itself at PyG's Data, or at features alone."""
    answer: Certificate = model.certificate(*_attributes(data))
    return answer


def _certify_parts(module: nn.Module, data: Any) -> Certificate:
    """What is known of the layers of any module."""
    inputs = _attributes(data)
    while inputs and inputs[-1] is None:  # it may take no weights and no batch
        inputs.pop()
    layers = layer_certificates(module, *inputs)
    what = "its layers one by one:" if layers else "nor is there a layer in it of which one is, such as CertifiedConv."
    reason = f"{type(module).__name__} is no model that knows an energy of its own; {what}"
    return Certificate(theorem="Theorem T1", holds=False, reason=reason, layers=layers)


def _attributes(data: Any) -> list[Any]:
    """x, edge_index, edge_weight and batch of PyG's Data, or features alone."""
    if isinstance(data, Tensor) or data is None:
        return [data]
    if not hasattr(data, "x"):
        raise TypeError(f"data must have an attribute x, as PyG's Data has; got {describe(data)}.")
    return [data.x, *(getattr(data, name, None) for name in ("edge_index", "edge_weight", "batch"))]


def certifiable(model: nn.Module) -> dict[str, Any]:
    """The parts of a model, by name, that say something of themselves: its layers."""
    layers = {name: part for name, part in model.named_modules() if part is not model}
    return {name: part for name, part in layers.items() if hasattr(part, "why_uncertified")}


@torch.no_grad()
def layer_certificates(model: nn.Module, *inputs: Any) -> dict[str, Certificate]:
    """What is known of every layer alone, at the states that reach it from these inputs.

    The model runs, in evaluation mode, where a state decides anything: ``model(*inputs)``.
    """
    layers = certifiable(model)
    found: dict[str, Certificate] = {}
    hooks = []
    for name, layer in layers.items():
        if not inputs or inputs[0] is None or layer.why_uncertified is not None:
            found[name] = layer.certificate()
        else:
            hooks.append(layer.register_forward_pre_hook(partial(_look, found, name), with_kwargs=True))
    modes = [(module, module.training) for module in model.modules()]
    try:
        if hooks:
            model.eval()(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return {name: found[name] for name in layers if name in found}


def _look(found: dict[str, Certificate], name: str, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Keeps what a layer says of itself at the inputs that reach it: the first that is refused, or the largest λ."""
    known = found.get(name)
    if known is None or known:
        options = {key: value for key, value in kwargs.items() if key in ("source", "features", "beside")}
        certificate = layer.certificate(*args, **options)
        if known is None or not certificate or certificate.lam > known.lam:
            found[name] = certificate


def broken_parameter(module: nn.Module, *parts: str) -> str | None:
    """A parameter that is not finite, as a sentence; ``parts``: what its name begins with, if not all are looked at."""
    for name, parameter in module.named_parameters():
        looked_at = name.startswith(parts or "") and not is_lazy(parameter) and not parameter.is_meta
        if looked_at and not bool(parameter.isfinite().all()):
            return f"the parameter {name} has entries that are not finite: {describe(parameter)}."
    return None


def random_input(channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """x and edge_index of eight nodes on a directed ring, for who asks about a model and has no data at hand."""
    if channels == -1:
        raise ValueError("x must be given, or the model called once: only then is it known how many channels it has.")
    x = torch.randn(8, channels, generator=torch.Generator().manual_seed(0)).to(like)
    ring = torch.arange(8, device=like.device)
    return x, torch.stack([ring, ring.roll(1)])


def _why_uncovered(diffusivity: Any, form: Form) -> str | None:
    """Why no theorem covers a step with this diffusivity, to be read behind its name; None where one does."""
    if diffusivity.penalty is None:
        why = getattr(diffusivity, "why_no_penalty", "")
        return f": {why or 'it declares no penalty, so no energy is known to belong to it.'}"
    if getattr(diffusivity, "needs_graph", False):
        return " couples the edges of a graph only; pass its unnormalised symmetric coupling to theorem7."
    if not getattr(diffusivity, "row_stochastic", True) and form == "residual":
        return " is not row-normalised, and the residual step then follows no sum over pairs."
    return None


def _certify_penalty(
    penalty: Penalty, x: Tensor | None, tau: float, leak: float, ptr: Tensor | None, normalize: bool = True
) -> Certificate:
    """Theorem 7, or without the normalisation Theorem 1 for Ω, which majorises the penalty's energy (Proposition 6)."""
    if x is None:
        raise ValueError("x must be given: what a penalty couples depends on the state.")
    check_heads(x)
    if x.is_meta:
        raise ValueError(f"x must have values, on which the certificate depends; got {describe(x)}.")
    flaw = find_flaw(penalty)
    if flaw is not None:
        return Certificate.refused("Theorem 7", tau, f"{penalty!r} is no penalty on {penalty.domain}: {flaw}")
    beyond = find_distance_above(penalty.reach(x.dtype), x, ptr)
    if beyond is not None:
        return Certificate.refused(
            "Theorem 7",
            tau,
            f"the state leaves the domain of {penalty!r}: a pair is at squared distance {beyond:.6g}, beyond "
            f"{penalty.domain[1]:g}. Scale the state into a ball of radius {math.sqrt(penalty.domain[1]) / 2:g}.",
        )
    with torch.no_grad():
        omega = penalty.coupling(x.double(), ptr)
        return theorem7(omega, tau, leak=leak) if normalize else theorem1(omega, tau, leak=leak)
