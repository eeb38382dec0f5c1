"""The plain truth: the matrix of every stride, written out."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from diffusion_mp.kernels.neumann.neighbours import Stencil, neighbours


def stencils(
    num_nodes: int, strides: Sequence[int], boundary: str, ptr: Tensor | None, like: Tensor
) -> Float[Tensor, "K N N"]:
    """A_h of every stride h, with A_h x = x_left + x_right; row sums are 2, and Δ_h = A_h − 2I."""
    left, right = neighbours(num_nodes, strides, boundary, ptr, like.device)
    if num_nodes == 0:
        return like.new_zeros(len(strides), 0, 0)
    return (one_hot(left, num_nodes) + one_hot(right, num_nodes)).to(like.dtype)


def neumann_product(
    v: Float[Tensor, "N H D"], alpha: Float[Tensor, "K H"], stencil: Stencil, transpose: bool = False
) -> Float[Tensor, "N H D"]:
    """Σ_k α_k A_{h_k} v, or with the transposed matrices; O(K N²)."""
    matrices = stencils(v.size(0), *stencil, v)
    matrices = matrices.transpose(1, 2) if transpose else matrices
    return torch.einsum("kij,kh,jhd->ihd", matrices, alpha, v)


def neumann_inner(g: Float[Tensor, "N H D"], v: Float[Tensor, "N H D"], stencil: Stencil) -> Float[Tensor, "K H"]:
    """⟨g, A_{h_k} v⟩ of every stride and head."""
    return torch.einsum("ihd,kij,jhd->kh", g, stencils(v.size(0), *stencil, v), v)
