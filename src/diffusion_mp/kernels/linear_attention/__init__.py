"""All-pair attention with a bilinear score, in O(N).

The bare product, attention with normalised rows, and the two halves of attention for graphs that are split up.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph.ops import Size
from diffusion_mp.kernels import gpu
from diffusion_mp.kernels.linear_attention import blocked, reference
from diffusion_mp.kernels.linear_attention.reference import Attended, Terms
from diffusion_mp.kernels.operation import Backend, Narrow, Wide, empty_like, once_differentiable, operation
from diffusion_mp.kernels.precision import accumulating

__all__ = ["Terms", "linear_attention", "linear_pool", "linear_product", "linear_read"]


FAMILY = "linear_attention"
TRITON = "diffusion_mp.kernels.linear_attention.triton"

# ---------------------------------------------------------------- the bare product


@operation(
    "linear_product", family="linear_product", reference=reference.linear_product, cpu=blocked.linear_product, dtype="v"
)
def _product(q: Wide, k: Wide, v: Wide, ptr: Tensor | None) -> Tensor:
    return empty_like(v)


# It is trilinear, so its derivatives are itself with the arguments exchanged.
_product.derivatives(
    {
        "q": lambda grad, k, v, ptr, backend: _product(grad, v, k, ptr, backend=backend),
        "k": lambda grad, q, v, ptr, backend: _product(v, grad, q, ptr, backend=backend),
        "v": lambda grad, q, k, ptr, backend: _product(k, q, grad, ptr, backend=backend),
    }
)


def linear_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph, in O(N F D) (Wu, Wipf & Yan 2025, Eq. 19).

    Args:
        q, k: feature maps of receivers and senders.
        v: values.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph.
        backend: how it is computed; see `kernels.operation`.

    Returns:
        The result in the dtype of ``v``; half precision accumulates in float32. Differentiable any number of times.

    Examples:
        >>> v = torch.rand(6, 2, 4)
        >>> torch.allclose(linear_product(q, k, v), torch.einsum("ihf,jhf,jhd->ihd", q, k, v))
        True
    """
    return _product(q, k, v, ptr, backend=backend)


# ---------------------------------------------------------------- attention


class Gradients(NamedTuple):
    """By q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@operation(
    "linear_attention",
    family=FAMILY,
    reference=reference.attention,
    cpu=blocked.forward,
    triton=gpu.kernel(TRITON, "forward"),
    dtype="v",
)
def _attention(q: Narrow, k: Narrow, v: Narrow, terms: Terms) -> Attended:
    return _empty_rows(v, (v.size(1) if terms.ptr is None else 0, k.size(2), v.size(2)))


@operation("linear_attention_backward", family=FAMILY, cpu=blocked.backward, triton=gpu.kernel(TRITON, "backward"))
def _attention_backward(grad_values: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Attended, terms: Terms) -> Gradients:
    return Gradients(*empty_like(q, k, v))


def _second_derivatives(
    grad_values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    grad_dq: Tensor,
    grad_dk: Tensor,
    grad_dv: Tensor,
) -> tuple[Tensor, ...]:
    """Through the reference with the fast product, whose derivative is taken here: out and d are functions there."""
    with torch.enable_grad():
        # Views tell equal tensors apart, as in self-attention.
        inputs = [t.view_as(t).requires_grad_() for t in (grad_values, q, k, v)]
        (q, k, v), dtype = accumulating(*inputs[1:])
        out = reference.attention(q, k, v, terms, linear_product).values.to(dtype)
        first = torch.autograd.grad(out, inputs[1:], inputs[0], create_graph=True)
        return torch.autograd.grad(first, inputs, (grad_dq, grad_dk, grad_dv), create_graph=True)


_attention.derivatives({"q k v": _attention_backward})
_attention_backward.derivatives({"grad_values q k v": _second_derivatives})


def linear_attention(
    q: Float[Tensor, " N #H F"],
    k: Float[Tensor, " N #H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    *,
    constant: float = 0.0,
    own: float = 0.0,
    unit: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = (own n v_i + Σ_j s_ij v_j) / (own n + Σ_j s_ij), s_ij = c + q_i·k_j, over the n nodes j of i's graph.

    DIFFormer-s is c = 1 with unit vectors (Wu, Wipf & Yan 2025, Eqs. 55–57), SGFormer own = 1 with unit vectors
    (D⁻¹(I + Q̃K̃ᵀ/n), multiplied by n; Wu et al. 2023b). A row whose denominator is zero is zero, in the gradient too.

    Args:
        q, k: queries of the receivers and keys of the senders; one head broadcasts over those of the values.
        v: values.
        ptr: row boundaries [B+1] of a ragged batch, on the CPU; ``None`` is one graph.
        constant: c.
        own: what a node weighs in its own row beyond s_ii, as a multiple of n.
        unit: divide every q_i and k_j by its norm; a zero vector stays zero, in the gradient too.
        backend: how it is computed; see `kernels.operation`.

    Returns:
        The result in the dtype of ``v``, in O(N F D) time and with no memory beyond the result's, in the backward pass
        beyond the gradients'; half precision accumulates in float32. Differentiable any number of times.

    Examples:
        >>> linear_attention(q, k, torch.rand(6, 2, 4)).shape
        torch.Size([6, 2, 4])
    """
    if q.size(1) != v.size(1):
        q, k = q.expand(-1, v.size(1), -1), k.expand(-1, v.size(1), -1)
    return _attention(q, k, v, Terms(ptr, constant, own, unit), backend=backend).values


# ---------------------------------------------------------------- its halves, for one graph


@operation("linear_pool", family=FAMILY, reference=reference.pool, cpu=blocked.pool, triton=gpu.kernel(TRITON, "pool"))
def linear_pool(k: Narrow, v: Narrow, terms: Terms) -> Tensor:
    """[[Σ_j k_j v_jᵀ, Σ_j k_j], [Σ_j v_j, n]] over the nodes of one graph, [H, F + 1, D + 1]: what all its rows read.

    The sums of parts of a graph add up to those of the whole. In at least float32; once differentiable.

    Args:
        k, v: [N, H, F] and [N, H, D] of the senders.
        terms: of which ``ptr`` plays no part; see :class:`Terms`.

    Examples:
        >>> v = torch.rand(6, 2, 4)
        >>> whole, parts = linear_pool(k, v, Terms()), [linear_pool(k[i], v[i], Terms()) for i in (node < 2, node >= 2)]
        >>> torch.allclose(sum(parts), whole)  # [heads, features + 1, channels + 1]
        True
    """
    return _empty_sums(k, v)


@operation(
    "linear_read",
    family=FAMILY,
    reference=reference.read,
    cpu=blocked.read,
    triton=gpu.kernel(TRITON, "read"),
    dtype="v",
)
def linear_read(q: Narrow, v: Narrow, sums: Wide, terms: Terms) -> Attended:
    """The rows of :func:`linear_attention` for some receivers, from the sums over all senders; once differentiable.

    Args:
        q, v: [n, H, F] and [n, H, D] of the receivers; v matters where ``terms.own`` is not zero.
        sums: what :func:`linear_pool` gives, [H, F + 1, D + 1].
        terms: those of the sums.

    Returns:
        A named tuple whose ``values`` are the rows [n, H, D].

    Examples:
        >>> v = torch.rand(6, 2, 4)
        >>> rows = linear_read(q[:2], v[:2], linear_pool(k, v, Terms()), Terms()).values
        >>> torch.allclose(rows, linear_attention(q, k, v, constant=0.0)[:2])
        True
    """
    return _empty_rows(v, (0, q.size(2), v.size(2)))


@operation("linear_pool_backward", family=FAMILY, cpu=blocked.pool_backward, triton=gpu.kernel(TRITON, "pool_backward"))
def _pool_backward(grad: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    return empty_like(k, v)


@operation("linear_read_backward", family=FAMILY, cpu=blocked.read_backward, triton=gpu.kernel(TRITON, "read_backward"))
def _read_backward(
    grad: Tensor, q: Tensor, v: Tensor, out: Attended, sums: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dsums = empty_like(q, sums)
    return dq, empty_like(v) if terms.own else v.new_empty(0), dsums


def _row_gradients(
    grad_values: Tensor, q: Tensor, v: Tensor, out: Attended, sums: Tensor, terms: Terms, backend: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    dq, dv, dsums = _read_backward(grad_values, q, v, out, sums, terms, backend=backend)
    return dq, dv if terms.own else None, dsums


def _empty_rows(v: Tensor, sums: tuple[Size, Size, Size]) -> Attended:
    heads, features, channels = sums
    new = v.new_empty(0, dtype=torch.promote_types(v.dtype, torch.float32)).new_empty
    by_head = new(heads, features, channels), new(heads, features, 1), new(heads, 1, channels)
    return Attended(empty_like(v), new(v.shape[:2]), *by_head)


def _empty_sums(k: Tensor, v: Tensor) -> Tensor:
    shape = (v.size(1), k.size(2) + 1, v.size(2) + 1)
    return v.new_empty(shape, dtype=torch.promote_types(v.dtype, torch.float32))


linear_pool.derivatives({"k v": _pool_backward})
linear_read.derivatives({"q v sums": _row_gradients})
for _half in (_pool_backward, _read_backward):
    _half.derivatives(once_differentiable("linear attention in two halves", instead="take it whole (linear_attention)"))
