"""Diffusivities: (state, graph) → coupling."""

from diffusion_mp.diffusivities.all_pair import (
    AllPairDiffusivity,
    GaussianDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
)
from diffusion_mp.diffusivities.base import Diffusivity, ScaledDiffusivity, SumDiffusivity
from diffusion_mp.diffusivities.edge import EdgeDiffusivity, GATDiffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity, IdentityDiffusivity, UniformDiffusivity
from diffusion_mp.diffusivities.graph_term import GraphAugmentedDiffusivity
from diffusion_mp.diffusivities.sgformer import SGFormerDiffusivity

__all__ = [
    "AdjacencyDiffusivity",
    "AllPairDiffusivity",
    "Diffusivity",
    "EdgeDiffusivity",
    "GATDiffusivity",
    "GaussianDiffusivity",
    "GraphAugmentedDiffusivity",
    "IdentityDiffusivity",
    "SGFormerDiffusivity",
    "ScaledDiffusivity",
    "SigmoidDiffusivity",
    "SimpleDiffusivity",
    "SoftmaxDiffusivity",
    "SumDiffusivity",
    "UniformDiffusivity",
]
