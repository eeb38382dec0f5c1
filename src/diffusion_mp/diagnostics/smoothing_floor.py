"""``smoothing_floor``: how far apart a source keeps the nodes, however long they smooth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling
from diffusion_mp.couplings.base import check_coupling_kind
from diffusion_mp.energies.pairs import State, by_head, check_heads
from diffusion_mp.errors import (
    CouplingMismatchError,
    check_device,
    check_number,
    check_positive,
    check_values,
    describe,
)
from diffusion_mp.graph.ops import graph_sizes
from diffusion_mp.kernels.precision import quotient


@dataclass(frozen=True)
class SmoothingFloor:
    """What `smoothing_floor` measured: ``spread`` ≥ ``floor``, which is (|β| ``source`` − ``residual``)/(2 + κ).

    All are norms of what differs between nodes, ‖ΠX‖ in the metric D̄: ``spread`` of the state, ``source`` of H,
    ``residual`` of (I − Ŝ + κ)Z − βH, which is zero at a steady state.

    Examples:
        >>> floor = smoothing_floor(SigmoidPenalty().coupling(0.1 * x), 0.1 * x, 0.1 * x)
        >>> isinstance(floor, SmoothingFloor)
        True
    """

    spread: float
    source: float
    residual: float
    floor: float


@torch.no_grad()
def smoothing_floor(
    coupling: Coupling, x: State, source: State, *, beta: float = 1.0, leak: float = 0.0
) -> SmoothingFloor:
    r"""How little ‖ΠZ‖ can be at a steady state (I − Ŝ + κ)Z = βH with Ŝ = D̄⁻¹Ω (Theorem T6 of docs/certified.md).

    ‖ΠZ‖_D̄ ≥ |β|/(2 + κ) ‖ΠH‖_D̄, with Π the projection that takes the D̄-weighted mean of every graph away: with a source
    no depth smooths everything out. The eigenvalues of I − Ŝ lie in [0, 2], so for a state that is not steady yet the
    residual comes off. Ω may be the one at this very state.

    Args:
        coupling: Ω, symmetric and nonnegative, with row sums d̄, not yet normalised. A node that nobody sends to weighs
            nothing.
        x, source: Z and H, [N, C] or [N, H, D]; heads and graphs are summed over.
        beta: β, the weight of the source, of either sign.
        leak: κ ≥ 0.

    Raises:
        CouplingMismatchError: Ω does not promise to be symmetric and nonnegative.
        TypeError, ValueError: arguments of another kind, shapes that do not fit.

    Examples:
        >>> floor = smoothing_floor(SigmoidPenalty().coupling(0.1 * x), 0.1 * x, 0.1 * x, beta=1.0, leak=0.5)
        >>> floor.floor >= 0
        True
    """
    check_coupling_kind(coupling)
    check_number(beta, "beta")
    check_positive(leak, "leak", allow_zero=True)
    for name, state in (("x", x), ("source", source)):
        check_heads(state, name)
        check_values(by_head(state), coupling.num_nodes, coupling.heads, name)
        check_device(state, name, coupling.device, "the coupling")
    z, h = by_head(x).double(), by_head(source).double()
    if z.shape != h.shape:
        raise ValueError(f"source must have the shape {list(x.shape)} of the state x; got {describe(source)}.")
    if not (coupling.symmetric and coupling.nonnegative):
        raise CouplingMismatchError(
            f"the floor needs a coupling that is symmetric and nonnegative; got {coupling!r}. Take "
            f"row_stochastic=False in all-pair diffusivities."
        )
    degree = coupling.exact_degree(torch.float64).unsqueeze(2)
    residual = quotient(coupling.laplacian(z), degree) + leak * z - beta * h
    spread, apart, left = (_spread(part, degree, coupling.ptr) for part in (z, h, residual))
    return SmoothingFloor(spread, apart, left, floor=max(0.0, abs(beta) * apart - left) / (2 + leak))


def _spread(x: Tensor, degree: Tensor, ptr: Tensor | None) -> float:
    """‖Πx‖ in the metric of the degrees, [N, H, 1]."""
    sizes = graph_sizes(ptr, len(x))
    total = 0.0
    for rows, weight in zip(x.split(sizes), degree.split(sizes), strict=True):
        if len(rows):
            mean = quotient((weight * rows).sum(0), weight.sum(0))
            total += float((weight * (rows - mean).square()).sum())
    return total**0.5
