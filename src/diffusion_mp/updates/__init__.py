"""State updates: how a coupling moves the state."""

from diffusion_mp.updates.backtracking import Backtracking
from diffusion_mp.updates.base import Form, LaplacianUpdate, StateUpdate
from diffusion_mp.updates.certified_step import CertifiedStep
from diffusion_mp.updates.explicit_euler import ExplicitEuler
from diffusion_mp.updates.fixed_point import fixed_point
from diffusion_mp.updates.heat_kernel import HeatKernel
from diffusion_mp.updates.implicit import CrankNicolson, Equilibrium, ImplicitEuler
from diffusion_mp.updates.momentum import MomentumStep
from diffusion_mp.updates.teleport import teleport, teleport_limit

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
    "fixed_point",
    "teleport",
    "teleport_limit",
]
