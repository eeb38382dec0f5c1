"""Sums over nodes accumulate in at least float32, also under autocast and in half precision."""

import torch
from torch import Tensor


def accumulating(*tensors: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """Bring ``tensors`` to one dtype of at least float32; also return the dtype of the last, for the result."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors], tensors[-1].dtype


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Autocast reaches into custom operations; inside this context it does not, on the device of ``tensor``."""
    return torch.autocast(tensor.device.type, enabled=False)
