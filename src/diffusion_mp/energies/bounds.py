"""``energy_bounds``: how fast the energy of a fixed coupling falls."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.spectrum import nonzero_spectrum
from diffusion_mp.errors import CouplingMismatchError, check_kind, check_positive


@dataclass(frozen=True)
class EnergyBounds:
    """``lower`` · E(Z_k, k−1) ≤ E(Z_{k+1}, k) ≤ ``upper`` · E(Z_k, k−1), and Δ's non-zero spectrum from μ to λ₁.

    Attributes:
        lower, upper: the rates.
        smallest_nonzero, largest: μ and λ₁.

    Examples:
        >>> bounds = energy_bounds(AdjacencyDiffusivity("sym")(x, graph), tau=0.5)
        >>> isinstance(bounds, EnergyBounds), 0 <= bounds.lower <= bounds.upper
        (True, True)
    """

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

    Args:
        coupling: S, symmetric.
        tau: τ > 0.

    Raises:
        CouplingMismatchError: S not symmetric or not declared non-negative. ValueError: τ not positive.

    Examples:
        >>> bounds = energy_bounds(AdjacencyDiffusivity("sym")(x, graph), tau=0.5)
        >>> bounds.lower <= bounds.upper
        True
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
