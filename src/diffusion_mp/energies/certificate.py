"""``certify``: does this step descend its energy, from which λ on, and if nothing is known, why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.pairs import State, check_heads, find_distance_above
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.spectrum import extreme_eigenvalue, laplacian, normalized_laplacian, solver_rtol
from diffusion_mp.errors import check_choice, check_positive, describe

Form = Literal["conservative", "residual"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a theorem says about one step of size ``tau``; true if and only if descent is proved.

    Attributes:
        theorem: the theorem asked.
        holds: the step descends ``Energy(penalty, lam)`` for every ``lam`` ≥ the certificate's.
        tau: the step size asked about.
        tau_max: step sizes below this are covered; 0 when a premise fails for all of them.
        lam: the smallest admissible λ for ``tau``, in the convention of `Energy`; ∞ when none is known.
        reason: why it holds, or which premise fails.
        eigenvalue: the largest eigenvalue behind the bound, λ₁ of Δ (Theorem 1) or l_max of I − D̄^-½ΩD̄^-½ (Theorem 7).
    """

    theorem: str
    holds: bool
    tau: float
    tau_max: float = 0.0
    lam: float = math.inf
    reason: str
    eigenvalue: float = math.nan

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        if self.holds:
            bound = f"descent for every λ ≥ {self.lam:.6g} (τ_max = {self.tau_max:.6g})"
            return f"{self.theorem} covers τ = {self.tau:g}: {bound}. {self.reason}"
        return f"{self.theorem} does not cover τ = {self.tau:g}: {self.reason}"


def certify(
    subject: Coupling | Penalty | Any,
    x: State | None,
    tau: float,
    *,
    form: Form = "conservative",
    leak: float = 0.0,
    ptr: Tensor | None = None,
) -> Certificate:
    """Certify the explicit step of size ``tau`` from state ``x`` (TfD: Wu, Wipf & Yan, 2025; bounds as corrected here).

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
        ValueError: τ ≤ 0 or not finite, negative leak. TypeError: a subject of another kind.
    """
    check_positive(tau, "tau")
    check_positive(leak, "leak", allow_zero=True)
    check_choice(form, "form", ["conservative", "residual"])
    if isinstance(subject, Coupling):
        return theorem1(subject, tau, form=form, leak=leak)
    if isinstance(subject, Penalty):
        return _certify_penalty(subject, x, tau, leak, ptr)
    if hasattr(subject, "penalty"):
        return _certify_diffusivity(subject, x, tau, form, leak, ptr)
    raise TypeError(
        f"certify takes a Coupling, a Penalty or a diffusivity (anything with a `penalty`); got {describe(subject)}. "
        f"For a layer pass its coupling, conv(x, edge_index, return_coupling=True)[1], or its diffusivity."
    )


def theorem1(coupling: Coupling, tau: float, *, form: Form = "conservative", leak: float = 0.0) -> Certificate:
    """Theorem 1 for a fixed symmetric S: z − τ(Δ + κ)z descends ‖z − z_k‖² + λ[2 tr zᵀΔz + 2κ‖z‖²].

    For every state if and only if τ < 2/(λ₁ + κ) and λ ≥ τ / (2 (2 − τ(λ₁ + κ))), λ₁ the largest eigenvalue of the
    positive semi-definite Δ. (The paper leaves λ(τ) open and writes λ tr zᵀΔz, whose λ is twice this one.)
    """
    name = "Theorem 1"
    if not coupling.symmetric:
        return _refuse(
            name,
            tau,
            f"the coupling is not symmetric ({coupling!r}), so its step is not the gradient of an energy. For a "
            f"row-normalised D̄⁻¹Ω certify the penalty, or the symmetric Ω with theorem7.",
        )
    rtol = solver_rtol(coupling)
    operators = [laplacian(coupling, head, form) for head in range(coupling.heads)]
    largest = max(max(extreme_eigenvalue(op, "largest", rtol) for op in operators), 0.0)
    if not (coupling.nonnegative and form == "conservative"):  # there Δ is positive semi-definite as it stands
        smallest = min(extreme_eigenvalue(op, "smallest", rtol) for op in operators)
        if smallest < -1e3 * rtol * max(1.0, largest):
            which = "D̄ − S" if form == "conservative" else "I − S"
            return _refuse(
                name,
                tau,
                f"{which} has the negative eigenvalue {smallest:.4g}, so its energy is not bounded from below.",
            )
    return _bound(name, tau, largest + leak, largest, f"λ₁ = {largest:.6g}", "λ₁")


def theorem7(omega: Coupling, tau: float, *, leak: float = 0.0) -> Certificate:
    """Theorem 7 for symmetric Ω with positive degrees d̄: z − τ(I − D̄⁻¹Ω)z descends ‖z − z_k‖² + λ Σ_ij δ(‖z_i − z_j‖²).

    Whenever τ < 2/l_max and λ ≥ τ / (2 min d̄ (2 − τ l_max)), l_max the largest eigenvalue of I − D̄^-½ΩD̄^-½, for every
    concave δ with ω_ij = δ′(‖z_i − z_j‖²) at the step's start. (The paper states only that some τ exists.) A leak κ
    adds 2κλ⟨z, D̄z⟩ to the energy and κ to l_max. Why: with D the move, the surrogate of Proposition 6 changes by
    ‖D‖² − (4λ/τ)⟨D, D̄D⟩ + 2λ⟨D, (D̄ − Ω + κD̄)D⟩ ≤ ‖D‖² (1 − 2λ min d̄ (2/τ − l_max − κ)).
    """
    name = "Theorem 7"
    if not omega.symmetric:
        return _refuse(name, tau, f"Ω is not symmetric ({omega!r}), so no energy of distances belongs to it.")
    if omega.num_nodes == 0:
        return _bound(name, tau, leak, 0.0, "no nodes", "l_max")
    degree = float(omega.degree().min())
    if degree <= 0:
        return _refuse(
            name, tau, f"a node has degree {degree:.4g} in Ω; the row-normalised step needs positive degrees."
        )
    rtol = solver_rtol(omega)
    heads = range(omega.heads)
    largest = max(0.0, *(extreme_eigenvalue(normalized_laplacian(omega, head), "largest", rtol) for head in heads))
    return _bound(
        name, tau, largest + leak, largest, f"l_max = {largest:.6g}, min d̄ = {degree:.6g}", "l_max", weight=degree
    )


def _certify_penalty(
    penalty: Penalty, x: Tensor | None, tau: float, leak: float, ptr: Tensor | None, normalize: bool = True
) -> Certificate:
    """Theorem 7, or without the normalisation Theorem 1 for Ω, which majorises the penalty's energy (Proposition 6)."""
    if x is None:
        raise ValueError("x must be given: what a penalty couples depends on the state.")
    check_heads(x)
    if x.is_meta:
        raise ValueError(f"x must have values, on which the certificate depends; got {describe(x)}.")
    reach = penalty.domain[1] * (1 + 16 * torch.finfo(x.dtype).eps)  # unit vectors are of unit norm up to rounding
    beyond = find_distance_above(reach, x, ptr)
    if beyond is not None:
        return _refuse(
            "Theorem 7",
            tau,
            f"the state leaves the domain of {penalty!r}: a pair is at squared distance {beyond:.6g}, beyond "
            f"{penalty.domain[1]:g}. Scale the state into a ball of radius {math.sqrt(penalty.domain[1]) / 2:g}.",
        )
    with torch.no_grad():
        omega = penalty.coupling(x.double(), ptr)
        return theorem7(omega, tau, leak=leak) if normalize else theorem1(omega, tau, leak=leak)


def _certify_diffusivity(
    diffusivity: Any, x: Tensor | None, tau: float, form: Form, leak: float, ptr: Tensor | None
) -> Certificate:
    """Through the diffusivity's penalty, head by head; or the reason why there is none."""
    name, kind, penalty = "Theorem 7", type(diffusivity).__name__, diffusivity.penalty
    if penalty is None:
        why = (
            getattr(diffusivity, "why_no_penalty", "")
            or "it declares no penalty, so no energy is known to belong to it."
        )
        return _refuse(name, tau, f"{kind}: {why}")
    if getattr(diffusivity, "needs_graph", False):
        return _refuse(
            name,
            tau,
            f"{kind} couples the edges of a graph only; pass its unnormalised symmetric coupling to theorem7.",
        )
    normalize = bool(getattr(diffusivity, "row_stochastic", True))
    if not normalize and form == "residual":
        return _refuse(
            name, tau, f"{kind} is not row-normalised, and the residual step then follows no sum over pairs."
        )
    heads = getattr(diffusivity, "heads", 1)
    if x is not None and x.dim() == 2 and heads > 1:
        x = x.unflatten(1, (heads, -1))
    return _certify_penalty(penalty, x, tau, leak, ptr, normalize)


def _bound(
    theorem: str, tau: float, stiffness: float, eigenvalue: float, facts: str, symbol: str, weight: float = 1.0
) -> Certificate:
    """λ ≥ τ / (2 w (2 − τ stiffness)) for τ < 2 / stiffness."""
    tau_max = 2 / stiffness if stiffness > 0 else math.inf
    if tau >= tau_max:
        reason = f"τ must be below τ_max = {tau_max:.6g} = 2/{stiffness:.6g}; {facts}."
        return Certificate(theorem=theorem, holds=False, tau=tau, tau_max=tau_max, reason=reason, eigenvalue=eigenvalue)
    return Certificate(
        theorem=theorem,
        holds=True,
        tau=tau,
        tau_max=tau_max,
        lam=tau / (2 * weight * (2 - tau * stiffness)),
        reason=f"Here {facts}.",
        eigenvalue=eigenvalue,
    )


def _refuse(theorem: str, tau: float, reason: str) -> Certificate:
    return Certificate(theorem=theorem, holds=False, tau=tau, reason=reason)
