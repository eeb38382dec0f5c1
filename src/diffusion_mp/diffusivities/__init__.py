"""Diffusivities: modules that map a state and a graph to a coupling."""

from diffusion_mp.diffusivities.all_pair import (
    GaussianDiffusivity,
    PenaltyDiffusivity,
    SGFormerDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
)
from diffusion_mp.diffusivities.base import (
    Diffusivity,
    ScaledDiffusivity,
    SumDiffusivity,
)
from diffusion_mp.diffusivities.edge import EdgeDiffusivity, GATDiffusivity
from diffusion_mp.diffusivities.fixed import (
    AdjacencyDiffusivity,
    AdjacencyEnhancedDiffusivity,
    GraphAugmentedDiffusivity,
    IdentityDiffusivity,
    NeumannDiffusivity,
    SymmetricDiffusivity,
    UniformDiffusivity,
)
from diffusion_mp.diffusivities.kernelized_softmax import (
    KernelizedSoftmaxDiffusivity,
    RelationalBias,
    edge_loss,
)
from diffusion_mp.diffusivities.sparse_flow import (
    EdgeSparseFlowDiffusivity,
    FrictionAttention,
    SparseFlowDiffusivity,
)
from diffusion_mp.modules import AuxiliaryLoss, Positive, auxiliary_loss

__all__ = [
    "AdjacencyDiffusivity",
    "AdjacencyEnhancedDiffusivity",
    "AuxiliaryLoss",
    "Diffusivity",
    "EdgeDiffusivity",
    "EdgeSparseFlowDiffusivity",
    "FrictionAttention",
    "GATDiffusivity",
    "GaussianDiffusivity",
    "GraphAugmentedDiffusivity",
    "IdentityDiffusivity",
    "KernelizedSoftmaxDiffusivity",
    "NeumannDiffusivity",
    "PenaltyDiffusivity",
    "Positive",
    "RelationalBias",
    "SGFormerDiffusivity",
    "ScaledDiffusivity",
    "SigmoidDiffusivity",
    "SimpleDiffusivity",
    "SoftmaxDiffusivity",
    "SparseFlowDiffusivity",
    "SumDiffusivity",
    "SymmetricDiffusivity",
    "UniformDiffusivity",
    "auxiliary_loss",
    "edge_loss",
]
