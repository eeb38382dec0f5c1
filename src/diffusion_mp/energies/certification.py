"""``certify`` for couplings, penalties, energies, layers and models, and ``certify_step`` by Theorem T1."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diffusion_mp import errors
from diffusion_mp.couplings import Coupling, IdentityCoupling, ScaledCoupling, SumCoupling
from diffusion_mp.energies.constraints import Constraint
from diffusion_mp.energies.counterexamples import counterexample, foreign_parts
from diffusion_mp.energies.energy import JointEnergy
from diffusion_mp.energies.pairs import State, by_head, check_heads
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.promises import not_as_declared, not_declared, weighted_terms
from diffusion_mp.energies.spectrum import Form
from diffusion_mp.energies.terms import term_flaw
from diffusion_mp.energies.theorems import (
    Certificate,
    check_step,
    penalty_flaw,
    state_flaw,
    theorem1,
    theorem7,
)
from diffusion_mp.modules import evaluating

CERTIFIED_STEPS = (
    16  # steps that a certificate takes where a part of the energy is not of the library
)


@torch.no_grad()
def certify(
    subject: Coupling | Penalty | JointEnergy | Any,
    x: State | Any = None,
    tau: float | None = None,
    *,
    form: Form = "conservative",
    leak: float = 0.0,
    ptr: Tensor | None = None,
) -> Certificate:
    """Certify that a step from state ``x`` descends an energy, and name the energy.

    Without a step size, by Theorem T1 of docs/certified.md: a `JointEnergy` (`certify_step`), or a model or layer with
    a method ``certificate(x, edge_index, edge_weight, batch)``. Then ``x`` is PyG's ``Data``, whose ``edge_attr`` is
    passed on where the model reads it, or the features, by default random ones. Any other module is refused; ``layers``
    of the certificate holds those of its layers.

    The explicit step of size ``tau`` (TfD: Wu, Wipf & Yan, 2025, with corrected bounds):

    * A `Coupling` S: `theorem1` for x − τ(Δ + κ)x, with Δ = D̄ − S or, for ``form="residual"``, I − S; at any state.
    * A `Penalty`: `theorem7` for x − τ(I − D̄⁻¹Ω + κ)x with Ω = ``penalty.coupling(x)``, if the state lies within the
      penalty's domain.
    * A diffusivity, any object with an attribute ``penalty``: as that penalty, or refused with its ``why_no_penalty``.

    A source leaves the bounds as they are. The energy is then the falling form of `Energy`, for Theorem 7 with the
    metric d̄ = Ω.degree(). For a state [N, H, D] the certificate is that of the worst head; ``leak`` is κ ≥ 0, and
    ``ptr`` [B + 1] bounds the graphs of a ragged batch.

    Examples:
        >>> bool(certify(SimplePenalty(), torch.nn.functional.normalize(x, dim=1), tau=0.5))
        True
        >>> bool(certify(AdjacencyDiffusivity("sym")(x, graph), tau=5.0))  # beyond the largest step
        False
    """
    if isinstance(subject, JointEnergy):
        return certify_step(subject, None, x)
    if isinstance(subject, nn.Module) and hasattr(subject, "certificate"):
        return cast("Any", subject).certificate(*_inputs(x), **_named(subject, x))
    if not isinstance(subject, (Coupling, Penalty)) and not hasattr(subject, "penalty"):
        if isinstance(subject, nn.Module):
            return _certify_parts(subject, x)
        raise TypeError(
            f"subject must be a Coupling, a Penalty, a diffusivity (anything with a `penalty`), a JointEnergy, a layer "
            f"or a model; got {errors.describe(subject)}."
        )
    if tau is None:
        raise ValueError(
            f"tau must be given, the size of the explicit step; got None for {errors.describe(subject)}."
        )
    check_step(tau, leak, form)
    if isinstance(subject, Coupling):
        return theorem1(subject, tau, form=form, leak=leak)
    if isinstance(subject, nn.Module):
        flaw = broken_parameter(subject)
    else:
        flaw = None
    penalty = subject
    normalize = True
    heads = 1
    if not isinstance(subject, Penalty):
        flaw = flaw or _why_uncovered(subject, form)
        penalty = subject.penalty
        normalize = bool(getattr(subject, "row_stochastic", True))
        heads = getattr(subject, "heads", 1)
    if flaw is not None:
        return Certificate.refused("Theorem 7", tau, flaw)
    if x is None:
        raise ValueError("x must be given: what a penalty couples depends on the state.")
    check_heads(x)
    errors.check_has_values(x, "x")
    if x.dim() == 2 and heads > 1:
        if x.size(1) % heads:
            raise ValueError(
                f"x must have channels that {heads} heads divide; got {errors.describe(x)}."
            )
        x = x.unflatten(1, (heads, -1))
    if (flaw := state_flaw(penalty, x, ptr)) is not None:
        return Certificate.refused("Theorem 7", tau, flaw)
    omega = penalty.coupling(x.double(), ptr)
    # Without normalisation Theorem 1 covers Ω, which majorises the energy (Proposition 6).
    if normalize:
        return theorem7(omega, tau, leak=leak)
    return theorem1(omega, tau, leak=leak)


def _certify_parts(module: nn.Module, data: Any) -> Certificate:
    """Refuse a module that has no energy, with the certificates of its layers."""
    inputs = _inputs(data)
    while inputs and inputs[-1] is None:  # its forward may take neither weights nor a batch
        inputs.pop()
    layers = layer_certificates(module, *inputs, **_named(module, data))
    if layers:
        what = "its layers one by one:"
    else:
        what = "nor is there a layer in it of which one is, such as CertifiedConv."
    reason = f"{type(module).__name__} is no model that knows an energy of its own; {what}"
    return replace(Certificate.refused("Theorem T1", math.nan, reason), layers=layers)


def _inputs(data: Any) -> list[Any]:
    """Return x, edge_index, edge_weight and batch of PyG's Data, or the features alone."""
    if isinstance(data, Tensor) or data is None:
        return [data]
    if not hasattr(data, "x"):
        raise TypeError(
            f"data must have an attribute x, as PyG's Data has; got {errors.describe(data)}."
        )
    return [data.x, *(getattr(data, name, None) for name in ("edge_index", "edge_weight", "batch"))]


def _named(module: nn.Module, data: Any) -> dict[str, Any]:
    """Return the further inputs that a model reads, such as ``edge_attr``, of PyG's Data."""
    reads = getattr(module, "reads", ())
    if isinstance(reads, str):  # of a DiffusionConv: "state" or "features"
        return {}
    found = {name: getattr(data, name, None) for name in reads}
    return {name: value for name, value in found.items() if value is not None}


#: Keywords of the call of a layer that its certificate depends on.
_CERTIFIED = {
    "x",
    "edge_index",
    "edge_weight",
    "batch",
    "source",
    "features",
    "beside",
    "edge_attr",
}


@torch.no_grad()
def layer_certificates(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, Certificate]:
    """Return the certificates of all layers by name, at the states of one run of the model in evaluation."""
    layers: dict[str, Any] = {
        name: part
        for name, part in model.named_modules()
        if part is not model and hasattr(part, "why_uncertified")
    }
    blind = not inputs or inputs[0] is None
    found = {
        name: layer.certificate()
        for name, layer in layers.items()
        if blind or layer.why_uncertified is not None
    }
    with ExitStack() as stack:
        for name in layers.keys() - found.keys():
            hook = layers[name].register_forward_pre_hook(
                partial(_record, found, name), with_kwargs=True
            )
            stack.callback(hook.remove)
        if len(found) < len(layers):
            stack.enter_context(evaluating(model))
            model(*inputs, **named)
    return {name: found[name] for name in layers if name in found}


def _record(
    found: dict[str, Certificate], name: str, layer: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    """Forward pre-hook that keeps, over all calls of a layer, the first refusal or else the largest λ."""
    known = found.get(name)
    if known is not None and not known:
        return
    certificate = layer.certificate(
        *args, **{key: kwargs[key] for key in _CERTIFIED & kwargs.keys()}
    )
    if known is None or not certificate or certificate.lam > known.lam:
        found[name] = certificate


def broken_parameter(module: nn.Module, *prefixes: str) -> str | None:
    """Return a sentence naming a parameter that is not finite, among those with one of ``prefixes`` if any is given."""
    for name, parameter in module.named_parameters():
        checked = (
            name.startswith(prefixes or "") and not is_lazy(parameter) and not parameter.is_meta
        )
        if checked and not bool(parameter.isfinite().all()):
            return f"the parameter {name} has entries that are not finite: {errors.describe(parameter)}."
    return None


def random_input(
    channels: int, like: Tensor, edge_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x, edge_index and edge_attr of eight nodes on a directed ring, to certify a model without data."""
    if channels == -1:
        raise ValueError(
            "x must be given, or the model called once: only then is it known how many channels it has."
        )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, channels, generator=generator).to(like)
    ring = torch.arange(8, device=like.device)
    if edge_dim is None:
        edge_attr = None
    else:
        edge_attr = torch.rand(8, edge_dim, generator=generator).to(like)
    return x, torch.stack([ring, ring.roll(1)]), edge_attr


def _why_uncovered(diffusivity: Any, form: Form) -> str | None:
    """Return a sentence saying why no theorem covers a step with this diffusivity; None if one does."""
    name = type(diffusivity).__name__
    if diffusivity.penalty is None:
        why = getattr(diffusivity, "why_no_penalty", "")
        return f"{name}: {why or 'it declares no penalty, so no energy is known to belong to it.'}"
    if getattr(diffusivity, "needs_graph", False):
        return f"{name} couples the edges of a graph only; pass its unnormalised symmetric coupling to theorem7."
    if not getattr(diffusivity, "row_stochastic", True) and form == "residual":
        return (
            f"{name} is not row-normalised, and the residual step then follows no sum over pairs."
        )
    return None


@torch.no_grad()
def certify_step(
    energy: JointEnergy, coupling: Coupling | None, x: State, *, steps: int = CERTIFIED_STEPS
) -> Certificate:
    """Certify that a `CertifiedStep` from ``x`` with the energy's β, source, metric and constraint does not raise it.

    By Theorem T1 of docs/certified.md, F(x′) ≤ F(x) if W = λ (f(‖x_i − x_j‖²))_ij + μA is symmetric and nonnegative,
    rows lie in C, and δ is concave up to the diameter of C. Declared properties are checked: f and δ at some hundred
    distances, A at all observed edges or, if it is not sparse, between the first nodes. Any number of steps is covered,
    with W recomputed at every state from the same A. Rounding may raise F by its own size. ``coupling`` is the W used
    at ``x`` and has to be that of ``energy``, which ``None`` takes.

    Where a term, penalty, constraint, coupling or function is not of the library, its premise cannot be proved. Then F
    of every graph is compared over ``steps`` steps from ``x`` and in steps from contracted and spread states, and the
    majorant of the term is tested there. A rise refuses; otherwise the certificate says that no counterexample was
    found, and in how many states (``searched``).

    Examples:
        >>> S = AdjacencyDiffusivity("sum")(x, graph)
        >>> bool(certify_step(JointEnergy(None, graph_term=S, source=x), S, x))
        True
    """
    errors.check_kind(energy, "energy", JointEnergy, "a JointEnergy")
    errors.check_kind(coupling, "coupling", (Coupling, NoneType), "a Coupling or None")
    errors.check_counts(steps=steps)
    energy._check(x)
    if coupling is not None:
        errors.check_values(by_head(x), coupling.num_nodes, coupling.heads, "x")
        errors.check_device(x, "x", coupling.device, "the coupling")
    errors.check_has_values(x, "x")
    failed = (  # every premise returns a sentence saying how it fails, or None where it holds
        _not_finite(energy, x)
        or _outside(energy.constraint, by_head(x))
        or _no_penalty(energy)
        or not_declared("energy's own", w := _coupling(energy, x.double()))
        or not_as_declared(energy.graph_term, energy.constraint.convex)
        or not_declared("step's", coupling)
        or _not_equal(w, coupling, x)
        or next(
            filter(None, (term.flaw(energy.constraint.convex) for term in energy.further)), None
        )
        or next(
            filter(None, (term_flaw(term, by_head(x), energy.graph(x)) for term in energy.further)),
            None,
        )
    )
    searched = 0
    own = foreign_parts(energy.terms, energy.constraint)
    if failed is None and own:
        failed, searched = counterexample(energy, by_head(x), steps, own)
    theorem = "Theorem T11" if energy.further else "Theorem T1"
    certificate = Certificate(
        theorem=theorem, holds=False, energy=repr(energy), reason=failed or ""
    )
    if failed is not None:
        return certificate
    if energy.constraint.convex:
        rows = "its row sums"
    else:
        rows = "twice its row sums, or once where it is definite"
    reason = (
        f"Here W is symmetric and nonnegative, p are {rows}, and rows stay in {energy.constraint}."
    )
    if energy.further:
        reason = (
            f"Every term has the majorant that it declares, and rows stay in {energy.constraint}."
        )
    if own:
        names = ", ".join(dict.fromkeys(_name(part) for part in own))
        reason = f"What is not of the library is tested and not proved: {names}."
    return replace(
        certificate,
        holds=True,
        tau_max=math.inf,
        lam=float(energy.lam),
        reason=reason,
        searched=searched,
    )


def _name(part: Any) -> str:
    """Return the name of a function, or the class of an object."""
    return str(getattr(part, "__name__", type(part).__name__))


def _not_finite(energy: JointEnergy, x: Tensor) -> str | None:
    """Numbers are finite, weights nonnegative and the metric positive."""
    for name in ("lam", "mu", "beta"):
        number = float(getattr(energy, name))
        if not 0 <= number < math.inf:
            return f"{name} must be finite and >= 0; it is {number:g}."
    given = {
        "state": x,
        "source": energy.source,
        "metric": energy.metric,
        "projection": energy.projection,
    }
    for name, value in given.items():
        if value is not None and not bool(value.isfinite().all()):
            return f"the {name} has entries that are not finite: {errors.describe(value)}."
    if energy.metric is not None and not bool((energy.metric > 0).all()):
        return f"the metric must be positive; its least entry is {float(energy.metric.min()):g}."
    return None


def _outside(constraint: Constraint, x: Float[Tensor, "N H D"]) -> str | None:
    """Rows lie in C up to the rounding of a projection; moving them there may otherwise raise the rest of F."""
    rounding = 16 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(x, dim=2)
    moved = torch.linalg.vector_norm(constraint.project(x) - x, dim=2)
    if bool(constraint.holds(x)) and bool((moved <= rounding).all()):
        return None
    return f"the state leaves {constraint}; begin with its projection, constraint.project(x)."


def _no_penalty(energy: JointEnergy) -> str | None:
    """δ is concave and non-decreasing with slope f ≥ 0, as far apart as rows of C can be."""
    if energy.pairs is None:
        return None
    penalty = energy.pairs.penalty
    diameter = energy.pairs.within().diameter
    limit = penalty.domain[1]
    flaw = penalty_flaw(penalty)
    if flaw is not None or penalty.covers(diameter):
        return flaw
    return (
        f"{penalty!r} is concave up to squared distance {limit:g}, and {energy.constraint} lets rows be "
        f"{diameter * diameter:g} apart. Take a ball or sphere of radius <= {limit**0.5 / 2:g}, or another penalty."
    )


def _coupling(energy: JointEnergy, x: Tensor) -> Coupling:
    """Return W = λ (f(‖x_i − x_j‖²))_ij + μA of an energy at a state."""
    terms: list[Coupling] = []
    if energy.pairs is not None:
        terms.append(
            ScaledCoupling(float(energy.lam), energy.pairs.coupling(by_head(x), energy.graph(x)))
        )
    if energy.graph_term is not None:
        terms.append(ScaledCoupling(float(energy.mu), energy.graph_term))
    if terms:
        return SumCoupling(terms)
    return 0.0 * IdentityCoupling(len(x), dtype=x.dtype, device=x.device)


def _not_equal(own: Coupling, coupling: Coupling | None, x: Tensor) -> str | None:
    """W is finite, and the step's equals the energy's: compared by their products with an arbitrary state."""
    if not x.numel():
        return None
    probe = (
        torch.arange(x.numel(), dtype=torch.float64, device=x.device)
        .square()
        .cos()
        .view(by_head(x).shape)
    )
    expected, row_sums = own.majorized(probe, convex=True)
    got = expected if coupling is None else coupling.laplacian(probe)
    for whose, product in (("energy's own", expected), ("step's", got)):
        if not bool(product.isfinite().all()):
            return f"the {whose} coupling has entries that are not finite in its dtype, or too large to be summed."
    if coupling is None:
        return None
    eps = max(
        torch.finfo(dtype).eps
        for dtype in (x.dtype, *(term.dtype for term, _ in weighted_terms(coupling)))
    )
    # An error in W raises F by its square only, hence the square root.
    if bool(
        ((got - expected).abs() <= max(eps**0.5, 1e-6) * row_sums + 64 * eps * row_sums.max()).all()
    ):
        return None
    return (
        f"the step's coupling {coupling!r} is not that of the energy at this state: another penalty, graph or weight, "
        f"a state that was transformed on the way, or a coupling made at another state."
    )
