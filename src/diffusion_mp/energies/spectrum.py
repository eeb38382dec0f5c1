"""Eigenvalues of Laplacians, matrix-free by SciPy's Lanczos solver or as bounds, and the rates they imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.errors import CouplingMismatchError, check_kind, check_positive
from diffusion_mp.graph.ops import graph_sizes

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

DENSE_NODES = (
    256  # up to this many nodes a dense eigenvalue solver, which is exact, is faster than Lanczos
)
LANCZOS = 1e-9  # default relative tolerance of Lanczos
EPS = 4 * float(
    np.finfo(np.float64).eps
)  # rounding of products with a Laplacian, relative to its diagonal
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
    # D̄^½ΔD̄^-½ is symmetric, with the same spectrum
    if coupling.symmetric:
        metric = None
    else:
        metric = coupling.metric
    if metric is None:
        root = np.ones((n, 1))
    else:
        root = metric[:, head, None].sqrt().cpu().numpy()
    if n <= DENSE_NODES:
        s: Array = root * coupling.to_dense()[head].detach().double().cpu().numpy() / root.T
        s = (s + s.T) / 2  # exactly symmetric
        if form == "residual":
            return np.eye(n) - s
        np.fill_diagonal(s, 0.0)  # s_ii would cancel, which costs digits
        return np.diag((s @ root / root)[:, 0]) - s
    product = coupling.as_linear_operator(head)
    if form == "conservative":
        diagonal = product @ np.ones((n, 1))
    else:
        diagonal = np.ones((1, 1))
    return _operator(
        n,
        lambda v: diagonal * v - root * (product @ (v / root)),
        rounding=EPS * float(diagonal.max()),
    )


def normalized_laplacian(coupling: Coupling, head: int) -> Array | LinearOperator:
    """Return D̄^-½ (D̄ − Ω) D̄^-½ of one head, with the spectrum of I − D̄⁻¹Ω. Degrees must be positive."""
    matrix = laplacian(coupling, head, "conservative")
    scale = coupling.exact_degree(torch.float64)[:, head, None].detach().cpu().numpy() ** -0.5
    if isinstance(matrix, np.ndarray):
        return scale * matrix * scale.T
    return _operator(len(scale), lambda v: scale * (matrix @ (scale * v)), rounding=EPS)


def largest_eigenvalue(matrix: Array | LinearOperator, rtol: float = LANCZOS) -> float:
    """Return the largest eigenvalue of a symmetric matrix, 0 if it is empty.

    That of Lanczos is moved outwards by its tolerance and the rounding of products: step bounds must not be too short.
    """
    if matrix.shape[0] == 0:
        return 0.0
    if isinstance(matrix, np.ndarray):
        return float(np.linalg.eigvalsh(matrix)[-1])
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(
        matrix.shape[0]
    )  # fixed, and not by the global generator
    if not (matrix @ start).any():  # the zero matrix, which ARPACK refuses
        return float(matrix.rounding)
    basis = min(matrix.shape[0], 80)
    (value,) = eigsh(
        matrix, k=1, which="LA", tol=rtol, v0=start, ncv=basis, return_eigenvectors=False
    )
    return float(value + rtol * abs(value) + matrix.rounding)


def extreme_eigenvalues(
    matrix: Array | LinearOperator, rtol: float = LANCZOS
) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric matrix, moved outwards as above."""
    if isinstance(matrix, np.ndarray):
        values = np.linalg.eigvalsh(matrix)
        if len(values):
            return (float(values[0]), float(values[-1]))
        return (0.0, 0.0)
    # The smallest is often zero and Lanczos has a relative tolerance, so it is applied to the top of λ_max − Δ.
    top = largest_eigenvalue(matrix, rtol)
    return top - largest_eigenvalue(
        _operator(matrix.shape[0], lambda v: top * v - matrix @ v), rtol
    ), top


@torch.no_grad()
def nonzero_spectrum(coupling: Coupling, head: int) -> tuple[float, float]:
    """Return the smallest non-zero and the largest eigenvalue of D̄ − S, S symmetric and nonnegative; (0, 0) if Δ = 0.

    Both are moved outwards by their tolerance. The kernel is spanned by the constants of the connected components,
    which are counted, since a threshold could mistake a slow mode for a part of the kernel.
    """
    component = _components(coupling, head)
    kernel = int(component.max(initial=-1)) + 1
    if kernel == coupling.num_nodes:
        return 0.0, 0.0
    matrix = laplacian(coupling, head, "conservative")
    top = largest_eigenvalue(matrix, DOUBLE)
    if isinstance(matrix, np.ndarray):
        smallest = float(np.linalg.eigvalsh(matrix)[kernel])
    else:
        from scipy.sparse import csr_array

        rows = np.arange(coupling.num_nodes)
        constants = csr_array((np.bincount(component)[component] ** -0.5, (rows, component)))
        # Lanczos finds the top of a spectrum: turn Δ over, with the kernel mapped to zero.
        turned = _operator(
            len(rows), lambda v: top * (v - constants @ (constants.T @ v)) - matrix @ v
        )
        smallest = top - largest_eigenvalue(turned, DOUBLE)
    slack = len(component) * EPS * top
    return max(0.0, smallest - slack), top + slack


@torch.no_grad()
def laplacian_extremes(
    coupling: Coupling, form: Form, rtol: float = LANCZOS
) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of Δ over all heads of a reversible coupling."""
    ends = [
        extreme_eigenvalues(laplacian(coupling, head, form), rtol) for head in range(coupling.heads)
    ]
    return min(low for low, _ in ends), max(high for _, high in ends)


@torch.no_grad()
def spectral_interval(coupling: Coupling, form: Form) -> tuple[float, float]:
    """Return an interval that contains every eigenvalue of Δ, of every head.

    For nonnegative S it takes a few products: 0 ≤ D̄ − S ≤ 2 max d (Gershgorin), and I − S within 1 ± ρ with ρ from
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

    The bound holds for every positive w, and w ← Mw improves the first, Gershgorin's largest row sum of w = 1, which
    for D^-½AD^-½ of a star is √d_max instead of 1 and would cost a heat kernel accuracy.
    """
    w: Tensor = torch.ones(
        coupling.num_nodes, coupling.heads, 1, dtype=torch.float64, device=coupling.device
    )
    bound = float("inf")
    for _ in range(10):
        image = w + coupling @ w
        bound = min(bound, (image / w).max().item() - 1.0)
        w = image / image.amax(0)
    return max(bound, 0.0)


@dataclass(frozen=True)
class EnergyBounds:
    """The result of `energy_bounds`.

    ``lower`` · E(Z_k, k−1) ≤ E(Z_{k+1}, k) ≤ ``upper`` · E(Z_k, k−1), and Δ's non-zero spectrum from μ to λ₁.

    Examples:
        >>> isinstance(energy_bounds(AdjacencyDiffusivity("sym")(x, graph), tau=0.5), EnergyBounds)
        True
    """

    lower: float
    upper: float
    smallest_nonzero: float
    largest: float


def energy_bounds(coupling: Coupling, tau: float) -> EnergyBounds:
    """Return the rates between which E = ‖Z − Z_k‖² + λ Σ_ij s_ij‖z_i − z_j‖² falls in a step Z − τΔZ, k ≥ 1, any λ.

    For τ ≤ 1/λ₁ these are (1 − τλ₁)² and (1 − τμ)², μ the smallest *non-zero* eigenvalue of Δ = D̄ − S (Proposition 4
    of TfD, Wu, Wipf & Yan, 2025; their Eq. 9 takes the smallest one, always 0). Both terms of E depend on the
    complement of Δ's kernel only, where the eigenvalues of I − τΔ lie between 1 − τλ₁ and 1 − τμ. For larger τ the
    upper rate is therefore the larger of the two squares, and the lower one 0 if the interval contains 0.

    Raises:
        CouplingMismatchError: S is not declared symmetric and nonnegative.

    Examples:
        >>> bounds = energy_bounds(AdjacencyDiffusivity("sym")(x, graph), tau=0.5)
        >>> bounds.lower <= bounds.upper
        True
    """
    check_kind(coupling, "coupling", Coupling, "a Coupling")
    check_positive(tau, "tau")
    if not (coupling.symmetric and coupling.nonnegative):
        needed = "a coupling that is symmetric and nonnegative"
        raise CouplingMismatchError(f"the bounds of Proposition 4 need {needed}; got {coupling!r}.")
    found = [
        ends
        for ends in (nonzero_spectrum(coupling, head) for head in range(coupling.heads))
        if ends[1] > 0
    ]
    smallest = min((ends[0] for ends in found), default=0.0)
    largest = max((ends[1] for ends in found), default=0.0)
    ends = (1 - tau * largest, 1 - tau * smallest)
    squares = [end * end for end in ends]  # end**2 raises an error where it overflows
    lower = 0.0 if ends[0] <= 0 <= ends[1] else min(squares)
    return EnergyBounds(lower, max(squares), smallest_nonzero=smallest, largest=largest)


def _components(coupling: Coupling, head: int) -> Array:
    """Return the connected component of every node: of a graph whose entries are not listed, the same for all."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    n = coupling.num_nodes
    if n <= DENSE_NODES:
        entries = (coupling.to_dense()[head] > 0).cpu().numpy()
    elif isinstance(coupling, SparseCoupling):
        # In int32, which SciPy before 1.12 requires of the indices; more nodes than that do not fit in memory.
        positive = coupling.graph.edges[:, coupling.weight[:, head] > 0].int().cpu().numpy()
        entries = csr_array((np.ones(positive.shape[1]), tuple(positive)), shape=(n, n))
    else:
        sizes = graph_sizes(coupling.ptr, n)
        return np.unique(np.repeat(np.arange(len(sizes)), sizes), return_inverse=True)[1]
    return connected_components(entries, directed=False)[1]


def _operator(n: int, apply: Callable[[Array], Array], rounding: float = 0.0) -> LinearOperator:
    from scipy.sparse.linalg import LinearOperator

    operator = LinearOperator(
        (n, n), lambda v: apply(np.reshape(v, (n, 1))).ravel(), matmat=apply, dtype=np.float64
    )
    operator.rounding = rounding
    return operator
