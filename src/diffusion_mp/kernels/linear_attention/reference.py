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

from diffusion_mp.kernels.operation import heads_first, nodes_first
from diffusion_mp.kernels.precision import LEAST, lies_in, quotient, unit_vectors
from diffusion_mp.kernels.segments import slices


class Terms(NamedTuple):
    """The options of a row, those of :func:`linear_attention`.

    Examples:
        >>> terms = Terms(constant=1.0, unit=True)
        >>> rows = linear_read(q, k, linear_pool(k, k, terms), terms).values
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
    pooled: Tensor  # as in :func:`pool`, [H, F + 1, D + 1], or zeros where they are not needed; of a batch no entry


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
    one = torch.ones_like(v[:, :, :1])
    size = product(one, one, one, terms.ptr)
    return _normalized(product(_queries(q, terms), _keys(k, terms), _with_one(v), terms.ptr), v, terms.own * size)


def attention_of_one_graph(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the rows of one graph through the sums over its nodes, in as few calls as possible."""
    one, mutual, own = v.size(1) == 1, q is k, terms.own * v.size(0)
    q = heads_first(unit_vectors(q) if terms.unit else q)
    k = q if mutual else heads_first(unit_vectors(k) if terms.unit else k)
    values = heads_first(v)
    keys, sums = k.sum(-2), values.sum(-2, keepdim=True)
    sums = sums if terms.constant == 1 else terms.constant * sums
    total = nodes_first((torch.addmm if one else torch.baddbmm)(sums, q, k.mT @ values))
    total = total + own * v if own else total
    row = torch.mv(q, keys) if one else torch.bmm(q, keys.unsqueeze(2)).squeeze(2)
    row = nodes_first(row.add_(terms.constant * v.size(0) + own).unsqueeze(-1))
    # No cosine is below −1, and that of a vector with itself is 1.
    positive = (mutual and terms.unit and terms.constant >= 1 and own >= 0) or lies_in(row, LEAST, math.inf)
    out = (total / row if positive else quotient(total, row)).contiguous()
    return LinearRows(out, out, out)


def pool(k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], terms: Terms) -> Float[Tensor, "H F_and_one D_and_one"]:
    """Σ_j k′_j v′_jᵀ over the nodes of one graph: KᵀV, Σ_j k_j, Σ_j v_j and their number."""
    return torch.einsum("jhf,jhd->hfd", _keys(k, terms), _with_one(v))


def read(
    q: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], sums: Float[Tensor, "H F_and_one D_and_one"], terms: Terms
) -> LinearRows:
    """Return the rows of attention from the sums over all senders."""
    return _normalized(torch.einsum("ihf,hfd->ihd", _queries(q, terms), sums), v, terms.own * sums[0, -1, -1])


def _queries(q: Tensor, terms: Terms) -> Tensor:
    return pad(unit_vectors(q) if terms.unit else q, (0, 1), value=terms.constant)


def _keys(k: Tensor, terms: Terms) -> Tensor:
    return _with_one(unit_vectors(k) if terms.unit else k)


def _with_one(x: Tensor) -> Tensor:
    return pad(x, (0, 1), value=1.0)


def _normalized(total: Tensor, v: Tensor, own: Tensor) -> LinearRows:
    return LinearRows(quotient(total[..., :-1] + own * v, total[..., -1:] + own), *2 * [total.new_empty(0)])
