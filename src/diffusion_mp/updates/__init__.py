"""State updates: how a coupling moves the state."""

from diffusion_mp.updates.backtracking import Backtracking
from diffusion_mp.updates.base import Form, LaplacianUpdate, StateUpdate
from diffusion_mp.updates.certified_step import CertifiedStep
from diffusion_mp.updates.explicit_euler import ExplicitEuler, teleport
from diffusion_mp.updates.heat_kernel import HeatKernel
from diffusion_mp.updates.implicit import CrankNicolson, Equilibrium, ImplicitEuler
from diffusion_mp.updates.momentum import MomentumStep

__all__ = [
    "Backtracking",
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
    "teleport",
]
