"""Neighbours in sequences, and the sums over them.

Every boundary condition is two index maps: the left and the right neighbour of each row at stride h. The reference
indexes by them; the fast path sums bags of rows, which are found once for a length or a batch.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from diffusion_mp.graph.cache import persistent
from diffusion_mp.graph.ops import compress
from diffusion_mp.kernels.segments import batch_plan

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
    """The neighbours of all rows: the strides h_k, the boundary condition, and the bounds of the sequences."""

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


def stencils(
    num_nodes: int, strides: Sequence[int], boundary: str, ptr: Tensor | None, like: Tensor
) -> Float[Tensor, "K N N"]:
    """A_h of every stride h, with A_h x = x_left + x_right; row sums are 2, and Δ_h = A_h − 2I."""
    left, right = neighbours(num_nodes, strides, boundary, ptr, like.device)
    if num_nodes == 0:
        return like.new_zeros(len(strides), 0, 0)
    return (one_hot(left, num_nodes) + one_hot(right, num_nodes)).to(like.dtype)


def reference_product(
    v: Float[Tensor, "N H D"], alpha: Float[Tensor, "K H"], stencil: Stencil, transpose: bool = False
) -> Float[Tensor, "N H D"]:
    """Σ_k α_k (v_left + v_right); with ``transpose`` every row is added to its neighbours instead."""
    left, right = neighbours(v.size(0), *stencil, v.device)
    if not transpose:
        return torch.einsum("kh,knhd->nhd", alpha, v[left] + v[right])
    given = torch.einsum("kh,nhd->knhd", alpha, v).flatten(0, 1)
    return torch.zeros_like(v).index_add(0, left.flatten(), given).index_add(0, right.flatten(), given)


def reference_inner(g: Float[Tensor, "N H D"], v: Float[Tensor, "N H D"], stencil: Stencil) -> Float[Tensor, "K H"]:
    """⟨g, A_{h_k} v⟩ of every stride and head."""
    left, right = neighbours(v.size(0), *stencil, v.device)
    return torch.einsum("nhd,knhd->kh", g, v[left] + v[right])


# Rows of the longest single sequence whose neighbours are kept: beyond, finding them takes less than reading them.
KEPT = 1 << 16

Bags = tuple[Tensor, Tensor]
"""Bounds [N+1] of the entries of every row, and the rows that these stand for."""


def gathered_product(v: Tensor, alpha: Tensor, stencil: Stencil, transpose: bool) -> Tensor:
    """Σ_k α_k A_{h_k} v, or with the transposed A."""
    out: Tensor | None = None
    for stride, weight in zip(stencil.strides, alpha.unsqueeze(2).unbind(), strict=True):
        moved = _sums(v, stride, stencil, transpose)
        out = moved.mul_(weight) if out is None else out.addcmul_(moved, weight)
    return torch.zeros_like(v) if out is None else out


def gathered_inner(g: Tensor, v: Tensor, stencil: Stencil) -> Tensor:
    """⟨g, A_{h_k} v⟩ of every stride and head, [K, H]."""
    return torch.stack([_sums(v, stride, stencil, False).mul_(g).sum((0, 2)) for stride in stencil.strides])


def _sums(v: Tensor, stride: int, stencil: Stencil, transpose: bool) -> Tensor:
    """A_h v, or with the transposed A."""
    if v.numel() == 0:
        return torch.zeros_like(v)
    bounds, rows = _bags(v.size(0), stride, stencil, transpose, v.device)
    # Of what requires a gradient torch would number the bags.
    flat = v.detach().reshape(v.size(0), -1)
    return torch.embedding_bag(flat, rows, bounds, include_last_offset=True)[0].view_as(v)


def _bags(num_nodes: int, stride: int, stencil: Stencil, transpose: bool, device: torch.device) -> Bags:
    _, boundary, ptr = stencil
    turned = transpose and boundary in ("replicate", "causal")  # the others are symmetric
    what = stride, boundary, turned, device
    if ptr is None:
        return (_known if num_nodes <= KEPT else _find)(num_nodes, *what)
    known = batch_plan(ptr).stencils
    if what not in known:
        known[what] = _find(num_nodes, *what, ptr)
    return known[what]


def _find(
    num_nodes: int, stride: int, boundary: str, turned: bool, device: torch.device, ptr: Tensor | None = None
) -> Bags:
    """Return the neighbours of every row or, if ``turned``, the rows that it is a neighbour of."""
    left, right = neighbours(num_nodes, (stride,), boundary, ptr, device)
    if turned:
        row = torch.arange(num_nodes, device=device).repeat(2)
        bounds, _, rows = compress(torch.cat([left[0], right[0]]), row, num_nodes)
        return bounds, rows
    rows = torch.stack([left[0], right[0]], 1).flatten()
    return torch.arange(0, rows.numel() + 1, 2, device=device), rows


@lru_cache(maxsize=64)
def _known(num_nodes: int, stride: int, boundary: str, turned: bool, device: torch.device) -> Bags:
    """Cached :func:`_find` for one sequence."""
    return persistent(lambda: _find(num_nodes, stride, boundary, turned, device))
