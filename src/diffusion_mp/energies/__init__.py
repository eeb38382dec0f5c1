"""What a diffusion descends: penalties δ, energies built from them, and certificates that a step goes down."""

from diffusion_mp.energies.certificate import (
    Certificate,
    EnergyBounds,
    certify,
    energy_bounds,
    theorem1,
    theorem7,
)
from diffusion_mp.energies.constraints import (
    Ball,
    Constraint,
    Nonnegative,
    Sphere,
    Unconstrained,
    get_constraint,
)
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.joint import JointEnergy
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
    "Ball",
    "Certificate",
    "Constraint",
    "Energy",
    "EnergyBounds",
    "GaussianPenalty",
    "JointEnergy",
    "Nonnegative",
    "Penalty",
    "QuadraticPenalty",
    "SigmoidPenalty",
    "SimplePenalty",
    "SoftmaxPenalty",
    "Sphere",
    "Unconstrained",
    "certify",
    "energy_bounds",
    "get_constraint",
    "get_penalty",
    "theorem1",
    "theorem7",
]
