"""Features [N, C] that may be sparse, and the linear maps that take them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear

from diffusion_mp.errors import check_fits, check_state, describe
from diffusion_mp.kernels.spmm import spmm
from diffusion_mp.pattern import Compressed, Pattern

SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


def check_features(x: Tensor, channels: int, module: nn.Module, name: str = "x") -> None:
    """Raise unless ``x`` is a state [N, channels], or a sparse matrix in its place, that fits ``module``."""
    if not isinstance(x, Tensor) or x.layout not in SPARSE:
        check_state(x, name, channels, module=module)
        return
    if x.dim() != 2 or x.dense_dim() or x.size(1) != channels:
        raise ValueError(f"{name} must be a sparse matrix [num_nodes, {channels}]; got {describe(x)}.")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {describe(x)}. Convert it with {name}.to(torch.float32).")
    if x.requires_grad:
        raise ValueError(
            f"{name} must not require a gradient where it is sparse: only the weights that meet it are learned. "
            f"Pass {name}.detach(), or {name}.to_dense()."
        )
    check_fits(x, module, name)


class _OfFeatures(nn.Module):
    """x Wᵀ + b for features that may be sparse: then of what is stored alone, differentiable by W and b."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """[N, out_channels], dense."""
        if x.layout is torch.strided:
            out: Tensor = super().forward(x)
            return out
        x = x.to_sparse_csr()
        row, column = x.to_sparse_coo().indices()
        pattern = Pattern(Compressed(row, column, x.size(0), x.crow_indices()), Compressed(column, row, x.size(1)))
        weight = self.weight.t().contiguous().unsqueeze(1)
        product = spmm(pattern, x.values().unsqueeze(1), weight).squeeze(1)
        return product if self.bias is None else product + self.bias


class FeatureLinear(_OfFeatures, nn.Linear):
    """torch's linear layer, for features."""


class ValueLinear(_OfFeatures, Linear):
    """PyG's linear layer, for features."""
