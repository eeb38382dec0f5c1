"""Arithmetic that keeps its range and its digits.

Sums over nodes accumulate in at least float32, also under autocast and for half-precision inputs. Norms of any size can
be divided by, and divisions by a sum that may be zero give zero, in the gradient too.
"""

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
    """Disable autocast, which reaches into custom operations, on the device of ``tensor``."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def exp_limit(dtype: torch.dtype) -> float:
    """An exponent that neither overflows nor does so in a sum over a row; entries beyond it do not count."""
    return 0.8 * math.log(torch.finfo(dtype).max)


def exp_(x: Tensor, most: float = math.inf) -> Tensor:
    """e^x in place, cut off at :func:`exp_limit` on both sides: an underflow takes a hundred times as long.

    ``most``: the largest exponent where that is known, and rounding may exceed it.
    """
    limit = exp_limit(x.dtype)
    return x.clamp_(-limit, min(limit, most)).exp_()


def unit_vectors(x: Tensor) -> Tensor:
    """x/‖x‖ along the last axis, for vectors of any length; a zero vector stays zero, in the gradient too.

    Vectors are divided by their largest entry first, so no square over- or underflows. Half precision is widened
    inside. What is below the smallest normal number of the dtype counts as zero. Differentiable any number of times.
    """
    if not x.size(-1):
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    size = wide.detach().abs().amax(-1, keepdim=True)
    zero = size < torch.finfo(size.dtype).tiny
    # The direction does not depend on the size, so that may be held constant.
    scaled = torch.where(zero, 1.0, wide / size.masked_fill(zero, 1.0))
    unit = scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return unit.masked_fill(zero, 0.0).to(x.dtype)


def quotient(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in at least float32, and 0 where the whole is 0, in the gradient too.

    A whole below the smallest normal number counts as 0: its digits are lost, and its reciprocal may be infinite.
    """
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
    zero = whole.abs() < torch.finfo(whole.dtype).tiny
    return torch.where(zero, 0.0, part / torch.where(zero, 1.0, whole))


def inverse_root(degree: Tensor) -> Tensor:
    """1/√d in at least float32, and 0 where d is not above zero, in the gradient too."""
    degree = degree.to(torch.promote_types(degree.dtype, torch.float32))
    none = ~(degree >= torch.finfo(degree.dtype).tiny)
    return torch.where(none, 0.0, torch.where(none, 1.0, degree).rsqrt())


def reciprocal(degree: Tensor) -> Tensor:
    """1/d in at least float32, and 0 where d is 0, in the gradient too: a row without senders stays zero."""
    return quotient(degree.new_ones(()), degree)
