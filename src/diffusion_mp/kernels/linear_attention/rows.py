"""What the fast paths on the CPU do with the rows of some graphs, [b, n, F] with a graph and head in every b."""

from typing import NamedTuple

import torch
from torch import Tensor

# Norms between which the squares of a vector, and products with those of others, stay within the range of float32.
LEAST, MOST = 1e-10, 1e10


class Vectors(NamedTuple):
    """Vectors x; multiplied by ``scale`` they are x̃, unit vectors or as they were."""

    entries: Tensor
    """[b, n, F]."""
    scale: Tensor
    """1/‖x‖, [b, n, 1]; one, [1, 1, 1], where vectors stay as they are."""
    size: Tensor | None = None
    """What the entries were divided by before, [b, n, 1]; ``None``: by nothing."""


def vectors(x: Tensor, unit: bool) -> Vectors:
    """Vectors and their norms; each is divided by its largest entry first where a square would over- or underflow.

    A vector whose entries are all below the smallest normal number becomes zero, divided by infinity.
    """
    if not unit:
        return Vectors(x, x.new_ones(1, 1, 1))
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
    shortest, longest = norm.aminmax() if x.numel() else (1.0, 1.0)
    if float(shortest) > LEAST and float(longest) < MOST:  # nearly always, and then the rows need not be written
        return Vectors(x, norm.reciprocal_())
    size = x.abs().amax(2, keepdim=True)
    size.masked_fill_(size < torch.finfo(size.dtype).tiny, torch.inf)
    x = x / size
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
    return Vectors(x, norm.masked_fill_(norm == 0, torch.inf).reciprocal_(), size)


def store_tangential(out: Tensor, gradient: Tensor, along: Tensor | None, x: Vectors) -> None:
    """Write what is left of a gradient by x̃, divided by ‖x‖, behind that division: (gradient·x) / ‖x‖² is ``along``.

    ``None`` where vectors stay as they are.
    """
    if along is None:
        if out is not gradient:
            out.copy_(gradient)
        return
    if x.size is not None:
        gradient, along = gradient / x.size, along / x.size
    torch.addcmul(gradient, along, x.entries, value=-1, out=out)


def reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 for 0, as which every number counts whose reciprocal is beyond the range."""
    return x.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)
