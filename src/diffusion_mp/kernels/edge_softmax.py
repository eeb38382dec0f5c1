"""Softmax over the entries of every row, as graph attention takes it; sums along rows, and what entries get of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph.ops import Compressed
from diffusion_mp.kernels.operation import Wide, empty_like, operation
from diffusion_mp.kernels.precision import accumulating, quotient
from diffusion_mp.kernels.spmm import matrix, trained


class Rows(NamedTuple):
    """The row of every entry [E]; bounds [N+1] and order [E] of the entries by row, as `Compressed` has them."""

    node: Tensor
    ptr: Tensor
    order: Tensor

    @classmethod
    def of(cls, rows: Compressed) -> Rows:
        """Those of one end of the edges."""
        return cls(rows.node, rows.ptr, rows.order)

    def matrix(self, like: Tensor) -> Tensor:
        """[N, E], ones where an entry stands in a row."""
        count = self.order.numel()
        return matrix(self.ptr, self.order, like.new_ones(count), count)


def _sums_along(rows: Rows, x: Tensor) -> Tensor:
    return x.new_zeros(rows.ptr.numel() - 1, x.size(1)).index_add(0, rows.node, x)


def _sums_by_product(rows: Rows, x: Tensor) -> Tensor:
    return rows.matrix(x) @ x if x.numel() else _sums_along(rows, x)


def _given(rows: Rows, x: Tensor) -> Tensor:
    return x.index_select(0, rows.node)


@operation("row_sums", family="spmm", reference=_sums_along, cpu=_sums_by_product)
def _row_sums(rows: Rows, x: Wide) -> Tensor:
    return x.new_empty(rows.ptr.size(0) - 1, x.size(1))


@operation("at_rows", family="spmm", reference=_given, cpu=_given)
def _at_rows(rows: Rows, x: Wide) -> Tensor:
    return x.new_empty(rows.node.size(0), x.size(1))


_row_sums.derivatives({"x": lambda grad, rows, backend: _at_rows(rows, grad, backend=backend)})
_at_rows.derivatives({"x": lambda grad, rows, backend: _row_sums(rows, grad, backend=backend)})


def _softmax_along(rows: Rows, logits: Tensor, prior: Tensor | None) -> Tensor:
    """Shifted by the largest logit of the row, in which edges of prior zero have no part either."""
    lowest = torch.finfo(logits.dtype).min
    none = torch.zeros_like(logits, dtype=torch.bool) if prior is None else (prior == 0).expand_as(logits)
    top = logits.new_full((rows.ptr.numel() - 1, logits.size(1)), lowest)
    index = rows.node.unsqueeze(1).expand_as(logits)
    top = top.scatter_reduce(0, index, logits.detach().masked_fill(none, lowest), "amax")
    weight = torch.exp((logits - _given(rows, top)).masked_fill(none, 0.0))
    weight = weight if prior is None else prior * weight
    return quotient(weight, _given(rows, _sums_along(rows, weight)))


def _softmax_in_place(rows: Rows, logits: Tensor, prior: Tensor | None) -> Tensor:
    """Return the softmax along compressed rows, in as few passes over [E, H] as torch allows."""
    if not logits.numel() or logits.device.type != "cpu":
        return _softmax_along(rows, logits, prior)
    if prior is not None:
        logits = logits.masked_fill(prior == 0, -torch.inf)
    ones = rows.matrix(logits)
    top = torch.sparse.mm(ones, logits, "amax").clamp_(min=torch.finfo(logits.dtype).min)
    weight = logits.sub(_given(rows, top)).exp_()
    if prior is not None:
        weight *= prior
    total = ones @ weight
    return weight.mul_(_given(rows, quotient(torch.ones_like(total), total)))


@operation("edge_softmax", family="spmm", reference=_softmax_along, cpu=_softmax_in_place)
def _softmax(rows: Rows, logits: Wide, prior: Wide | None) -> Tensor:
    return empty_like(logits)


def _by_logits(grad: Tensor, rows: Rows, out: Tensor, backend: str) -> Tensor:
    moved = out * grad
    return moved - out * _at_rows(rows, _row_sums(rows, moved, backend=backend), backend=backend)


_softmax.derivatives({"logits": _by_logits})


def row_sums(rows: Compressed, x: Float[Tensor, "E H"]) -> Float[Tensor, "N H"]:
    """The sum over the entries of every row. O(E H)."""
    return _row_sums(Rows.of(rows), x)


def at_rows(rows: Compressed, x: Float[Tensor, "N H"]) -> Float[Tensor, "E H"]:
    """Return the value of its row for every entry, in at least float32. O(E H)."""
    if trained(x):
        return _at_rows(Rows.of(rows), x)
    (x,), _ = accumulating(x)  # only gradients, sums along the rows, need the entries in their order
    return x.index_select(0, rows.node)


def edge_softmax(
    rows: Compressed, logits: Float[Tensor, "E H"], prior: Float[Tensor, "E one"] | None = None
) -> Float[Tensor, "E H"]:
    """prior · exp(logit) over its sum along the row, in at least float32; without ``prior`` it is 1 for all.

    Edges of prior zero have no part, not even in the maximum. O(E H).
    """
    learned = prior is not None and trained(prior)
    return _softmax(Rows.of(rows), logits, prior, backend="reference" if learned else "auto")
