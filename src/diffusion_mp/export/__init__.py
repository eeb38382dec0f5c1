"""Exported programs that run where this library is not installed, as ONNX for example."""

from diffusion_mp.export.plain import in_plain_torch

__all__ = ["in_plain_torch"]
