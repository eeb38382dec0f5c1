"""One-dimensional stencils: out_i = Σ_k α_k (v_left + v_right), with i's neighbours at strides h_k in its sequence.

The product is bilinear, so its derivatives are the product itself and the inner product declared beside it.
"""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels import gpu
from diffusion_mp.kernels.neumann.spectral import neumann_function
from diffusion_mp.kernels.neumann.stencil import (
    Boundary,
    Stencil,
    gathered_inner,
    gathered_product,
    neighbours,
    reference_inner,
    reference_product,
)
from diffusion_mp.kernels.operation import Backend, Wide, empty_like, operation

__all__ = ["Boundary", "neighbours", "neumann_function", "neumann_product"]


TRITON = "diffusion_mp.kernels.neumann.triton"


@operation(
    "neumann_product",
    family="neumann",
    reference=reference_product,
    cpu=gathered_product,
    triton=gpu.kernel(TRITON, "product", math.inf),
    dtype="v",
)
def _product(v: Wide, alpha: Wide, stencil: Stencil, transpose: bool) -> Tensor:
    return empty_like(v)


@operation(
    "neumann_inner",
    family="neumann",
    reference=reference_inner,
    cpu=gathered_inner,
    triton=gpu.kernel(TRITON, "inner", math.inf),
    dtype="v",
)
def _inner(g: Wide, v: Wide, stencil: Stencil) -> Tensor:
    return v.new_empty(len(stencil.strides), v.size(1))


def _by_alpha(grad: Tensor, v: Tensor, stencil: Stencil, transpose: bool, backend: str) -> Tensor:
    left, right = (v, grad) if transpose else (grad, v)  # ⟨g, Aᵀv⟩ = ⟨v, A g⟩
    return _inner(left, right, stencil, backend=backend)


_product.derivatives(
    {
        "v": lambda grad, alpha, stencil, transpose, backend: _product(
            grad, alpha, stencil, not transpose, backend=backend
        ),
        "alpha": _by_alpha,
    }
)
_inner.derivatives(
    {
        "g": lambda grad, v, stencil, backend: _product(v, grad, stencil, False, backend=backend),
        "v": lambda grad, g, stencil, backend: _product(g, grad, stencil, True, backend=backend),
    }
)


def neumann_product(
    v: Float[Tensor, "N H D"],
    alpha: Float[Tensor, "K H"],
    strides: Sequence[int],
    boundary: str = "symmetric",
    ptr: Tensor | None = None,
    *,
    transpose: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_k α_k (v_left + v_right), the neighbours of i at stride h_k in its sequence, in O(K N D).

    Args:
        v: values, the rows of a sequence in order.
        alpha: weight of every stride and head.
        strides: h_k ≥ 1.
        boundary: what a neighbour is where the sequence ends; see `neighbours`.
        ptr: row boundaries [B+1] of several sequences, on the CPU; ``None`` is one sequence.
        transpose: multiply with the transposed matrix.
        backend: how it is computed; see `kernels.operation`.

    Differentiable any number of times. Half precision accumulates in float32; the result has the dtype of ``v``.

    Examples:
        >>> neumann_product(torch.rand(6, 1, 4), torch.full((1, 1), 0.25), (1,)).shape
        torch.Size([6, 1, 4])
    """
    return _product(v, alpha, Stencil(list(strides), boundary, ptr), transpose, backend=backend)


def neumann_inner(
    g: Float[Tensor, "N H D"],
    v: Float[Tensor, "N H D"],
    strides: Sequence[int],
    boundary: str = "symmetric",
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "K H"]:
    """Σ_i g_i·(v_left + v_right) of every stride and head: the derivative of `neumann_product` in ``alpha``.

    Args:
        g, v: [N, H, D].
        strides, boundary, ptr, backend: as of :func:`neumann_product`.

    Returns:
        [K, H].

    Examples:
        >>> neumann_inner(torch.rand(6, 1, 4), torch.rand(6, 1, 4), (1, 2)).shape  # one number per stride and head
        torch.Size([2, 1])
    """
    return _inner(g, v, Stencil(list(strides), boundary, ptr), backend=backend)
