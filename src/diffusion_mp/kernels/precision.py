"""Sums over nodes accumulate in at least float32, also under autocast and in half precision."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: Tensors that all have one of these dtypes stay as they are.
ALREADY = (torch.float32, torch.float64)


def accumulating(*tensors: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """Bring ``tensors`` to one dtype of at least float32; also return the dtype of the last, for the result."""
    dtype = tensors[-1].dtype
    if dtype in ALREADY and {tensor.dtype for tensor in tensors} == {dtype}:
        return [*tensors], dtype
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors], tensors[-1].dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast reaches into custom operations; inside this context it does not, on the device of ``tensor``."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def exp_limit(dtype: torch.dtype) -> float:
    """An exponent that neither overflows nor does so in a sum over a row: entries beyond it are out of play."""
    return 0.8 * math.log(torch.finfo(dtype).max)


def exp_(x: Tensor, most: float = math.inf) -> Tensor:
    """e^x in place, cut off at :func:`exp_limit` on both sides: an underflow takes a hundred times as long.

    ``most``: the largest exponent where that is known, and rounding may exceed it.
    """
    limit = exp_limit(x.dtype)
    return x.clamp_(-limit, min(limit, most)).exp_()
