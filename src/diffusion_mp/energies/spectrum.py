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

DENSE_NODES = 256  # below this a dense eigenvalue solver is faster than Lanczos, and exact


def laplacian(coupling: Coupling, head: int, form: str) -> LinearOperator:
    """Δ = D̄ − S (``form="conservative"``) or I − S (``"residual"``) of one head."""
    s = coupling.as_linear_operator(head)
    diagonal = _degree(coupling, head) if form == "conservative" else np.ones(coupling.num_nodes)
    return _operator(coupling.num_nodes, lambda v: diagonal[:, None] * v - s @ v)


def normalized_laplacian(coupling: Coupling, head: int) -> LinearOperator:
    """I − D̄^-½ Ω D̄^-½ of one head; its spectrum is that of I − D̄⁻¹Ω. Degrees must be positive."""
    omega = coupling.as_linear_operator(head)
    scale = _degree(coupling, head)[:, None] ** -0.5
    return _operator(coupling.num_nodes, lambda v: v - scale * (omega @ (scale * v)))


def extreme_eigenvalue(operator: LinearOperator, end: Literal["largest", "smallest"], rtol: float = 1e-12) -> float:
    """The largest or smallest eigenvalue of a symmetric operator, moved outwards by the tolerance of the solver."""
    from scipy.sparse.linalg import eigsh

    n, sign = operator.shape[0], 1.0 if end == "largest" else -1.0
    if n == 0:
        return 0.0
    if n <= DENSE_NODES:
        return float(_dense(operator)[-1 if end == "largest" else 0])
    which = "LA" if end == "largest" else "SA"
    value = float(eigsh(operator, k=1, which=which, tol=rtol, v0=_start(n), return_eigenvectors=False)[0])
    return value + sign * rtol * abs(value)


def smallest_nonzero_eigenvalue(operator: LinearOperator, zero: float, rtol: float = 1e-12) -> float | None:
    """The smallest eigenvalue above ``zero`` of a positive semi-definite operator; None if all are zero."""
    from scipy.sparse.linalg import eigsh

    n, count = operator.shape[0], 2
    while n > DENSE_NODES and count < n // 4:
        values = eigsh(operator, k=count, which="SA", tol=rtol, v0=_start(n), return_eigenvectors=False)
        if (values > zero).any():
            return float(values[values > zero].min())
        count *= 4  # the kernel has one dimension per connected component
    values = _dense(operator)
    return float(values[values > zero].min()) if (values > zero).any() else None


def solver_rtol(coupling: Coupling) -> float:
    """How precisely eigenvalues of a coupling of this dtype can be asked for."""
    return max(1e-12, 8 * torch.finfo(coupling.dtype).eps)


def _degree(coupling: Coupling, head: int) -> Array:
    return coupling.degree()[:, head].detach().double().cpu().numpy()


def _operator(n: int, apply: Callable[[Array], Array]) -> LinearOperator:
    from scipy.sparse.linalg import LinearOperator

    return LinearOperator((n, n), dtype=np.float64, matvec=lambda v: apply(np.reshape(v, (n, 1))).ravel(), matmat=apply)


def _dense(operator: LinearOperator) -> Array:
    return np.linalg.eigvalsh(operator @ np.eye(operator.shape[0]))


def _start(n: int) -> Array:
    """A start vector of our own: the same run twice gives the same number, and no global generator moves."""
    return np.random.default_rng(0).standard_normal(n)
