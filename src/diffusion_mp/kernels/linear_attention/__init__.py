"""All-pair attention with a bilinear score, in O(N): normalised rows as one operation, and the bare product."""

from diffusion_mp.kernels.linear_attention.op import linear_attention
from diffusion_mp.kernels.linear_attention.product import linear_product

__all__ = ["linear_attention", "linear_product"]
