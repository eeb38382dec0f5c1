"""Energies of diffusions: penalties δ, energies built from them, and certificates that steps descend them."""

from diffusion_mp.energies.certification import certify, certify_step
from diffusion_mp.energies.constraints import (
    Ball,
    Constraint,
    Nonnegative,
    NonnegativeBall,
    NonnegativeSphere,
    Sphere,
    Unconstrained,
    get_constraint,
)
from diffusion_mp.energies.energy import Energy, JointEnergy
from diffusion_mp.energies.learned import FunctionPenalty, MixturePenalty
from diffusion_mp.energies.matrix_terms import AttentionTerm, MatrixTerm, MLPTerm
from diffusion_mp.energies.penalties import (
    GaussianPenalty,
    Penalty,
    QuadraticPenalty,
    ScorePenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
    get_penalty,
)
from diffusion_mp.energies.spectrum import EnergyBounds, energy_bounds
from diffusion_mp.energies.terms import CouplingTerm, EnergyTerm, PairTerm, ScaledTerm, SourceTerm
from diffusion_mp.energies.theorems import Certificate, certify_trajectory, theorem1, theorem7

__all__ = [
    "AttentionTerm",
    "Ball",
    "Certificate",
    "Constraint",
    "CouplingTerm",
    "Energy",
    "EnergyBounds",
    "EnergyTerm",
    "FunctionPenalty",
    "GaussianPenalty",
    "JointEnergy",
    "MLPTerm",
    "MatrixTerm",
    "MixturePenalty",
    "Nonnegative",
    "NonnegativeBall",
    "NonnegativeSphere",
    "PairTerm",
    "Penalty",
    "QuadraticPenalty",
    "ScaledTerm",
    "ScorePenalty",
    "SigmoidPenalty",
    "SimplePenalty",
    "SoftmaxPenalty",
    "SourceTerm",
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
