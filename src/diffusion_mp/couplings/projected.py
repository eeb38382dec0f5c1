"""Heads that look at a state through projections of their own, and move it together."""

from __future__ import annotations

from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.couplings.base import Coupling, check_coupling_kind
from diffusion_mp.errors import CouplingMismatchError, check_device, check_tensor, describe
from diffusion_mp.kernels.precision import accumulating, without_autocast


class ProjectedCoupling(Coupling):
    r"""Σ_h W_hᵀ S_h W_h on a state of one head [N, 1, C]: its Laplacian is that of Σ_h Σ_ij s^h_ij ‖W_h(z_i − z_j)‖².

    (Remark c of Theorem T1, docs/certified.md.) It mixes channels, so it has no single number for a pair of nodes:
    neither row sums nor entries, but a product, a Laplacian and a majorant Σ_h p_h ‖W_h‖₂².

    Args:
        coupling: S, with H heads or one.
        projection: W [H, D, C].

    Raises:
        TypeError, ValueError: no coupling, or a projection of another shape.

    Examples:
        >>> S = ProjectedCoupling(UniformCoupling(6), torch.rand(1, 2, 4))
        >>> (S @ x.unsqueeze(1)).shape
        torch.Size([6, 1, 4])
    """

    def __init__(self, coupling: Coupling, projection: Float[Tensor, "heads D C"]) -> None:
        check_coupling_kind(coupling)
        check_tensor(projection, "projection", "[heads, head_channels, channels]")
        check_device(projection, "projection", coupling.device, "the coupling")
        if projection.dim() != 3 or coupling.heads not in (1, projection.size(0)):
            raise ValueError(
                f"projection must be [heads, head_channels, channels] with the {coupling.heads} heads of the coupling; "
                f"got {describe(projection)}."
            )
        super().__init__(
            coupling.num_nodes,
            1,
            coupling,
            symmetric=lambda: coupling.symmetric,
            nonnegative=lambda: coupling.nonnegative,
            positive_semidefinite=lambda: coupling.positive_semidefinite,
        )
        self.coupling, self.projection = coupling, projection

    def _seen(self, v: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
        """W and Wv of every head in at least float32, and the dtype of v."""
        if v.size(1) != 1 or v.size(2) != self.projection.size(2):
            raise ValueError(
                f"v must be a state of one head with the {self.projection.size(2)} channels that the projection reads; "
                f"got {describe(v)}."
            )
        (w, wide), dtype = accumulating(self.projection, v.squeeze(1))
        return w, torch.einsum("hdc,nc->nhd", w, wide), dtype

    def _product(self, v: Float[Tensor, "N H D"]) -> Float[Tensor, "N H D"]:
        with without_autocast(v):
            w, seen, dtype = self._seen(v)
            return torch.einsum("hdc,nhd->nc", w, self.coupling.product(seen)).unsqueeze(1).to(dtype)

    def _majorized(self, v: Tensor, convex: bool) -> tuple[Tensor, Tensor]:
        with without_autocast(v):
            # Of values without channels only the majorant is asked, which has nothing to project.
            if v.size(2):
                w, seen, _ = self._seen(v)
            else:
                w, seen = accumulating(self.projection)[0][0], v.expand(-1, self.coupling.heads, -1)
            moved, bounds = self.coupling._majorized(seen, convex)
            bound = (spectral_norms(w).square().unsqueeze(1) * bounds).sum(1, keepdim=True)
            return torch.einsum("hdc,nhd->nc", w, moved).unsqueeze(1) if v.size(2) else v, bound

    def _transpose(self) -> Coupling:
        return ProjectedCoupling(self.coupling.T, self.projection)

    def degree(self) -> NoReturn:
        raise self._no("row sums")

    def _at(self, edge_index: Int[Tensor, "two E"]) -> NoReturn:
        raise self._no("entries")

    def to_dense(self) -> NoReturn:
        raise self._no("entries")

    def _no(self, what: str) -> CouplingMismatchError:
        return CouplingMismatchError(
            f"a ProjectedCoupling has no {what}: it mixes channels, so what a pair of nodes has is a matrix. Ask its "
            f"`coupling`, one head at a time; laplacian(v) and majorant(convex) are those of the whole."
        )


def spectral_norms(w: Float[Tensor, "heads D C"]) -> Float[Tensor, " heads"]:
    """‖W_h‖₂ of every head, and NaN for one whose entries are not finite, which LAPACK would refuse."""
    finite = w.isfinite()
    norms = torch.linalg.matrix_norm(w.masked_fill(~finite, 0.0), 2)
    return norms.masked_fill(~finite.all(2).all(1), torch.nan)
