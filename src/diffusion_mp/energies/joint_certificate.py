"""``certify_step``: whether a certified step descends the energy that it is said to descend."""

from __future__ import annotations

import math
from types import NoneType

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    ProjectedCoupling,
    ScaledCoupling,
    SparseCoupling,
    SumCoupling,
)
from diffusion_mp.couplings.weighted import averaged, spectral_norms
from diffusion_mp.energies.certificate import Certificate
from diffusion_mp.energies.constraints import Ball, Constraint
from diffusion_mp.energies.function import find_flaw
from diffusion_mp.energies.joint import JointEnergy
from diffusion_mp.energies.pairs import State, by_head
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.errors import check_device, check_kind, check_values, describe

THEOREM = "Theorem T1"
#: Nodes whose columns of A are looked at.
LOOKED_AT = 32


@torch.no_grad()
def certify_step(energy: JointEnergy, coupling: Coupling | None, x: State) -> Certificate:
    """Certify that a `CertifiedStep` from ``x`` with the energy's β, source, metric and constraint does not raise it.

    By Theorem T1 of docs/certified.md, F(x′) ≤ F(x) if W = λ (f(‖x_i − x_j‖²))_ij + μA is symmetric and nonnegative,
    rows lie in C, and δ is concave as far apart as rows of C can be. None of this changes from step to step, so with
    W made anew at every state, of this A, the certificate is for a block of any number of steps. It holds in exact
    arithmetic; rounding may raise F by its own size.

    Promises are also looked at: f and δ at some hundred distances, and of A the entries of observed edges and those
    between the first nodes.

    Args:
        energy: F. Its A is a coupling that stays as it is. An A that is made anew at every state belongs to another F.
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
    return (
        _not_finite(energy, x)
        or _outside(energy.constraint, by_head(x))
        or _no_penalty(energy)
        or _not_promised("energy's own", own := _coupling(energy, x.double()))
        or _not_kept(energy.graph_term, energy.constraint.convex)
        or _not_promised("step's", coupling)
        or _another(own, coupling, x)
    )


def _not_finite(energy: JointEnergy, x: Tensor) -> str | None:
    """A number that is not finite, or negative where it may not be."""
    for name in ("lam", "mu", "beta"):
        number = float(getattr(energy, name))
        if not 0 <= number < math.inf:
            return f"{name} must be finite and >= 0; it is {number:g}."
    given = {"state": x, "source": energy.source, "metric": energy.metric, "projection": energy.projection}
    for name, value in given.items():
        if value is not None and not bool(torch.isfinite(value).all()):
            return f"the {name} has entries that are not finite: {describe(value)}."
    if energy.metric is not None and not bool((energy.metric > 0).all()):
        return f"the metric must be positive; its least entry is {float(energy.metric.min()):g}."
    return None


def _outside(constraint: Constraint, x: Float[Tensor, "N H D"]) -> str | None:
    """That rows are not in C, by more than a projection rounds: to move them there may raise the rest of F."""
    rounding = 16 * torch.finfo(x.dtype).eps * torch.linalg.vector_norm(x, dim=2)
    moved = torch.linalg.vector_norm(constraint.project(x) - x, dim=2)
    if bool(constraint.holds(x)) and bool((moved <= rounding).all()):
        return None
    return f"the state leaves {constraint}; begin with its projection, constraint.project(x)."


def _no_penalty(energy: JointEnergy) -> str | None:
    """That δ is no penalty, or none as far apart as rows can be."""
    penalty = energy.penalty
    if penalty is None:
        return None
    flaw = find_flaw(penalty)
    if flaw is not None:
        return f"{penalty!r} is no penalty on {penalty.domain}: {flaw}"
    farthest, limit = _seen(energy, penalty).diameter ** 2, penalty.domain[1]
    if farthest <= limit:
        return None
    return (
        f"{penalty!r} is concave up to squared distance {limit:g}, and {energy.constraint} lets rows be {farthest:g} "
        f"apart. Take a ball or sphere of radius <= {limit**0.5 / 2:g}, or another penalty."
    )


def _seen(energy: JointEnergy, penalty: Penalty) -> Constraint:
    """What the constraint says of the rows that the penalty sees.

    A projection that was divided by its norm is longer than one by rounding, and f at the far end of the domain as
    little below zero. That is as good: with loops w_ii = f(0) in W, D_W + W stays positive semi-definite.
    """
    within, end = energy.constraint, penalty.domain[1]
    norm = 1.0 if energy.projection is None else float(spectral_norms(energy.projection.double()).max())
    if energy.projection is None or (norm > 0 and within.diameter == math.inf):
        return within
    farthest = norm * within.diameter if norm > 0 else 0.0
    if end < farthest**2 <= penalty.reach(torch.promote_types(energy.projection.dtype, torch.float32)):
        farthest = math.nextafter(math.sqrt(end), 0.0)
    return Ball(max(farthest / 2, torch.finfo(torch.float64).tiny))


def _coupling(energy: JointEnergy, x: Tensor) -> Coupling:
    """W = λ (f(‖x_i − x_j‖²))_ij + μA of an energy at a state."""
    terms: list[Coupling] = []
    if energy.penalty is not None:
        pairs = energy.penalty.coupling(energy._seen(x), energy.ptr, constraint=_seen(energy, energy.penalty))
        pairs = averaged(pairs) if energy.mean else pairs
        if energy.projection is not None:
            pairs = ProjectedCoupling(pairs, energy.projection.double())
        terms.append(ScaledCoupling(float(energy.lam), pairs))
    if energy.graph_term is not None:
        terms.append(ScaledCoupling(float(energy.mu), energy.graph_term))
    return SumCoupling(terms) if terms else 0.0 * IdentityCoupling(len(x), dtype=x.dtype, device=x.device)


def _not_kept(coupling: Coupling | None, convex: bool) -> str | None:
    """What A promises and its entries deny: those of all observed edges, or those between the first nodes."""
    for term in [] if coupling is None else _terms(coupling):
        whole = term
        while isinstance(whole, ScaledCoupling):
            whole = whole.coupling
        observed = whole.graph.edges if isinstance(whole, SparseCoupling) else None
        first = torch.arange(min(term.num_nodes, LOOKED_AT), device=term.device)
        pairs = torch.cartesian_prod(first, first).T if observed is None else observed
        if not pairs.numel():
            continue
        forth, back = term.at(pairs).double(), term.at(pairs.flip(0)).double()
        size = forth.abs() + back.abs()
        eps = torch.finfo(term.dtype).eps  # entries that are made of a state are as exact as its squares
        rounding = eps**0.5 * size.max() if observed is None else 64 * eps * size
        if not bool(size.isfinite().all()):
            return f"A has entries that are not finite, in {term!r}."
        if bool((forth < -rounding).any()):
            return f"A has the negative entry {float(forth.min()):g}, which {term!r} promises not to have."
        if bool(((forth - back).abs() > rounding).any()):
            return f"A has two entries a_ij and a_ji that differ by {float((forth - back).abs().max()):g}, in {term!r}."
        if not convex and observed is None and term.positive_semidefinite:
            least = float(torch.linalg.eigvalsh(forth.view(len(first), len(first), -1).permute(2, 0, 1)).min())
            if least < -len(first) * float(rounding):
                return f"A has the negative eigenvalue {least:g}, which {term!r} promises not to have."
    return None


def _terms(coupling: Coupling) -> list[Coupling]:
    """The parts of a sum, and of multiples of one."""
    if isinstance(coupling, SumCoupling):
        return [part for term in coupling.terms for part in _terms(term)]
    if isinstance(coupling, ScaledCoupling) and isinstance(coupling.coupling, SumCoupling):
        return [part for term in coupling.coupling.terms for part in _terms(coupling.scale * term)]
    return [coupling]


def _not_promised(whose: str, coupling: Coupling | None) -> str | None:
    """What a coupling does not promise."""
    for promise in ("symmetric", "nonnegative"):
        if coupling is not None and not getattr(coupling, promise):
            culprit = _culprit(coupling, promise)
            return f"the {whose} coupling is not promised to be {promise}, for {culprit!r} is not."
    return None


def _another(own: Coupling, coupling: Coupling | None, x: Tensor) -> str | None:
    """That W is not finite, or the step's not the energy's, as far as a product with a state without pattern tells."""
    if not x.numel():
        return None
    probe = torch.arange(x.numel(), dtype=torch.float64, device=x.device).square().cos().view(by_head(x).shape)
    expected, row_sums = own.majorized(probe, convex=True)
    got = expected if coupling is None else coupling.laplacian(probe)
    for whose, product in (("energy's own", expected), ("step's", got)):
        if not bool(product.isfinite().all()):
            return f"the {whose} coupling has entries that are not finite in its dtype, or too large to be summed."
    if coupling is None:
        return None
    eps = max(torch.finfo(dtype).eps for dtype in (x.dtype, *(term.dtype for term in _terms(coupling))))
    # A step with a W that is a little off raises F by the square of that.
    if not bool(((got - expected).abs() <= max(eps**0.5, 1e-6) * row_sums + 64 * eps * row_sums.max()).all()):
        return (
            f"the step's coupling {coupling!r} is not that of the energy at this state: another penalty, graph or "
            f"weight, a state that was transformed on the way, or a coupling made at another state."
        )
    return None


def _culprit(coupling: Coupling, promise: str) -> Coupling:
    """The part of a coupling that does not promise it, though its own parts do."""
    parts = getattr(coupling, "terms", [getattr(coupling, "coupling", None)])
    for part in parts:
        if isinstance(part, Coupling) and not getattr(part, promise):
            return _culprit(part, promise)
    return coupling
