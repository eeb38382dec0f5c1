"""All-pair attention with a bilinear score, in O(N): out_i = Σ_j (q_i·k_j) v_j within every graph."""

from diffusion_mp.kernels.linear_attention.op import linear_attention

__all__ = ["linear_attention"]
