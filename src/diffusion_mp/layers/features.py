"""Features [N, C] that may be sparse, and the linear maps that take them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn.dense import Linear

from diffusion_mp.errors import check_fits, check_state, describe, found_later
from diffusion_mp.graph.cache import cached_by
from diffusion_mp.graph.ops import values_only
from diffusion_mp.graph.pattern import Compressed, Pattern
from diffusion_mp.kernels.spmm import spmm

SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


def check_features(x: Tensor, name: str = "x", *, channels: int, module: nn.Module) -> None:
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


def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b from what a sparse x stores, [N, out_channels] and dense; differentiable by W and b."""
    x = x if x.layout is torch.sparse_csr else x.to_sparse_csr()
    bounds, column = x.crow_indices(), x.col_indices()

    def find() -> Pattern:
        row = torch.repeat_interleave(bounds.diff(), output_size=column.numel())
        return Pattern(Compressed(row, column, x.size(0), bounds), Compressed(column, row, x.size(1)))

    pattern = cached_by((x,), "pattern", find) if values_only() else find()
    out = spmm(pattern, x.values().unsqueeze(1), weight.t().contiguous().unsqueeze(1)).squeeze(1)
    return out if bias is None else out + bias


class FeatureLinear(nn.Linear):
    """torch's linear layer, for features."""

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, dense."""
        return super().forward(x) if x.layout is torch.strided else sparse_linear(x, self.weight, self.bias)


class ValueLinear(Linear):
    """PyG's linear layer, for features; with -1 for those of the first call."""

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, dense."""
        return super().forward(x) if x.layout is torch.strided else sparse_linear(x, self.weight, self.bias)


def input_linear(in_channels: int, out_channels: int) -> FeatureLinear | ValueLinear:
    """What a model begins with; -1 for the channels of the first call."""
    return (ValueLinear if found_later(in_channels) else FeatureLinear)(in_channels, out_channels)


def channels_at_first(module: nn.Module, x: object) -> int:
    """The channels of a module that was built with -1: of weights it has loaded, or else of ``x``, if that is a state.

    A linear layer of PyG's is the first that such a module has, and what it begins with.
    """
    first = next((part for part in module.modules() if isinstance(part, ValueLinear)), None)
    if first is not None and not is_lazy(first.weight):
        return first.in_channels
    return x.size(1) if isinstance(x, Tensor) and x.dim() == 2 else -1
