"""Diagnostics: what a layer does, measured."""

from diffusion_mp.diagnostics.kernel_error import kernel_error

__all__ = ["kernel_error"]
