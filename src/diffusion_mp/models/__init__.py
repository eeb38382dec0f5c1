"""Models: chains of diffusion layers, tensors in and logits or embeddings out."""

from diffusion_mp.inference import full_graph_inference
from diffusion_mp.models.certified_difformer import CertifiedDIFFormer
from diffusion_mp.models.certified_transformer import CertifiedTransformer
from diffusion_mp.models.difformer import DIFFormer
from diffusion_mp.models.gnn import DiffusionGNN
from diffusion_mp.models.gps import GPS, DFiFormer, GatedGCN, SFiFormer
from diffusion_mp.models.label_propagation import LabelPropagation
from diffusion_mp.models.nodeformer import NodeFormer
from diffusion_mp.models.pde_transformer import PDETransformer
from diffusion_mp.models.sgformer import SGFormer
from diffusion_mp.released import released_state_dict

__all__ = [
    "GPS",
    "CertifiedDIFFormer",
    "CertifiedTransformer",
    "DFiFormer",
    "DIFFormer",
    "DiffusionGNN",
    "GatedGCN",
    "LabelPropagation",
    "NodeFormer",
    "PDETransformer",
    "SFiFormer",
    "SGFormer",
    "full_graph_inference",
    "released_state_dict",
]
