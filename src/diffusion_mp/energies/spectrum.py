"""Ends of the spectrum of a Laplacian, matrix-free by SciPy's Lanczos solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from diffusion_mp.couplings import Coupling

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

Array = np.ndarray[Any, np.dtype[Any]]

DENSE_NODES = 256  # up to this many, a dense eigenvalue solver is faster than Lanczos, and exact


def laplacian(coupling: Coupling, head: int, form: str) -> Array | LinearOperator:
    """Δ = D̄ − S (``form="conservative"``) or I − S (``"residual"``) of one head; dense for small graphs."""
    diagonal = _degree(coupling, head) if form == "conservative" else np.ones(coupling.num_nodes)
    if coupling.num_nodes <= DENSE_NODES:
        return np.diag(diagonal) - _dense(coupling, head)
    s = coupling.as_linear_operator(head)
    return _operator(coupling.num_nodes, lambda v: diagonal[:, None] * v - s @ v)


def normalized_laplacian(coupling: Coupling, head: int) -> Array | LinearOperator:
    """I − D̄^-½ Ω D̄^-½ of one head; its spectrum is that of I − D̄⁻¹Ω. Degrees must be positive."""
    scale = _degree(coupling, head)[:, None] ** -0.5
    if coupling.num_nodes <= DENSE_NODES:
        return np.eye(coupling.num_nodes) - scale * _dense(coupling, head) * scale.T
    omega = coupling.as_linear_operator(head)
    return _operator(coupling.num_nodes, lambda v: v - scale * (omega @ (scale * v)))


def extreme_eigenvalue(
    matrix: Array | LinearOperator, end: Literal["largest", "smallest"], rtol: float = 1e-12
) -> float:
    """The largest or smallest eigenvalue of a symmetric matrix, moved outwards by the tolerance of the solver."""
    if matrix.shape[0] == 0:
        return 0.0
    if isinstance(matrix, np.ndarray):
        return float(np.linalg.eigvalsh(matrix)[-1 if end == "largest" else 0])
    value = float(_lanczos(matrix, 1, "LA" if end == "largest" else "SA", rtol)[0])
    return value + (rtol if end == "largest" else -rtol) * abs(value)


def smallest_nonzero_eigenvalue(matrix: Array | LinearOperator, zero: float, rtol: float = 1e-12) -> float | None:
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


def solver_rtol(coupling: Coupling) -> float:
    """How precisely eigenvalues of a coupling of this dtype can be asked for."""
    return max(1e-12, 8 * torch.finfo(coupling.dtype).eps)


def _degree(coupling: Coupling, head: int) -> Array:
    return coupling.degree()[:, head].detach().double().cpu().numpy()


def _operator(n: int, apply: Callable[[Array], Array]) -> LinearOperator:
    from scipy.sparse.linalg import LinearOperator

    return LinearOperator((n, n), dtype=np.float64, matvec=lambda v: apply(np.reshape(v, (n, 1))).ravel(), matmat=apply)


def _dense(coupling: Coupling, head: int) -> Array:
    return coupling.to_dense()[head].detach().double().cpu().numpy()


def _lanczos(operator: LinearOperator, count: int, which: str, rtol: float) -> Array:
    """``count`` eigenvalues from a start vector of our own: repeatable, and no global generator moves."""
    from scipy.sparse.linalg import eigsh

    start = np.random.default_rng(0).standard_normal(operator.shape[0])
    return eigsh(operator, k=count, which=which, tol=rtol, v0=start, return_eigenvectors=False)
