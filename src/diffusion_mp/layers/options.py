"""Options that constructors take as ``**options`` and hand on, with their types; and the split between parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from diffusion_mp.checks import Count, CountOrZero, NonnegativeNumber, PositiveNumber
from diffusion_mp.diffusivities.all_pair import Normalization, Projection
from diffusion_mp.diffusivities.fixed import Direction
from diffusion_mp.graph.graph import SelfLoops

# An option has no default here: the class that reads it has one, unless the class that hands it on has another.


# ``None`` stands for the layer's choice, which depends on the channels.
class ConvOptions(TypedDict, total=False):
    """Options of `DiffusionConv`."""

    concat: bool
    transform: bool | None
    bias: bool | None
    keep: Literal["values", "state"] | None
    reads: Literal["state", "values"]
    steps: Count


class QueryKeyOptions(TypedDict, total=False):
    """Options of `QueryKeyDiffusivity`."""

    projection: Projection
    normalize: Normalization


class AdjacencyOptions(TypedDict, total=False):
    """Options of `AdjacencyDiffusivity`."""

    self_loops: SelfLoops
    direction: Direction
    degrees: Literal["weighted", "count"]


# Not the step size, which every layer has by name.
class StepOptions(TypedDict, total=False):
    """Options of `ExplicitEuler`."""

    beta: float
    leak: NonnegativeNumber


class DIFFormerParts(ConvOptions, QueryKeyOptions, AdjacencyOptions, total=False):
    """Options of `DIFFormerConv` in a model, which has its own dropout and its own source."""

    qkv_bias: bool


class DIFFormerOptions(DIFFormerParts, StepOptions, total=False):
    """Options of `DIFFormerConv`."""

    dropout: float


class MixOptions(TypedDict, total=False):
    """Options of `MultiHeadConv`."""

    bias: bool
    dropout: float


class RelationalOptions(TypedDict, total=False):
    """Options of `RelationalBias`."""

    hops: Count
    powers: Literal["walks", "reach"]
    direction: Direction
    gate: Literal["sigmoid"] | None


class NodeFormerParts(RelationalOptions, QueryKeyOptions, total=False):
    """Options of `NodeFormerConv` in a model: the options of its parts and of `KernelizedSoftmaxDiffusivity`."""

    num_features: Count
    tau: float
    logits: Literal["dot", "scaled_dot"]
    num_samples: CountOrZero
    relative_edge_loss: bool
    generator: torch.Generator | None
    stabilizer: NonnegativeNumber


class NodeFormerOptions(NodeFormerParts, MixOptions, total=False):
    """Options of `NodeFormerConv`."""

    edge_regularization: float


class ResidualOptions(MixOptions, total=False):
    """Options of `MultiHeadConv` in a layer that adds the state itself."""

    residual: bool


# Without degrees: those of the paper are sums of weights.
class EnhancedOptions(TypedDict, total=False):
    """Options of `AdjacencyEnhancedDiffusivity`."""

    gamma: float
    self_loops: SelfLoops
    direction: Direction


class SFiOptions(ResidualOptions, EnhancedOptions, QueryKeyOptions, total=False):
    """Options of `SFiConv`: the options of its parts and of `SparseFlowDiffusivity`."""

    lam: float
    lam_scale: Literal["own", "batch_max"]
    alpha: float
    friction: Literal["attention", "constant"] | nn.Module


# The dropout of PyG's `GATConv` is one of the entries, and stands in its signature.
class EdgeAttentionOptions(TypedDict, total=False):
    """Options of `GATDiffusivity`."""

    self_loops: SelfLoops
    edge_dim: int | None


class GATOptions(EdgeAttentionOptions, total=False):
    """Options of `GATConv`: the options of its attention and of `DiffusionConv`."""

    transform: bool
    bias: bool
    value_bias: bool
    keep: Literal["values", "state"]
    steps: Count


class BlockOptions(TypedDict, total=False):
    """Options of `CertifiedBlock`."""

    radius: float
    beta: PositiveNumber


class PairOptions(TypedDict, total=False):
    """Options of `Pairs`."""

    projection: Literal["tied"] | None


class CertifiedConvOptions(BlockOptions, PairOptions, total=False):
    """Options of `CertifiedConv`."""


def split(options: Mapping[str, Any], *kinds: Any) -> list[dict[str, Any]]:
    """Return the options of every kind, each in a dict, and the remaining options in a last dict."""
    # A copy, since the next layer gets the same options.
    left = dict(options)
    parts = []
    for kind in kinds:
        names = [name for name in left if name in kind.__optional_keys__]
        parts.append({name: left.pop(name) for name in names})
    return [*parts, left]
