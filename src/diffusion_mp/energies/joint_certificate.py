"""``certify_step``: whether a certified step descends the energy that it is said to descend."""

from __future__ import annotations

from types import NoneType

import torch
from torch import Tensor

from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    ProjectedCoupling,
    ScaledCoupling,
    SumCoupling,
)
from diffusion_mp.couplings.reweighted import averaged
from diffusion_mp.energies.certificate import Certificate
from diffusion_mp.energies.constraints import Ball, Constraint
from diffusion_mp.energies.joint import JointEnergy
from diffusion_mp.energies.pairs import State, by_head
from diffusion_mp.errors import check_device, check_kind, check_values, describe

THEOREM = "Theorem T1"


@torch.no_grad()
def certify_step(energy: JointEnergy, coupling: Coupling | None, x: State) -> Certificate:
    """Certify that a `CertifiedStep` from ``x`` with the energy's β, source, metric and constraint does not raise it.

    By Theorem T1 of docs/certified.md, F(x′) ≤ F(x) if W = λ (f(‖x_i − x_j‖²))_ij + μA is symmetric and nonnegative,
    rows lie in C, and δ is concave as far apart as rows of C can be. None of this changes from step to step, so with
    W made anew at every state the certificate is for a block of any number of steps. It holds in exact arithmetic;
    rounding may raise F by its own size.

    Args:
        energy: F.
        coupling: W as it was used at x, which has to be the one of ``energy``; ``None`` takes that.
        x: the state [N, C] or [N, H, D].

    Raises:
        TypeError, ValueError: arguments of another kind, or shapes that do not fit.

    Examples:
        >>> S = AdjacencyDiffusivity("sum")(x, graph)
        >>> bool(certify_step(JointEnergy(None, graph_term=S, source=x), S, x))
        True
    """
    check_kind(energy, "energy", JointEnergy, "a JointEnergy")
    check_kind(coupling, "coupling", (Coupling, NoneType), "a Coupling or None")
    energy._check(x, "x")
    if coupling is not None:
        check_values(by_head(x), coupling.num_nodes, coupling.heads, "x")
        check_device(x, "x", coupling.device, "the coupling")
    if x.is_meta:
        raise ValueError(f"x must have values, on which the certificate depends; got {describe(x)}.")
    reason = _why_not(energy, coupling, x)
    if reason is not None:
        return Certificate(theorem=THEOREM, holds=False, energy=repr(energy), reason=reason)
    rows = "its row sums" if energy.constraint.convex else "twice its row sums, or once where it is definite"
    return Certificate(
        theorem=THEOREM,
        holds=True,
        tau_max=float("inf"),
        lam=float(energy.lam),
        energy=repr(energy),
        reason=f"Here W is symmetric and nonnegative, p are {rows}, and rows stay in {energy.constraint}.",
    )


def _why_not(energy: JointEnergy, coupling: Coupling | None, x: Tensor) -> str | None:
    """The premise that fails, as a sentence; None where all of them hold."""
    if not bool(torch.isfinite(x).all()):
        return f"the state has entries that are not finite: {describe(x)}."
    if not bool(energy.constraint.holds(by_head(x))):
        return f"the state leaves {energy.constraint}; begin with its projection, constraint.project(x)."
    if energy.metric is not None and not bool((energy.metric > 0).all()):
        return f"the metric must be positive; its least entry is {float(energy.metric.min()):g}."
    if energy.penalty is not None:
        flaw = energy.penalty.flaw()
        if flaw is not None:
            return f"{energy.penalty!r} is no penalty on {energy.penalty.domain}: {flaw}"
        seen, limit = _seen(energy).diameter, energy.penalty.domain[1]
        if seen**2 > limit * (1 + 1e-6):
            return (
                f"{energy.penalty!r} is concave up to squared distance {limit:g}, and {energy.constraint} lets rows be "
                f"{seen**2:g} apart. Take a ball or sphere of radius <= {limit**0.5 / 2:g}, or another penalty."
            )
    own = _coupling(energy, x.double())
    for what, terms in (("the energy's own", own), ("the step's", coupling)):
        for promise in ("symmetric", "nonnegative"):
            if terms is not None and not getattr(terms, promise):
                return f"{what} coupling is not promised to be {promise}, for {_culprit(terms, promise)!r} is not."
    if coupling is not None and not _agree(own, coupling, x):
        return (
            f"the step's coupling {coupling!r} is not that of the energy at this state: another penalty, graph or "
            f"weight, a state that was transformed on the way, or a coupling made at another state."
        )
    return None


def _seen(energy: JointEnergy) -> Constraint:
    """What the constraint says of the rows that the penalty sees."""
    if energy.projection is None or energy.constraint.diameter == float("inf"):
        return energy.constraint
    return Ball(float(torch.linalg.matrix_norm(energy.projection.double(), 2).max()) * energy.constraint.diameter / 2)


def _coupling(energy: JointEnergy, x: Tensor) -> Coupling:
    """W = λ (f(‖x_i − x_j‖²))_ij + μA of an energy at a state."""
    terms: list[Coupling] = []
    if energy.penalty is not None:
        pairs = energy.penalty.coupling(energy._seen(x), energy.ptr, constraint=_seen(energy))
        pairs = averaged(pairs) if energy.mean else pairs
        if energy.projection is not None:
            pairs = ProjectedCoupling(pairs, energy.projection.double())
        terms.append(ScaledCoupling(float(energy.lam), pairs))
    if energy.graph_term is not None:
        terms.append(ScaledCoupling(float(energy.mu), energy.graph_term))
    return SumCoupling(terms) if terms else 0.0 * IdentityCoupling(len(x), dtype=x.dtype, device=x.device)


def _culprit(coupling: Coupling, promise: str) -> Coupling:
    """The part of a coupling that does not promise it, though its own parts do."""
    parts = getattr(coupling, "terms", [getattr(coupling, "coupling", None)])
    for part in parts:
        if isinstance(part, Coupling) and not getattr(part, promise):
            return _culprit(part, promise)
    return coupling


def _agree(own: Coupling, coupling: Coupling, x: Tensor) -> bool:
    """Whether two couplings have the same Laplacian, as far as one product with a state without pattern can tell."""
    if not x.numel():
        return True
    probe = torch.arange(x.numel(), dtype=torch.float64, device=x.device).square().cos().view(by_head(x).shape)
    (expected, row_sums), got = own.majorized(probe, convex=True), coupling.laplacian(probe)
    size = row_sums.max() * probe.abs().max()
    return bool((got - expected).abs().max() <= torch.finfo(coupling.dtype).eps ** 0.5 * size)
