"""Sums over nodes accumulate in at least float32, also under autocast and in half precision."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor


def accumulating(*tensors: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """Bring ``tensors`` to one dtype of at least float32; also return the dtype of the last, for the result."""
    return promoted(*tensors, least=torch.float32)


def promoted(*tensors: Tensor, least: torch.dtype | None = None) -> tuple[list[Tensor], torch.dtype]:
    """Bring ``tensors`` to one dtype, half precision too, unless ``least`` is more; also return that of the last."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), least or tensors[0].dtype)
    return [tensor.to(dtype) for tensor in tensors], tensors[-1].dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast reaches into custom operations; inside this context it does not, on the device of ``tensor``."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def exp_limit(dtype: torch.dtype) -> float:
    """An exponent that neither overflows nor does so in a sum over a row: entries beyond it are out of play."""
    return 0.8 * math.log(torch.finfo(dtype).max)
