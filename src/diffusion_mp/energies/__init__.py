"""What a diffusion descends: penalties δ, energies built from them, and certificates that a step goes down."""

from diffusion_mp.energies.bounds import EnergyBounds, energy_bounds
from diffusion_mp.energies.certificate import Certificate
from diffusion_mp.energies.certification import certify
from diffusion_mp.energies.constraints import (
    Ball,
    Constraint,
    Nonnegative,
    Sphere,
    Unconstrained,
    get_constraint,
)
from diffusion_mp.energies.energy import Energy
from diffusion_mp.energies.function import FunctionPenalty
from diffusion_mp.energies.joint import JointEnergy
from diffusion_mp.energies.joint_certificate import certify_step
from diffusion_mp.energies.mixture import MixturePenalty
from diffusion_mp.energies.penalties import (
    GaussianPenalty,
    Penalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
    get_penalty,
)
from diffusion_mp.energies.theorems import theorem1, theorem7
from diffusion_mp.energies.trajectory import certify_trajectory

__all__ = [
    "Ball",
    "Certificate",
    "Constraint",
    "Energy",
    "EnergyBounds",
    "FunctionPenalty",
    "GaussianPenalty",
    "JointEnergy",
    "MixturePenalty",
    "Nonnegative",
    "Penalty",
    "QuadraticPenalty",
    "SigmoidPenalty",
    "SimplePenalty",
    "SoftmaxPenalty",
    "Sphere",
    "Unconstrained",
    "certify",
    "certify_step",
    "certify_trajectory",
    "energy_bounds",
    "get_constraint",
    "get_penalty",
    "theorem1",
    "theorem7",
]
