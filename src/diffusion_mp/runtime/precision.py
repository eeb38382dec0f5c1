"""Arithmetic that keeps its range and its digits: at least float32 for sums, and safe norms and quotients."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.runtime.cache import values_only

#: Dtypes in which sums over nodes are taken as they are.
ALREADY = (torch.float32, torch.float64)
#: Norms between which the squares of a vector, and products with squares of others, stay
#: within the range of float32.
LEAST = 1e-10
MOST = 1e10


def lies_in(x: Tensor, least: float, most: float) -> bool:
    """Return whether all numbers lie between two limits; ``False`` if one is NaN or the numbers are not at hand."""
    if not (x.is_cpu and x.numel() and values_only() and type(x) is Tensor):
        return False
    low, high = x.detach().aminmax()
    return float(low) > least and float(high) < most


def accumulating(*tensors: Tensor) -> tuple[list[Tensor], torch.dtype]:
    """Promote ``tensors`` to one dtype of at least float32; also return the dtype of the last, for the result."""
    last = tensors[-1].dtype
    # Nearly always all have one wide dtype already, and this runs in every product.
    if last in ALREADY and all(tensor.dtype == last for tensor in tensors):
        return [*tensors], last
    dtypes = [tensor.dtype for tensor in tensors]
    wide = reduce(torch.promote_types, dtypes, torch.float32)
    return [tensor.to(wide) for tensor in tensors], last


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over nodes are taken: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32."""
    return x.to(wide_dtype(x.dtype))


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, which reaches into custom operations, on the device of ``tensor``."""
    device = "cpu" if tensor.is_cpu else tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def exp_limit(dtype: torch.dtype) -> float:
    """Return the exponent beyond which terms are negligible, and up to which a sum over a row does not overflow."""
    return 0.8 * math.log(torch.finfo(dtype).max)


def exp_(x: Tensor, most: float = math.inf) -> Tensor:
    """Exponentiate in place, clamped to ± :func:`exp_limit` and ``most``: underflows take a hundred times as long."""
    limit = exp_limit(x.dtype)
    return x.clamp_(-limit, min(limit, most)).exp_()


def finite_shift(shift: Tensor) -> Tensor:
    """Replace −∞, the maximum of nothing, by zero: −∞ − (−∞) is NaN."""
    return shift.masked_fill(shift.isneginf(), 0.0)


def scaled_norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x with vectors along the last axis rescaled, their norms, and the factors of the rescaling.

    The factors are ``None`` where no square overflows or underflows. Otherwise the largest entry of every vector
    becomes ±1. A zero vector has the norm ∞.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if lies_in(norm, LEAST, MOST):  # nearly always on the CPU
        return x, norm, None
    if not x.size(-1):
        return x, norm + math.inf, None
    largest = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True)
    scale = largest.clamp(min=torch.finfo(x.dtype).tiny).reciprocal()
    # The scale cancels in what is made of both, so it needs no gradient.
    x = x * scale
    square = x.square().sum(-1, keepdim=True)
    return x, square.masked_fill(square == 0, math.inf).sqrt(), scale


def unit_vectors(x: Tensor) -> Tensor:
    """Return x/‖x‖ along the last axis for vectors of any length; a zero vector stays zero, in the gradient too.

    Half precision is widened. Differentiable any number of times.
    """
    scaled, norm, _ = scaled_norms(widened(x))
    return (scaled / norm).to(x.dtype)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide in at least float32; a zero (or subnormal) denominator gives 0, in the gradient too."""
    denominator = widened(denominator)
    zero = denominator.abs() < torch.finfo(denominator.dtype).tiny
    # The divisor is replaced as well: the gradient of a quotient by zero that is not
    # taken would be 0 · ∞.
    return torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))


def inverse_root(degree: Tensor) -> Tensor:
    """Return 1/√d in at least float32, and 0 where d is not above zero, in the gradient too."""
    degree = widened(degree)
    none = ~(degree >= torch.finfo(degree.dtype).tiny)
    return torch.where(none, 0.0, torch.where(none, 1.0, degree).rsqrt())


def reciprocal(degree: Tensor) -> Tensor:
    """Return 1/d in at least float32, and 0 where d is 0, in the gradient too: a row without senders stays zero."""
    return quotient(torch.ones_like(degree), degree)
