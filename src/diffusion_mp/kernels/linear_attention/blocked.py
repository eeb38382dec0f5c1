"""The fast path on the CPU: sums over a block of nodes at a time, or, for small graphs, all pairs.

A block stays in cache from its norms to its products. With K = Σ_j k̃_j v_jᵀ, κ = Σ_j k̃_j and σ = Σ_j v_j over the n
nodes of a graph, and a = own n,

    d_i = q̃_i·κ + c n + a,  out_i = (Kᵀq̃_i + c σ + a v_i) / d_i.

Backward, with g_i = ∂out_i / d_i and h_i = −g_i·out_i, the sums are G = Σ_i q̃_i g_iᵀ, γ = Σ_i q̃_i h_i, b = c Σ_i g_i,

    ∂q̃_i = K g_i + h_i κ,  ∂k̃_j = G v_j + γ,  ∂v_j = Gᵀk̃_j + b + a g_j,

and ∂q_i = (∂q̃_i − (q̃_i·∂q̃_i) q̃_i) / ‖q_i‖; ∂k_j likewise. Products are written to the result itself where dtypes
allow it, and all other memory is reused by every block. Of one tensor x = q = k = v every norm and sum is computed
once, and since v_i = ‖x_i‖ x̃_i, the gradient of all roles takes a product less: with t_i = (K g_i + h_i κ + γ) / ‖x_i‖,

    ∂x_i = t_i + (G + Gᵀ) x̃_i + b − (x̃_i·t_i + x̃_i·G x̃_i) x̃_i  for a = 0.

All pairs take n²(F + D) steps instead of 2 n F D, and fewer calls. With T_ij = g_i·v_j + h_i, and S = a I + c 11ᵀ + Q̃K̃ᵀ
of the row sums d,

    out = diag(1/d) S v,  ∂q̃ = T k̃,  ∂k̃ = Tᵀq̃,  ∂v = Sᵀg.

Padding sends nothing, k̃ = c = 0, and receives no gradient, 1/d = 0.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import ALL, Buffers, cut, largest, stacks
from diffusion_mp.runtime.precision import scaled_norms

# Entries of one block over all heads, 4 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 20

# The least entries of a block, also where there are few nodes.
SMALL = 1 << 18


class Vectors(NamedTuple):
    """Vectors x; multiplied by ``scale`` they are x̃, unit vectors or unchanged."""

    entries: Tensor  # [b, n, F]
    scale: Tensor  # 1/‖x‖, [b, n, 1]; one, [1, 1, 1], where vectors are unchanged
    power: Tensor | None = (
        None  # what the entries were multiplied by before, [b, n, 1]; None is one
    )


def vectors(x: Tensor, unit: bool) -> Vectors:
    # Exact, so that scores which cancel sum to zero; x · 1/|x| would be rounded.
    if unit and x.size(-1) == 1:
        x = x / x.abs().masked_fill(x == 0, torch.inf)
        unit = False
    if not unit:
        return Vectors(x, x.new_ones(1, 1, 1))
    x, norm, power = scaled_norms(x)
    return Vectors(x, norm.reciprocal_(), power)


def _store_tangential(
    out: Tensor, gradient: Tensor, inner: Tensor | None, x: Vectors
) -> None:
    """Write ∂x from ∂x̃ / ‖x‖ and its inner product with x, which is ``None`` for unchanged vectors."""
    if inner is None:
        out.copy_(gradient)
        return
    along = inner.mul_(x.scale).mul_(x.scale)
    if x.power is not None:
        gradient = gradient * x.power
        along = along * x.power
    torch.addcmul(gradient, along, x.entries, value=-1, out=out)


def reciprocal(x: Tensor) -> Tensor:
    """Return 1/x, and 0 where that overflows."""
    return x.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)


class Sums(NamedTuple):
    """K [b, F, D], κ [b, F, 1] and σ [b, 1, D] over the senders of b graphs and heads; or backward G, γ and b."""

    outer: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def split(cls, state: Tensor) -> Sums:
        """Invert :meth:`state`; κ is copied, since a column with gaps slows down every product with it."""
        return cls(
            state[..., :-1, :-1],
            state[..., :-1, -1:].contiguous(),
            state[..., -1:, :-1],
        )

    def state(self, nodes: int) -> Tensor:
        """Return [[K, κ], [σ, n]]."""
        last = self.right.new_full((*self.right.shape[:-1], 1), nodes)
        return torch.cat(
            [torch.cat([self.outer, self.left], -1), torch.cat([self.right, last], -1)],
            -2,
        )


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Compute every graph of a batch by its pairs, or by pooling and reading."""
    values = v.new_empty(v.shape)
    den = v.new_empty(
        *v.shape[:2], 1, dtype=torch.promote_types(v.dtype, torch.float32)
    )
    kept = None
    inputs = [v] if q is k is v else [q, k, v]
    for mask, (out, out_den), views in stacks(
        terms.ptr, _rows_at_once(k, v), (values, den), inputs
    ):
        qs, ks, vs = views if len(views) == 3 else 3 * views
        graphs = _Graphs(ks, vs, terms, mask)
        if _few(ks.size(1), ks, vs):
            graphs.by_pairs(out, out_den, qs, ks, vs)
            continue
        sums = graphs.pool(ks, vs)
        graphs.read(out, out_den, qs, vs, sums)
        if terms.ptr is None:
            kept = sums.state(ks.size(1))
    if kept is None:
        kept = den.new_zeros(
            v.size(1) if terms.ptr is None else 0, k.size(2) + 1, v.size(2) + 1
        )
    return LinearRows(values, den.squeeze(2), kept)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: LinearRows,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; or without k and v that of q in all roles, and twice no entry."""
    roles = [q] if k is None or v is None else [q, k, v]
    rows = [grad]
    alone = len(roles) == 1
    key = roles[len(roles) // 2]
    value = roles[-1]
    # The gradients of several roles are added up with at least the precision of float32.
    wide = torch.promote_types(q.dtype, torch.float32)
    gradients: list[Tensor] = (
        [q.new_empty(q.shape, dtype=wide)] if alone else [*empty_like(*roles)]
    )
    if not _few(largest(terms.ptr, key.size(0)), key, value):  # pairs recompute these
        rows += [out.values, out.den.unsqueeze(2)]
    for mask, into, views in stacks(
        terms.ptr, _rows_at_once(key, value), gradients, [*roles, *rows]
    ):
        grads, *found = views[len(roles) :]
        qs, ks, vs = 3 * views[:1] if alone else views[:3]
        graphs = _Graphs(ks, vs, terms, mask)
        if _few(ks.size(1), ks, vs):
            graphs.by_pairs_backward(into, grads, qs, ks, vs)
            continue
        # A batch is pooled again: the sums of many small graphs may be larger than their nodes.
        if terms.ptr is None:
            sums = Sums.split(out.pooled)
        else:
            sums = graphs.pool(ks, vs)
        (values, den) = found
        by_sums = graphs.read_backward(
            into[0], grads, qs, vs, values, den, sums, not alone
        )
        if alone:
            graphs.add_senders(into[0], by_sums, vs)
        else:
            graphs.pool_backward(into[1], into[2], by_sums, ks, vs, (grads, den))
    dq, *others = gradients
    dk, dv = others or (q.new_empty(0), q.new_empty(0))
    return dq.to(q.dtype), dk, dv


def _few(size: int, k: Tensor, v: Tensor) -> bool:
    """Return whether all pairs cost at most twice the steps of the sums; pairs need fewer calls and write less."""
    return size * (k.size(2) + v.size(2)) <= 4 * k.size(2) * v.size(2)


def _rows_at_once(k: Tensor, v: Tensor) -> int:
    return BLOCK // max(1, k.size(1) * max(k.size(2), v.size(2)))


class _Graphs:
    """Graphs of nearly one size [b, n, F], all pairs or a block of rows at a time; ``mask`` [b, n, 1] has the nodes."""

    def __init__(self, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None) -> None:
        graphs, nodes, features = k.shape
        self.terms = terms
        self.mask = mask
        self.nodes: Tensor | int = nodes if mask is None else mask.sum(1, keepdim=True)
        self.wide = torch.promote_types(v.dtype, torch.float32)
        # A block has an eighth of all nodes, to be small compared to the result, within the limits above.
        width = max(1, graphs * max(features, v.size(2)))
        height = max(1, min(BLOCK, max(SMALL, nodes * width // 8)) // width)
        if nodes > height:
            self.blocks = [
                slice(first, first + height) for first in range(0, nodes, height)
            ]
        else:
            self.blocks = [ALL]
        self.buffer = Buffers(v, self.wide) if nodes > height else None
        # By the identity of tensors: those of one that has several roles are computed once.
        self._known: dict[tuple[int, int | None], Vectors] = {}
        self._units: dict[int, Tensor] = {}

    def by_pairs(
        self, out: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        _, scores, row = self._scores(q, k)
        den.copy_(row)
        out.copy_(self._product(scores.mul_(reciprocal(row)), self._load(v), out))

    def by_pairs_backward(
        self, into: list[Tensor], grad: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write the gradients of q, k and v, or of one tensor in all roles."""
        grad = self._load(grad)
        (inner, attention, row) = self._scores(q, k)
        queries = self._vectors(q)
        keys = self._vectors(k)
        inverse = self._of_nodes(reciprocal(row))
        attention.mul_(inverse)
        into[-1].copy_(self._product(attention.mT, grad, into[-1]))
        by_scores = grad.bmm(self._load(v).mT)
        by_scores.sub_(self._inner(attention, by_scores)).mul_(
            inverse.mul_(queries.scale)
        )
        turned = inner.mul_(self._times_senders(by_scores, keys.scale))
        roles = [
            (by_scores, turned, queries, keys),
            (by_scores.mT, turned.mT, keys, queries),
        ]
        if len(into) == 1:
            roles = [(by_scores + by_scores.mT, turned + turned.mT, queries, queries)]
        for place, (p, p_turned, x, y) in enumerate(roles):
            gradient = p.bmm(y.entries)
            out = gradient if len(into) == 1 else into[place]
            _store_tangential(
                out,
                gradient,
                p_turned.sum(2, keepdim=True) if self.terms.unit else None,
                x,
            )
        if len(into) == 1:
            into[0].add_(gradient)

    def _scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return QKᵀ, S and d."""
        queries = self._vectors(q)
        keys = self._vectors(k)
        inner = queries.entries.bmm(keys.entries.mT)
        scores = self._times_senders(inner * queries.scale, keys.scale)
        scores.add_(
            self.terms.constant
            if self.mask is None
            else self.terms.constant * self.mask.mT
        )
        if self.terms.own:
            scores.diagonal(dim1=1, dim2=2).unsqueeze(2).add_(
                self.terms.own * self.nodes
            )
        return inner, scores, scores.sum(2, keepdim=True)

    def _times_senders(self, x: Tensor, scale: Tensor) -> Tensor:
        """Multiply columns in place by the scale of senders, zero for padding."""
        if self.terms.unit or self.mask is not None:
            return x.mul_(self._of_nodes(scale).mT)
        return x

    def pool(self, k: Tensor, v: Tensor) -> Sums:
        sums = []
        for rows in self.blocks:
            unit = self._unit(k, rows)
            values = self._load(v, rows)
            if self.mask is None:
                right = values.sum(1, keepdim=True)
            else:
                right = _contract(cut(self.mask, rows), values)
            sums.append(Sums(_contract(unit, values), unit.sum(1).unsqueeze(2), right))
        return _added(sums)

    def read(self, out: Tensor, den: Tensor, q: Tensor, v: Tensor, sums: Sums) -> None:
        own = self.terms.own * self.nodes
        constant = self.terms.constant
        least = constant * self.nodes + own
        bias = sums.right if constant == 1 else constant * sums.right
        for rows in self.blocks:
            unit = self._unit(q, rows)
            row = torch.bmm(unit, sums.left, out=cut(den, rows)).add_(least)
            total = self._product(unit, sums.outer, out, rows, bias)
            if self.terms.own:
                total.add_(self._load(v, rows) * own)
            torch.mul(total, reciprocal(row), out=cut(out, rows))

    def read_backward(
        self,
        dq: Tensor,
        grad: Tensor,
        q: Tensor,
        v: Tensor,
        out: Tensor,
        den: Tensor,
        sums: Sums,
        through_norm: bool,
    ) -> Sums:
        """Write ∂q, or ∂q̃ / ‖q‖; return G, γ and b."""
        constant = self.terms.constant
        own = self.terms.own * self.nodes
        by_sums = []
        turned = sums.outer.mT
        left = sums.left.mT
        for rows in self.blocks:
            queries = self._vectors(q, rows)
            gradient = self._load(grad, rows)
            inverse = self._of_nodes(reciprocal(cut(den, rows)), rows)
            right = _contract(inverse, gradient)
            right = right if constant == 1 else right.mul_(constant)
            inner = self._inner(gradient, self._load(out, rows)).mul_(inverse).neg_()
            cosine = None
            if self.terms.unit and through_norm:
                cosine = torch.bmm(gradient, sums.right.mT).mul_(-constant)
                if self.terms.own:
                    cosine = cosine.sub_(
                        self._inner(gradient, self._load(v, rows)) * own
                    )
                else:
                    cosine = cosine
                cosine = cosine.mul_(inverse).sub_(
                    inner * (constant * self.nodes + own)
                )
            inverse = inverse * queries.scale
            inner = inner * queries.scale
            grads = torch.mul(gradient, inverse, out=self._scratch("grads", grad, rows))
            by_sums.append(
                Sums(
                    _contract(queries.entries, grads),
                    _contract(queries.entries, inner),
                    right,
                )
            )
            by_queries = self._product(grads, turned, dq, rows).addcmul_(inner, left)
            if through_norm:
                _store_tangential(cut(dq, rows), by_queries, cosine, queries)
        return _added(by_sums)

    def pool_backward(
        self,
        dk: Tensor,
        dv: Tensor,
        by_sums: Sums,
        k: Tensor,
        v: Tensor,
        own: tuple[Tensor, Tensor],
    ) -> None:
        """Write ∂k and ∂v from G, γ and b; ``own`` are grad and denominators, for the gradient of own values."""
        outer, left, right = by_sums
        for rows in self.blocks:
            keys = self._vectors(k, rows)
            values = torch.mul(
                self._load(v, rows), keys.scale, out=self._scratch("values", v, rows)
            )
            by_keys = self._product(values, outer.mT, dk, rows).addcmul_(
                keys.scale, left.mT
            )
            if self.terms.unit:
                cosine = self._inner(by_keys, keys.entries)
            else:
                cosine = None
            _store_tangential(cut(dk, rows), by_keys, cosine, keys)
            total = self._product(keys.entries, outer, dv, rows)
            torch.addcmul(right, total, keys.scale, out=cut(dv, rows))
            if self.terms.own:
                factor = reciprocal(cut(own[1], rows)).mul_(self.terms.own * self.nodes)
                cut(dv, rows).add_(self._load(own[0], rows) * factor)

    def add_senders(self, dx: Tensor, by_sums: Sums, x: Tensor) -> None:
        """Complete the gradient of one tensor in all roles, of which dx is that of receivers, ∂q̃ / ‖q‖."""
        outer, left, right = by_sums
        both = outer + outer.mT
        left = left.mT
        for rows in self.blocks:
            unit = self._unit(x, rows)
            (_, scale, power) = self._vectors(x, rows)
            total = cut(dx, rows).addcmul_(scale, left)
            total = total if power is None else total.mul_(power)
            along = self._inner(total, unit) if self.terms.unit else None
            total.baddbmm_(unit, both)
            if along is not None:
                total.addcmul_(unit, along.add_(self._inner(total, unit)), value=-0.5)
            total.add_(right)

    def _load(self, x: Tensor, rows: slice = ALL) -> Tensor:
        block = cut(x, rows)
        return block if block.dtype == self.wide else block.to(self.wide)

    def _vectors(self, x: Tensor, rows: slice = ALL) -> Vectors:
        if rows is not ALL and x.dtype != self.wide:  # a copy of the block
            return vectors(self._load(x, rows), self.terms.unit)
        key = id(x), rows.start
        if key not in self._known:
            self._known[key] = vectors(self._load(x, rows), self.terms.unit)
        return self._known[key]

    def _unit(self, x: Tensor, rows: slice = ALL) -> Tensor:
        """Return x̃, zero for padding."""
        if rows is ALL and id(x) in self._units:
            return self._units[id(x)]
        unit, scale, _ = self._vectors(x, rows)
        if self.mask is not None:
            scale = scale * cut(self.mask, rows)
        elif not self.terms.unit:
            return unit
        unit = torch.mul(unit, scale, out=self._scratch("unit", x, rows))
        if rows is ALL:
            self._units[id(x)] = unit
        return unit

    def _of_nodes(self, x: Tensor, rows: slice = ALL) -> Tensor:
        return x if self.mask is None else x * cut(self.mask, rows)

    def _scratch(self, name: str, x: Tensor, rows: slice) -> Tensor | None:
        """Return memory for a block of x, used again by the next block."""
        if self.buffer is None:
            return None
        return self.buffer(name, *cut(x, rows).shape)

    def _product(
        self,
        x: Tensor,
        y: Tensor,
        out: Tensor,
        rows: slice = ALL,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return x y + bias, in ``out`` itself if that has its dtype: then ``out.copy_`` of it does nothing."""
        into = (
            cut(out, rows)
            if out.dtype == x.dtype
            else self._scratch("product", out, rows)
        )
        if bias is None:
            return torch.bmm(x, y, out=into)
        return torch.baddbmm(bias, x, y, out=into)

    def _inner(self, x: Tensor, y: Tensor) -> Tensor:
        if self.buffer is None:
            into = None
        else:
            into = self.buffer("inner", *x.shape)
        return torch.mul(x, y, out=into).sum(2, keepdim=True)


def _added(sums: list[Sums]) -> Sums:
    return Sums(*(reduce(Tensor.add_, parts) for parts in zip(*sums, strict=True)))


def _contract(x: Tensor, y: Tensor) -> Tensor:
    """Return xᵀy; a single one as two halves, since torch divides no product among threads along its sum."""
    if (
        torch.get_num_threads() == 1
        or x.size(0) > 1
        or x.size(1) % 2
        or x.size(1) < 1024
    ):
        return torch.bmm(x.transpose(1, 2), y)
    halves = torch.bmm(
        x.reshape(2, -1, x.size(2)).transpose(1, 2), y.reshape(2, -1, y.size(2))
    )
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
            torch.bmm(torch.bmm(qs, senders.transpose(1, 2)), vs, out=result)
        else:
            torch.bmm(qs, torch.bmm(senders.transpose(1, 2), vs), out=result)
    return out
