"""Diagnostics: measure layers, couplings and states, and plot the measurements."""

from diffusion_mp.diagnostics.attention import kernel_error, plot_attention
from diffusion_mp.diagnostics.hooks import EnergyTrace, roughness
from diffusion_mp.diagnostics.perturbation import (
    Perturbation,
    lipschitz,
    perturbation_bound,
)
from diffusion_mp.diagnostics.placement import PlacementReport, commutator, diagnose
from diffusion_mp.diagnostics.steady_state import posterior_variance

__all__ = [
    "EnergyTrace",
    "Perturbation",
    "PlacementReport",
    "commutator",
    "diagnose",
    "kernel_error",
    "lipschitz",
    "perturbation_bound",
    "plot_attention",
    "posterior_variance",
    "roughness",
]
