"""Where the eigenvalues of a Laplacian lie, matrix-free: SciPy's Lanczos solver, or a bound where that is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

#: Which Laplacian a step or an energy means: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).
Form = Literal["conservative", "residual"]
Array = np.ndarray[Any, np.dtype[Any]]

DENSE_NODES = 256  # up to this many, a dense eigenvalue solver is faster than Lanczos, and exact
LANCZOS = 1e-9  # relative tolerance of Lanczos where the sixth digit does not matter; it works in double throughout


class Precision(NamedTuple):
    """What a dtype allows to ask for.

    Attributes:
        residual: of conjugate gradients, relative to the right-hand side.
        eigenvalue: of eigenvalues, relative to the largest one.
        regular: a Laplacian whose smallest eigenvalue is below this may as well be singular.
    """

    residual: float
    eigenvalue: float
    regular: float


def precision(dtype: torch.dtype) -> Precision:
    """What can be asked of solvers for couplings and states of ``dtype``."""
    if dtype == torch.float64:
        return Precision(1e-12, 1e-12, 1e-6)
    return Precision(1e-6, 8 * torch.finfo(dtype).eps, 1e-2)


def laplacian(coupling: Coupling, head: int, form: Form) -> Array | LinearOperator:
    """Δ = D̄ − S or I − S of one head, by ``form``, made symmetric where S is reversible; dense for small graphs."""
    diagonal = _degree(coupling, head) if form == "conservative" else np.ones(coupling.num_nodes)
    metric = None if coupling.symmetric else coupling.metric  # D̄^½ΔD̄^-½ is symmetric, with the same spectrum
    root = np.ones((len(diagonal), 1)) if metric is None else metric[:, head, None].sqrt().cpu().numpy()
    if coupling.num_nodes <= DENSE_NODES:
        return np.diag(diagonal) - root * _dense(coupling, head) / root.T
    s = coupling.as_linear_operator(head)
    return _operator(coupling.num_nodes, lambda v: diagonal[:, None] * v - root * (s @ (v / root)))


def normalized_laplacian(coupling: Coupling, head: int) -> Array | LinearOperator:
    """I − D̄^-½ Ω D̄^-½ of one head; its spectrum is that of I − D̄⁻¹Ω. Degrees must be positive."""
    scale = _degree(coupling, head)[:, None] ** -0.5
    if coupling.num_nodes <= DENSE_NODES:
        return np.eye(coupling.num_nodes) - scale * _dense(coupling, head) * scale.T
    omega = coupling.as_linear_operator(head)
    return _operator(coupling.num_nodes, lambda v: v - scale * (omega @ (scale * v)))


def largest_eigenvalue(matrix: Array | LinearOperator, rtol: float = LANCZOS) -> float:
    """The largest eigenvalue of a symmetric matrix; 0 where there are no nodes.

    Lanczos approaches it from inside the spectrum, so its answer is moved outwards by its tolerance: step bounds and
    Chebyshev intervals must not be too short.
    """
    if matrix.shape[0] == 0:
        return 0.0
    if isinstance(matrix, np.ndarray):
        return float(np.linalg.eigvalsh(matrix)[-1])
    value = float(_lanczos(matrix, 1, "LA", rtol)[0])
    return value + rtol * abs(value)


def extreme_eigenvalues(matrix: Array | LinearOperator, rtol: float = LANCZOS) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric matrix, moved outwards as in `largest_eigenvalue`."""
    if isinstance(matrix, np.ndarray):
        values = np.linalg.eigvalsh(matrix)
        return (float(values[0]), float(values[-1])) if len(values) else (0.0, 0.0)
    # The smallest is often zero, and Lanczos is accurate relative to what it seeks: so it seeks the top of λ_max − Δ.
    top = largest_eigenvalue(matrix, rtol)
    return top - largest_eigenvalue(_operator(matrix.shape[0], lambda v: top * v - matrix @ v), rtol), top


def smallest_nonzero_eigenvalue(matrix: Array | LinearOperator, zero: float, rtol: float) -> float | None:
    """The smallest eigenvalue above ``zero`` of a positive semi-definite matrix; None if all are zero."""
    if isinstance(matrix, np.ndarray):
        values = np.linalg.eigvalsh(matrix)
        return float(values[values > zero].min()) if (values > zero).any() else None
    n, count = matrix.shape[0], 2
    while True:
        values = _lanczos(matrix, count, "SA", rtol)
        if (values > zero).any():
            return float(values[values > zero].min())
        if count == n - 1:
            return None
        count = min(4 * count, n - 1)  # the kernel has one dimension per connected component


@torch.no_grad()
def laplacian_extremes(coupling: Coupling, form: Form, rtol: float = LANCZOS) -> tuple[float, float]:
    """Smallest and largest eigenvalue of Δ over all heads of a reversible coupling."""
    lowest, highest = zip(
        *(extreme_eigenvalues(laplacian(coupling, head, form), rtol) for head in range(coupling.heads)), strict=True
    )
    return min(lowest), max(highest)


@torch.no_grad()
def spectral_interval(coupling: Coupling, form: Form) -> tuple[float, float]:
    """An interval that holds every eigenvalue of Δ, of every head; tight where that is cheap.

    For non-negative S it takes a few products: 0 ≤ D̄ − S ≤ 2 max d (Gershgorin), and I − S within 1 ± ρ with ρ from
    `spectral_radius_bound`. Otherwise Lanczos finds both ends.
    """
    if coupling.num_nodes == 0:
        return 0.0, 0.0
    if coupling.nonnegative and form == "conservative":
        return 0.0, 2.0 * coupling.degree().max().item()
    if coupling.nonnegative:
        radius = spectral_radius_bound(coupling)
        return 1.0 - radius, 1.0 + radius
    return laplacian_extremes(coupling, form)


def spectral_radius_bound(coupling: Coupling) -> float:
    """An upper bound of the spectral radius of a non-negative S: max_i (Mw)_i/w_i − 1, M = I + S (Collatz, Wielandt).

    It holds for every positive w; w ← Mw improves it step by step. The first step, w = 1, is Gershgorin's largest row
    sum, which for D^-½AD^-½ of a star is √d_max where the truth is 1; exp(t(√d_max − 1)) would be lost in accuracy.
    """
    w: Tensor = torch.ones(coupling.num_nodes, coupling.heads, 1, dtype=torch.float64, device=coupling.device)
    bound = float("inf")
    for _ in range(10):
        image = w + coupling @ w
        bound = min(bound, (image / w).max().item() - 1.0)
        w = image / image.amax(0)
    return max(bound, 0.0)


def _degree(coupling: Coupling, head: int) -> Array:
    return coupling.degree()[:, head].detach().double().cpu().numpy()


def _dense(coupling: Coupling, head: int) -> Array:
    return coupling.to_dense()[head].detach().double().cpu().numpy()


def _operator(n: int, apply: Callable[[Array], Array]) -> LinearOperator:
    from scipy.sparse.linalg import LinearOperator

    return LinearOperator((n, n), dtype=np.float64, matvec=lambda v: apply(np.reshape(v, (n, 1))).ravel(), matmat=apply)


def _lanczos(operator: LinearOperator, count: int, which: str, rtol: float) -> Array:
    """``count`` eigenvalues from a start vector of our own: repeatable, and no global generator moves."""
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(operator.shape[0])
    return eigsh(operator, k=count, which=which, tol=rtol, v0=start, return_eigenvectors=False)
