"""``certify``: does this step descend its energy, from which λ on, and if nothing is known, why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.pairs import State, check_heads, find_distance_above
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.spectrum import (
    Form,
    laplacian,
    laplacian_extremes,
    largest_eigenvalue,
    nonzero_spectrum,
    normalized_laplacian,
    precision,
)
from diffusion_mp.errors import CouplingMismatchError, check_choice, check_kind, check_positive, describe


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

    @classmethod
    def refused(cls, theorem: str, tau: float, reason: str) -> Certificate:
        """No step is covered: a premise fails."""
        return cls(theorem=theorem, holds=False, tau=tau, reason=reason)

    @classmethod
    def of_step(
        cls, theorem: str, tau: float, eigenvalue: float, leak: float, facts: str, *, weight: float = 1.0
    ) -> Certificate:
        """What both theorems say: λ ≥ τ / (2 w (2 − τ(λ₁ + κ))) for τ < 2/(λ₁ + κ), with w = ``weight``."""
        stiffness = eigenvalue + leak
        tau_max = 2 / stiffness if stiffness > 0 else math.inf
        known: dict[str, Any] = {"theorem": theorem, "tau": tau, "tau_max": tau_max, "eigenvalue": eigenvalue}
        if tau >= tau_max:
            reason = f"τ must be below τ_max = {tau_max:.6g} = 2/{stiffness:.6g}; {facts}."
            return cls(**known, holds=False, reason=reason)
        return cls(**known, holds=True, lam=tau / (2 * weight * (2 - tau * stiffness)), reason=f"Here {facts}.")


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
    if not hasattr(subject, "penalty"):
        raise TypeError(
            f"certify takes a Coupling, a Penalty or a diffusivity (anything with a `penalty`); got "
            f"{describe(subject)}. For a layer pass its coupling, conv(x, edge_index, return_coupling=True)[1], or its "
            f"diffusivity."
        )
    uncovered = _why_uncovered(subject, form)
    if uncovered is not None:
        return Certificate.refused("Theorem 7", tau, f"{type(subject).__name__}{uncovered}")
    heads = getattr(subject, "heads", 1)
    if x is not None and x.dim() == 2 and heads > 1:
        x = x.unflatten(1, (heads, -1))
    return _certify_penalty(subject.penalty, x, tau, leak, ptr, bool(getattr(subject, "row_stochastic", True)))


def theorem1(coupling: Coupling, tau: float, *, form: Form = "conservative", leak: float = 0.0) -> Certificate:
    """Theorem 1 for a fixed symmetric S: z − τ(Δ + κ)z descends ‖z − z_k‖² + λ[2 tr zᵀΔz + 2κ‖z‖²].

    For every state if and only if τ < 2/(λ₁ + κ) and λ ≥ τ / (2 (2 − τ(λ₁ + κ))), λ₁ the largest eigenvalue of the
    positive semi-definite Δ. (The paper leaves λ(τ) open and writes λ tr zᵀΔz, whose λ is twice this one.)
    """
    name = "Theorem 1"
    if not coupling.symmetric:
        return Certificate.refused(
            name,
            tau,
            f"the coupling is not symmetric ({coupling!r}), so its step is not the gradient of an energy. For a "
            f"row-normalised D̄⁻¹Ω certify the penalty, or the symmetric Ω with theorem7.",
        )
    rtol = precision(coupling.dtype).eigenvalue
    if coupling.nonnegative and form == "conservative":  # then Δ is positive semi-definite as it stands
        smallest, largest = 0.0, _largest_eigenvalue(coupling, rtol)
    else:
        smallest, largest = laplacian_extremes(coupling, form, rtol)
    if smallest < -1e3 * rtol * max(1.0, largest):
        which = "D̄ − S" if form == "conservative" else "I − S"
        reason = f"{which} has the negative eigenvalue {smallest:.4g}, so its energy is not bounded from below."
        return Certificate.refused(name, tau, reason)
    largest = max(largest, 0.0)
    return Certificate.of_step(name, tau, largest, leak, f"λ₁ = {largest:.6g}")


def theorem7(omega: Coupling, tau: float, *, leak: float = 0.0) -> Certificate:
    """Theorem 7 for symmetric Ω with positive degrees d̄: z − τ(I − D̄⁻¹Ω)z descends ‖z − z_k‖² + λ Σ_ij δ(‖z_i − z_j‖²).

    Whenever τ < 2/l_max and λ ≥ τ / (2 min d̄ (2 − τ l_max)), l_max the largest eigenvalue of I − D̄^-½ΩD̄^-½, for every
    concave δ with ω_ij = δ′(‖z_i − z_j‖²) at the step's start. (The paper states only that some τ exists.) A leak κ
    adds 2κλ⟨z, D̄z⟩ to the energy and κ to l_max. Why: with D the move, the surrogate of Proposition 6 changes by
    ‖D‖² − (4λ/τ)⟨D, D̄D⟩ + 2λ⟨D, (D̄ − Ω + κD̄)D⟩ ≤ ‖D‖² (1 − 2λ min d̄ (2/τ − l_max − κ)).
    """
    name = "Theorem 7"
    if not omega.symmetric:
        return Certificate.refused(
            name, tau, f"Ω is not symmetric ({omega!r}), so no energy of distances belongs to it."
        )
    if omega.num_nodes == 0:
        return Certificate.of_step(name, tau, 0.0, leak, "no nodes")
    degree = float(omega.degree().min())
    if degree <= 0:
        reason = f"a node has degree {degree:.4g} in Ω; the row-normalised step needs positive degrees."
        return Certificate.refused(name, tau, reason)
    rtol = precision(omega.dtype).eigenvalue
    heads = range(omega.heads)
    largest = max(0.0, *(largest_eigenvalue(normalized_laplacian(omega, head), rtol) for head in heads))
    facts = f"l_max = {largest:.6g}, min d̄ = {degree:.6g}"
    return Certificate.of_step(name, tau, largest, leak, facts, weight=degree)


@dataclass(frozen=True)
class EnergyBounds:
    """``lower`` · E(Z_k, k−1) ≤ E(Z_{k+1}, k) ≤ ``upper`` · E(Z_k, k−1), and Δ's non-zero spectrum from μ to λ₁."""

    lower: float
    upper: float
    smallest_nonzero: float
    largest: float


def energy_bounds(coupling: Coupling, tau: float) -> EnergyBounds:
    """Rates between which E = ‖Z − Z_k‖² + λ Σ_ij s_ij‖z_i − z_j‖² falls in a step Z − τΔZ, k ≥ 1, any λ.

    For τ ≤ 1/λ₁ these are (1 − τλ₁)² and (1 − τμ)², μ the smallest *non-zero* eigenvalue of Δ = D̄ − S (Proposition 4
    of TfD, Wu, Wipf & Yan, 2025). The paper's Eq. 9 takes the smallest one, which is 0 for every Laplacian and bounds
    nothing. Both terms of E live on the complement of Δ's kernel, where the eigenvalues of I − τΔ lie between 1 − τλ₁
    and 1 − τμ; hence for larger τ the upper rate is the larger of the two squares, and the lower one is 0 once the
    interval contains 0.

    Raises:
        CouplingMismatchError: S not symmetric or not declared non-negative. ValueError: τ not positive.
    """
    check_kind(coupling, "coupling", Coupling, "a Coupling")
    check_positive(tau, "tau")
    if not (coupling.symmetric and coupling.nonnegative):
        raise CouplingMismatchError(
            f"the bounds of Proposition 4 need a coupling that is symmetric and nonnegative; got {coupling!r}."
        )
    found = [ends for ends in (nonzero_spectrum(coupling, head) for head in range(coupling.heads)) if ends[1] > 0]
    smallest = min((ends[0] for ends in found), default=0.0)
    largest = max((ends[1] for ends in found), default=0.0)
    ends = (1 - tau * largest, 1 - tau * smallest)
    squares = [end**2 for end in ends]
    lower = 0.0 if ends[0] <= 0 <= ends[1] else min(squares)
    return EnergyBounds(lower, max(squares), smallest_nonzero=smallest, largest=largest)


def _largest_eigenvalue(coupling: Coupling, rtol: float) -> float:
    """λ₁ of D̄ − S over all heads."""
    heads = range(coupling.heads)
    return max(largest_eigenvalue(laplacian(coupling, head, "conservative"), rtol) for head in heads)


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
