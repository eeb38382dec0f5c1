"""The fast path: the sums of a row's neighbours are bags of rows, found once for a length or a batch."""

from functools import lru_cache

import torch
from torch import Tensor

from diffusion_mp.graph.cache import persistent
from diffusion_mp.graph.ops import compress
from diffusion_mp.kernels.neumann.neighbours import Stencil, neighbours
from diffusion_mp.kernels.segments import batch_plan

# Rows of the longest single sequence whose neighbours are kept: beyond, finding them takes less than reading them.
KEPT = 1 << 16

Bags = tuple[Tensor, Tensor]
"""Bounds [N+1] of the entries of every row, and the rows that these stand for."""


def product(v: Tensor, alpha: Tensor, stencil: Stencil, transpose: bool) -> Tensor:
    """Σ_k α_k A_{h_k} v, or with the transposed A."""
    out: Tensor | None = None
    for stride, weight in zip(stencil.strides, alpha.unsqueeze(2).unbind(), strict=True):
        moved = _sums(v, stride, stencil, transpose)
        out = moved.mul_(weight) if out is None else out.addcmul_(moved, weight)
    return torch.zeros_like(v) if out is None else out


def inner(g: Tensor, v: Tensor, stencil: Stencil) -> Tensor:
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
    """The neighbours of every row, or whose neighbour it is."""
    left, right = neighbours(num_nodes, (stride,), boundary, ptr, device)
    if turned:
        row = torch.arange(num_nodes, device=device).repeat(2)
        bounds, _, rows = compress(torch.cat([left[0], right[0]]), row, num_nodes)
        return bounds, rows
    rows = torch.stack([left[0], right[0]], 1).flatten()
    return torch.arange(0, rows.numel() + 1, 2, device=device), rows


@lru_cache(maxsize=64)
def _known(num_nodes: int, stride: int, boundary: str, turned: bool, device: torch.device) -> Bags:
    """The same, kept."""
    return persistent(lambda: _find(num_nodes, stride, boundary, turned, device))
