"""``LabelPropagation``: the same diffusion, with labels as the state."""

from __future__ import annotations

from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from diffusion_mp.diffusivities import AdjacencyDiffusivity, Diffusivity
from diffusion_mp.errors import INTEGERS, check_counts, check_device, check_kind, check_number, check_state, describe
from diffusion_mp.graph import Graph
from diffusion_mp.updates import teleport

# Classes that nobody is labelled with, beyond one per node: more is a wrong number, and costs memory.
MANY_CLASSES = 1 << 16


class LabelPropagation(nn.Module):
    r"""Y^(k+1) = α S Y^(k) + (1 − α) Y^(0), clamped to [0, 1] (Zhu & Ghahramani 2002; Zhou et al. 2004).

    Args:
        num_layers: how many steps.
        alpha: α in (0, 1].
        diffusivity: a fixed one; D^-½AD^-½ by default. It never reads the labels.

    Shapes:
        y: [N] class labels or [N, K] soft labels; mask: [N] of bool, the nodes whose labels are known; output: [N, K].
    """

    references = ("zhou2004learning",)

    def __init__(self, num_layers: int = 50, alpha: float = 0.9, diffusivity: Diffusivity | None = None) -> None:
        super().__init__()
        check_counts(num_layers=num_layers)
        check_number(alpha, "alpha")
        check_kind(diffusivity, "diffusivity", (Diffusivity, NoneType), "a Diffusivity")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must lie in (0, 1]; got {alpha}.")
        self.num_layers = num_layers
        self.update = teleport(1 - alpha)
        self.diffusivity = AdjacencyDiffusivity("sym", direction="pyg") if diffusivity is None else diffusivity

    @torch.no_grad()
    def forward(
        self,
        y: Tensor,
        edge_index: Tensor | Graph,
        edge_weight: Tensor | None = None,
        mask: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Soft labels of every node."""
        check_kind(y, "y", Tensor, "a tensor of class labels [N] or soft labels [N, K]")
        if y.is_meta:
            raise ValueError(f"y must have values, the labels that spread; got {describe(y)}.")
        if y.dim() not in (1, 2):
            raise ValueError(f"y must hold class labels [N] or soft labels [N, K]; got {describe(y)}.")
        if y.dim() == 1:
            if y.dtype not in INTEGERS:
                raise TypeError(f"y must hold class labels [N] or soft labels [N, K]; got {describe(y)}.")
            classes = 1 + max(int(y.max()), 0) if y.numel() else 1
            if classes > y.numel() + MANY_CLASSES:
                raise ValueError(f"y must number the classes of {y.numel()} nodes; it reaches {classes - 1}.")
            y = one_hot(y.long().clamp(min=0), classes).to(torch.get_default_dtype()) * (y >= 0).unsqueeze(1)
        check_state(y, "y")
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != y.shape[:1]:
                raise ValueError(f"mask must be a bool tensor [{y.size(0)}]; got {describe(mask)}.")
            check_device(mask, "mask", y.device, "y")
            y = y * mask.unsqueeze(1)
        coupling = self.diffusivity(y, Graph.coerce(y, edge_index, edge_weight, batch))
        state = y
        for _ in range(self.num_layers):
            state = self.update(state, coupling, source=y).clamp(0, 1)
        return state
