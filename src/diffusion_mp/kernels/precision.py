"""Sums over nodes accumulate in at least float32, also under autocast and in half precision."""

import math
from functools import reduce

import torch
from torch import Tensor


def accumulating(*tensors: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """Bring ``tensors`` to one dtype of at least float32; also return the dtype of the last, for the result."""
    return promoted(*tensors, least=torch.float32)


def promoted(*tensors: Tensor, least: torch.dtype | None = None) -> tuple[list[Tensor], torch.dtype]:
    """Bring ``tensors`` to one dtype, half precision too, unless ``least`` is more; also return that of the last."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), least or tensors[0].dtype)
    return [tensor.to(dtype) for tensor in tensors], tensors[-1].dtype


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Autocast reaches into custom operations; inside this context it does not, on the device of ``tensor``."""
    return torch.autocast(tensor.device.type, enabled=False)


def exp_limit(dtype: torch.dtype) -> float:
    """An exponent that neither overflows nor does so in a sum over a row: entries beyond it are out of play."""
    return 0.8 * math.log(torch.finfo(dtype).max)
