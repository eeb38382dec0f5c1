"""Where the eigenvalues of a Laplacian lie, without ever forming it."""

from functools import partial

import numpy as np
import torch
from scipy.sparse import diags_array, eye_array
from scipy.sparse.linalg import aslinearoperator, eigsh
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.updates.base import Form


def resolution(dtype: torch.dtype) -> float:
    """How far an eigenvalue computed with products in ``dtype`` can be trusted, relative to the largest one."""
    return 1e-8 if dtype == torch.float64 else 1e-5


@torch.no_grad()
def laplacian_extremes(coupling: Coupling, form: Form) -> list[tuple[float, float]]:
    """Smallest and largest eigenvalue of Δ for every head of a symmetric coupling (SciPy's Lanczos; small N dense)."""
    num_nodes = coupling.num_nodes
    if num_nodes == 0:
        return [(1.0, 1.0)] * coupling.heads
    degrees = coupling.degree().double().cpu().numpy()
    extremes = []
    for head in range(coupling.heads):
        product = coupling.as_linear_operator(head)
        diagonal = degrees[:, head] if form == "conservative" else np.ones(num_nodes)
        laplacian = aslinearoperator(diags_array(diagonal)) - product
        if num_nodes <= 32:  # Lanczos needs room for its basis
            eigenvalues = np.linalg.eigvalsh(laplacian @ np.eye(num_nodes))
            extremes.append((float(eigenvalues[0]), float(eigenvalues[-1])))
            continue
        start = np.random.default_rng(0).standard_normal(num_nodes)  # a generic vector; no global random state
        lanczos = partial(eigsh, k=1, v0=start, tol=resolution(coupling.dtype), return_eigenvectors=False)
        # Lanczos is accurate relative to the eigenvalue that it looks for, hence the shift away from zero.
        width = abs(float(lanczos(laplacian, which="LM")[0]))
        shift = width * aslinearoperator(eye_array(num_nodes))
        low = width - float(lanczos(shift - laplacian, which="LA")[0])
        high = float(lanczos(shift + laplacian, which="LA")[0]) - width
        extremes.append((low, high))
    return extremes


@torch.no_grad()
def spectral_interval(coupling: Coupling, form: Form) -> tuple[float, float]:
    """An interval that holds every eigenvalue of Δ, of every head; tight where that is cheap.

    For non-negative S it takes a few products: 0 ≤ D̄ − S ≤ 2 max d (Gershgorin), and I − S within 1 ± ρ with ρ from
    `spectral_radius_bound`. Otherwise Lanczos, with a margin of one percent since it approaches from inside.
    """
    if coupling.num_nodes == 0:
        return 0.0, 0.0
    if coupling.nonnegative and form == "conservative":
        return 0.0, 2.0 * coupling.degree().max().item()
    if coupling.nonnegative:
        radius = spectral_radius_bound(coupling)
        return 1.0 - radius, 1.0 + radius
    extremes = laplacian_extremes(coupling, form)
    low, high = min(low for low, _ in extremes), max(high for _, high in extremes)
    margin = 0.01 * (high - low)
    return low - margin, high + margin


def spectral_radius_bound(coupling: Coupling, products: int = 10) -> float:
    """An upper bound of the spectral radius of a non-negative S: max_i (Mw)_i/w_i − 1, M = I + S (Collatz, Wielandt).

    It holds for every positive w; w ← Mw improves it step by step. The first step, w = 1, is Gershgorin's largest row
    sum, which for D^-½AD^-½ of a star is √d_max where the truth is 1; exp(t(√d_max − 1)) would be lost in accuracy.
    """
    w: Tensor = torch.ones(coupling.num_nodes, coupling.heads, 1, dtype=torch.float64, device=coupling.device)
    bound = float("inf")
    for _ in range(products):
        image = w + coupling @ w
        bound = min(bound, (image / w).max().item() - 1.0)
        w = image / image.amax(0)
    return max(bound, 0.0)
