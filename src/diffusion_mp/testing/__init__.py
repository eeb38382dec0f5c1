"""Checks of couplings, diffusivities, energy terms, layers and updates; diffusion problems with known solutions."""

from diffusion_mp.testing.coupling_laws import check_coupling
from diffusion_mp.testing.descent import assert_energy_descent
from diffusion_mp.testing.diffusivity_laws import check_diffusivity
from diffusion_mp.testing.energy_laws import check_energy_term
from diffusion_mp.testing.laws import TOLERANCES, Tolerance, tolerance
from diffusion_mp.testing.layer_laws import check_layer, check_update
from diffusion_mp.testing.problems import (
    Problem,
    cosine_mode,
    exact_problems,
    order_of_convergence,
    path_problem,
    random_problem,
)

__all__ = [
    "TOLERANCES",
    "Problem",
    "Tolerance",
    "assert_energy_descent",
    "check_coupling",
    "check_diffusivity",
    "check_energy_term",
    "check_layer",
    "check_update",
    "cosine_mode",
    "exact_problems",
    "order_of_convergence",
    "path_problem",
    "random_problem",
    "tolerance",
]
