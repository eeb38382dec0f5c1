"""The fast path: shifted views where all sequences have one length, rows gathered by index where they do not."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffusion_mp.kernels.neumann.neighbours import Stencil, neighbours
from diffusion_mp.kernels.segments import common_size


def product(v: Tensor, alpha: Tensor, stencil: Stencil, transpose: bool) -> Tensor:
    """Σ_k α_k A_{h_k} v, or with the transposed A: one read of v and one update of the result per neighbour."""
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    if v.numel() == 0:
        return out
    strides, boundary, ptr = stencil
    length = common_size(ptr, v.size(0))
    if length is not None:
        stack, weights = _stack(v, length), alpha.repeat_interleave(v.size(2), dim=1)
        result = _stack(out, length)
        for stride, weight in zip(strides, weights, strict=True):
            for rows, piece in pieces(stack, stride, boundary, transpose):
                result[:, rows].addcmul_(piece, weight)
        return out
    turned = transpose and boundary in ("replicate", "causal")  # the others are symmetric
    for maps in neighbours(v.size(0), *stencil, v.device):
        for neighbour, weight in zip(maps, alpha.unsqueeze(2), strict=True):
            if turned:
                out.index_add_(0, neighbour, weight * v)
            else:
                out.addcmul_(v.index_select(0, neighbour), weight)
    return out


def inner(g: Tensor, v: Tensor, stencil: Stencil) -> Tensor:
    """⟨g, A_{h_k} v⟩ of every stride and head, [K, H]."""
    strides, boundary, ptr = stencil
    out = v.new_zeros(len(strides), v.size(1))
    if v.numel() == 0:
        return out
    length = common_size(ptr, v.size(0))
    if length is not None:
        left, right = _stack(g, length), _stack(v, length)
        for total, stride in zip(out, strides, strict=True):
            for rows, piece in pieces(right, stride, boundary, False):
                total += (left[:, rows] * piece).sum((0, 1)).unflatten(0, (v.size(1), -1)).sum(1)
        return out
    for maps in neighbours(v.size(0), *stencil, v.device):
        for total, neighbour in zip(out, maps, strict=True):
            total += (g * v.index_select(0, neighbour)).sum((0, 2))
    return out


def _stack(v: Tensor, length: int) -> Tensor:
    """[N, H, D] → [sequences, length, H·D]."""
    return v.flatten(1).unflatten(0, (-1, length))


def pieces(v: Tensor, stride: int, boundary: str, transpose: bool) -> Iterator[tuple[slice, Tensor]]:
    """The terms of A_h v for a stack [b, n, F]: rows of the result, and the view of v that is added to them."""
    n = v.size(1)
    if boundary == "symmetric":  # reflections repeat with period 2n, and a step of h is one of 2n − h backwards
        h = min(stride % (2 * n), -stride % (2 * n))
    else:
        h = stride % n if boundary == "periodic" else min(stride, n)
    first, last, head, tail = v[:, :h], v[:, n - h :], slice(0, h), slice(n - h, n)
    from_left, from_right = (slice(h, n), v[:, : n - h]), (slice(0, n - h), v[:, h:])
    if boundary == "causal":
        yield from (from_right if transpose else from_left, (head, first), (slice(0, n), v))
        return
    yield from (from_left, from_right)
    if boundary == "symmetric":
        yield from ((head, first.flip(1)), (tail, last.flip(1)))
    elif boundary == "periodic":
        yield from ((head, last), (tail, first))
    elif boundary == "drop":
        yield from ((head, first), (tail, last))
    elif transpose:
        yield from ((slice(0, 1), first.sum(1, keepdim=True)), (slice(n - 1, n), last.sum(1, keepdim=True)))
    else:
        yield from ((head, v[:, :1]), (tail, v[:, -1:]))
