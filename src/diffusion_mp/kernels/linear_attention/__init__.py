"""All-pair attention with a bilinear score, in O(N): the bare product, normalised rows, and the two halves of these."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels import gpu
from diffusion_mp.kernels.linear_attention import blocked, reference
from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.operation import (
    Backend,
    Narrow,
    Wide,
    empty_like,
    few_numbers,
    operation,
)
from diffusion_mp.runtime.precision import (
    accumulating,
    unit_vectors,
    wide_dtype,
    without_autocast,
)

__all__ = ["Terms", "linear_attention", "linear_pool", "linear_product", "linear_read"]

on_gpu = partial(gpu.kernel, "diffusion_mp.kernels.linear_attention.triton")


@operation(
    "linear_product",
    formula=reference.linear_product,
    cpu=blocked.linear_product,
    # The formula of a batch runs graph by graph, in many calls.
    small=lambda q, k, v, ptr: ptr is None and few_numbers(q, k, v),
    dtype="v",
)
def trilinear(q: Wide, k: Wide, v: Wide, ptr: Tensor | None) -> Tensor:
    return empty_like(v)


# Its derivatives are itself with the arguments exchanged.
trilinear.derivatives(
    {
        "q": lambda grad, k, v, ptr, backend: trilinear(
            grad, v, k, ptr, backend=backend
        ),
        "k": lambda grad, q, v, ptr, backend: trilinear(
            v, grad, q, ptr, backend=backend
        ),
        "v": lambda grad, q, k, ptr, backend: trilinear(
            k, q, grad, ptr, backend=backend
        ),
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
    r"""Multiply values by the scores q_i·k_j of all pairs of a graph, in O(N F D) (Wu, Wipf & Yan 2025, Eq. 19).

        out_i = Σ_j (q_i·k_j) v_j

    The sum runs over the nodes j of i's graph and accumulates in at least float32. The result has the dtype of ``v``.
    The function can be differentiated any number of times.

    Args:
        q: features of the receivers.
        k: features of the senders.
        v: values of the senders.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        q, k: [N, H, F].
        v, output: [N, H, D].

    Examples:
        >>> torch.allclose(linear_product(q, k, k), torch.einsum("ihf,jhf,jhd->ihd", q, k, k))
        True
    """
    return trilinear(q, k, v, ptr, backend=backend)


@operation(
    "linear_attention",
    formula=reference.attention,
    cpu=blocked.forward,
    triton=on_gpu("forward"),
    small=lambda q, k, v, terms: terms.ptr is None and few_numbers(q, k, v),
    dtype="v",
)
def linear_rows(q: Narrow, k: Narrow, v: Narrow, terms: Terms) -> LinearRows:
    """Return :func:`linear_attention` as ``values`` of a tuple; q, k and v have the same number of heads."""
    # Denominators, which half precision could not tell from zero or infinity.
    wide = v.new_empty(v.shape[:2], dtype=wide_dtype(v.dtype))
    sums = wide.new_empty(
        # The sums of a single graph serve the backward pass; those of many small graphs may be larger than v.
        v.size(1) if terms.ptr is None else 0,
        k.size(2) + 1,
        v.size(2) + 1,
    )
    return LinearRows(empty_like(v), wide, sums)


@operation(
    "linear_attention_backward",
    family="linear_attention",
    formula=(linear_rows, "q k v"),
    cpu=blocked.backward,
    triton=on_gpu("backward"),
)
def _backward(
    grad_values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: LinearRows,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q, k, v)


def _formula_of_one(
    grad_values: Tensor,
    x: Tensor,
    out: LinearRows,
    terms: Terms,
) -> Tensor:
    # The gradients of one tensor in three roles add up.
    return sum(_backward.formula(grad_values, x, x, x, out, terms))


@operation(
    "linear_attention_of_one_backward",
    family="linear_attention",
    formula=_formula_of_one,
    cpu=blocked.backward_of_one,
)
def _backward_of_one(
    grad_values: Tensor,
    x: Tensor,
    out: LinearRows,
    terms: Terms,
) -> Tensor:
    """Return the gradient of one tensor that serves as queries, keys and values."""
    return empty_like(x)


def _gradients(
    grad_values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: LinearRows,
    terms: Terms,
    backend: Backend,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # The gradient of all three roles at once takes a product less. Autograd adds it to the first role.
    if q is k is v and q.is_cpu and backend in ("auto", "cpu"):
        total = _backward_of_one(grad_values, q, out, terms, backend=backend)
        return total, None, None
    return _backward(grad_values, q, k, v, out, terms, backend=backend)


linear_rows.derivatives({"q k v": _gradients})


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
    r"""Return attention over all pairs of a graph, normalised by row, in O(N F D).

        out_i = (a n v_i + Σ_j s_ij v_j) / (a n + Σ_j s_ij),  s_ij = c + q_i·k_j

    The sums run over the n nodes j of i's graph. DIFFormer-s is c = 1, a = 0 with unit vectors (Wu, Wipf & Yan 2025,
    Eqs. 55–57). SGFormer is c = 0, a = 1 with unit vectors (D⁻¹(I + Q̃K̃ᵀ/n), multiplied by n; Wu et al. 2023b).

    A row whose denominator is zero is zero, in the gradient too. Nothing is kept in memory beyond results and
    gradients. Sums accumulate in at least float32, and the result has the dtype of ``v``. The function can be
    differentiated any number of times.

    Args:
        q: queries of the receivers.
        k: keys of the senders.
        v: values of the senders. One head of q and k meets every head of v.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        constant: c, added to every score. The default is the bare inner product.
        own: a, the weight of a node in its own row beyond s_ii, as a multiple of n. None by default.
        unit: whether to divide every q_i and k_j by its norm. A zero vector stays zero, in the gradient too. The
            default leaves vectors as they are.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        q, k: [N, H, F] or [N, 1, F].
        v, output: [N, H, D].

    Examples:
        >>> linear_attention(q, k, torch.rand(6, 2, 4)).shape
        torch.Size([6, 2, 4])
    """
    if q.size(1) != v.size(1):
        # Views, so that the one head is not copied.
        q = q.expand(-1, v.size(1), -1)
        k = k.expand(-1, v.size(1), -1)
    return linear_rows(q, k, v, Terms(ptr, constant, own, unit), backend=backend).values


def linear_pool(
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    terms: Terms,
) -> Float[Tensor, "H G E"]:
    """Return the sums over senders that :func:`linear_read` needs, [[Σ_j k_j v_jᵀ, Σ_j k_j], [Σ_j v_j, n]].

    The sums of the parts of a graph add up to the sums of the graph, so that a large graph can be pooled part by part.
    The function runs in plain torch and accumulates in at least float32.

    Args:
        k: keys of the senders, nodes of one graph.
        v: values of the senders.
        terms: options of the attention. ``terms.ptr`` is ignored.

    Shapes:
        k: [N, H, F].
        v: [N, H, D].
        output: [H, F + 1, D + 1].

    Examples:
        >>> v = torch.rand(6, 2, 4)
        >>> parts = [linear_pool(k[part], v[part], Terms()) for part in (node < 2, node >= 2)]
        >>> torch.allclose(sum(parts), linear_pool(k, v, Terms()))  # [heads, features + 1, channels + 1]
        True
    """
    (k, v), _ = accumulating(k, v)
    with without_autocast(v):
        # Norms of rows first, so that the sums of all blocks are of the same vectors.
        keys = unit_vectors(k) if terms.unit else k
        outer, left, right = reference.pool(keys.transpose(0, 1), v.transpose(0, 1))
    return blocked.Sums(outer, left.unsqueeze(1), right).state(v.size(0))


def linear_read(
    q: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    sums: Float[Tensor, "H G E"],
    terms: Terms,
) -> Float[Tensor, "N H D"]:
    """Return the rows of :func:`linear_attention` for some receivers, in plain torch.

    Args:
        q: queries of the receivers.
        v: values of the receivers, which matter if ``terms.own`` is not zero.
        sums: the result of :func:`linear_pool` for all senders, with the same terms.
        terms: options of the attention.

    Shapes:
        q: [N, H, F].
        v, output: [N, H, D].
        sums: [H, F + 1, D + 1].

    Examples:
        >>> v = torch.rand(6, 2, 4)
        >>> rows = linear_read(q[:2], v[:2], linear_pool(k, v, Terms()), Terms())
        >>> torch.allclose(rows, linear_attention(q, k, v)[:2])
        True
    """
    (q, sums, v), dtype = accumulating(q, sums, v)
    with without_autocast(v):
        queries = unit_vectors(q) if terms.unit else q
        outer, left, right = blocked.Sums.split(sums)
        rows = reference.read(
            queries.transpose(0, 1),
            v.transpose(0, 1),
            outer,
            left.squeeze(1),
            right,
            # The number of all senders, which is the last entry of the sums.
            sums[0, -1, -1],
            terms,
        )
    return rows.transpose(0, 1).to(dtype)
