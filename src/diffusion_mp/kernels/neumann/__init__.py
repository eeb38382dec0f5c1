"""One-dimensional stencils: out_i = Σ_k α_k (v_left + v_right), with i's neighbours at strides h_k in its sequence."""

from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import check_choice
from diffusion_mp.kernels.neumann import stencil
from diffusion_mp.kernels.neumann.stencil import (
    Boundary,
    Stencil,
    neighbours,
    neumann_function,
)
from diffusion_mp.kernels.operation import (
    Backend,
    Narrow,
    Wide,
    empty_like,
    few_numbers,
    operation,
)
from diffusion_mp.runtime.precision import wide_dtype

__all__ = ["Boundary", "neighbours", "neumann_function", "neumann_product"]

declare = partial(operation, family="neumann", dtype="v")


@declare(
    "neumann_product",
    formula=partial(stencil.product, stencil.plain_sums),
    cpu=partial(stencil.product, stencil.fast_sums),
    # Only a compiler fuses the calls of the formula.
    small=lambda v, alpha, *_: torch.compiler.is_compiling() and few_numbers(v, alpha),
)
def _product(v: Narrow, alpha: Wide, stencil: Stencil, transpose: bool) -> Tensor:
    return empty_like(v)


@declare(
    "neumann_inner",
    formula=partial(stencil.inner, stencil.plain_sums),
    cpu=partial(stencil.inner, stencil.fast_sums),
)
def _inner(g: Narrow, v: Narrow, stencil: Stencil) -> Tensor:
    # A sum over nodes: half precision would lose most of it.
    return v.new_empty(
        len(stencil.strides),
        v.size(1),
        dtype=wide_dtype(v.dtype),
    )


def _by_v(
    grad: Tensor,
    alpha: Tensor,
    stencil: Stencil,
    transpose: bool,
    backend: str,
) -> Tensor:
    return _product(grad, alpha, stencil, not transpose, backend=backend)


def _by_alpha(
    grad: Tensor,
    v: Tensor,
    stencil: Stencil,
    transpose: bool,
    backend: str,
) -> Tensor:
    # The inner product of g with Aᵀv is the inner product of v with A g.
    pair = (v, grad) if transpose else (grad, v)
    return _inner(*pair, stencil, backend=backend)


# Linear in both arguments, so each derivative is one of the two operations again.
_product.derivatives({"v": _by_v, "alpha": _by_alpha})
_inner.derivatives(
    {
        "g": lambda grad, v, stencil, backend: _product(
            v, grad, stencil, False, backend=backend
        ),
        "v": lambda grad, g, stencil, backend: _product(
            g, grad, stencil, True, backend=backend
        ),
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
    r"""Add up the left and right neighbours of every row in its sequence, at several strides, in O(K N D).

        out_i = Σ_k α_k (v_left + v_right)

    Left and right are the neighbours of i at stride h_k. Sums accumulate in at least float32, and the result has the
    dtype of ``v``. The function can be differentiated any number of times.

    Args:
        v: values, with the rows of a sequence in order.
        alpha: α, the weight of every stride and head.
        strides: h_k ≥ 1, the K distances to the neighbours.
        boundary: how a sequence continues beyond its ends, see `neighbours`. The default reflects it, so that the
            matrix is symmetric.
        ptr: row boundaries [B + 1] of several sequences, on the CPU. By default all rows are one sequence.
        transpose: whether to multiply by the transposed matrix.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        v, output: [N, H, D].
        alpha: [K, H].

    Examples:
        >>> neumann_product(torch.rand(6, 1, 4), torch.full((1, 1), 0.25), (1,)).shape
        torch.Size([6, 1, 4])
    """
    # Checked here, since an operation has no sentence for what it cannot compute.
    check_choice(boundary, "boundary", get_args(Boundary))
    return _product(
        v, alpha, Stencil(list(strides), boundary, ptr), transpose, backend=backend
    )
