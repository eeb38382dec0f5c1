"""``certify`` for couplings, penalties, energies, layers and models, and ``certify_step`` by Theorem T11."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.constraints import Constraint
from diffusion_mp.energies.counterexamples import (
    counterexample,
    foreign_parts,
    numbers_flaw,
)
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.pairs import HeadState, State, check_heads
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.spectrum import Form
from diffusion_mp.energies.terms import values_flaw
from diffusion_mp.energies.theorems import Certificate, state_flaw, theorem1, theorem7
from diffusion_mp.modules import evaluating
from diffusion_mp.runtime.precision import widened

CERTIFIED_STEPS = (
    16  # that a certificate takes where a part of the energy is not of the library
)
STEPS = "Theorem T11"  # about certified steps


@checks.checked
@torch.no_grad()
def certify(
    subject: Any,
    x: State | Any = None,
    tau: checks.PositiveNumber | None = None,
    *,
    form: Form = "conservative",
    leak: checks.NonnegativeNumber = 0.0,
    ptr: Tensor | None = None,
) -> Certificate:
    """Certify that a step from a state descends an energy, and name the energy.

    Without a step size, Theorem T11 of docs/certified.md applies to

    * an `Energy`: the same as `certify_step`; * a model or layer with a method ``certificate(x, edge_index,
    edge_weight, batch)``. The certificate is about the model's steps at these inputs. Any other module is refused;
    ``layers`` of the certificate then holds the certificates of its layers.

    With a step size ``tau``, the certificate is about an explicit step (Wu, Wipf & Yan 2025, with corrected bounds):

    * A `Coupling` S: `theorem1` for x − τ(Δ + κ)x, with Δ = D̄ − S or, for ``form="residual"``, I − S; at any state. *
    A `Penalty`: `theorem7` for x − τ(I − D̄⁻¹Ω + κ)x with Ω = ``penalty.coupling(x)``, if the state lies within the
    domain of the penalty. * A diffusivity, that is, any object with an attribute ``penalty``: the same as for this
    penalty. If it is ``None``, the certificate is refused with ``why_no_penalty``.

    A source h of weight β leaves the bounds as they are. It adds −4λβ⟨h, z⟩ to the energy (docs/errata.md, D21), for
    Theorem 7 in the metric d̄ = Ω.degree(). For a state [N, H, D] the certificate is the one of the worst head.

    Args:
        subject: an `Energy`, a model, a layer, a `Coupling`, a `Penalty` or a diffusivity.
        x: state [N, C] or [N, H, D]. For a model or layer: its features, or PyG's ``Data``, whose ``edge_attr`` is
            passed on if the model reads it; ``None`` takes random features.
        tau: size of the explicit step. ``None`` only for energies, models and layers.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄. ``"residual"``: Δ = I − S.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU. ``None`` is one graph.

    Examples:
        >>> bool(certify(SimplePenalty(), torch.nn.functional.normalize(x, dim=1), tau=0.5))
        True
        >>> bool(certify(AdjacencyDiffusivity("sym")(x, graph), tau=5.0))  # beyond the largest step
        False
    """
    if isinstance(subject, Energy):
        return certify_step(subject, x)
    if hasattr(subject, "certificate"):
        inputs = _inputs(x)
        certificate: Certificate = subject.certificate(*inputs, **_named(subject, x))
        return certificate
    explicit = isinstance(subject, (Coupling, Penalty)) or hasattr(subject, "penalty")
    if isinstance(subject, nn.Module) and not explicit:
        return _certify_parts(subject, x)
    if not explicit:
        raise TypeError(
            f"subject must be a Coupling, a Penalty, a diffusivity (anything with a `penalty`), an Energy, a layer "
            f"or a model; got {checks.describe(subject)}."
        )
    # Only now: energies and models, which come first, have steps without a size.
    if tau is None:
        raise ValueError(
            f"tau must be given, the size of the explicit step; got None for {checks.describe(subject)}."
        )
    if isinstance(subject, Coupling):
        return theorem1(subject, tau, form=form, leak=leak)
    # A penalty is certified as its row-normalised diffusivity of one head.
    normalized = getattr(subject, "row_stochastic", True)
    heads = getattr(subject, "heads", 1)
    penalty = getattr(subject, "penalty", subject)
    flaw = broken_parameter(subject) if isinstance(subject, nn.Module) else None
    flaw = flaw or _why_uncovered(subject, penalty, form)
    if flaw is None:
        if x is None:
            raise ValueError(
                "x must be given: what a penalty couples depends on the state."
            )
        check_heads(x)
        checks.check_has_values(x, "x")
        if x.dim() == 2:
            if x.size(1) % heads:
                raise ValueError(
                    f"x must have channels that {heads} heads divide; got {checks.describe(x)}."
                )
            # Every head has an energy of its own, and distances within it.
            x = x.unflatten(1, (heads, -1))
        flaw = state_flaw(penalty, x, ptr)
    if flaw is not None:
        return Certificate.refused("Theorem 7", tau, flaw)
    # In double, since the certificate is about a step in exact arithmetic.
    omega = penalty.coupling(x.double(), ptr)
    # Without normalisation Theorem 1 covers Ω, which majorises the energy (Proposition
    # 6).
    theorem = theorem7 if normalized else theorem1
    return theorem(omega, tau, leak=leak)


def _certify_parts(module: nn.Module, data: Any) -> Certificate:
    """Refuse a module that has no energy, with the certificates of its layers."""
    inputs = _inputs(data)
    # Its forward may take neither weights nor a batch.
    while inputs and inputs[-1] is None:
        inputs.pop()
    layers = layer_certificates(module, *inputs, **_named(module, data))
    what = "its layers one by one:"
    if not layers:
        what = "nor is there a layer in it of which one is, such as CertifiedConv."
    reason = (
        f"{type(module).__name__} is no model that knows an energy of its own; {what}"
    )
    return replace(Certificate.refused(STEPS, math.nan, reason), layers=layers)


def _inputs(data: Any) -> list[Any]:
    """Return x, edge_index, edge_weight and batch of PyG's Data, or only the features."""
    if isinstance(data, Tensor) or data is None:
        return [data]
    if not hasattr(data, "x"):
        raise TypeError(
            f"data must have an attribute x, as PyG's Data has; got {checks.describe(data)}."
        )
    return [
        data.x,
        *(getattr(data, name, None) for name in ("edge_index", "edge_weight", "batch")),
    ]


def _named(module: Any, data: Any) -> dict[str, Any]:
    """Return the further inputs that a model reads of PyG's Data, such as ``edge_attr``."""
    reads = getattr(module, "reads", ())
    if isinstance(reads, str):  # of a DiffusionConv: "state" or "features"
        return {}
    inputs = {name: getattr(data, name, None) for name in reads}
    return {name: value for name, value in inputs.items() if value is not None}


#: Keywords of the call of a layer that its certificate depends on.
_CERTIFIED = {
    "x",
    "edge_index",
    "edge_weight",
    "batch",
    "source",
    "beside",
    "edge_attr",
}


@torch.no_grad()
def layer_certificates(
    model: nn.Module, *inputs: Any, **named: Any
) -> dict[str, Certificate]:
    """Return the certificates of all layers by name, at the states of one run of the model in evaluation."""
    layers: dict[str, Any] = {
        name: part
        for name, part in model.named_modules()
        if part is not model and hasattr(part, "why_uncertified")
    }
    if not layers or not inputs or inputs[0] is None:
        return {name: layer.certificate() for name, layer in layers.items()}
    # In the order of calls, which may differ from the order of the modules.
    certificates: dict[str, Certificate] = {}

    def record(name: str, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep, over all calls of a layer, the first refusal or else the largest λ."""
        before = certificates.get(name)
        if before is not None and not before:
            return
        read = {key: kwargs[key] for key in _CERTIFIED & kwargs.keys()}
        certificate = layer.certificate(*args, **read)
        if before is None or not certificate or certificate.lam > before.lam:
            certificates[name] = certificate

    hooks = [
        layer.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with evaluating(model):
            model(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: certificates[name] for name in layers if name in certificates}


def broken_parameter(module: nn.Module, *prefixes: str) -> str | None:
    """Return a sentence naming a parameter that is not finite, or ``None``. ``prefixes`` restrict the names."""
    for name, parameter in module.named_parameters():
        empty = is_lazy(parameter) or parameter.is_meta
        if empty or not name.startswith(prefixes or ""):
            continue
        if (flaw := values_flaw(parameter, f"parameter {name}")) is not None:
            return flaw
    return None


def random_input(
    channels: int, like: Tensor, edge_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x, edge_index and edge_attr of eight nodes on a directed ring, to certify a model without data."""
    if channels == -1:
        raise ValueError(
            "x must be given, or the model called once: only then is it known how many channels it has."
        )
    # Always the same, so that a certificate without data does not change between calls.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, channels, generator=generator).to(like)
    ring = torch.arange(8, device=like.device)
    edge_attr = None
    if edge_dim is not None:
        edge_attr = torch.rand(8, edge_dim, generator=generator).to(like)
    return x, torch.stack([ring, ring.roll(1)]), edge_attr


def _why_uncovered(subject: Any, penalty: Penalty | None, form: Form) -> str | None:
    """Return a sentence saying why no theorem covers a step with this diffusivity; ``None`` if one does."""
    name = type(subject).__name__
    if penalty is None:
        # Anything with a `penalty` counts; only a `Diffusivity` has to say more.
        why = getattr(subject, "why_no_penalty", None)
        return f"{name}: {why or 'it declares no penalty.'}"
    if getattr(subject, "needs_graph", False):
        return f"{name} couples the edges of a graph only; pass its unnormalised symmetric coupling to theorem7."
    if form == "residual" and not getattr(subject, "row_stochastic", True):
        return f"{name} is not row-normalised, and the residual step then follows no sum over pairs."
    return None


@checks.checked
@torch.no_grad()
def certify_step(
    energy: Energy, x: State, *, steps: checks.Count = CERTIFIED_STEPS
) -> Certificate:
    """Certify that certified steps of an `Energy` from a state never raise it, however many are taken.

    By Theorem T11 of docs/certified.md, F(x′) ≤ F(x) if rows lie in C and every term has the majorant that it declares.
    Every term names the premise that it breaks: a negative weight, a coupling that is not symmetric, a penalty that is
    not concave up to the diameter of C, a matrix above its norm. What terms declare is checked: f and δ at some hundred
    distances, and couplings at all observed edges or, if they are not sparse, between the first nodes. Rounding may
    raise F by 64 ε (|F| + Σ_i p_i ‖z_i‖²).

    The premise cannot be proved for a term, penalty, constraint, coupling or function from outside the library. In that
    case F of every graph is compared over ``steps`` steps from ``x`` and in steps from contracted and spread states,
    and the majorant of the term is tested there. A rise refuses the certificate. Otherwise the certificate says that no
    counterexample was found, and in how many states (``searched``).

    Args:
        energy: the energy F.
        x: state [N, C] or [N, H, D].
        steps: number of steps from ``x`` to compare if a part of the energy is from outside the library.

    Examples:
        >>> S = AdjacencyDiffusivity("sum")(x, graph)
        >>> bool(certify_step(Energy([CouplingTerm(S), SourceTerm(x)]), x))
        True
    """
    z, _ = energy.checked(x)
    checks.check_has_values(x, "x")
    # Promises cost little and name what is wrong, so they come before any search.
    flaw = broken_premise(energy, z)
    reason = f"Every term has the majorant that it declares, and rows stay in {energy.constraint}."
    searched = 0
    foreign = foreign_parts(energy.terms, energy.constraint)
    if flaw is None and foreign:
        flaw, searched = counterexample(energy, z, steps, foreign)
        names = dict.fromkeys(
            getattr(part, "__name__", type(part).__name__) for part in foreign
        )
        reason = (
            f"What is not of the library is tested and not proved: {', '.join(names)}."
        )
    # After the check of the promises, which the repr shows.
    certificate = partial(Certificate, theorem=STEPS, energy=repr(energy))
    if flaw is not None:
        return certificate(holds=False, reason=flaw)
    return certificate(
        holds=True, tau_max=math.inf, lam=math.nan, reason=reason, searched=searched
    )


def broken_premise(energy: Energy, z: HeadState) -> str | None:
    """Return a sentence naming a premise of Theorem T11 that an energy breaks at a state, or ``None``."""
    graph = energy.graph_of(z)
    flaw = values_flaw(z, "state") or _outside(energy.constraint, z)
    for term in energy.terms:
        flaw = flaw or term.flaw(energy.constraint)
    # In the dtype of the step, whose numbers may overflow where the energy's do not.
    wide = widened(z)
    for term in energy.terms:
        flaw = flaw or numbers_flaw(term, wide, graph)
    return flaw


def _outside(constraint: Constraint, x: HeadState) -> str | None:
    """Return a sentence unless rows lie in C up to the rounding of a projection.

    If they do not, moving them there may raise the rest of F.
    """
    rounding = 16 * torch.finfo(x.dtype).eps * x.norm(dim=2)
    moved = (constraint.project(x) - x).norm(dim=2)
    if bool(constraint.holds(x)) and bool((moved <= rounding).all()):
        return None
    return f"the state leaves {constraint}; begin with its projection, constraint.project(x)."
