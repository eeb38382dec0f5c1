"""Couplings: matrix-free linear operators over nodes, one per head."""

from diffusion_mp.couplings.algebra import ScaledCoupling, SumCoupling
from diffusion_mp.couplings.base import Coupling
from diffusion_mp.couplings.dense import DenseCoupling
from diffusion_mp.couplings.distance import DistanceCoupling
from diffusion_mp.couplings.features import distance_features, with_constant
from diffusion_mp.couplings.identity import IdentityCoupling
from diffusion_mp.couplings.linear_attention import LinearAttentionCoupling
from diffusion_mp.couplings.log_low_rank import LogLowRankCoupling
from diffusion_mp.couplings.low_rank import LowRankCoupling, UniformCoupling
from diffusion_mp.couplings.neumann import NeumannCoupling
from diffusion_mp.couplings.pairwise import PairwiseCoupling
from diffusion_mp.couplings.polynomial import PolynomialCoupling
from diffusion_mp.couplings.pooled import PooledCoupling, Sums, merged
from diffusion_mp.couplings.projected import ProjectedCoupling
from diffusion_mp.couplings.reweighted import ReweightedCoupling, row_normalized
from diffusion_mp.couplings.score import Score
from diffusion_mp.couplings.sparse import SparseCoupling
from diffusion_mp.couplings.sparse_flow import SparseFlowCoupling
from diffusion_mp.couplings.symmetric import symmetric_normalized, without_diagonal

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
    "ProjectedCoupling",
    "ReweightedCoupling",
    "ScaledCoupling",
    "Score",
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
