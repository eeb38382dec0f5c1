"""State updates: how a coupling moves the state; one update per file."""

from diffusion_mp.updates.backtracking import Backtracking
from diffusion_mp.updates.base import Form, LaplacianUpdate, StateUpdate
from diffusion_mp.updates.crank_nicolson import CrankNicolson
from diffusion_mp.updates.equilibrium import Equilibrium
from diffusion_mp.updates.explicit_euler import ExplicitEuler
from diffusion_mp.updates.heat_kernel import HeatKernel
from diffusion_mp.updates.implicit_euler import ImplicitEuler

__all__ = [
    "Backtracking",
    "CrankNicolson",
    "Equilibrium",
    "ExplicitEuler",
    "Form",
    "HeatKernel",
    "ImplicitEuler",
    "LaplacianUpdate",
    "StateUpdate",
]
