"""Energies of diffusions: penalties δ, energies built from them, and certificates that steps descend them."""

from diffusion_mp.energies.certification import certify, certify_step
from diffusion_mp.energies.constraints import (
    Ball,
    Constraint,
    Nonnegative,
    NonnegativeBall,
    Sphere,
    Unconstrained,
    get_constraint,
)
from diffusion_mp.energies.energy import Energy
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
from diffusion_mp.energies.terms import (
    CouplingTerm,
    EdgeTerm,
    EnergyTerm,
    LinearTerm,
    PairTerm,
    ProximalTerm,
    ScaledTerm,
    SourceTerm,
)
from diffusion_mp.energies.theorems import (
    Certificate,
    certify_trajectory,
    theorem1,
    theorem7,
)

__all__ = [
    "AttentionTerm",
    "Ball",
    "Certificate",
    "Constraint",
    "CouplingTerm",
    "EdgeTerm",
    "Energy",
    "EnergyTerm",
    "FunctionPenalty",
    "GaussianPenalty",
    "LinearTerm",
    "MLPTerm",
    "MatrixTerm",
    "MixturePenalty",
    "Nonnegative",
    "NonnegativeBall",
    "PairTerm",
    "Penalty",
    "ProximalTerm",
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
    "get_constraint",
    "get_penalty",
    "theorem1",
    "theorem7",
]
