"""Layers: the generic ``DiffusionConv`` and the named ones built from it."""

from diffusion_mp.layers.attention import DIFFormerConv, NodeFormerConv, SFiConv, SGFormerConv
from diffusion_mp.layers.certified_conv import CertifiedConv
from diffusion_mp.layers.diffusion_conv import DiffusionConv
from diffusion_mp.layers.fixed import APPNPConv, GATConv, GCNConv, GCNIIConv, GINConv, MLPConv, SGConv
from diffusion_mp.layers.from_pyg import from_pyg
from diffusion_mp.layers.gated_gcn_conv import GatedGCNConv
from diffusion_mp.layers.gps_block import GPSBlock
from diffusion_mp.layers.multi_head_conv import MultiHeadConv
from diffusion_mp.layers.pde_diffusion import PDEDiffusion1d
from diffusion_mp.layers.positional import LaplacianEncoder

__all__ = [
    "APPNPConv",
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
    "NodeFormerConv",
    "PDEDiffusion1d",
    "SFiConv",
    "SGConv",
    "SGFormerConv",
    "from_pyg",
]
