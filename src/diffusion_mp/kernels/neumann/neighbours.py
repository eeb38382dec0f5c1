"""Every boundary is two index maps: who is my left neighbour at stride h, and who is my right one."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

Boundary = Literal["symmetric", "replicate", "drop", "periodic", "causal"]
"""How a sequence goes on beyond its two ends: see :func:`neighbours`.

Examples:
    >>> from typing import get_args
    >>> for boundary in get_args(Boundary):
    ...     left, right = neighbours(4, (1,), boundary, None, torch.device("cpu"))
    ...     print(boundary, left.tolist(), right.tolist())
    symmetric [[0, 0, 1, 2]] [[1, 2, 3, 3]]
    replicate [[0, 0, 1, 2]] [[1, 2, 3, 3]]
    drop [[0, 0, 1, 2]] [[1, 2, 3, 3]]
    periodic [[3, 0, 1, 2]] [[1, 2, 3, 0]]
    causal [[0, 0, 1, 2]] [[0, 1, 2, 3]]
"""


class Stencil(NamedTuple):
    """Who is whose neighbour: the strides h_k, what stands beyond the ends of a sequence, and where sequences begin."""

    strides: Sequence[int]
    boundary: str
    ptr: Tensor | None


def positions(ptr: Tensor | None, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor | int]:
    """The place of every row in its sequence, 0 … n − 1, and n: one number, or [N] for a ragged batch."""
    row = torch.arange(num_nodes, device=device)
    if ptr is None:
        return row, max(num_nodes, 1)
    lengths = ptr.diff().to(device)
    start = ptr[:-1].to(device).repeat_interleave(lengths, output_size=num_nodes)
    return row - start, lengths.repeat_interleave(lengths, output_size=num_nodes)


def column(strides: Sequence[int], like: Tensor) -> Int[Tensor, "K one"]:
    """The strides below each other; made without ``torch.tensor``, which operations cannot be written out with."""
    return torch.cat([like.new_zeros(0, 1), *(like.new_full((1, 1), stride) for stride in strides)])


def neighbours(
    num_nodes: int, strides: Sequence[int], boundary: str, ptr: Tensor | None, device: torch.device
) -> tuple[Int[Tensor, "K N"], Int[Tensor, "K N"]]:
    """The rows of the left and the right neighbours at every stride, in the same sequence.

    ``"symmetric"`` reflects with the end repeated (x₀ = x₁, x₋₁ = x₂, …), ``"replicate"`` stops at the end, ``"drop"``
    puts the node itself where a neighbour is missing, ``"periodic"`` goes round, ``"causal"`` drops on the left and
    has the node itself for its right neighbour.

    Args:
        num_nodes: N.
        strides: K distances h ≥ 1.
        boundary: one of `Boundary`.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one sequence.
        device: of the result.

    Returns:
        Left and right, each [K, N].

    Examples:
        >>> left, right = neighbours(6, (1, 2), "symmetric", None, torch.device("cpu"))
        >>> left.tolist()
        [[0, 0, 1, 2, 3, 4], [1, 0, 0, 1, 2, 3]]
    """
    place, length = positions(ptr, num_nodes, device)
    stride = column(strides, place)
    left, right = place - stride, place + stride
    if boundary == "symmetric":
        left, right = left % (2 * length), right % (2 * length)
        left, right = torch.minimum(left, 2 * length - 1 - left), torch.minimum(right, 2 * length - 1 - right)
    elif boundary == "replicate":
        left, right = left.clamp(min=0), torch.where(right < length, right, length - 1)
    elif boundary == "periodic":
        left, right = left % length, right % length
    else:
        left = torch.where(left < 0, place, left)
        right = torch.where(right < length, right, place) if boundary == "drop" else place.expand_as(right)
    start = torch.arange(num_nodes, device=device) - place
    return start + left, start + right
