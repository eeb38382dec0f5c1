"""Weighted sparse products over observed edges: out_i = Σ_e w_e v_source(e), and their derivative."""

from diffusion_mp.kernels.spmm.op import sddmm, spmm

__all__ = ["sddmm", "spmm"]
