"""The fast path on the CPU: sums over a block of nodes at a time, or, for small graphs, all pairs.

A block stays in cache from its norms to its products. With K = Σ_j k̃_j v_jᵀ, κ = Σ_j k̃_j and σ = Σ_j v_j over the n
nodes of a graph, and a = own n,

    d_i = q̃_i·κ + c n + a,  out_i = (Kᵀq̃_i + c σ + a v_i) / d_i.

Backward, with g_i = ∂out_i / d_i and h_i = −g_i·out_i, the sums are G = Σ_i q̃_i g_iᵀ, γ = Σ_i q̃_i h_i, b = c Σ_i g_i,

    ∂q̃_i = K g_i + h_i κ,  ∂k̃_j = G v_j + γ,  ∂v_j = Gᵀk̃_j + b + a g_j,

and ∂q_i = (∂q̃_i − (q̃_i·∂q̃_i) q̃_i) / ‖q_i‖; ∂k_j likewise. Of one tensor x = q = k = v every norm and sum is computed
once, and since v_i = ‖x_i‖ x̃_i, the gradient of all roles takes a product less: with t_i = (K g_i + h_i κ + γ) / ‖x_i‖,

    ∂x_i = t_i + (G + Gᵀ) x̃_i + b + a g_i − (x̃_i·t_i + x̃_i·G x̃_i) x̃_i.

All pairs take n²(F + D) steps instead of 2 n F D. With S = a I + c 11ᵀ + Q̃K̃ᵀ of the row sums d, and
P_ij = g_i·v_j + h_i,

    out = diag(1/d) S v,  ∂q̃ = P k̃,  ∂k̃ = Pᵀq̃,  ∂v = Sᵀg.

Padding sends nothing, k̃ = c = 0, and receives no gradient, g = h = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.graph.ops import graph_sizes
from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import ALL, cut, even, stacks
from diffusion_mp.runtime.precision import accumulating, scaled_norms

# Entries of one block over all heads, 1 MiB in float32: a block stays in cache, and is small compared to the result.
BLOCK = 1 << 18


class Sums(NamedTuple):
    """K [b, F, D], κ [b, 1, F] and σ [b, 1, D] over the senders of b graphs and heads; or backward G, γ and b."""

    outer: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def split(cls, state: Tensor) -> Sums:
        """Invert :meth:`state`; κ is copied, since a column with gaps slows down every product with it."""
        left = state[..., :-1, -1:].mT.contiguous()
        return cls(state[..., :-1, :-1], left, state[..., -1:, :-1])

    def state(self, nodes: int) -> Tensor:
        """Return [[K, κ], [σ, n]]."""
        above = torch.cat([self.outer, self.left.mT], -1)
        below = torch.nn.functional.pad(self.right, (0, 1), value=nodes)
        return torch.cat([above, below], -2)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Compute every graph of a batch by its pairs, or by pooling and reading."""
    roles, dtype = accumulating(*([v] if q is k is v else [q, k, v]))
    values = empty_like(roles[-1])
    den = values.new_empty(*v.shape[:2], 1)
    # The sums of many small graphs may be larger than their nodes, so the sums of a batch are not kept.
    graphs = v.size(1) if terms.ptr is None else 0
    pooled = den.new_zeros(graphs, k.size(2) + 1, v.size(2) + 1)
    rows_at_once = _rows_at_once(k, v)
    for mask, (out, row), views in stacks(
        terms.ptr, rows_at_once, (values, den), roles
    ):
        attention = _Attention(views, terms, mask)
        # No sums: a small graph needs fewer steps for its pairs.
        if attention.few:
            attention.by_pairs(out, row)
            continue
        sums = attention.pool()
        attention.read(sums, out, row)
        if terms.ptr is None:
            pooled = sums.state(v.size(0))
    return LinearRows(values.to(dtype), den.squeeze(2), pooled)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: LinearRows,
    terms: Terms,
) -> tuple[Tensor, ...]:
    return _gradients([q, k, v], grad, out, terms)


def backward_of_one(grad: Tensor, x: Tensor, out: LinearRows, terms: Terms) -> Tensor:
    (total,) = _gradients([x], grad, out, terms)
    return total


def _gradients(
    roles: list[Tensor],
    grad: Tensor,
    out: LinearRows,
    terms: Terms,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, or of one tensor in all roles."""
    k = roles[len(roles) // 2]
    v = roles[-1]
    rows = [grad]
    # Pairs find these in their scores, and copies of them would take as long as a product.
    if not _few(max(graph_sizes(terms.ptr, len(v)), default=0), k, v):
        rows += [out.values, out.den.unsqueeze(2)]
    inputs, _ = accumulating(*roles, *rows)
    gradients = [empty_like(x) for x in inputs[: len(roles)]]
    for mask, into, views in stacks(terms.ptr, _rows_at_once(k, v), gradients, inputs):
        features = views[: len(roles)]
        grads, *of_rows = views[len(roles) :]
        attention = _Attention(features, terms, mask)
        if attention.few:
            attention.by_pairs_backward(into, grads)
            continue
        values, den = of_rows
        if terms.ptr is None:
            # Kept by the forward pass.
            sums = Sums.split(out.pooled)
        else:
            sums = attention.pool()
        by_sums = attention.read_backward(sums, into[0], grads, values, den)
        attention.pool_backward(by_sums, into, grads, den)
    return tuple(x.to(role.dtype) for x, role in zip(gradients, roles, strict=True))


def _few(nodes: int, k: Tensor, v: Tensor) -> bool:
    """Return whether all pairs cost at most twice the steps of the sums: they need fewer calls and write less."""
    features = k.size(2)
    channels = v.size(2)
    return nodes * (features + channels) <= 4 * features * channels


def _rows_at_once(k: Tensor, v: Tensor) -> int:
    # Several blocks of small graphs, since a longer chunk has more graphs of nearly one size, and takes fewer calls.
    return 4 * BLOCK // max(1, k.size(1) * max(k.size(2), v.size(2)))


class _Attention:
    """Rows of graphs of nearly one size [b, n, F], a block at a time; ``mask`` [b, n, 1] is one for nodes."""

    def __init__(
        self,
        roles: Sequence[Tensor],
        terms: Terms,
        mask: Tensor | None,
    ) -> None:
        # One tensor has all roles, or there are three.
        self.alone = len(roles) == 1
        self.q = roles[0]
        self.k = roles[len(roles) // 2]
        self.v = roles[-1]
        graphs, nodes, features = self.k.shape
        self.terms = terms
        self.mask = mask
        self.size: Tensor | int = nodes if mask is None else mask.sum(1, keepdim=True)
        self.few = _few(nodes, self.k, self.v)
        width = graphs * max(features, self.v.size(2))
        self.blocks = even(nodes, BLOCK // max(1, width))
        self._vectors: dict[int, tuple[Tensor, Tensor | None]] = {}

    def by_pairs(self, out: Tensor, den: Tensor) -> None:
        scores = self._scores()
        torch.sum(scores, 2, keepdim=True, out=den)
        torch.bmm(scores.mul_(_reciprocal(den)), self.v, out=out)

    def by_pairs_backward(self, into: list[Tensor], grad: Tensor) -> None:
        """Write the gradients of q, k and v, or of one tensor in all roles."""
        queries, q_norm = self.vectors(self.q)
        keys, k_norm = self.vectors(self.k)
        scores = self._scores()
        # g, P and Sᵀ of the formulas at the head of this file, with h_i = −Σ_j s_ij (g_i·v_j) / d_i.
        inverse = self._of_nodes(_reciprocal(scores.sum(2, keepdim=True)))
        grads = grad * inverse
        by_scores = torch.bmm(grads, self.v.mT)
        along = (by_scores * scores).sum(2, keepdim=True)
        by_scores.sub_(along.mul_(inverse))
        if self.mask is not None:
            by_scores.mul_(self.mask.mT)
        turned = scores.mT
        if self.alone:
            # Queries are keys, so both gradients go through one product and one norm.
            (total,) = into
            torch.bmm(by_scores + by_scores.mT, keys, out=total)
            _through_norm(total, keys, k_norm)
            total.baddbmm_(turned, grads)
            return
        dq, dk, dv = into
        torch.bmm(by_scores, keys, out=dq)
        torch.bmm(by_scores.mT, queries, out=dk)
        torch.bmm(turned, grads, out=dv)
        _through_norm(dq, queries, q_norm)
        _through_norm(dk, keys, k_norm)

    def _scores(self) -> Tensor:
        queries, _ = self.vectors(self.q)
        keys, _ = self.vectors(self.k)
        scores = queries.bmm(keys.mT)
        if self.terms.constant:
            scores.add_(self.terms.constant)
        # Fewer entries than the keys have.
        if self.mask is not None:
            scores.mul_(self.mask.mT)
        if self.terms.own:
            # A column of the diagonal, as the size of padded graphs is a column.
            scores.diagonal(dim1=1, dim2=2).unsqueeze(2).add_(
                self.terms.own * self.size
            )
        return scores

    def pool(self) -> Sums:
        sums = []
        for rows in self.blocks:
            keys = self._of_nodes(self.vectors(self.k, rows)[0], rows)
            values = cut(self.v, rows)
            # Keys of padding are zero, which removes it from the other two sums; this one has no keys.
            right = self._of_nodes(values, rows).sum(1, keepdim=True)
            sums.append(Sums(_contract(keys, values), keys.sum(1, keepdim=True), right))
        return _added(sums)

    def read(self, sums: Sums, out: Tensor, den: Tensor) -> None:
        own = self.terms.own * self.size
        bias = self.terms.constant * sums.right
        for rows in self.blocks:
            queries, _ = self.vectors(self.q, rows)
            row = torch.bmm(queries, sums.left.mT, out=cut(den, rows))
            row.add_(self.terms.constant * self.size + own)
            total = torch.baddbmm(bias, queries, sums.outer, out=cut(out, rows))
            if self.terms.own:
                total.add_(cut(self.v, rows) * own)
            total.mul_(_reciprocal(row))

    def read_backward(
        self,
        sums: Sums,
        dq: Tensor,
        grad: Tensor,
        out: Tensor,
        den: Tensor,
    ) -> Sums:
        """Write ∂q, or ∂q̃ if the gradient of the senders is to be added to it; return G, γ and b."""
        by_sums = []
        for rows in self.blocks:
            queries, norm = self.vectors(self.q, rows)
            grads, inner = self._row_gradients(grad, out, den, rows)
            by_sums.append(
                Sums(
                    _contract(queries, grads),
                    _contract(inner, queries),
                    grads.sum(1, keepdim=True).mul_(self.terms.constant),
                )
            )
            by_queries = torch.bmm(grads, sums.outer.mT, out=cut(dq, rows))
            # With several heads a product of matrices is faster than a product of rows.
            by_queries.baddbmm_(inner, sums.left)
            if not self.alone:
                _through_norm(by_queries, queries, norm)
        return _added(by_sums)

    def pool_backward(
        self,
        by_sums: Sums,
        into: list[Tensor],
        grad: Tensor,
        den: Tensor,
    ) -> None:
        """Write ∂k and ∂v from G, γ and b, or complete the gradient of one tensor in all roles."""
        outer, left, right = by_sums
        for rows in self.blocks:
            keys, norm = self.vectors(self.k, rows)
            total = cut(into[-1], rows)
            if self.alone:
                # ``read_backward`` has left the gradient of the receivers there.
                total.add_(left)
                _add_through_values(total, keys, norm, outer + outer.mT)
                total.add_(right)
            else:
                by_keys = cut(into[1], rows)
                torch.baddbmm(left, cut(self.v, rows), outer.mT, out=by_keys)
                _through_norm(by_keys, keys, norm)
                torch.baddbmm(right, keys, outer, out=total)
            if self.terms.own:
                # The term of a node with itself, which no sum over senders holds.
                inverse = _reciprocal(cut(den, rows)) * (self.terms.own * self.size)
                total.add_(cut(grad, rows) * inverse)

    def _row_gradients(
        self,
        grad: Tensor,
        out: Tensor,
        den: Tensor,
        rows: slice = ALL,
    ) -> tuple[Tensor, Tensor]:
        """Return g and h, zero for padding."""
        inverse = self._of_nodes(_reciprocal(cut(den, rows)), rows)
        grads = cut(grad, rows) * inverse
        # The derivative of the denominator, by the result itself: no score is needed for it.
        inner = (grads * cut(out, rows)).sum(2, keepdim=True).neg_()
        return grads, inner

    def vectors(self, x: Tensor, rows: slice = ALL) -> tuple[Tensor, Tensor | None]:
        """Return x̃ and ‖x‖, or x unchanged and ``None``. For a single block both are kept."""
        if not self.terms.unit:
            return cut(x, rows), None
        if rows is ALL and id(x) in self._vectors:
            return self._vectors[id(x)]
        vectors, norm, power = scaled_norms(cut(x, rows))
        # A quotient, so that scores which cancel sum to zero: a product with 1/‖x‖ would be rounded twice.
        vectors = vectors / norm
        norm = norm if power is None else norm / power
        if rows is ALL:
            self._vectors[id(x)] = vectors, norm
        return vectors, norm

    def _of_nodes(self, x: Tensor, rows: slice = ALL) -> Tensor:
        return x if self.mask is None else x * cut(self.mask, rows)


def _add_through_values(
    total: Tensor,
    unit: Tensor,
    norm: Tensor | None,
    both: Tensor,
) -> None:
    """Turn ∂x̃ of receivers and γ into ∂x without b, for one tensor in all roles; ``both`` is G + Gᵀ."""
    if norm is None:
        total.baddbmm_(unit, both)
        return
    # As x̃·Gᵀx̃ = x̃·Gx̃, the mean of the inner products before and after is x̃·t + x̃·Gx̃.
    along = (total.div_(norm) * unit).sum(2, keepdim=True)
    total.baddbmm_(unit, both)
    along.add_((total * unit).sum(2, keepdim=True))
    total.addcmul_(unit, along, value=-0.5)


def _through_norm(gradient: Tensor, unit: Tensor, norm: Tensor | None) -> None:
    """Turn ∂x̃ into ∂x in place."""
    if norm is not None:
        along = (gradient * unit).sum(2, keepdim=True)
        gradient.addcmul_(along, unit, value=-1).div_(norm)


def _reciprocal(x: Tensor) -> Tensor:
    """Return 1/x, and 0 where that overflows."""
    return x.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)


def _added(sums: list[Sums]) -> Sums:
    return Sums(*(reduce(Tensor.add_, parts) for parts in zip(*sums, strict=True)))


def _contract(x: Tensor, y: Tensor) -> Tensor:
    """Return xᵀy; a single product as two halves, since torch divides no product among threads along its sum."""
    if (
        torch.get_num_threads() == 1
        or x.size(0) > 1
        or x.size(1) % 2
        or x.size(1) < 1024
    ):
        return torch.bmm(x.mT, y)
    halves = torch.bmm(x.reshape(2, -1, x.size(2)).mT, y.reshape(2, -1, y.size(2)))
    return halves.sum(0, keepdim=True)


def linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Return q(kᵀv), or (qkᵀ)v for small graphs: whichever is cheaper, 2nFD or n²(F + D)."""
    out = empty_like(v)
    features = q.size(2)
    channels = v.size(2)
    for mask, (result,), (qs, ks, vs) in stacks(
        ptr, _rows_at_once(k, v), [out], [q, k, v]
    ):
        senders = ks if mask is None else ks * mask  # padding sends nothing
        if qs.size(1) * (features + channels) < 2 * features * channels:
            torch.bmm(torch.bmm(qs, senders.mT), vs, out=result)
        else:
            torch.bmm(qs, torch.bmm(senders.mT, vs), out=result)
    return out
