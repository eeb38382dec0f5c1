"""Vectors divided by their norms, whatever their length, and numbers divided by sums that may be zero."""

import torch
from torch import Tensor


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
    """1/d in at least float32, and 0 where d is 0: a row nobody sends to stays a zero row, in the gradient too."""
    return quotient(degree.new_ones(()), degree)
