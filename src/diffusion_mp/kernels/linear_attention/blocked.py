"""The fast path on the CPU: a block of nodes at a time, small enough to stay in cache from its norms to its products.

With one more feature k′_j = [k̃_j, 1], K = Σ_j k′_j v_jᵀ and κ = Σ_j k′_j of a graph hold Σ_j v_j and n too. With
b = c Σ_j v_j and a = own n,

    d_i = q̃_i·κ + c n + a,  out_i = (Kᵀq̃_i + b + a v_i) / d_i.

Backward, with g_i = ∂out_i / d_i, h_i = −g_i·out_i and G = Σ_i q̃_i [g_i, h_i]ᵀ in the place of K:

    ∂q̃_i = [K, κ] [g_i, h_i],  ∂k̃_j = G [v_j, 1],  ∂v_j = Gᵀk̃_j + c Σ_i g_i + a g_j,

and ∂q_i = (1 − q̃_i q̃_iᵀ) ∂q̃_i / ‖q_i‖. Only k′ is written with unit vectors; else the norms weigh the other factor of a
product.
"""

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusion_mp.kernels.buffers import Buffers
from diffusion_mp.kernels.segments import Rows, put, row_blocks, stack

# Entries of one block over all heads, 4 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 20

# Entries of a block that are worth starting it, also where there are few nodes.
SMALL = 1 << 18

# Norms between which the squares of a vector, and those of its norm, stay within the range of float32.
LEAST, MOST = 1e-15, 1e15


def forward(
    q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, constant: float, own: float, unit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The result [N, H, D], the denominators [N, H], and K, κ and Σ_j v_j of a single graph [H, F D + F + D]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    den = v.new_empty(v.shape[:2], dtype=torch.promote_types(v.dtype, torch.float32))
    features, channels = k.size(2), v.size(2)
    sums = den.new_zeros(k.size(1) if ptr is None else 0, features * channels + features + channels)
    buffer = Buffers(v, den.dtype)
    for size, _, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        pooled, weight = _pool(k, v, blocks, unit, buffer)
        if ptr is None:
            torch.cat([pooled[:, :-1].flatten(1), weight[:, :-1, 0], pooled[:, -1]], dim=1, out=sums)
        _read(out, den, q, v, pooled, weight, size, blocks, constant, own, unit, buffer)
    return out, den, sums


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    den: Tensor,
    sums: Tensor,
    ptr: Tensor | None,
    constant: float,
    own: float,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    buffer = Buffers(v, den.dtype)
    for size, _, blocks in row_blocks(ptr, q.size(0), _height(k, v), q.device):
        parts = _kept(sums, k, v) if ptr is None else _pool(k, v, blocks, unit, buffer)
        pooled = torch.cat([part[:, : k.size(2)] for part in parts], dim=2)
        pooled_grad, bias = _read_backward(dq, grad, q, out, den, pooled, blocks, constant, unit, buffer)
        own_part = partial(_own_gradient, grad, out, den, own * size, buffer) if own else None
        _pool_backward(dk, dv, pooled_grad, bias, k, v, blocks, unit, buffer, own_part)
    return dq, dk, dv


def pool(k: Tensor, v: Tensor, unit: bool) -> Tensor:
    """[K, κ; Σ_j v_j, n] of one graph, [H, F + 1, D + 1]: the first half of ``forward``."""
    if k.size(0) == 0:
        return v.new_zeros(k.size(1), k.size(2) + 1, v.size(2) + 1)
    return torch.cat(_pool(k, v, _blocks(k, v), unit, Buffers(v, v.dtype)), dim=2)


def read(q: Tensor, v: Tensor, sums: Tensor, constant: float, own: float, unit: bool) -> tuple[Tensor, Tensor]:
    """The result and the denominators from such sums, which may be those of more rows: the second half."""
    out, den = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(v.shape[:2])
    pooled, weight = (part.contiguous() for part in sums.split([v.size(2), 1], dim=2))
    size = float(sums[0, -1, -1])
    _read(out, den, q, v, pooled, weight, size, _blocks(q, v), constant, own, unit, Buffers(v, v.dtype))
    return out, den


def read_backward(
    grad: Tensor, q: Tensor, v: Tensor, out: Tensor, den: Tensor, sums: Tensor, constant: float, own: float, unit: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of q, v (where it is read: a node's own) and the sums, but for n, which is a number of nodes."""
    dq, buffer, blocks = torch.empty_like(q, memory_format=torch.contiguous_format), Buffers(v, v.dtype), _blocks(q, v)
    pooled_grad, bias = _read_backward(dq, grad, q, out, den, sums[:, :-1], blocks, constant, unit, buffer)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format) if own else None
    if dv is not None:
        for b in blocks:
            put(dv, b, _own_gradient(grad, out, den, own * float(sums[0, -1, -1]), buffer, b))
    return dq, dv, torch.cat([pooled_grad, pad(bias, (0, 1))], dim=1)


def pool_backward(grad: Tensor, k: Tensor, v: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    """Gradients of k and v."""
    dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
    _pool_backward(dk, dv, grad[:, :-1], grad[:, -1:, :-1], k, v, _blocks(k, v), unit, Buffers(v, v.dtype))
    return dk, dv


def _blocks(k: Tensor, v: Tensor) -> list[Rows]:
    """The blocks of one graph."""
    return [b for _, _, blocks in row_blocks(None, k.size(0), _height(k, v), k.device) for b in blocks]


def _read(
    out: Tensor,
    den: Tensor,
    q: Tensor,
    v: Tensor,
    pooled: Tensor,
    weight: Tensor,
    size: float,
    blocks: list[Rows],
    constant: float,
    own: float,
    unit: bool,
    buffer: Buffers,
) -> None:
    """Writes the result and the denominators of graphs of ``size`` nodes, from their K and κ with the constant's."""
    bias = constant * pooled[:, -1:]
    for b in blocks:
        queries, norm, _ = _vectors(q, b, unit)
        scale = _scale(norm, queries)
        row = (queries @ weight[:, :-1]).mul_(scale).add_((constant + own) * size)
        total = _product(queries, pooled[:, :-1], out, b, buffer)
        torch.addcmul(bias, total, scale, out=total)
        if own:
            total.add_(_load(v, b), alpha=own * size)
        put(den.unsqueeze(2), b, row)
        _store(out, b, torch.mul, total, _reciprocal(row))


def _read_backward(
    dq: Tensor,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    den: Tensor,
    pooled: Tensor,
    blocks: list[Rows],
    constant: float,
    unit: bool,
    buffer: Buffers,
) -> tuple[Tensor, Tensor]:
    """Writes ∂q; returns G and c Σ_i g_i. ``pooled`` is [K, κ]."""
    pooled_grad, bias = torch.zeros_like(pooled), torch.zeros_like(pooled[:, :1, :-1])
    for b in blocks:
        (queries, norm, size), grads = _vectors(q, b, unit), _gradients(grad, out, den, b, buffer)
        bias += grads[..., :-1].sum(1, keepdim=True)
        grads.mul_(_scale(norm, queries))
        pooled_grad += _contract(queries, grads)
        gradient = _product(grads, pooled.transpose(1, 2), dq, b, buffer)
        _store_tangential(dq, b, gradient, queries, norm, size, buffer)
    return pooled_grad, bias.mul_(constant)


def _pool_backward(
    dk: Tensor,
    dv: Tensor,
    pooled_grad: Tensor,
    bias: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: list[Rows],
    unit: bool,
    buffer: Buffers,
    own_part: Callable[[Rows], Tensor] | None = None,
) -> None:
    """Writes ∂k and ∂v from G and c Σ_i g_i; ``own_part`` is what a block of ∂v has beside these."""
    for b in blocks:
        (keys, norm, size), values = _vectors(k, b, unit), _load(v, b)
        scale = _scale(norm, keys)
        values = _extended(values, scale, scale, buffer)
        gradient = _product(values, pooled_grad.transpose(1, 2), dk, b, buffer)
        _store_tangential(dk, b, gradient, keys, norm, size, buffer)
        total = _product(keys, pooled_grad[..., :-1], dv, b, buffer)
        _store(dv, b, torch.addcmul, bias if own_part is None else own_part(b).add_(bias), total, scale)


def _own_gradient(grad: Tensor, out: Tensor, den: Tensor, weight: float, buffer: Buffers, rows: Rows) -> Tensor:
    """a g_i of a block, what its own values get."""
    return _gradients(grad, out, den, rows, buffer)[..., :-1].mul_(weight)


def _height(k: Tensor, v: Tensor) -> int:
    """Nodes of a block: an eighth of all, so that blocks are small beside the result, within the limits above."""
    width = max(1, k.size(1) * max(k.size(2), v.size(2)))
    return min(BLOCK, max(SMALL, k.size(0) * width // 8)) // width


def _load(x: Tensor, rows: Rows) -> Tensor:
    """A block [b, n, F], a graph and head in every b, in the precision of sums."""
    return stack(x, rows).to(torch.promote_types(x.dtype, torch.float32))


def _store(out: Tensor, rows: Rows, function: Callable[..., Tensor], *arguments: Tensor) -> None:
    """Write what the function makes of its arguments to rows of ``out``."""
    if isinstance(rows, slice):
        function(*arguments, out=stack(out, rows))
    else:
        put(out, rows, function(*arguments))


def _product(x: Tensor, y: Tensor, out: Tensor, rows: Rows, buffer: Buffers) -> Tensor:
    """x y, at its place in ``out`` where that is a view of its dtype."""
    if isinstance(rows, slice) and out.dtype == x.dtype:
        return torch.bmm(x, y, out=stack(out, rows))
    return torch.bmm(x, y, out=buffer("product", x.size(0), x.size(1), y.size(2)))


def _contract(x: Tensor, y: Tensor) -> Tensor:
    """xᵀy; a single one in two halves, for a product is not divided among threads along its sum."""
    if x.size(0) > 1 or x.size(1) % 2:
        return x.transpose(1, 2) @ y
    x, y = (t.view(2, -1, t.size(2)) for t in (x, y))
    return (x.transpose(1, 2) @ y).sum(0, keepdim=True)


def _vectors(x: Tensor, rows: Rows, unit: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A block of vectors, the norms that they are to be divided by, and ``None``.

    Where a square would over- or underflow, each is divided by its largest entry before; that is then the third part,
    [b, n, 1]. A vector whose entries are all below the smallest normal number becomes zero, divided by infinity.
    """
    block = _load(x, rows)
    if not unit:
        return block, None, None
    norm = torch.linalg.vector_norm(block, dim=2, keepdim=True)
    if not block.numel():
        return block, norm, None
    shortest, longest = norm.aminmax()
    if shortest > LEAST and longest < MOST:
        return block, norm, None
    size = block.abs().amax(2, keepdim=True)
    size.masked_fill_(size < torch.finfo(size.dtype).tiny, torch.inf)
    block = block / size
    norm = torch.linalg.vector_norm(block, dim=2, keepdim=True)
    return block, norm.masked_fill_(norm == 0, torch.inf), size


def _scale(norm: Tensor | None, like: Tensor) -> Tensor:
    """What a vector of that norm is multiplied by; 1 where vectors stay as they are."""
    return like.new_ones(1) if norm is None else norm.reciprocal()


def _reciprocal(x: Tensor) -> Tensor:
    """1/x, and 0 for 0, as which every number counts whose reciprocal is beyond the range."""
    inverse = x.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0.0)


def _extended(x: Tensor, scale: Tensor, last: Tensor | float, buffer: Buffers) -> Tensor:
    """[scale · x, last], [b, n, F + 1]."""
    extended = buffer("extended", x.size(0), x.size(1), x.size(2) + 1)
    torch.mul(x, scale, out=extended[..., :-1])
    extended[..., -1:] = last
    return extended


def _pool(k: Tensor, v: Tensor, blocks: list[Rows], unit: bool, buffer: Buffers) -> tuple[Tensor, Tensor]:
    """K [b, F + 1, D] and κ [b, F + 1, 1] of the graphs that the blocks make up."""

    def part(b: Rows) -> tuple[Tensor, Tensor]:
        keys, norm, _ = _vectors(k, b, unit)
        features = _extended(keys, _scale(norm, keys), 1.0, buffer)
        return _contract(features, _load(v, b)), features.sum(1).unsqueeze(2)

    return reduce(lambda x, y: (x[0].add_(y[0]), x[1].add_(y[1])), map(part, blocks))


def _kept(sums: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and κ without the constant's row, from what the forward pass kept."""
    features, channels = k.size(2), v.size(2)
    pooled, weight, _ = sums.split([features * channels, features, channels], dim=1)
    return pooled.unflatten(1, (features, channels)), weight.unsqueeze(2)


def _gradients(grad: Tensor, out: Tensor, den: Tensor, rows: Rows, buffer: Buffers) -> Tensor:
    """[g, h], [b, n, D + 1]."""
    extended = _extended(_load(grad, rows), _reciprocal(_load(den.unsqueeze(2), rows)), 0.0, buffer)
    inner = torch.mul(extended[..., :-1], stack(out, rows), out=buffer("inner", *extended[..., :-1].shape))
    torch.sum(inner, 2, out=extended[..., -1]).neg_()
    return extended


def _store_tangential(
    out: Tensor, rows: Rows, gradient: Tensor, x: Tensor, norm: Tensor | None, size: Tensor | None, buffer: Buffers
) -> None:
    """Write (1 − x̃x̃ᵀ) of the gradient: what is left of it behind a division by the norm, and by the size."""
    if norm is None:
        _store(out, rows, torch.mul, gradient, _scale(norm, x))
        return
    inner = torch.mul(gradient, x, out=buffer("inner", *x.shape))
    along = inner.sum(2, keepdim=True).div_(norm.square())
    if size is not None:
        gradient, along = gradient / size, along / size
    _store(out, rows, torch.addcmul, gradient, along.neg_(), x)
