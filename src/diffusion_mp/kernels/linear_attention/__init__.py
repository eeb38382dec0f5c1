"""All-pair attention with a bilinear score, in O(N): normalised rows as one operation or two, and the bare product."""

from diffusion_mp.kernels.linear_attention.op import linear_attention, linear_pool, linear_product, linear_read
from diffusion_mp.kernels.linear_attention.reference import Terms

__all__ = ["Terms", "linear_attention", "linear_pool", "linear_product", "linear_read"]
