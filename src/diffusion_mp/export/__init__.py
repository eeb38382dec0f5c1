"""Export of programs that run where this library is not installed, for example as ONNX."""

from diffusion_mp.export.plain import in_plain_torch

__all__ = ["in_plain_torch"]
