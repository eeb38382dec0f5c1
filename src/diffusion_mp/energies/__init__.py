"""What a diffusion descends: penalties δ, energies built from them, and certificates that a step goes down."""

from diffusion_mp.energies.certificate import (
    Certificate,
    EnergyBounds,
    certify,
    energy_bounds,
    theorem1,
    theorem7,
)
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.penalties import (
    GaussianPenalty,
    Penalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
    get_penalty,
)

__all__ = [
    "Certificate",
    "Energy",
    "EnergyBounds",
    "GaussianPenalty",
    "Penalty",
    "QuadraticPenalty",
    "SigmoidPenalty",
    "SimplePenalty",
    "SoftmaxPenalty",
    "certify",
    "energy_bounds",
    "get_penalty",
    "theorem1",
    "theorem7",
]
