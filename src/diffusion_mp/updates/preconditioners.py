"""What conjugate gradients on a Laplacian are preconditioned with: one place decides."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.base import LowRankForm
from diffusion_mp.updates.closed_forms import LowRankInverse
from diffusion_mp.updates.linear_solve import Operator

# Entries of all heads up to which a dense factor is made: 128 MiB in double, 4 096 nodes of one head.
DENSE = 1 << 24


@torch.no_grad()
def precondition(
    coupling: Coupling, diagonal: Tensor | float, metric: Tensor | None, form: LowRankForm | None, dominant: bool
) -> Operator | None:
    """An approximate inverse of diag(d) − S that is self-adjoint and positive definite in the metric; ``None`` is I.

    - A product with a ``quadratic`` coupling costs as much as writing down its matrix: up to 4 096 nodes the matrix
      is factorised, N³/3, which pays from some hundred products on, and an iteration or two remain.
    - Where ``dominant`` (S ≥ 0, and no row of S reaches d) the low-rank part of S and the diagonal are inverted
      exactly, O(N F² + F³), and an iteration costs O(N F D) more; what is left to the iteration is the rest of S,
      usually a sparse graph.
    - Else the diagonal is, where it varies.

    Args:
        coupling: S.
        diagonal: d [N, H, 1], or a number.
        metric: d̄ [N, H] where S is not symmetric.
        form: the low-rank part of S.
        dominant: see above.
    """
    if coupling.quadratic and coupling.heads * coupling.num_nodes**2 <= DENSE:
        factor = dense_factor(coupling, diagonal, metric)
        if factor is not None:
            root = 1.0 if metric is None else metric.sqrt().unsqueeze(2)
            return lambda r: torch.cholesky_solve((root * r).transpose(0, 1), factor).transpose(0, 1) / root
    if not dominant:
        return None
    if form is not None and form.left.size(2):
        return LowRankInverse(form, diagonal)
    return (lambda r: r / diagonal) if isinstance(diagonal, Tensor) else None


def dense_factor(coupling: Coupling, diagonal: Tensor | float, metric: Tensor | None = None) -> Tensor | None:
    """The Cholesky factor [H, N, N] of D̄^½(diag(d) − S)D̄^-½ in double; ``None`` where that is not positive definite."""
    matrix = coupling.to_dense().double()
    if metric is not None:
        root = metric.sqrt().t()
        matrix = root.unsqueeze(2) * matrix / root.unsqueeze(1)
    on = diagonal if isinstance(diagonal, Tensor) else matrix.new_full((coupling.num_nodes, 1, 1), diagonal)
    factor, info = torch.linalg.cholesky_ex(torch.diag_embed(on.squeeze(2).t()) - matrix)
    return None if bool(info.any()) else factor
