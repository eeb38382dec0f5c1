"""``Certificate``, and the theorems about explicit steps: 1 and 7 for one step, T2 for all steps of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from diffusion_mp.checks import (
    NonnegativeNumber,
    PositiveNumber,
    check_has_values,
    checked,
)
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import spectrum
from diffusion_mp.energies.pairs import State, blocks, find_distance_above
from diffusion_mp.energies.penalties import Penalty
from diffusion_mp.energies.terms import penalty_flaw


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of a theorem about one step or all steps of a run.

    It is true if descent is proved, or if no counterexample was found.

    Attributes:
        theorem: name of the theorem.
        holds: whether the theorem covers the step: it descends the energy for every λ ≥ ``lam``, or the energy that
            ``energy`` names.
        tau: step size; NaN if steps have none.
        tau_max: the theorem covers step sizes below it; 0 if it covers none.
        lam: the smallest admissible λ for ``tau``, the factor of Σ_ij in the energy E(Z, k) (see `Energy`); ∞ if none
            is known.
        reason: why the theorem holds, or which premise fails.
        eigenvalue: λ₁ of Δ (Theorem 1), or l_max of I − D̄^-½ΩD̄^-½ (Theorem 7).
        energy: the energy with its coefficients (Theorem T1).
        layers: certificates of the layers of a model by name, if the layers have energies of their own.
        searched: number of states at which a counterexample was sought, if code outside the library claims a premise. 0
            if descent is proved.

    Examples:
        >>> isinstance(theorem1(AdjacencyDiffusivity("sym")(x, graph), tau=0.5), Certificate)
        True
    """

    theorem: str
    holds: bool
    tau: float = math.nan
    tau_max: float = 0.0
    lam: float = math.inf
    reason: str
    eigenvalue: float = math.nan
    energy: str = ""
    layers: Mapping[str, Certificate] = field(default_factory=dict)
    searched: int = 0

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        what = "the step" if math.isnan(self.tau) else f"τ = {self.tau:g}"
        # A sum of layers may be covered by several theorems.
        verb = "do" if self.theorem.startswith("Theorems") else "does"
        sentence = f"{self.theorem} {verb} not cover {what}: {self.reason}"
        if self.holds and self.searched:
            sentence = (
                f"No counterexample found in {self.searched} states to the descent of "
                f"{self.energy}. {self.reason}"
            )
        elif self.holds:
            proved = (
                f"descent for every λ ≥ {self.lam:.6g} (τ_max = {self.tau_max:.6g})"
            )
            if self.energy:
                proved = f"{self.energy} does not rise"
            sentence = f"{self.theorem} covers {what}: {proved}. {self.reason}"
        return "\n".join(
            [sentence, *(f"  {name}: {layer}" for name, layer in self.layers.items())]
        )

    @classmethod
    def refused(cls, theorem: str, tau: float, reason: str) -> Certificate:
        """Return the certificate of a premise that fails for every step size.

        Args:
            theorem: name of the theorem.
            tau: step size.
            reason: a sentence naming the premise.
        """
        return cls(theorem=theorem, holds=False, tau=tau, reason=reason)

    @classmethod
    def of_step(
        cls,
        theorem: str,
        tau: float,
        eigenvalue: float,
        leak: float,
        facts: str,
        *,
        weight: float = 1.0,
    ) -> Certificate:
        """Return the certificate of λ ≥ τ / (2w(2 − τ(λ₁ + κ))) for τ < 2/(λ₁ + κ).

        Args:
            theorem: name of the theorem.
            tau: step size τ.
            eigenvalue: λ₁.
            leak: κ.
            facts: the numbers that the reason names.
            weight: w; 1 by default.
        """
        stiffness = eigenvalue + leak
        # Nothing moves in a graph without edges and leak, so every step is covered.
        tau_max = 2 / stiffness if stiffness > 0 else math.inf
        certificate = cls(
            theorem=theorem,
            holds=tau < tau_max,
            tau=tau,
            tau_max=tau_max,
            reason=f"τ must be below τ_max = {tau_max:.6g} = 2/{stiffness:.6g}; {facts}.",
            eigenvalue=eigenvalue,
        )
        # λ stays infinite where no λ would do.
        if not certificate:
            return certificate
        lam = tau / (2 * weight * (2 - tau * stiffness))
        return replace(certificate, lam=lam, reason=f"Here {facts}.")


def state_flaw(penalty: Penalty, x: State, ptr: Tensor | None) -> str | None:
    """Return a sentence saying where δ fails to be a penalty at the distances of a state; ``None`` if nowhere."""
    # A flawed penalty has no domain to leave.
    flaw = penalty_flaw(penalty)
    if (
        flaw is not None
        or (beyond := find_distance_above(penalty.reach(x.dtype), x, ptr)) is None
    ):
        return flaw
    if math.isnan(beyond):
        return "the state has entries that are not finite."
    return (
        f"the state leaves the domain of {penalty!r}: a pair is at squared distance {beyond:.6g}, beyond "
        f"{penalty.domain[1]:g}. Scale the state into a ball of radius {math.sqrt(penalty.domain[1]) / 2:g}."
    )


@checked
def theorem1(
    coupling: Coupling,
    tau: PositiveNumber,
    *,
    form: spectrum.Form = "conservative",
    leak: NonnegativeNumber = 0.0,
) -> Certificate:
    """Certify an explicit step with a fixed symmetric coupling (Wu, Wipf & Yan 2025, Theorem 1, with a bound on λ).

    The step is z − τ(Δ + κ)z. With λ₁ the largest eigenvalue of a positive semi-definite Δ, it descends

        ‖z − z_k‖² + λ[2 tr zᵀΔz + 2κ‖z‖²]

    from every state if and only if τ < 2/(λ₁ + κ) and λ ≥ τ / (2 (2 − τ(λ₁ + κ))). (The paper leaves λ(τ) open and
    writes λ tr zᵀΔz, whose λ is twice this λ.)

    Args:
        coupling: the coupling S of Δ.
        tau: step size τ > 0.
        form: ``"conservative"``, the default: Δ = D̄ − S with the row sums D̄. ``"residual"``: Δ = I − S.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default.

    Examples:
        >>> bool(theorem1(AdjacencyDiffusivity("sym")(x, graph), tau=0.5, form="residual"))
        True
    """
    refused = partial(Certificate.refused, "Theorem 1", tau)
    if not coupling.symmetric:
        return refused(
            f"the coupling is not symmetric ({coupling!r}), so its step is not the gradient of an energy. For a "
            f"row-normalised D̄⁻¹Ω certify the penalty, or the symmetric Ω with theorem7."
        )
    if not bool(coupling.degree().isfinite().all()):
        return refused(f"the coupling has row sums that are not finite ({coupling!r}).")
    rtol = spectrum.precision(coupling.dtype).eigenvalue
    # Entries of S are rounded to its dtype, so eigenvalues are no more exact than that.
    # Δ is positive semi-definite, so one end is enough.
    if coupling.nonnegative and form == "conservative":
        heads = range(coupling.heads)
        largest = max(
            spectrum.largest_eigenvalue(spectrum.laplacian(coupling, head, form), rtol)
            for head in heads
        )
    else:
        smallest, largest = spectrum.laplacian_extremes(coupling, form, rtol)
        if smallest < -1e3 * rtol * max(1.0, largest):
            which = "D̄ − S" if form == "conservative" else "I − S"
            return refused(
                f"{which} has the negative eigenvalue {smallest:.4g}, so its energy has no lower bound."
            )
    # Δ has the eigenvalue zero, which rounding may take below.
    largest = max(largest, 0.0)
    return Certificate.of_step("Theorem 1", tau, largest, leak, f"λ₁ = {largest:.6g}")


@checked
def theorem7(
    omega: Coupling, tau: PositiveNumber, *, leak: NonnegativeNumber = 0.0
) -> Certificate:
    """Certify an explicit step with a row-normalised attention (Wu, Wipf & Yan 2025, Theorem 7, with a bound on τ).

    For a symmetric Ω with positive degrees d̄, the step is z − τ(I − D̄⁻¹Ω)z. With l_max the largest eigenvalue of I −
    D̄^-½ΩD̄^-½, it descends

        ‖z − z_k‖² + λ Σ_ij δ(‖z_i − z_j‖²)

    if τ < 2/l_max and λ ≥ τ / (2 min d̄ (2 − τ l_max)), for every concave δ with ω_ij = δ′(‖z_i − z_j‖²) at the start
    of the step. (The paper states only that some τ exists.) A leak κ adds 2κλ⟨z, D̄z⟩ to the energy and κ to l_max.
    Proof: with the move D, the surrogate of Proposition 6 changes by ‖D‖² − (4λ/τ)⟨D, D̄D⟩ + 2λ⟨D, (D̄ − Ω + κD̄)D⟩ ≤
    ‖D‖² (1 − 2λ min d̄ (2/τ − l_max − κ)).

    Args:
        omega: the coupling Ω.
        tau: step size τ > 0.
        leak: κ ≥ 0, the rate at which the state decays. 0 by default.

    Examples:
        >>> bool(theorem7(SimplePenalty().coupling(torch.nn.functional.normalize(x, dim=1)), tau=0.5))
        True
    """
    refused = partial(Certificate.refused, "Theorem 7", tau)
    of_step = partial(Certificate.of_step, "Theorem 7", tau)
    if not omega.symmetric:
        return refused(
            f"Ω is not symmetric ({omega!r}), so no energy of distances belongs to it."
        )
    if omega.num_nodes == 0:
        return of_step(0.0, leak, "no nodes")
    # The smallest degree bounds what a step gains, so an isolated node covers nothing.
    degrees = omega.degree()
    degree = float(degrees.min())
    if not (degree > 0 and float(degrees.max()) < math.inf):
        return refused(
            f"a node has degree {degree:.4g} in Ω; the row-normalised step needs finite degrees above zero."
        )
    rtol = spectrum.precision(omega.dtype).eigenvalue
    matrices = (
        spectrum.normalized_laplacian(omega, head) for head in range(omega.heads)
    )
    largest = max(
        0.0, *(spectrum.largest_eigenvalue(matrix, rtol) for matrix in matrices)
    )
    facts = f"l_max = {largest:.6g}, min d̄ = {degree:.6g}"
    return of_step(largest, leak, facts, weight=degree)


@checked
@torch.no_grad()
def certify_trajectory(
    penalty: Penalty, x: State, tau: PositiveNumber, *, ptr: Tensor | None = None
) -> Certificate:
    """Certify all steps of a run in which a penalty's attention is recomputed at every state (Theorem T2).

    The steps are z ← z − τ(z − D̄⁻¹Ωz), and the theorem is in docs/certified.md.

    For τ ≤ 1 the states stay within the convex hull of the first state, of diameter D. All degrees of a graph of n
    nodes are therefore at least d = f(0) + (n − 1) f(D²), and l_max ≤ 2(1 − 1/n). Hence E(Z_{k+1}, k) ≤ E(Z_k, k − 1)
    at every k for every λ ≥ τ / (2d(2 − τ l_max)). D is bounded by twice the largest distance to the mean, in O(N d).

    Args:
        penalty: δ, with f = δ′.
        x: the first state, [N, C] or [N, H, D]. For H heads the certificate is the one of the worst head.
        tau: step size τ > 0. Steps above 1 are not covered.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU. ``None`` is one graph.

    Examples:
        >>> bool(certify_trajectory(SimplePenalty(), torch.nn.functional.normalize(x, dim=1), tau=0.1))
        True
    """
    parts = blocks(x, ptr)
    check_has_values(x, "x")
    refused = partial(Certificate.refused, "Theorem T2", tau)
    if (flaw := state_flaw(penalty, x, ptr)) is not None:
        return refused(flaw)
    if tau > 1:
        reason = "above τ = 1 a step may leave the convex hull of the state, and no later degree is known."
        return replace(refused(reason), tau_max=1.0)
    degree = math.inf
    stiffness = 0.0
    for part in parts:
        wide = part.double()
        # The domain bounds D.
        # Rows lie in a ball around their mean, whose diameter no distance exceeds.
        radius = (wide - wide.mean(0)).square().sum(1).max()
        across = (4 * radius).clamp(max=penalty.domain[1])
        ends = torch.stack([torch.zeros_like(across), across])
        nearest, farthest = penalty.f(ends).tolist()
        # f falls, so that no neighbour weighs less than one at the largest distance.
        degree = min(degree, nearest + (len(part) - 1) * max(farthest, 0.0))
        stiffness = max(stiffness, 2 * (1 - 1 / len(part)))
    # Every head and graph has its own energy, and one λ has to serve all of them.
    facts = f"d >= {degree:.6g} and l_max <= {stiffness:.6g} at every state of the run"
    return replace(
        Certificate.of_step("Theorem T2", tau, stiffness, 0.0, facts, weight=degree),
        tau_max=1.0,
    )
