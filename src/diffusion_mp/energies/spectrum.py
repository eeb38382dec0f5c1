"""Eigenvalues of Laplacians, matrix-free by SciPy's Lanczos solver or as bounds, and the rates that they imply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

Form = Literal["conservative", "residual"]
"""Laplacian of a step or an energy: Δ = D̄ − S (``"conservative"``) or I − S (``"residual"``).

Examples:
    >>> form: Form = "residual"
    >>> ExplicitEuler(tau=0.5, form=form)(x, AdjacencyDiffusivity("row")(x, graph)).shape
    torch.Size([6, 4])
"""
Array = np.ndarray[Any, np.dtype[Any]]

DENSE_NODES = 256  # up to this many nodes a dense eigenvalue solver, which is exact, is faster than Lanczos
LANCZOS = 1e-9  # default relative tolerance of Lanczos
# Rounding of products with a Laplacian, relative to its diagonal.
EPS = 4 * float(np.finfo(np.float64).eps)
DOUBLE = 1e-12  # relative tolerance of Lanczos for double precision


class Precision(NamedTuple):
    """Tolerances of solvers for a dtype: relative residual, relative error of eigenvalues, least regular eigenvalue."""

    residual: float
    eigenvalue: float
    regular: float


def precision(dtype: torch.dtype) -> Precision:
    """Return the tolerances for couplings and states of ``dtype``."""
    if dtype == torch.float64:
        return Precision(1e-12, DOUBLE, 1e-6)
    return Precision(1e-6, 8 * torch.finfo(dtype).eps, 1e-2)


def laplacian(coupling: Coupling, head: int, form: Form) -> Array | LinearOperator:
    """Return Δ = D̄ − S or I − S of one head, symmetrised if S is reversible; dense for small graphs."""
    n = coupling.num_nodes
    # D̄^½ΔD̄^-½ is symmetric, with the same spectrum.
    metric = None if coupling.symmetric else coupling.metric
    root = np.ones((n, 1))
    if metric is not None:
        root = metric[:, head, None].sqrt().cpu().numpy()
    if n <= DENSE_NODES:
        dense = coupling.to_dense()[head].detach().double().cpu().numpy()
        s: Array = root * dense / root.T
        s = (s + s.T) / 2  # exactly symmetric
        if form == "residual":
            return np.eye(n) - s
        np.fill_diagonal(s, 0.0)  # s_ii would cancel, which costs digits
        return np.diag((s @ root / root)[:, 0]) - s
    product = coupling.as_linear_operator(head)
    diagonal = np.ones((1, 1))
    if form == "conservative":
        diagonal = product @ np.ones((n, 1))
    return _operator(
        n,
        lambda v: diagonal * v - root * (product @ (v / root)),
        rounding=EPS * float(diagonal.max()),
    )


def normalized_laplacian(coupling: Coupling, head: int) -> Array | LinearOperator:
    """Return D̄^-½ (D̄ − Ω) D̄^-½ of one head, with the spectrum of I − D̄⁻¹Ω. Degrees must be positive."""
    # From D̄ − Ω, in which s_ii does not appear, and not from I − D̄⁻¹Ω.
    matrix = laplacian(coupling, head, "conservative")
    degree = coupling.exact_degree(torch.float64)[:, head, None]
    scale = degree.detach().cpu().numpy() ** -0.5
    if isinstance(matrix, np.ndarray):
        return scale * matrix * scale.T

    def apply(v: Array) -> Array:
        return scale * (matrix @ (scale * v))

    return _operator(len(scale), apply, rounding=EPS)


def largest_eigenvalue(matrix: Array | LinearOperator, rtol: float = LANCZOS) -> float:
    """Return the largest eigenvalue of a symmetric matrix, 0 if it is empty.

    The eigenvalue that Lanczos finds is moved outwards by its tolerance and by the rounding of products, since step
    bounds must not be too short.
    """
    if matrix.shape[0] == 0:
        return 0.0
    if isinstance(matrix, np.ndarray):
        return float(np.linalg.eigvalsh(matrix)[-1])
    from scipy.sparse.linalg import eigsh

    # Fixed, and not by the global generator.
    start = np.random.default_rng(0).standard_normal(matrix.shape[0])
    if not (matrix @ start).any():  # the zero matrix, which ARPACK refuses
        return float(matrix.rounding)
    (value,) = eigsh(
        matrix,
        k=1,
        which="LA",
        tol=rtol,
        v0=start,
        ncv=min(len(start), 80),
        return_eigenvectors=False,
    )
    return float(value + rtol * abs(value) + matrix.rounding)


def extreme_eigenvalues(
    matrix: Array | LinearOperator, rtol: float = LANCZOS
) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric matrix, moved outwards by `largest_eigenvalue`."""
    if isinstance(matrix, np.ndarray):
        return -largest_eigenvalue(-matrix), largest_eigenvalue(matrix)
    # The smallest is often zero and Lanczos has a relative tolerance, so it is applied
    # to the top of λ_max − Δ.
    top = largest_eigenvalue(matrix, rtol)
    turned = _operator(matrix.shape[0], lambda v: top * v - matrix @ v)
    return top - largest_eigenvalue(turned, rtol), top


@torch.no_grad()
def laplacian_extremes(
    coupling: Coupling, form: Form, rtol: float = LANCZOS
) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of Δ over all heads of a reversible coupling."""
    ends = [
        extreme_eigenvalues(laplacian(coupling, head, form), rtol)
        for head in range(coupling.heads)
    ]
    return min(low for low, _ in ends), max(high for _, high in ends)


@torch.no_grad()
def spectral_interval(coupling: Coupling, form: Form) -> tuple[float, float]:
    """Return an interval that contains every eigenvalue of Δ, of every head.

    For a nonnegative S it takes a few products: 0 ≤ D̄ − S ≤ 2 max d (Gershgorin), and I − S within 1 ± ρ with ρ from
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
    """Bound the spectral radius of a nonnegative S by max_i (Mw)_i/w_i − 1, M = I + S (Collatz, Wielandt).

    The bound holds for every positive w. The first, w = 1, is Gershgorin's largest row sum, and w ← Mw improves it. For
    D^-½AD^-½ of a star Gershgorin's bound is √d_max instead of 1, which would cost a heat kernel accuracy.
    """
    # In double, since ten products of rounded row sums could fall below the radius.
    w: Tensor = coupling._ones(torch.float64).unsqueeze(2)
    bound = float("inf")
    for _ in range(10):
        image = w + coupling @ w
        bound = min(bound, (image / w).max().item() - 1.0)
        w = image / image.amax(0)
    return max(bound, 0.0)


def _operator(
    n: int, apply: Callable[[Array], Array], rounding: float = 0.0
) -> LinearOperator:
    from scipy.sparse.linalg import LinearOperator

    operator = LinearOperator(
        (n, n),
        lambda v: apply(np.reshape(v, (n, 1))).ravel(),
        matmat=apply,
        dtype=np.float64,
    )
    # An attribute of ours, since SciPy's class has none: rounding moves every eigenvalue by as much as this.
    operator.rounding = rounding
    return operator
