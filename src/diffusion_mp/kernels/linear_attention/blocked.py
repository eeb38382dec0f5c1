"""The fast path on the CPU: a block of nodes at a time, small enough to stay in cache from its norms to its products.

With one more feature k′_j = [k̃_j, 1], K = Σ_j k′_j v_jᵀ and κ = Σ_j k′_j of a graph hold Σ_j v_j and n too. With
b = c Σ_j v_j and a = own n,

    d_i = q̃_i·κ + c n + a,  out_i = (Kᵀq̃_i + b + a v_i) / d_i.

Backward, with g_i = ∂out_i / d_i, h_i = −g_i·out_i and G = Σ_i q̃_i [g_i, h_i]ᵀ in the place of K:

    ∂q̃_i = [K, κ] [g_i, h_i],  ∂k̃_j = G [v_j, 1],  ∂v_j = Gᵀk̃_j + c Σ_i g_i + a g_j,

and ∂q_i = (1 − q̃_i q̃_iᵀ) ∂q̃_i / ‖q_i‖. Either direction pools, then reads: a pass over the blocks of the senders (of
the receivers, backward) that adds up, and one over those of the receivers (the senders) that multiplies by the sums.

What a block costs is memory that is written, so there are three rules. Only k′ is written with unit vectors; else the
norms weigh the other factor of a product, which is written anyway. Products land in the result itself where it can hold
them, or else in memory that every block uses again (``Buffers``). What follows a product is done to it in place.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.buffers import Buffers
from diffusion_mp.kernels.linear_attention.reference import Terms
from diffusion_mp.kernels.segments import Rows, put, row_blocks, stack

# Entries of one block over all heads, 4 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 20

# Entries of a block that are worth starting it, also where there are few nodes.
SMALL = 1 << 18

# Norms between which the squares of a vector, and those of its norm, stay within the range of float32.
LEAST, MOST = 1e-15, 1e15


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """The result [N, H, D], the denominators [N, H], and of a single graph [K, κ], [H, F + 1, D + 1]."""
    out, den = _results(v)
    sums = den.new_zeros(k.size(1) if terms.ptr is None else 0, k.size(2) + 1, v.size(2) + 1)
    blockwise = _Blockwise(v, terms)
    for size, blocks in blockwise.graphs(k, v):
        pooled, weight = blockwise.pool(k, v, blocks)
        if terms.ptr is None:
            torch.cat([pooled, weight], dim=2, out=sums)
        blockwise.read(out, den, q, v, pooled, weight, size, blocks)
    return out, den, sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, den: Tensor, sums: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    blockwise = _Blockwise(v, terms)
    for size, blocks in blockwise.graphs(k, v):
        # In a batch they are pooled again: the sums of many small graphs may be more than their nodes.
        pooled = sums if terms.ptr is None else torch.cat(blockwise.pool(k, v, blocks), dim=2)
        pooled_grad, bias = blockwise.read_backward(dq, grad, q, out, den, pooled[:, :-1], blocks)

        def own_part(b: Rows, weight: float = terms.own * size) -> Tensor:
            return blockwise.row_gradients(grad, out, den, b)[..., :-1].mul_(weight)

        blockwise.pool_backward(dk, dv, pooled_grad, bias, k, v, blocks, own_part if terms.own else None)
    return dq, dk, dv


def pool(k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """[K, κ] of one graph, which is [[Σ_j k̃_j v_jᵀ, Σ_j k̃_j], [Σ_j v_j, n]]: [H, F + 1, D + 1]."""
    blockwise = _Blockwise(v, terms)
    if not k.size(0):
        return v.new_zeros(k.size(1), k.size(2) + 1, v.size(2) + 1, dtype=blockwise.dtype)
    return torch.cat(blockwise.pool(k, v, blockwise.one_graph(k, v)), dim=2)


def read(q: Tensor, v: Tensor, sums: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The result and the denominators from such sums, which may be those of more rows."""
    out, den = _results(v)
    pooled, weight = (part.contiguous() for part in sums.split([v.size(2), 1], dim=2))
    blockwise = _Blockwise(v, terms)
    blockwise.read(out, den, q, v, pooled, weight, float(sums[0, -1, -1]), blockwise.one_graph(q, v))
    return out, den


def read_backward(
    grad: Tensor, q: Tensor, v: Tensor, out: Tensor, den: Tensor, sums: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, of v where a node reads its own ([0]: it does not), and of the sums.

    n is a number of nodes and has no gradient: zero.
    """
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format) if terms.own else v.new_empty(0)
    blockwise = _Blockwise(v, terms)
    blocks = blockwise.one_graph(q, v)
    pooled_grad, bias = blockwise.read_backward(dq, grad, q, out, den, sums[:, :-1], blocks)
    if terms.own:
        for b in blocks:
            put(dv, b, blockwise.row_gradients(grad, out, den, b)[..., :-1].mul_(terms.own * float(sums[0, -1, -1])))
    return dq, dv, torch.cat([pooled_grad, pad(bias, (0, 1))], dim=1)


def pool_backward(grad: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Gradients of k and v."""
    dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
    blockwise = _Blockwise(v, terms)
    blockwise.pool_backward(dk, dv, grad[:, :-1], grad[:, -1:, :-1], k, v, blockwise.one_graph(k, v))
    return dk, dv


class _Vectors(NamedTuple):
    """A block of vectors; multiplied by ``scale`` they are what the formulas above call x̃."""

    entries: Tensor
    norm: Tensor | None
    """[b, n, 1]; ``None`` where vectors stay as they are."""
    size: Tensor | None
    """What the entries were divided by before, [b, n, 1]; ``None``: by nothing."""

    @property
    def scale(self) -> Tensor:
        return self.entries.new_ones(1) if self.norm is None else self.norm.reciprocal()


class _Blockwise:
    """What the blocks of one call share: the terms of a row, the precision of sums, and memory."""

    def __init__(self, v: Tensor, terms: Terms) -> None:
        self.terms, self.dtype = terms, _wide(v)
        self.buffer = Buffers(v, self.dtype)

    def graphs(self, x: Tensor, v: Tensor) -> Iterator[tuple[int, list[Rows]]]:
        """The size and the blocks of one graph, or of some graphs of equal size in one block.

        A block has an eighth of all nodes, so that it is small beside the result, within the limits above.
        """
        width = max(1, x.size(1) * max(x.size(2), v.size(2)))
        height = min(BLOCK, max(SMALL, x.size(0) * width // 8)) // width
        for size, _, blocks in row_blocks(self.terms.ptr, x.size(0), height, x.device):
            yield size, blocks

    def one_graph(self, x: Tensor, v: Tensor) -> list[Rows]:
        """All blocks of a single graph."""
        return [b for _, blocks in self.graphs(x, v) for b in blocks]

    # ---------------------------------------------------------------- the two halves, and their gradients

    def pool(self, k: Tensor, v: Tensor, blocks: list[Rows]) -> tuple[Tensor, Tensor]:
        """K [b, F + 1, D] and κ [b, F + 1, 1] of the graphs that the blocks make up."""

        def part(b: Rows) -> tuple[Tensor, Tensor]:
            keys = self._vectors(k, b)
            features = self._extended(keys.entries, keys.scale, 1.0)
            return _contract(features, _load(v, b)), features.sum(1).unsqueeze(2)

        pooled, weight = part(blocks[0])
        for b in blocks[1:]:
            more_pooled, more_weight = part(b)
            pooled += more_pooled
            weight += more_weight
        return pooled, weight

    def read(
        self,
        out: Tensor,
        den: Tensor,
        q: Tensor,
        v: Tensor,
        pooled: Tensor,
        weight: Tensor,
        size: float,
        blocks: list[Rows],
    ) -> None:
        """Writes the result and the denominators of graphs of ``size`` nodes, from their K and κ."""
        constant, own = self.terms.constant, self.terms.own
        bias = constant * pooled[:, -1:]
        for b in blocks:
            queries = self._vectors(q, b)
            scale = queries.scale
            row = (queries.entries @ weight[:, :-1]).mul_(scale).add_((constant + own) * size)
            total = self._product(queries.entries, pooled[:, :-1], out, b)
            torch.addcmul(bias, total, scale, out=total)
            if own:
                total.add_(_load(v, b), alpha=own * size)
            put(den.unsqueeze(2), b, row)
            _store(out, b, torch.mul, total, _reciprocal(row))

    def read_backward(
        self, dq: Tensor, grad: Tensor, q: Tensor, out: Tensor, den: Tensor, pooled: Tensor, blocks: list[Rows]
    ) -> tuple[Tensor, Tensor]:
        """Writes ∂q; returns G and c Σ_i g_i. ``pooled`` is [K, κ] without the row of the constant."""
        pooled_grad, bias = torch.zeros_like(pooled), torch.zeros_like(pooled[:, :1, :-1])
        for b in blocks:
            queries, grads = self._vectors(q, b), self.row_gradients(grad, out, den, b)
            bias += grads[..., :-1].sum(1, keepdim=True)
            grads.mul_(queries.scale)
            pooled_grad += _contract(queries.entries, grads)
            self._store_tangential(dq, b, self._product(grads, pooled.transpose(1, 2), dq, b), queries)
        return pooled_grad, bias.mul_(self.terms.constant)

    def pool_backward(
        self,
        dk: Tensor,
        dv: Tensor,
        pooled_grad: Tensor,
        bias: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: list[Rows],
        own_part: Callable[[Rows], Tensor] | None = None,
    ) -> None:
        """Writes ∂k and ∂v from G and c Σ_i g_i; ``own_part`` is what a block of ∂v has beside these, a g_j."""
        for b in blocks:
            keys, values = self._vectors(k, b), _load(v, b)
            scale = keys.scale
            values = self._extended(values, scale, scale)
            self._store_tangential(dk, b, self._product(values, pooled_grad.transpose(1, 2), dk, b), keys)
            total = self._product(keys.entries, pooled_grad[..., :-1], dv, b)
            _store(dv, b, torch.addcmul, bias if own_part is None else own_part(b).add_(bias), total, scale)

    def row_gradients(self, grad: Tensor, out: Tensor, den: Tensor, rows: Rows) -> Tensor:
        """[g, h] of a block, [b, n, D + 1]."""
        extended = self._extended(_load(grad, rows), _reciprocal(_load(den.unsqueeze(2), rows)), 0.0)
        inner = torch.mul(extended[..., :-1], stack(out, rows), out=self.buffer("inner", *extended[..., :-1].shape))
        torch.sum(inner, 2, out=extended[..., -1]).neg_()
        return extended

    # ---------------------------------------------------------------- what these do with a block

    def _vectors(self, x: Tensor, rows: Rows) -> _Vectors:
        """A block of vectors and their norms; each is divided by its largest entry first where a square of the block
        would over- or underflow.

        A vector whose entries are all below the smallest normal number becomes zero, divided by infinity.
        """
        block = _load(x, rows)
        if not self.terms.unit:
            return _Vectors(block, None, None)
        norm = torch.linalg.vector_norm(block, dim=2, keepdim=True)
        if not block.numel():
            return _Vectors(block, norm, None)
        shortest, longest = norm.aminmax()
        if shortest > LEAST and longest < MOST:  # nearly always, and then the block need not be written
            return _Vectors(block, norm, None)
        size = block.abs().amax(2, keepdim=True)
        size.masked_fill_(size < torch.finfo(size.dtype).tiny, torch.inf)
        block = block / size
        norm = torch.linalg.vector_norm(block, dim=2, keepdim=True)
        return _Vectors(block, norm.masked_fill_(norm == 0, torch.inf), size)

    def _product(self, x: Tensor, y: Tensor, out: Tensor, rows: Rows) -> Tensor:
        """x y, at its place in ``out`` where that is a view of its dtype."""
        if isinstance(rows, slice) and out.dtype == x.dtype:
            return torch.bmm(x, y, out=stack(out, rows))
        return torch.bmm(x, y, out=self.buffer("product", x.size(0), x.size(1), y.size(2)))

    def _extended(self, x: Tensor, scale: Tensor, last: Tensor | float) -> Tensor:
        """[scale · x, last], [b, n, F + 1]: what belongs to a row's vector and its sum go through one product."""
        extended = self.buffer("extended", x.size(0), x.size(1), x.size(2) + 1)
        torch.mul(x, scale, out=extended[..., :-1])
        extended[..., -1:] = last
        return extended

    def _store_tangential(self, out: Tensor, rows: Rows, gradient: Tensor, x: _Vectors) -> None:
        """Write (1 − x̃x̃ᵀ) of the gradient: what is left of it behind a division by the norm, and by the size."""
        if x.norm is None:
            _store(out, rows, torch.mul, gradient, x.scale)
            return
        inner = torch.mul(gradient, x.entries, out=self.buffer("inner", *x.entries.shape))
        along = inner.sum(2, keepdim=True).div_(x.norm.square())
        if x.size is not None:
            gradient, along = gradient / x.size, along / x.size
        _store(out, rows, torch.addcmul, gradient, along.neg_(), x.entries)


def _wide(x: Tensor) -> torch.dtype:
    """The precision of sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _results(v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape[:2], dtype=_wide(v))


def _load(x: Tensor, rows: Rows) -> Tensor:
    """A block [b, n, F], a graph and head in every b, in the precision of sums."""
    return stack(x, rows).to(_wide(x))


def _store(out: Tensor, rows: Rows, function: Callable[..., Tensor], *arguments: Tensor) -> None:
    """Write what the function makes of its arguments to rows of ``out``."""
    if isinstance(rows, slice):
        function(*arguments, out=stack(out, rows))
    else:
        put(out, rows, function(*arguments))


def _contract(x: Tensor, y: Tensor) -> Tensor:
    """xᵀy; a single one in two halves, for a product is not divided among threads along its sum."""
    if x.size(0) > 1 or x.size(1) % 2:
        return x.transpose(1, 2) @ y
    x, y = (t.view(2, -1, t.size(2)) for t in (x, y))
    return (x.transpose(1, 2) @ y).sum(0, keepdim=True)


def _reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 for 0, as which every number counts whose reciprocal is beyond the range."""
    inverse = x.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0.0)
