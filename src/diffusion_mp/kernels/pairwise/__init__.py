"""All-pair attention with a nonlinear score, tile by tile: O(N²) time, O(N) memory."""

from diffusion_mp.kernels.pairwise.op import pairwise_attention, pairwise_logsumexp, pairwise_product
from diffusion_mp.kernels.pairwise.scores import SCORES, log_score

__all__ = ["SCORES", "log_score", "pairwise_attention", "pairwise_logsumexp", "pairwise_product"]
