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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.buffers import Buffers
from diffusion_mp.kernels.linear_attention.reference import Attended, Terms
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.segments import Rows, put, row_blocks, stack

# Entries of one block over all heads, 4 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 20

# Entries of a block that are worth starting it, also where there are few nodes.
SMALL = 1 << 18

# Norms between which the squares of a vector, and those of its norm, stay within the range of float32.
LEAST, MOST = 1e-15, 1e15


class _Sums(NamedTuple):
    """K [b, F + 1, D] and κ [b, F + 1, 1] of b graphs and heads."""

    pooled: Tensor
    weight: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Attended:
    """Every graph of a batch: pooled, then read."""
    blockwise = _Blockwise(v, terms)
    out = blockwise.empty_results(k.size(2), k.size(1) if terms.ptr is None else 0)
    for size, blocks in blockwise.graphs(k):
        sums = blockwise.pool(k, v, blocks)
        if terms.ptr is None:
            torch.cat(sums, dim=2, out=out.pooled)
        blockwise.read(out, q, v, sums, size, blocks)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Attended, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = empty_like(q, k, v)
    blockwise = _Blockwise(v, terms)
    for size, blocks in blockwise.graphs(k):
        # In a batch they are pooled again: the sums of many small graphs may be more than their nodes.
        sums = out.pooled if terms.ptr is None else torch.cat(blockwise.pool(k, v, blocks), dim=2)
        pooled_grad, bias = blockwise.read_backward(dq, grad, q, out, sums[:, :-1], blocks)
        own_part = partial(blockwise.own_gradient, grad, out, terms.own * size) if terms.own else None
        blockwise.pool_backward(dk, dv, pooled_grad, bias, k, v, blocks, own_part)
    return dq, dk, dv


def pool(k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """[K, κ] of one graph, which is [[Σ_j k̃_j v_jᵀ, Σ_j k̃_j], [Σ_j v_j, n]]: [H, F + 1, D + 1]."""
    blockwise = _Blockwise(v, terms)
    if not k.size(0):
        return blockwise.empty_results(k.size(2), k.size(1)).pooled.zero_()
    return torch.cat(blockwise.pool(k, v, blockwise.blocks(k)), dim=2)


def pool_backward(grad: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Gradients of k and v."""
    dk, dv = empty_like(k, v)
    blockwise = _Blockwise(v, terms)
    blockwise.pool_backward(dk, dv, grad[:, :-1], grad[:, -1:, :-1], k, v, blockwise.blocks(k))
    return dk, dv


def read(q: Tensor, v: Tensor, sums: Tensor, terms: Terms) -> Attended:
    """The rows from such sums, which may be those of more nodes."""
    blockwise = _Blockwise(v, terms)
    out = blockwise.empty_results(0, 0)
    parts = _Sums(*(part.contiguous() for part in sums.split([v.size(2), 1], dim=2)))
    blockwise.read(out, q, v, parts, float(sums[0, -1, -1]), blockwise.blocks(q))
    return out


def read_backward(
    grad: Tensor, q: Tensor, v: Tensor, out: Attended, sums: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, of v where a node reads its own (else no entry), and of the sums, n's being zero."""
    dq, dv = empty_like(q), empty_like(v) if terms.own else v.new_empty(0)
    blockwise = _Blockwise(v, terms)
    blocks = blockwise.blocks(q)
    pooled_grad, bias = blockwise.read_backward(dq, grad, q, out, sums[:, :-1], blocks)
    for b in blocks if terms.own else []:
        put(dv, b, blockwise.own_gradient(grad, out, terms.own * float(sums[0, -1, -1]), b))
    return dq, dv, torch.cat([pooled_grad, pad(bias, (0, 1))], dim=1)


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
        self.like, self.terms = v, terms
        self.wide = torch.promote_types(v.dtype, torch.float32)  # the precision of sums
        self.buffer = Buffers(v, self.wide)

    def graphs(self, x: Tensor) -> Iterator[tuple[int, list[Rows]]]:
        """The size and the blocks of one graph, or of some graphs of equal size in one block.

        A block has an eighth of all nodes, so that it is small beside the result, within the limits above.
        """
        width = max(1, x.size(1) * max(x.size(2), self.like.size(2)))
        height = min(BLOCK, max(SMALL, x.size(0) * width // 8)) // width
        for size, _, blocks in row_blocks(self.terms.ptr, x.size(0), height, x.device):
            yield size, blocks

    def blocks(self, x: Tensor) -> list[Rows]:
        """All blocks of a single graph."""
        return [b for _, blocks in self.graphs(x) for b in blocks]

    def empty_results(self, features: int, heads: int) -> Attended:
        """With room for the sums of so many heads."""
        v = self.like
        values = torch.empty_like(v, memory_format=torch.contiguous_format)
        den = v.new_empty(v.shape[:2], dtype=self.wide)
        return Attended(values, den, den.new_zeros(heads, features + 1, v.size(2) + 1))

    # ---------------------------------------------------------------- the two halves, and their gradients

    def pool(self, k: Tensor, v: Tensor, blocks: list[Rows]) -> _Sums:
        """The sums of the graphs that the blocks make up."""

        def part(b: Rows) -> tuple[Tensor, Tensor]:
            keys = self._vectors(k, b)
            features = self._extended(keys.entries, keys.scale, 1.0)
            return _contract(features, self._load(v, b)), features.sum(1).unsqueeze(2)

        pooled, weight = part(blocks[0])
        for b in blocks[1:]:
            more_pooled, more_weight = part(b)
            pooled += more_pooled
            weight += more_weight
        return _Sums(pooled, weight)

    def read(self, out: Attended, q: Tensor, v: Tensor, sums: _Sums, size: float, blocks: list[Rows]) -> None:
        """Writes the result and the denominators of graphs of ``size`` nodes."""
        constant, own = self.terms.constant, self.terms.own
        bias = constant * sums.pooled[:, -1:]
        for b in blocks:
            queries = self._vectors(q, b)
            scale = queries.scale
            row = (queries.entries @ sums.weight[:, :-1]).mul_(scale).add_((constant + own) * size)
            total = self._product(queries.entries, sums.pooled[:, :-1], out.values, b)
            torch.addcmul(bias, total, scale, out=total)
            if own:
                total.add_(self._load(v, b), alpha=own * size)
            put(out.den.unsqueeze(2), b, row)
            _store(out.values, b, torch.mul, total, _reciprocal(row))

    def read_backward(
        self, dq: Tensor, grad: Tensor, q: Tensor, out: Attended, pooled: Tensor, blocks: list[Rows]
    ) -> tuple[Tensor, Tensor]:
        """Writes ∂q; returns G and c Σ_i g_i. ``pooled`` is [K, κ] without the row of the constant."""
        pooled_grad, bias = torch.zeros_like(pooled), torch.zeros_like(pooled[:, :1, :-1])
        for b in blocks:
            queries, grads = self._vectors(q, b), self.row_gradients(grad, out, b)
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
            keys, values = self._vectors(k, b), self._load(v, b)
            scale = keys.scale
            values = self._extended(values, scale, scale)
            self._store_tangential(dk, b, self._product(values, pooled_grad.transpose(1, 2), dk, b), keys)
            total = self._product(keys.entries, pooled_grad[..., :-1], dv, b)
            _store(dv, b, torch.addcmul, bias if own_part is None else own_part(b).add_(bias), total, scale)

    def own_gradient(self, grad: Tensor, out: Attended, weight: float, rows: Rows) -> Tensor:
        """a g of a block: what its own values get."""
        return self.row_gradients(grad, out, rows)[..., :-1].mul_(weight)

    def row_gradients(self, grad: Tensor, out: Attended, rows: Rows) -> Tensor:
        """[g, h] of a block, [b, n, D + 1]."""
        extended = self._extended(self._load(grad, rows), _reciprocal(self._load(out.den.unsqueeze(2), rows)), 0.0)
        values = stack(out.values, rows)
        inner = torch.mul(extended[..., :-1], values, out=self.buffer("inner", *values.shape))
        torch.sum(inner, 2, out=extended[..., -1]).neg_()
        return extended

    # ---------------------------------------------------------------- what these do with a block

    def _vectors(self, x: Tensor, rows: Rows) -> _Vectors:
        """A block of vectors and their norms; each is divided by its largest entry first where a square of the block
        would over- or underflow.

        A vector whose entries are all below the smallest normal number becomes zero, divided by infinity.
        """
        block = self._load(x, rows)
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

    def _load(self, x: Tensor, rows: Rows) -> Tensor:
        """A block [b, n, F], a graph and head in every b, in the precision of sums."""
        return (x[rows].transpose(0, 1) if isinstance(rows, slice) else stack(x, rows)).to(self.wide)

    def _product(self, x: Tensor, y: Tensor, out: Tensor, rows: Rows) -> Tensor:
        """x y, at its place in ``out`` where that is a view of its dtype."""
        if isinstance(rows, slice) and out.dtype == x.dtype:
            return torch.bmm(x, y, out=out[rows].transpose(0, 1))
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


def _store(out: Tensor, rows: Rows, function: Callable[..., Tensor], *arguments: Tensor) -> None:
    """Write what the function makes of its arguments to rows of ``out``."""
    if isinstance(rows, slice):
        function(*arguments, out=out[rows].transpose(0, 1))
    else:
        put(out, rows, function(*arguments))


def _contract(x: Tensor, y: Tensor) -> Tensor:
    """xᵀy; a single one in two halves, for a product is not divided among threads along its sum."""
    if x.size(0) > 1 or x.size(1) % 2:
        return x.transpose(1, 2) @ y
    halves = x.view(2, -1, x.size(2)).transpose(1, 2) @ y.view(2, -1, y.size(2))
    return halves.sum(0, keepdim=True)


def _reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 for 0, as which every number counts whose reciprocal is beyond the range."""
    inverse = x.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0.0)
