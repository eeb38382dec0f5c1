"""Every update by matrices of the coupling's entries, and the random states that tests of updates share."""

import numpy as np
import torch
from scipy.linalg import expm
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    HeatKernel,
    ImplicitEuler,
    StateUpdate,
)

DOUBLE = torch.float64


def source_for(update: StateUpdate, x: Tensor) -> Tensor | None:
    return x.cos() if getattr(update, "beta", 0.0) else None


def both(update: StateUpdate, coupling: Coupling, x: Tensor) -> tuple[Tensor, Tensor]:
    """The next state, and the same by dense algebra."""
    source = source_for(update, x)
    return update(x, coupling, source=source), dense_update(update, coupling, x, source)


def largest(x: Tensor) -> float:
    """The largest entry, or one."""
    return float(x.abs().amax().clamp(min=1.0)) if x.numel() else 1.0


def dense_update(
    update: StateUpdate, coupling: Coupling, x: Tensor, source: Tensor | None = None
) -> Tensor:
    """Return the next state by dense solves and exponentials, [N, H, D]."""
    s = coupling.to_dense().expand(x.size(1), -1, -1)
    eye = torch.eye(s.size(1), dtype=s.dtype).expand_as(s)
    laplacian = (
        torch.diag_embed(s.sum(2)) if update.form == "conservative" else eye
    ) - s
    v = x.transpose(0, 1)
    if isinstance(update, HeatKernel):
        power = -update.t * laplacian
        if x.requires_grad or s.requires_grad:
            return (torch.linalg.matrix_exp(power) @ v).transpose(0, 1)
        exact = torch.from_numpy(np.stack([expm(head.numpy()) for head in power]))
        return (exact @ v).transpose(0, 1)
    drive = 0.0 if source is None else update.beta * source.transpose(0, 1)
    laplacian = laplacian + update.leak * eye
    if isinstance(update, Equilibrium):
        return torch.linalg.solve(laplacian, drive).transpose(0, 1)
    theta = {ImplicitEuler: 1.0, CrankNicolson: 0.5}.get(type(update), 0.0)
    tau = update.tau
    right = v - (1 - theta) * tau * (laplacian @ v) + tau * drive
    return torch.linalg.solve(eye + theta * tau * laplacian, right).transpose(0, 1)
