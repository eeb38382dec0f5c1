"""``Certificate``: what a theorem says about a step, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a theorem says about a step, or about all of them; true if and only if descent is proved.

    Attributes:
        theorem: the theorem asked.
        holds: the step descends ``Energy(penalty, lam)`` for every ``lam`` ≥ the certificate's, or ``energy``.
        tau: the step size asked about; NaN where steps have none.
        tau_max: step sizes below this are covered; 0 when a premise fails for all of them.
        lam: the smallest admissible λ for ``tau``, in the convention of `Energy`; ∞ when none is known.
        reason: why it holds, or which premise fails.
        eigenvalue: the largest eigenvalue behind the bound, λ₁ of Δ (Theorem 1) or l_max of I − D̄^-½ΩD̄^-½ (Theorem 7).
        energy: the energy with its coefficients, where the theorem is about one that is given (Theorem T1).
        layers: of a model whose layers have energies of their own, what is known of each, by name.

    Examples:
        >>> certificate = certify(SimplePenalty(), torch.nn.functional.normalize(x, dim=1), tau=0.5)
        >>> isinstance(certificate, Certificate), bool(certificate), certificate.lam > 0
        (True, True, True)
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

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return "\n".join([self._sentence(), *(f"  {name}: {layer}" for name, layer in self.layers.items())])

    def _sentence(self) -> str:
        what = "the step" if math.isnan(self.tau) else f"τ = {self.tau:g}"
        if self.energy and self.holds:
            return f"{self.theorem} covers {what}: {self.energy} does not rise. {self.reason}"
        if self.holds:
            bound = f"descent for every λ ≥ {self.lam:.6g} (τ_max = {self.tau_max:.6g})"
            return f"{self.theorem} covers {what}: {bound}. {self.reason}"
        return f"{self.theorem} does not cover {what}: {self.reason}"

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
