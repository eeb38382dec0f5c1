"""One-dimensional stencils: out_i = Σ_k α_k (v_left + v_right), with i's neighbours at strides h_k in its sequence."""

from diffusion_mp.kernels.neumann.neighbours import Boundary, neighbours
from diffusion_mp.kernels.neumann.op import neumann_inner, neumann_product
from diffusion_mp.kernels.neumann.spectral import neumann_function

__all__ = ["Boundary", "neighbours", "neumann_function", "neumann_inner", "neumann_product"]
