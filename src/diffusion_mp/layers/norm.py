"""Normalisations by name."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch_geometric.nn import BatchNorm

from diffusion_mp.errors import check_choice

Norm = Literal["batch", "layer"] | None


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """``"batch"``: over all rows of the call in training, running statistics in evaluation (and in training for a
    single row or none, which has no variance); ``"layer"``: over the channels of a row; ``None``: the identity.

    Only with running statistics, or without batch normalisation, is a graph's output independent of its batch-mates.
    """
    check_choice(norm, "norm", ["batch", "layer", None])
    if norm == "batch":
        return BatchNorm(channels, allow_single_element=True)
    return nn.Identity() if norm is None else nn.LayerNorm(channels)
