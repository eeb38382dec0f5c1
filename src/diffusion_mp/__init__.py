"""Energy-constrained diffusion layers for PyTorch Geometric.

state x  ──Diffusivity──▶  coupling S  ──StateUpdate──▶  next state x′            Energy watches x, x′ and S
"""

from diffusion_mp.cite import cite
from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    LowRankCoupling,
    PairwiseCoupling,
    ScaledCoupling,
    SparseCoupling,
    SumCoupling,
    UniformCoupling,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    EdgeDiffusivity,
    GATDiffusivity,
    GaussianDiffusivity,
    GraphAugmentedDiffusivity,
    IdentityDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
    UniformDiffusivity,
)
from diffusion_mp.energies import (
    Certificate,
    Energy,
    EnergyTrace,
    GaussianPenalty,
    Penalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
    certify,
    energy_bounds,
)
from diffusion_mp.errors import ConvergenceError, CouplingMismatchError, SingularSystemError
from diffusion_mp.graph import Graph
from diffusion_mp.layers import (
    APPNPConv,
    DIFFormerConv,
    DiffusionConv,
    GATConv,
    GCNConv,
    GCNIIConv,
    GINConv,
    MLPConv,
    SGConv,
)
from diffusion_mp.models import DIFFormer, DiffusionGNN, LabelPropagation
from diffusion_mp.updates import Backtracking, Equilibrium, ExplicitEuler, HeatKernel, ImplicitEuler, StateUpdate

__version__ = "0.1.0"

__all__ = [
    "APPNPConv",
    "AdjacencyDiffusivity",
    "Backtracking",
    "Certificate",
    "ConvergenceError",
    "Coupling",
    "CouplingMismatchError",
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
    "GATConv",
    "GATDiffusivity",
    "GCNConv",
    "GCNIIConv",
    "GINConv",
    "GaussianDiffusivity",
    "GaussianPenalty",
    "Graph",
    "GraphAugmentedDiffusivity",
    "HeatKernel",
    "IdentityCoupling",
    "IdentityDiffusivity",
    "ImplicitEuler",
    "LabelPropagation",
    "LowRankCoupling",
    "MLPConv",
    "PairwiseCoupling",
    "Penalty",
    "QuadraticPenalty",
    "SGConv",
    "ScaledCoupling",
    "SigmoidDiffusivity",
    "SigmoidPenalty",
    "SimpleDiffusivity",
    "SimplePenalty",
    "SingularSystemError",
    "SoftmaxDiffusivity",
    "SoftmaxPenalty",
    "SparseCoupling",
    "StateUpdate",
    "SumCoupling",
    "UniformCoupling",
    "UniformDiffusivity",
    "certify",
    "cite",
    "energy_bounds",
]
