"""The fast path on the CPU: a block of nodes at a time, small enough to stay in cache from its norms to its products.

With one more feature k′_j = [k̃_j, 1] and one more channel v′_j = [v_j, 1], K = Σ_j k′_j v′_jᵀ of a graph has
κ = Σ_j k̃_j in its last column, and Σ_j v_j and n in its last row. With b = c Σ_j v_j and a = own n,

    d_i = q̃_i·κ + c n + a,  out_i = (Kᵀq̃_i + b + a v_i) / d_i.

Backward, with g_i = ∂out_i / d_i, h_i = −g_i·out_i and G = Σ_i q̃_i [g_i, h_i]ᵀ in the place of K:

    ∂q̃_i = [K, κ] [g_i, h_i],  ∂k̃_j = G [v_j, 1],  ∂v_j = Gᵀk̃_j + c Σ_i g_i + a g_j,

and ∂q_i = (1 − q̃_i q̃_iᵀ) ∂q̃_i / ‖q_i‖. Either direction pools, then reads: a pass over the blocks of the senders (of
the receivers, backward) that adds up, and one over those of the receivers (the senders) that multiplies by the sums.

What a block costs is memory that is written, so there are three rules. Unit vectors are written once, for the sums of
the senders; else the norms weigh the other factor of a product, which is written anyway. Products land in the result
itself where it can hold them, or else in memory that every block uses again (``Buffers``). What follows a product is
done to it in place.

Graphs of a batch are stacked with others of nearly one size, which makes one block; small ones are done by their pairs
(``pairs.py``).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diffusion_mp.kernels.buffers import Buffers
from diffusion_mp.kernels.linear_attention import pairs
from diffusion_mp.kernels.linear_attention.reference import Attended, Terms
from diffusion_mp.kernels.linear_attention.rows import Vectors, reciprocal, store_tangential, vectors
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import batch_plan

# Entries of one block over all heads, 4 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 20

# Entries of a block that are worth starting it, also where there are few nodes.
SMALL = 1 << 18


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Attended:
    """Every graph of a batch: by its pairs, or pooled, then read."""
    out = _empty_results(v, k.size(2), k.size(1) if terms.ptr is None else 0)
    results = (out.values, out.den.unsqueeze(2))
    for mask, (values, den), (qs, ks, vs) in _stacks(terms, results, (q, k, v)):
        if _by_pairs(ks.size(1), ks, vs, terms):
            pairs.forward(values, den, qs, ks, vs, terms, mask)
            continue
        blockwise = _Blockwise(ks, vs, terms, mask)
        sums = blockwise.no_sums(ks, vs) if terms.ptr is not None else out.pooled
        blockwise.pool(sums, ks, vs)
        blockwise.read(values, den, qs, vs, sums, blockwise.nodes)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Attended, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradients = empty_like(q, k, v)
    pooled_only = (out.values, out.den.unsqueeze(2))
    for mask, (dq, dk, dv), (qs, ks, vs, grads, *rest) in _stacks(terms, gradients, (q, k, v, grad), pooled_only):
        if _by_pairs(ks.size(1), ks, vs, terms):
            pairs.backward(dq, dk, dv, grads, qs, ks, vs, terms, mask)
            continue
        values, den = rest
        blockwise, sums = _Blockwise(ks, vs, terms, mask), out.pooled
        if terms.ptr is not None:  # pooled again: the sums of many small graphs may be more than their nodes
            sums = blockwise.no_sums(ks, vs)
            blockwise.pool(sums, ks, vs)
        by_sums = blockwise.read_backward(dq, grads, qs, values, den, sums)
        blockwise.pool_backward(dk, dv, by_sums, ks, vs, (grads, den))
    return gradients


def pool(k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """K of one graph, [[Σ_j k̃_j v_jᵀ, Σ_j k̃_j], [Σ_j v_j, n]]: [H, F + 1, D + 1]."""
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    blockwise = _Blockwise(k, v, terms)
    sums = blockwise.no_sums(k, v)
    blockwise.pool(sums, k, v)
    return sums


def pool_backward(grad: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Gradients of k and v."""
    dk, dv = gradients = empty_like(k, v)
    dk, dv, k, v = (x.transpose(0, 1) for x in (dk, dv, k, v))
    _Blockwise(k, v, terms).pool_backward(dk, dv, grad, k, v)
    return gradients


def read(q: Tensor, v: Tensor, sums: Tensor, terms: Terms) -> Attended:
    """The rows from such sums, which may be those of more nodes."""
    out = _empty_results(v, 0, 0)
    values, den, q, v = (x.transpose(0, 1) for x in (out.values, out.den.unsqueeze(2), q, v))
    _Blockwise(q, v, terms).read(values, den, q, v, sums, sums[:1, -1:, -1:])
    return out


def read_backward(
    grad: Tensor, q: Tensor, v: Tensor, out: Attended, sums: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, of v where a node reads its own (else no entry), and of the sums, n's being zero."""
    dq, dv = empty_like(q), empty_like(v) if terms.own else v.new_empty(0)
    gradient, queries, values, den = (x.transpose(0, 1) for x in (grad, q, out.values, out.den.unsqueeze(2)))
    blockwise = _Blockwise(queries, gradient, terms)
    by_sums = blockwise.read_backward(dq.transpose(0, 1), gradient, queries, values, den, sums)
    for rows in blockwise.blocks if terms.own else ():
        dv.transpose(0, 1)[:, rows] = blockwise.own_gradient(gradient, den, rows, sums[:1, -1:, -1:])
    return dq, dv, by_sums


def _empty_results(v: Tensor, features: int, heads: int) -> Attended:
    """With zeros as the sums of so many heads."""
    values = torch.empty_like(v, memory_format=torch.contiguous_format)
    den = v.new_empty(v.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    return Attended(values, den, den.new_zeros(heads, features + 1, v.size(2) + 1))


def _by_pairs(size: int, k: Tensor, v: Tensor, terms: Terms) -> bool:
    """Whether a product by all pairs of so many nodes takes at most twice the steps; it writes less."""
    return terms.ptr is not None and size * (k.size(2) + v.size(2)) <= 4 * k.size(2) * v.size(2)


def _stacks(
    terms: Terms, results: Sequence[Tensor], inputs: Sequence[Tensor], pooled_only: Sequence[Tensor] = ()
) -> Iterator[tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]]:
    """Yield, for graphs of nearly one size, which of their rows [b, n, F] are nodes (``None``: all), these rows of
    results, which are to be written, and of inputs: q, k, v and more. Also of ``pooled_only``, unless all are by pairs.
    """
    if terms.ptr is None:
        yield None, [x.transpose(0, 1) for x in results], [x.transpose(0, 1) for x in (*inputs, *pooled_only)]
        return
    _, k, v, *_ = inputs
    height = BLOCK // max(1, k.size(1) * max(k.size(2), v.size(2)))
    for part in batch_plan(terms.ptr).parts(max(1, height)):
        taken = inputs if _by_pairs(part.largest, k, v, terms) else [*inputs, *pooled_only]
        parts = [result[part.rows] for result in results]
        rooms = [part.room(x) for x in parts]
        masks = part.masks(k.size(1), torch.promote_types(v.dtype, torch.float32), k.device)
        views = zip(*[part.views(part.stack(x[part.rows])) for x in taken], strict=True)
        yield from zip(masks, zip(*map(part.views, rooms), strict=True), views, strict=True)
        for room, x in zip(rooms, parts, strict=True):
            part.unstack(room, x)


class _Blockwise:
    """Graphs of nearly one size [b, n, F], a block of their rows at a time; ``mask`` [b, n, 1] is one for nodes."""

    def __init__(self, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None = None) -> None:
        self.terms, self.mask = terms, mask
        self.nodes: Tensor | int = k.size(1) if mask is None else mask.sum(1, keepdim=True)
        self.buffer = Buffers(v, torch.promote_types(v.dtype, torch.float32))  # in the precision of sums
        # A block has an eighth of all nodes, so that it is small beside the result, within the limits above.
        width = max(1, k.size(0) * max(k.size(2), v.size(2)))
        height = max(1, min(BLOCK, max(SMALL, k.size(1) * width // 8)) // width)
        self.blocks = [slice(first, first + height) for first in range(0, k.size(1), height)]

    # ---------------------------------------------------------------- the two halves, and their gradients

    def no_sums(self, k: Tensor, v: Tensor) -> Tensor:
        """K of no senders."""
        return v.new_zeros(k.size(0), k.size(2) + 1, v.size(2) + 1, dtype=self.buffer.dtype)

    def pool(self, sums: Tensor, k: Tensor, v: Tensor) -> None:
        """Adds up K of the senders."""
        features, values = sums[:, :-1], sums[:, -1, :-1]
        outer, last = features[..., :-1], features[..., -1]
        for rows in self.blocks:
            keys, block = self._vectors(k, rows, self.mask), self._load(v, rows)
            unit = keys.entries
            if keys.scale is not None:
                unit = torch.mul(unit, keys.scale, out=self.buffer("unit", *unit.shape))
            _add_product(outer, unit, block)
            last.add_(unit.sum(1))
            values.add_(block.sum(1) if self.mask is None else _dot(self.mask[:, rows], block))
        sums[:, -1:, -1:].add_(self.nodes)

    def read(self, out: Tensor, den: Tensor, q: Tensor, v: Tensor, sums: Tensor, nodes: Tensor | int) -> None:
        """Writes the result and the denominators, from the sums of so many senders."""
        constant, own = self.terms.constant, self.terms.own * nodes
        bias = constant * sums[:, -1:, :-1]
        features = sums[:, :-1]
        outer, last = features[..., :-1], features[..., -1:]
        for rows in self.blocks:
            queries = self._vectors(q, rows)
            row = torch.bmm(queries.entries, last, out=den[:, rows]).mul_(queries.factor).add_(constant * nodes + own)
            total = self._product(queries.entries, outer, out, rows)
            torch.addcmul(bias, total, queries.factor, out=total)
            if self.terms.own:
                total.add_(self._load(v, rows) * own)
            torch.mul(total, reciprocal(row), out=out[:, rows])

    def read_backward(self, dq: Tensor, grad: Tensor, q: Tensor, out: Tensor, den: Tensor, sums: Tensor) -> Tensor:
        """Writes ∂q; returns [G, c Σ_i g_i], as K is, with zero as its last number."""
        by_sums, turned = torch.zeros_like(sums), sums[:, :-1].transpose(1, 2)
        by_features, by_values = by_sums[:, :-1], by_sums[:, -1, :-1]
        for rows in self.blocks:
            queries, gradient, inverse = self._vectors(q, rows), self._load(grad, rows), self._inverse(den, rows)
            by_values.add_(_dot(inverse, gradient), alpha=self.terms.constant)
            inverse = inverse.mul_(queries.factor)
            inner = self._inner(gradient, self._load(out, rows))
            grads = self._extended(gradient, inverse, inner.mul_(inverse).neg_())
            _add_product(by_features, queries.entries, grads)
            self._store_tangential(dq, rows, self._product(grads, turned, dq, rows), queries)
        return by_sums

    def pool_backward(
        self, dk: Tensor, dv: Tensor, by_sums: Tensor, k: Tensor, v: Tensor, own: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Writes ∂k and ∂v from [G, c Σ_i g_i]; own values get their part of the gradient, given with denominators."""
        bias, by_features = by_sums[:, -1:, :-1], by_sums[:, :-1]
        turned, outer = by_features.transpose(1, 2), by_features[..., :-1]
        for rows in self.blocks:
            keys = self._vectors(k, rows)
            values = self._extended(self._load(v, rows), keys.factor, keys.factor)
            self._store_tangential(dk, rows, self._product(values, turned, dk, rows), keys)
            total = self._product(keys.entries, outer, dv, rows)
            torch.addcmul(bias, total, keys.factor, out=dv[:, rows])
            if self.terms.own and own is not None:
                dv[:, rows] += self.own_gradient(*own, rows, self.nodes)

    def own_gradient(self, grad: Tensor, den: Tensor, rows: slice, nodes: Tensor | int) -> Tensor:
        """a g of a block: what its own values get."""
        return self._load(grad, rows) * self._inverse(den, rows).mul_(self.terms.own * nodes)

    # ---------------------------------------------------------------- what these do with a block

    def _load(self, x: Tensor, rows: slice) -> Tensor:
        """A block in the precision of sums."""
        return x[:, rows].to(self.buffer.dtype)

    def _vectors(self, x: Tensor, rows: slice, mask: Tensor | None = None) -> Vectors:
        found = vectors(self._load(x, rows), self.terms.unit)
        return found if mask is None else found._replace(scale=found.factor * mask[:, rows])

    def _inverse(self, den: Tensor, rows: slice) -> Tensor:
        """1/d of nodes; zero for rows that are none."""
        inverse = reciprocal(den[:, rows])
        return inverse if self.mask is None else inverse.mul_(self.mask[:, rows])

    def _product(self, x: Tensor, y: Tensor, out: Tensor, rows: slice) -> Tensor:
        """x y, at its place in ``out`` where that is of its dtype."""
        if out.dtype == x.dtype:
            return torch.bmm(x, y, out=out[:, rows])
        return torch.bmm(x, y, out=self.buffer("product", x.size(0), x.size(1), y.size(2)))

    def _inner(self, x: Tensor, y: Tensor) -> Tensor:
        """x·y of every row."""
        return torch.mul(x, y, out=self.buffer("inner", *x.shape)).sum(2, keepdim=True)

    def _extended(self, x: Tensor, scale: Tensor, last: Tensor) -> Tensor:
        """[scale · x, last], [b, n, F + 1]: what belongs to a row's vector and its sum go through one product."""
        extended = self.buffer("extended", x.size(0), x.size(1), x.size(2) + 1)
        torch.mul(x, scale, out=extended[..., :-1])
        extended[..., -1:] = last
        return extended

    def _store_tangential(self, out: Tensor, rows: slice, gradient: Tensor, x: Vectors) -> None:
        along = self._inner(gradient, x.entries).mul_(x.factor.square()) if self.terms.unit else None
        store_tangential(out[:, rows], gradient, along, x)


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += xᵀy; a single one in two halves, for a product is not divided among threads along its sum."""
    if x.size(0) > 1 or x.size(1) % 2 or x.size(1) < 1024 or torch.get_num_threads() == 1:
        total.baddbmm_(x.transpose(1, 2), y)
    else:
        halves = x.reshape(2, -1, x.size(2)).transpose(1, 2) @ y.reshape(2, -1, y.size(2))
        total += halves.sum(0)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Σ_i x_i y_i over the rows, where x has one number each."""
    return (x.transpose(1, 2) @ y).squeeze(1)
