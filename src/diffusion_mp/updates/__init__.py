"""State updates: one numerical step of the diffusion of a coupling."""

from diffusion_mp.updates.base import Form, LaplacianUpdate, StateUpdate
from diffusion_mp.updates.certified_step import CertifiedStep
from diffusion_mp.updates.explicit import ExplicitEuler, MomentumStep, teleport
from diffusion_mp.updates.fixed_point import fixed_point
from diffusion_mp.updates.heat_kernel import HeatKernel
from diffusion_mp.updates.implicit import (
    CrankNicolson,
    Equilibrium,
    ImplicitEuler,
    teleport_limit,
)

__all__ = [
    "CertifiedStep",
    "CrankNicolson",
    "Equilibrium",
    "ExplicitEuler",
    "Form",
    "HeatKernel",
    "ImplicitEuler",
    "LaplacianUpdate",
    "MomentumStep",
    "StateUpdate",
    "fixed_point",
    "teleport",
    "teleport_limit",
]
