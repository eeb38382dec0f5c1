"""Where the eigenvalues of a Laplacian lie, without ever forming it."""

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.energies.spectrum import extreme_eigenvalue, laplacian
from diffusion_mp.updates.base import Form

# How far Lanczos can be trusted, relative to the largest eigenvalue: it works in double, whatever the coupling's type.
RESOLUTION = 1e-9


@torch.no_grad()
def laplacian_extremes(coupling: Coupling, form: Form) -> tuple[float, float]:
    """Smallest and largest eigenvalue of Δ over all heads of a symmetric coupling (Lanczos, unless N is small)."""
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import LinearOperator, aslinearoperator

    if coupling.num_nodes == 0:
        return 1.0, 1.0
    ends = []
    for head in range(coupling.heads):
        delta = laplacian(coupling, head, form)
        high = extreme_eigenvalue(delta, "largest", RESOLUTION)
        if isinstance(delta, LinearOperator):
            # The smallest one is often zero; Lanczos is accurate relative to what it seeks, so it looks from above.
            flipped = high * aslinearoperator(eye_array(coupling.num_nodes)) - delta
            low = high - extreme_eigenvalue(flipped, "largest", RESOLUTION)
        else:
            low = extreme_eigenvalue(delta, "smallest")
        ends.append((low, high))
    return min(low for low, _ in ends), max(high for _, high in ends)


def resolution(dtype: torch.dtype) -> float:
    """How far an eigenvalue of a coupling with entries in ``dtype`` can be trusted, relative to the largest one."""
    return RESOLUTION if dtype == torch.float64 else 1e-5


@torch.no_grad()
def spectral_interval(coupling: Coupling, form: Form) -> tuple[float, float]:
    """An interval that holds every eigenvalue of Δ, of every head; tight where that is cheap.

    For non-negative S it takes a few products: 0 ≤ D̄ − S ≤ 2 max d (Gershgorin), and I − S within 1 ± ρ with ρ from
    `spectral_radius_bound`. Otherwise Lanczos, with a margin since it approaches from inside.
    """
    if coupling.num_nodes == 0:
        return 0.0, 0.0
    if coupling.nonnegative and form == "conservative":
        return 0.0, 2.0 * coupling.degree().max().item()
    if coupling.nonnegative:
        radius = spectral_radius_bound(coupling)
        return 1.0 - radius, 1.0 + radius
    return sharp_interval(coupling, form)


@torch.no_grad()
def sharp_interval(coupling: Coupling, form: Form) -> tuple[float, float]:
    """Such an interval by Lanczos, at most a few millionths too long."""
    low, high = laplacian_extremes(coupling, form)
    margin = 1000 * RESOLUTION * (high - low)
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
