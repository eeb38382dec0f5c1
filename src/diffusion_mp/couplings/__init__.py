"""Couplings: matrix-free linear operators over nodes, one per head."""

from diffusion_mp.couplings.algebra import IdentityCoupling, PolynomialCoupling
from diffusion_mp.couplings.base import Coupling, ScaledCoupling, SumCoupling
from diffusion_mp.couplings.features import distance_features, with_constant
from diffusion_mp.couplings.log_low_rank import LogLowRankCoupling
from diffusion_mp.couplings.low_rank import (
    LinearAttentionCoupling,
    LowRankCoupling,
    PooledCoupling,
    Sums,
    UniformCoupling,
    merged,
)
from diffusion_mp.couplings.neumann import NeumannCoupling
from diffusion_mp.couplings.pairwise import (
    DistanceCoupling,
    PairwiseCoupling,
    SparseFlowCoupling,
)
from diffusion_mp.couplings.stored import DenseCoupling, SparseCoupling
from diffusion_mp.couplings.weighted import (
    ReweightedCoupling,
    row_normalized,
    symmetric_normalized,
    without_diagonal,
)

__all__ = [
    "Coupling",
    "DenseCoupling",
    "DistanceCoupling",
    "IdentityCoupling",
    "LinearAttentionCoupling",
    "LogLowRankCoupling",
    "LowRankCoupling",
    "NeumannCoupling",
    "PairwiseCoupling",
    "PolynomialCoupling",
    "PooledCoupling",
    "ReweightedCoupling",
    "ScaledCoupling",
    "SparseCoupling",
    "SparseFlowCoupling",
    "SumCoupling",
    "Sums",
    "UniformCoupling",
    "distance_features",
    "merged",
    "row_normalized",
    "symmetric_normalized",
    "with_constant",
    "without_diagonal",
]
