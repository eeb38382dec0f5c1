"""Diagnostics: what a layer does, measured and drawn."""

from diffusion_mp.diagnostics.commutator import Commutator, commutator
from diffusion_mp.diagnostics.energy_trace import EnergyTrace
from diffusion_mp.diagnostics.kernel_error import kernel_error
from diffusion_mp.diagnostics.lipschitz import lipschitz
from diffusion_mp.diagnostics.perturbation import Perturbation, perturbation_bound
from diffusion_mp.diagnostics.placement_report import PlacementReport, diagnose
from diffusion_mp.diagnostics.plotting import plot_attention
from diffusion_mp.diagnostics.posterior_variance import posterior_variance
from diffusion_mp.diagnostics.roughness import roughness
from diffusion_mp.diagnostics.smoothing_floor import SmoothingFloor, smoothing_floor

__all__ = [
    "Commutator",
    "EnergyTrace",
    "Perturbation",
    "PlacementReport",
    "SmoothingFloor",
    "commutator",
    "diagnose",
    "kernel_error",
    "lipschitz",
    "perturbation_bound",
    "plot_attention",
    "posterior_variance",
    "roughness",
    "smoothing_floor",
]
