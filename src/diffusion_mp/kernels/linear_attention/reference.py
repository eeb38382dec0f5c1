"""Linear attention in plain torch, O(N): the sums over the senders of every graph, and the rows that read them."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.operation import heads_first, pulled_back
from diffusion_mp.kernels.segments import slices
from diffusion_mp.runtime.precision import LEAST, lies_in, quotient, unit_vectors


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
    """The result of attention, and what gradients of the fast paths need; the formula puts the result there too."""

    values: Tensor  # [N, H, D]
    den: Tensor  # denominators [N, H]
    pooled: Tensor  # as of :func:`linear_pool`, or zeros where they are not needed; of a batch no entry


def linear_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None,
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph, through the sums over the nodes of every graph."""
    if ptr is None:
        sums = torch.bmm(k.transpose(0, 1).mT, v.transpose(0, 1))
        return torch.bmm(q.transpose(0, 1), sums).transpose(0, 1).contiguous()
    parts = [
        linear_product(q[rows], k[rows], v[rows], None)
        for rows in slices(ptr, q.size(0))
    ]
    return torch.cat(parts) if parts else torch.zeros_like(v)


def attention(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    terms: Terms,
) -> LinearRows:
    """Return the rows through the sums over the nodes of every graph, in as few calls as possible."""
    if terms.ptr is not None:
        of_one = terms._replace(ptr=None)
        graphs = [_rows(q, k, v, rows) for rows in slices(terms.ptr, q.size(0))]
        parts = [attention(q, k, v, of_one).values for q, k, v in graphs]
        values = torch.cat(parts) if parts else torch.zeros_like(v)
        return LinearRows(values, values, values)
    # No cosine is below −1, and that of a vector with itself is 1.
    positive = q is k and terms.unit and terms.constant >= 1 and terms.own >= 0
    q, k, v = heads_first(q, k, v)
    queries = unit_vectors(q) if terms.unit else q
    keys = queries
    if q is not k:
        keys = unit_vectors(k) if terms.unit else k
    values = read(queries, v, *pool(keys, v), v.size(-2), terms, positive)
    return LinearRows(values, values, values)


def attention_backward(
    grad_values: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: LinearRows,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; or without k and v that of q in all roles, and twice no entry."""
    if k is None or v is None:
        (of_all,) = pulled_back(
            lambda x: attention(x, x, x, terms).values, (q,), grad_values
        )
        return of_all, q.new_empty(0), q.new_empty(0)
    dq, dk, dv = pulled_back(
        lambda q, k, v: attention(q, k, v, terms).values, (q, k, v), grad_values
    )
    return dq, dk, dv


def _rows(
    q: Tensor, k: Tensor, v: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return some rows; a tensor in several roles is cut once, so that it stays one."""
    parts = {id(x): x[rows] for x in (q, k, v)}
    return parts[id(q)], parts[id(k)], parts[id(v)]


def pool(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ_j k_j v_jᵀ, Σ_j k_j and Σ_j v_j for k and v as `heads_first` returns them."""
    return k.mT @ v, k.sum(-2), v.sum(-2, keepdim=True)


def read(
    q: Tensor,
    v: Tensor,
    outer: Tensor,
    left: Tensor,
    right: Tensor,
    size: int | Tensor,
    terms: Terms,
    positive: bool = False,
) -> Float[Tensor, "N H D"]:
    """Return the rows [N, H, D] from such sums over ``size`` nodes; ``positive`` says that no row sums to zero."""
    constant = terms.constant * size
    own = terms.own * size
    one = q.dim() == 2
    right = right if terms.constant == 1 else terms.constant * right
    total = (torch.addmm if one else torch.baddbmm)(right, q, outer)
    total = total + own * v if terms.own else total
    if one:
        row = torch.mv(q, left)
    else:
        row = torch.bmm(q, left.unsqueeze(2)).squeeze(2)
    row = (row + (constant + own)).unsqueeze(-1)
    if positive or lies_in(row, LEAST, math.inf):
        out = total / row
    else:
        out = quotient(total, row)
    return (out.unsqueeze(1) if one else out.transpose(0, 1)).contiguous()
