"""Diagnostics: what a layer does, measured and drawn."""

from diffusion_mp.diagnostics.kernel_error import kernel_error
from diffusion_mp.diagnostics.plot_attention import plot_attention

__all__ = ["kernel_error", "plot_attention"]
