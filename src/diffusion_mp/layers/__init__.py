"""Layers: the generic ``DiffusionConv``, and published layers built from it."""

from diffusion_mp.layers.attention import (
    DIFFormerConv,
    MultiHeadConv,
    NodeFormerConv,
    SFiConv,
    SGFormerConv,
)
from diffusion_mp.layers.certified_block import (
    CertifiedBlock,
    Neighbours,
    Pairs,
    RowAttention,
    TermModule,
    TiedMLP,
    WeightedGraph,
)
from diffusion_mp.layers.certified_conv import CertifiedConv
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.layers.features import LaplacianEncoder
from diffusion_mp.layers.fixed import (
    APPNPConv,
    GATConv,
    GCNConv,
    GCNIIConv,
    GINConv,
    MLPConv,
    SGConv,
)
from diffusion_mp.layers.gps import GatedGCNConv, GPSBlock
from diffusion_mp.layers.pyg import from_pyg
from diffusion_mp.layers.sequences import PDEDiffusion1d

__all__ = [
    "APPNPConv",
    "CertifiedBlock",
    "CertifiedConv",
    "DIFFormerConv",
    "DiffusionConv",
    "GATConv",
    "GCNConv",
    "GCNIIConv",
    "GINConv",
    "GPSBlock",
    "GatedGCNConv",
    "LaplacianEncoder",
    "MLPConv",
    "MultiHeadConv",
    "Neighbours",
    "NodeFormerConv",
    "PDEDiffusion1d",
    "Pairs",
    "RowAttention",
    "SFiConv",
    "SGConv",
    "SGFormerConv",
    "TermModule",
    "TiedMLP",
    "WeightedGraph",
    "from_pyg",
]
