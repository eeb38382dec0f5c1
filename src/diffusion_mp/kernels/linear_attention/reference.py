"""Linear attention in plain torch: the bare product pair by pair, and attention as a quotient of such products.

With q′_i = [q_i, c], k′_j = [k_j, 1] and v′_j = [v_j, 1], the last channel of Σ_j (q′_i·k′_j) v′_j is the sum of the
scores c + q_i·k_j of row i.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.operation import heads_first
from diffusion_mp.kernels.precision import LEAST, lies_in, quotient, unit_vectors
from diffusion_mp.kernels.segments import slices


class Terms(NamedTuple):
    """The options of a row, those of :func:`linear_attention`.

    Examples:
        >>> terms = Terms(constant=1.0, unit=True)
        >>> rows = linear_read(q, k, linear_pool(k, k, terms), terms)
        >>> torch.allclose(rows, linear_attention(q, k, k, constant=1.0, unit=True))
        True
    """

    ptr: Tensor | None = None
    constant: float = 0.0
    own: float = 0.0
    unit: bool = False


class LinearRows(NamedTuple):
    """The result of attention, and what gradients of the fast paths need; the reference leaves that empty."""

    values: Tensor  # [N, H, D]
    den: Tensor  # denominators [N, H]
    pooled: Tensor  # as of :func:`linear_pool`, or zeros where they are not needed; of a batch no entry


def linear_product(
    q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], ptr: Tensor | None
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph, in O(n²) per graph."""
    parts = [torch.einsum("ihf,jhf,jhd->ihd", q[rows], k[rows], v[rows]) for rows in slices(ptr, q.size(0))]
    return torch.cat(parts) if parts else torch.zeros_like(v)


def product_of_one_graph(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Return Σ_j (q_i·k_j) v_j of one graph through the sums over its nodes."""
    sums = torch.bmm(k.transpose(0, 1).mT, v.transpose(0, 1))
    return torch.bmm(q.transpose(0, 1), sums).transpose(0, 1).contiguous()


def attention(
    q: Float[Tensor, "N H F"], k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], terms: Terms,
    product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = linear_product,
) -> LinearRows:  # fmt: skip
    """out_i = (own n v_i + Σ_j s_ij v_j) / (own n + Σ_j s_ij), as differentiable as ``product`` is."""
    q, k = (unit_vectors(q), unit_vectors(k)) if terms.unit else (q, k)
    one = torch.ones_like(v[:, :, :1])
    own = terms.own * product(one, one, one, terms.ptr)
    queries, keys, values = pad(q, (0, 1), value=terms.constant), pad(k, (0, 1), value=1.0), pad(v, (0, 1), value=1.0)
    total = product(queries, keys, values, terms.ptr)
    values = quotient(total[..., :-1] + own * v, total[..., -1:] + own)
    return LinearRows(values, *2 * [total.new_empty(0)])


def attention_of_one_graph(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the rows of one graph through the sums over its nodes, in as few calls as possible."""
    # No cosine is below −1, and that of a vector with itself is 1.
    positive = q is k and terms.unit and terms.constant >= 1 and terms.own >= 0
    q, k, v = heads_first(q, k, v)
    queries = unit_vectors(q) if terms.unit else q
    keys = queries if q is k else unit_vectors(k) if terms.unit else k
    out = read(queries, v, *pool(keys, v), v.size(-2), terms, positive)
    return LinearRows(out, out, out)


def pool(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ_j k_j v_jᵀ, Σ_j k_j and Σ_j v_j for k and v as `heads_first` returns them."""
    return k.mT @ v, k.sum(-2), v.sum(-2, keepdim=True)


def read(
    q: Tensor, v: Tensor, outer: Tensor, left: Tensor, right: Tensor, size: int | Tensor, terms: Terms,
    positive: bool = False,
) -> Float[Tensor, "N H D"]:  # fmt: skip
    """Return the rows [N, H, D] from such sums over ``size`` nodes; ``positive`` says that no row sums to zero."""
    constant, own, one = terms.constant * size, terms.own * size, q.dim() == 2
    right = right if terms.constant == 1 else terms.constant * right
    total = (torch.addmm if one else torch.baddbmm)(right, q, outer)
    total = total + own * v if terms.own else total
    row = torch.mv(q, left) if one else torch.bmm(q, left.unsqueeze(2)).squeeze(2)
    row = row.add_(constant + own).unsqueeze(-1)
    out = total / row if positive or lies_in(row, LEAST, math.inf) else quotient(total, row)
    return (out.unsqueeze(1) if one else out.transpose(0, 1)).contiguous()
