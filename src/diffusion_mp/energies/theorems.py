"""Theorems 1 and 7: explicit steps that descend an energy, for a coupling that is at hand."""

from __future__ import annotations

import math

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.certificate import Certificate
from diffusion_mp.energies.spectrum import (
    Form,
    laplacian,
    laplacian_extremes,
    largest_eigenvalue,
    normalized_laplacian,
    precision,
)


def theorem1(coupling: Coupling, tau: float, *, form: Form = "conservative", leak: float = 0.0) -> Certificate:
    """Theorem 1 for a fixed symmetric S: z − τ(Δ + κ)z descends ‖z − z_k‖² + λ[2 tr zᵀΔz + 2κ‖z‖²].

    For every state if and only if τ < 2/(λ₁ + κ) and λ ≥ τ / (2 (2 − τ(λ₁ + κ))), λ₁ the largest eigenvalue of the
    positive semi-definite Δ. (The paper leaves λ(τ) open and writes λ tr zᵀΔz, whose λ is twice this one.)

    Args:
        coupling: S, symmetric.
        tau: τ.
        form: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
        leak: κ ≥ 0.

    Examples:
        >>> bool(theorem1(AdjacencyDiffusivity("sym")(x, graph), tau=0.5, form="residual"))
        True
    """
    name = "Theorem 1"
    if not coupling.symmetric:
        return Certificate.refused(
            name,
            tau,
            f"the coupling is not symmetric ({coupling!r}), so its step is not the gradient of an energy. For a "
            f"row-normalised D̄⁻¹Ω certify the penalty, or the symmetric Ω with theorem7.",
        )
    if not bool(coupling.degree().isfinite().all()):
        return Certificate.refused(name, tau, f"the coupling has row sums that are not finite ({coupling!r}).")
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

    Args:
        omega: Ω.
        tau: τ.
        leak: κ ≥ 0.

    Examples:
        >>> bool(theorem7(SimplePenalty().coupling(torch.nn.functional.normalize(x, dim=1)), tau=0.5))
        True
    """
    name = "Theorem 7"
    if not omega.symmetric:
        return Certificate.refused(
            name, tau, f"Ω is not symmetric ({omega!r}), so no energy of distances belongs to it."
        )
    if omega.num_nodes == 0:
        return Certificate.of_step(name, tau, 0.0, leak, "no nodes")
    degrees = omega.degree()
    degree = float(degrees.min())
    if not (degree > 0 and float(degrees.max()) < math.inf):
        reason = f"a node has degree {degree:.4g} in Ω; the row-normalised step needs positive and finite degrees."
        return Certificate.refused(name, tau, reason)
    rtol = precision(omega.dtype).eigenvalue
    heads = range(omega.heads)
    largest = max(0.0, *(largest_eigenvalue(normalized_laplacian(omega, head), rtol) for head in heads))
    facts = f"l_max = {largest:.6g}, min d̄ = {degree:.6g}"
    return Certificate.of_step(name, tau, largest, leak, facts, weight=degree)


def _largest_eigenvalue(coupling: Coupling, rtol: float) -> float:
    """λ₁ of D̄ − S over all heads."""
    heads = range(coupling.heads)
    return max(largest_eigenvalue(laplacian(coupling, head, "conservative"), rtol) for head in heads)
