"""Linear attention in plain torch, O(N): the sums over the senders of every graph, and the rows that read them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.operation import heads_first
from diffusion_mp.kernels.segments import nodes_first, slices
from diffusion_mp.runtime.precision import LEAST, lies_in, quotient, unit_vectors


class Terms(NamedTuple):
    """The options of :func:`linear_attention`, for :func:`linear_pool` and :func:`linear_read`.

    Attributes:
        ptr: row boundaries [B + 1] of a ragged batch; ``None`` is one graph.
        constant: c, added to every score.
        own: weight of a node in its own row beyond s_ii, as a multiple of n.
        unit: whether queries and keys are divided by their norms.

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


def linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Return out_i = Σ_j (q_i·k_j) v_j over the nodes j of i's graph, by sums over the nodes of every graph."""

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q @ (k.mT @ v)

    return _by_graph(rows, ptr, q, k, v)


def attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the rows through the sums over the nodes of every graph."""

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = unit_vectors(q) if terms.unit else q
        # Of one tensor in both roles the norms are taken once.
        keys = queries
        if q is not k:
            keys = unit_vectors(k) if terms.unit else k
        return read(queries, v, *pool(keys, v), v.size(-2), terms)

    values = _by_graph(rows, terms.ptr, q, k, v)
    return LinearRows(values, values, values)


def _by_graph(
    rows: Callable[..., Tensor],
    ptr: Tensor | None,
    *inputs: Tensor,
) -> Tensor:
    """Apply a function of features as `heads_first` returns them to every graph of inputs [N, H, F]."""
    if ptr is None:
        return nodes_first(rows(*heads_first(*inputs))).contiguous()
    parts = [
        _by_graph(rows, None, *(x[graph] for x in inputs))
        for graph in slices(ptr, inputs[0].size(0))
    ]
    return torch.cat(parts) if parts else torch.zeros_like(inputs[-1])


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
) -> Tensor:
    """Return the rows [..., n, D] of receivers [..., n, F] from the sums of :func:`pool` over ``size`` nodes."""
    # A product and a sum in one call, which torch has for matrices and for stacks of them.
    product = torch.addmm if q.dim() == 2 else torch.baddbmm
    total = product(right if terms.constant == 1 else terms.constant * right, q, outer)
    row = (q @ left.unsqueeze(-1)) + (terms.constant + terms.own) * size
    if terms.own:
        total = total + terms.own * size * v
    # A look takes less time than the cases of a quotient and their derivatives.
    if lies_in(row, LEAST, math.inf):
        return total / row
    return quotient(total, row)
