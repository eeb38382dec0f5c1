"""Node features before the first layer: linear maps of dense or sparse features, and Laplacian eigenvectors."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn.dense import Linear

from diffusion_mp.checks import (
    Count,
    check_mask,
    check_place,
    check_rows,
    check_state,
    describe,
)
from diffusion_mp.graph.ops import Compressed, Pattern
from diffusion_mp.graph.sparse_rows import SPARSE
from diffusion_mp.kernels.spmm import spmm
from diffusion_mp.modules import Resettable
from diffusion_mp.runtime.cache import cached_by, values_only


def check_input(
    x: Tensor, name: str = "x", *, channels: int, module: nn.Module | None
) -> None:
    """Raise unless ``x`` is a dense state or a sparse matrix [N, channels] that fits ``module``."""
    if not isinstance(x, Tensor) or x.layout not in SPARSE:
        check_state(x, name, channels, module=module)
        return
    if x.dim() != 2 or x.dense_dim() or x.size(1) != channels:
        raise ValueError(
            f"{name} must be a sparse matrix [num_nodes, {channels}]; got {describe(x)}."
        )
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must be floating point; got {describe(x)}. Convert it with {name}.to(torch.float32)."
        )
    # A gradient of x would be as dense as [N, channels], which is what a sparse x avoids.
    if x.requires_grad:
        raise ValueError(
            f"{name} must not require a gradient where it is sparse: only the weights that meet it are learned. "
            f"Pass {name}.detach(), or {name}.to_dense()."
        )
    check_place(x, module, name, dtype=True)


class FeatureLinear(Linear):
    """PyG's ``Linear``, which also takes sparse features; with ``in_channels=-1`` the first call sets their number."""

    def __deepcopy__(self, memo: dict[int, object]) -> FeatureLinear:
        # That of PyG 2.6 makes a Linear, and modules that torch parametrizes cannot be copied through pickle.
        memo[id(self)] = copied = self.__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        # PyG's saves the weight, and not what torch's parametrizations or pruning compute it from.
        nn.Module._save_to_state_dict(
            self, destination, prefix, keep_vars or self.in_channels == -1
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.layout is torch.strided:
            return super().forward(x)
        # One layout for the product; CSR has the row boundaries that it reads.
        if x.layout is not torch.sparse_csr:
            x = x.to_sparse_csr()
        bounds = x.crow_indices()
        column = x.col_indices()

        def find() -> Pattern:
            row = torch.repeat_interleave(bounds.diff(), output_size=column.numel())
            by_row = Compressed(row, column, x.size(0), bounds)
            return Pattern(by_row, Compressed(column, row, x.size(1)))

        # Sorting the entries by column takes longer than the product, and features are the same at every step.
        # Under a trace there are no values to recognise features by.
        if values_only():
            pattern = cached_by((x,), "pattern", find)
        else:
            pattern = find()
        # One row of Wᵀ is read for every entry of x, so its numbers have to lie side by side.
        weight = self.weight.t().contiguous().unsqueeze(1)
        out = spmm(pattern, x.values().unsqueeze(1), weight).squeeze(1)
        if self.bias is None:
            return out
        return out + self.bias


def channels_at_first(module: nn.Module, x: object) -> int:
    """Return the input channels of a module built with -1: of loaded weights, or else of ``x``; -1 if unknown."""
    for part in module.modules():
        if isinstance(part, FeatureLinear):
            if not is_lazy(part.weight):
                return part.in_channels
            # Only the first one reads x itself.
            break
    # The check of x that follows refuses anything but a matrix.
    if isinstance(x, Tensor) and x.dim() == 2:
        return x.size(1)
    return -1


class LaplacianEncoder(Resettable):
    r"""Encode eigenvectors of the graph as positions that do not depend on their signs.

        p_i = ρ(Σ_r [φ(v_ir, λ_r) + φ(−v_ir, λ_r)])

    for eigenvectors v_r and eigenvalues λ_r (Lim et al. 2023). φ and ρ are two linear layers with a SiLU between them;
    with a ReLU, φ(v) + φ(−v) would be flat around v = 0. (GraphGPS (Rampášek et al. 2022) sums φ(v_ir, λ_r) and trains
    on random signs.)

    Args:
        out_channels: Number of channels C of the encoding.
        hidden_channels: Number of channels between φ and ρ; ``2 * out_channels`` by default.

    Shapes:
        eigenvectors: [N, R], R eigenvectors, as :class:`AddLaplacianPE` stores them.
        eigenvalues: [N, R]; 0 by default.
        mask: [N, R], true at valid entries; all entries are valid by default.
        output: [N, C].

    Examples:
        >>> LaplacianEncoder(8)(torch.rand(6, 2), torch.rand(6, 2)).shape
        torch.Size([6, 8])
    """

    references = ("lim2023signnet",)

    def __init__(
        self, out_channels: Count, hidden_channels: Count | None = None
    ) -> None:
        super().__init__()
        hidden = hidden_channels or 2 * out_channels
        self.out_channels = out_channels
        self.hidden_channels = hidden
        self.phi = nn.Sequential(
            nn.Linear(2, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.rho = nn.Sequential(
            nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, out_channels)
        )

    def forward(
        self,
        eigenvectors: Float[Tensor, "N R"],
        eigenvalues: Float[Tensor, "N R"] | None = None,
        mask: Bool[Tensor, "N R"] | None = None,
    ) -> Float[Tensor, "N C"]:
        check_state(eigenvectors, "eigenvectors", module=self)
        # Zeros, so that φ has two inputs with and without eigenvalues.
        if eigenvalues is None:
            eigenvalues = torch.zeros_like(eigenvectors)
        check_state(eigenvalues, "eigenvalues", eigenvectors.size(1), module=self)
        check_rows(eigenvalues, "eigenvalues", eigenvectors)
        check_mask(mask, eigenvectors)
        # φ(v) + φ(−v) has no sign to learn, whatever sign the solver chose.
        encoded = self.phi(torch.stack([eigenvectors, eigenvalues], -1))
        encoded = encoded + self.phi(torch.stack([-eigenvectors, eigenvalues], -1))
        if mask is not None:
            # Not a product with the mask, which a NaN in the padding would survive.
            encoded = encoded.masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.rho(encoded.sum(dim=1))
