"""Energy-constrained diffusion layers for PyTorch Geometric.

state x  ──Diffusivity──▶  coupling S  ──StateUpdate──▶  next state x′            Energy watches x, x′ and S
"""

from typing import Any

from diffusion_mp import estimators
from diffusion_mp.cite import cite
from diffusion_mp.couplings import Coupling
from diffusion_mp.data import KNNGraph, knn_graph
from diffusion_mp.diagnostics import EnergyTrace, diagnose
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    AdjacencyEnhancedDiffusivity,
    Diffusivity,
    EdgeDiffusivity,
    GATDiffusivity,
    GaussianDiffusivity,
    GraphAugmentedDiffusivity,
    IdentityDiffusivity,
    KernelizedSoftmaxDiffusivity,
    NeumannDiffusivity,
    PenaltyDiffusivity,
    SGFormerDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
    SparseFlowDiffusivity,
    SymmetricDiffusivity,
    UniformDiffusivity,
    auxiliary_loss,
)
from diffusion_mp.energies import (
    Energy,
    FunctionPenalty,
    GaussianPenalty,
    MixturePenalty,
    Penalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
    certify,
)
from diffusion_mp.errors import (
    ConvergenceError,
    CouplingMismatchError,
    SingularSystemError,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers import (
    APPNPConv,
    CertifiedConv,
    DIFFormerConv,
    DiffusionConv,
    GATConv,
    GatedGCNConv,
    GCNConv,
    GCNIIConv,
    GINConv,
    MLPConv,
    MultiHeadConv,
    NodeFormerConv,
    PDEDiffusion1d,
    SFiConv,
    SGConv,
    SGFormerConv,
    from_pyg,
)
from diffusion_mp.models import (
    GPS,
    CertifiedDIFFormer,
    CertifiedTransformer,
    DFiFormer,
    DIFFormer,
    DiffusionGNN,
    GatedGCN,
    LabelPropagation,
    NodeFormer,
    PDETransformer,
    SFiFormer,
    SGFormer,
    full_graph_inference,
)
from diffusion_mp.runtime.progress import show_progress
from diffusion_mp.saving import load
from diffusion_mp.updates import (
    CertifiedStep,
    CrankNicolson,
    Equilibrium,
    ExplicitEuler,
    HeatKernel,
    ImplicitEuler,
    MomentumStep,
    StateUpdate,
)

__version__ = "0.2.0"

__all__ = [
    "GPS",
    "APPNPConv",
    "AdjacencyDiffusivity",
    "AdjacencyEnhancedDiffusivity",
    "CertifiedConv",
    "CertifiedDIFFormer",
    "CertifiedStep",
    "CertifiedTransformer",
    "ConvergenceError",
    "Coupling",
    "CouplingMismatchError",
    "CrankNicolson",
    "DFiFormer",
    "DIFFormer",
    "DIFFormerConv",
    "DiffusionConv",
    "DiffusionGNN",
    "Diffusivity",
    "EdgeDiffusivity",
    "Energy",
    "EnergyTrace",
    "Equilibrium",
    "ExplicitEuler",
    "FunctionPenalty",
    "GATConv",
    "GATDiffusivity",
    "GCNConv",
    "GCNIIConv",
    "GINConv",
    "GatedGCN",
    "GatedGCNConv",
    "GaussianDiffusivity",
    "GaussianPenalty",
    "Graph",
    "GraphAugmentedDiffusivity",
    "HeatKernel",
    "IdentityDiffusivity",
    "ImplicitEuler",
    "KNNGraph",
    "KernelizedSoftmaxDiffusivity",
    "LabelPropagation",
    "MLPConv",
    "MixturePenalty",
    "MomentumStep",
    "MultiHeadConv",
    "NeumannDiffusivity",
    "NodeFormer",
    "NodeFormerConv",
    "PDEDiffusion1d",
    "PDETransformer",
    "Penalty",
    "PenaltyDiffusivity",
    "QuadraticPenalty",
    "SFiConv",
    "SFiFormer",
    "SGConv",
    "SGFormer",
    "SGFormerConv",
    "SGFormerDiffusivity",
    "SigmoidDiffusivity",
    "SigmoidPenalty",
    "SimpleDiffusivity",
    "SimplePenalty",
    "SingularSystemError",
    "SoftmaxDiffusivity",
    "SoftmaxPenalty",
    "SparseFlowDiffusivity",
    "StateUpdate",
    "SymmetricDiffusivity",
    "UniformDiffusivity",
    "auxiliary_loss",
    "certify",
    "cite",
    "diagnose",
    "from_pyg",
    "full_graph_inference",
    "knn_graph",
    "load",
    "show_progress",
]


def __getattr__(name: str) -> Any:
    # Not in __all__: it imports scikit-learn, which is an extra.
    if name == "DiffusionClassifier":
        return estimators.DiffusionClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
