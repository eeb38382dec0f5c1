"""The fast path on the CPU: sums over a block of nodes at a time, or, for small graphs, all pairs.

A block stays in cache from its norms to its products. With K = Σ_j k̃_j v_jᵀ, κ = Σ_j k̃_j and σ = Σ_j v_j over the n
nodes of a graph, and a = own n,

    d_i = q̃_i·κ + c n + a,  out_i = (Kᵀq̃_i + c σ + a v_i) / d_i.

Backward, with g_i = ∂out_i / d_i and h_i = −g_i·out_i, the sums are G = Σ_i q̃_i g_iᵀ, γ = Σ_i q̃_i h_i, b = c Σ_i g_i,

    ∂q̃_i = K g_i + h_i κ,  ∂k̃_j = G v_j + γ,  ∂v_j = Gᵀk̃_j + b + a g_j,

and ∂q_i = (∂q̃_i − (q̃_i·∂q̃_i) q̃_i) / ‖q_i‖ with q̃_i·∂q̃_i = −(c σ + a v_i)·g_i − (c n + a) h_i, without another
product of rows; ∂k_j likewise, with one. Products are written to the result itself where dtypes allow it, norms are
applied to the other factor of a product, and all other memory is reused by every block.

All pairs take n²(F + D) steps instead of 2 n F D, and fewer calls. With C = QKᵀ, α_i = 1/‖q_i‖ and β_j = 1/‖k_j‖ (or
1), and A = diag(1/d) S, d the row sums of S,

    S = own n I + c 11ᵀ + diag(α) C diag(β),   out = A v,
    P = diag(α/d) (T − ((A∘T) 1) 1ᵀ) diag(β),   T = grad vᵀ,
    ∂v = Aᵀ grad,   ∂q = P k − diag(α² (P∘C) 1) q,   ∂k = Pᵀ q − diag(β² (P∘C)ᵀ 1) k,

the second terms only with norms. Padding sends nothing, c = β = 0, and receives no gradient, 1/d = 0.

Of one tensor x = q = k = v, with r_i = 1/‖x_i‖, every norm and sum is computed once, and the gradient of all roles is

    ∂x_i = r_i (K g_i + h_i κ + γ) + (G + Gᵀ) x̃_i + b − s_i x̃_i,

where s_i is the part along x̃_i of what passes through the norm: r_i (γ·x̃_i − c σ·g_i − c n h_i), as above, and
x̃_i·G x̃_i, half of x̃_i·(G + Gᵀ) x̃_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.operation import empty_like
from diffusion_mp.kernels.precision import ALREADY
from diffusion_mp.kernels.segments import Buffers, largest, stacks

# Entries of one block over all heads, 4 MiB in float32: a block stays in cache, and threads seldom wait for each other.
BLOCK = 1 << 20

# The least entries of a block, also where there are few nodes.
SMALL = 1 << 18

# Norms between which the squares of a vector, and products with those of others, stay within the range of float32.
LEAST, MOST = 1e-10, 1e10

Block = slice | None  # some rows, or all
T = TypeVar("T", bound=tuple[Tensor, ...])


class Vectors(NamedTuple):
    """Vectors x; multiplied by ``scale`` they are x̃, unit vectors or unchanged."""

    entries: Tensor  # [b, n, F]
    scale: Tensor  # 1/‖x‖, [b, n, 1]; one, [1, 1, 1], where vectors are unchanged
    size: Tensor | None = None  # what the entries were divided by before, [b, n, 1]; None is one


def vectors(x: Tensor, unit: bool) -> Vectors:
    """Return vectors and inverse norms; where squares would over- or underflow, divide by the largest entry first.

    A vector whose entries are all below the smallest normal number becomes zero, divided by infinity.
    """
    if not unit:
        return Vectors(x, x.new_ones(1, 1, 1))
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
    shortest, longest = norm.aminmax() if x.numel() else (1.0, 1.0)
    if float(shortest) > LEAST and float(longest) < MOST:  # nearly always, and nothing is copied
        return Vectors(x, norm.reciprocal_())
    size = x.abs().amax(2, keepdim=True)
    size.masked_fill_(size < torch.finfo(size.dtype).tiny, torch.inf)
    x = x / size
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
    return Vectors(x, norm.masked_fill_(norm == 0, torch.inf).reciprocal_(), size)


def _store_tangential(out: Tensor, gradient: Tensor, inner: Tensor | None, x: Vectors) -> None:
    """Write ∂x from ∂x̃ / ‖x‖ and its inner product with x, which is ``None`` for unchanged vectors."""
    if inner is None:
        if out is not gradient:
            out.copy_(gradient)
        return
    along = inner.mul_(x.scale).mul_(x.scale)
    if x.size is not None:
        gradient, along = gradient / x.size, along / x.size
    torch.addcmul(gradient, along, x.entries, value=-1, out=out)


def reciprocal(x: Tensor) -> Tensor:
    """Return 1/x, and 0 where that overflows."""
    return x.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)


class _Sums(NamedTuple):
    """K [b, F, D], κ [b, F, 1] and σ [b, 1, D] over the senders of b graphs and heads; or backward G, γ and b."""

    outer: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def split(cls, state: Tensor) -> _Sums:
        """Invert :meth:`state`; κ is copied, since a column with gaps slows down every product with it."""
        return cls(state[:, :-1, :-1], state[:, :-1, -1:].contiguous(), state[:, -1:, :-1])

    def state(self, nodes: float) -> Tensor:
        """Return [[K, κ], [σ, n]]."""
        last = self.right.new_full((self.right.size(0), 1, 1), nodes)
        return torch.cat([torch.cat([self.outer, self.left], 2), torch.cat([self.right, last], 2)], 1)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Compute every graph of a batch by its pairs, or by pooling and reading."""
    rows = _self_forward(v, terms) if q is k and k is v else None
    if rows is not None:
        return rows
    values, den = _empty_results(v)
    kept = None
    for mask, (out, out_den), (qs, ks, vs) in stacks(terms.ptr, _rows_at_once(k, v), (values, den), (q, k, v)):
        if _few(ks.size(1), ks, vs):
            _by_pairs(out, out_den, qs, ks, vs, terms, mask)
            continue
        blockwise = _Blockwise(ks, vs, terms, mask)
        sums = blockwise.pool(ks, vs)
        blockwise.read(out, out_den, qs, vs, sums, blockwise.nodes)
        if terms.ptr is None:
            kept = sums
    return LinearRows(values, den.squeeze(2), *(kept or _no_sums(den, k.size(1) if terms.ptr is None else 0, k, v)))


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: LinearRows, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = empty_like(q, k, v)
    _write_gradients(gradients, grad, q, k, v, out, terms)
    return gradients


def self_backward(grad: Tensor, x: Tensor, out: LinearRows, terms: Terms) -> Tensor:
    """Return the gradient of x = q = k = v, the sum of all three."""
    gradient = _self_backward(grad, x, out, terms)
    if gradient is None:
        gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
        _write_gradients((gradient,), grad, x, x, x, out, terms)
    return gradient


def _write_gradients(
    gradients: tuple[Tensor, ...], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: LinearRows, terms: Terms
) -> None:
    inputs = [q, k, v, grad]
    if not _few(largest(terms.ptr, k.size(0)), k, v):  # pairs recompute these
        inputs += [out.values, out.den.unsqueeze(2)]
    for mask, into, (qs, ks, vs, grads, *rows) in stacks(terms.ptr, _rows_at_once(k, v), gradients, inputs):
        if _few(ks.size(1), ks, vs):
            _by_pairs_backward(into, grads, qs, ks, vs, terms, mask)
            continue
        blockwise, (values, den) = _Blockwise(ks, vs, terms, mask), rows
        # A batch is pooled again: the sums of many small graphs may be larger than their nodes.
        sums = _Sums(*out[2:]) if terms.ptr is None else blockwise.pool(ks, vs)
        dq, dk, dv = into if len(into) == 3 else into[0].new_empty(3, *into[0].shape)
        by_sums = blockwise.read_backward(dq, grads, qs, vs, values, den, sums, blockwise.nodes)
        blockwise.pool_backward(dk, dv, by_sums, ks, vs, (grads, den))
        if len(into) == 1:
            torch.add(dq.add_(dk), dv, out=into[0])


def _self_forward(x: Tensor, terms: Terms) -> LinearRows | None:
    """Return the rows of attention, or ``None`` where :func:`_norms` does."""
    norms = _norms(x, terms)
    if norms is None:
        return None
    x, count = x.squeeze(1), terms.constant * x.size(0)
    parts, sums = _parts(x), []
    for part, norm in zip(parts, norms, strict=True):
        unit = part / norm
        sums.append((_summed(unit, part), unit.sum(0), part.sum(0)))
    outer, left, right = _added(sums)
    bias = right if terms.constant == 1 else terms.constant * right
    if len(parts) == 1:
        den = torch.mv(unit, left).add_(count)
        values = torch.addmm(bias, unit, outer).div_(den.unsqueeze(1))
    else:
        values, den = x.new_empty(x.shape), x.new_empty(len(x))
        for part, norm, out, row in zip(parts, norms, _parts(values), den.split(len(norms[0])), strict=True):
            unit = part / norm
            torch.mv(unit, left, out=row).add_(count)
            torch.addmm(bias, unit, outer, out=out).div_(row.unsqueeze(1))
    of_head = outer.unsqueeze(0), left.view(1, -1, 1), right.view(1, 1, -1)
    return LinearRows(values.unsqueeze(1), den.unsqueeze(1), *of_head)


def _self_backward(grad: Tensor, x: Tensor, out: LinearRows, terms: Terms) -> Tensor | None:
    """Return the gradient of x, or ``None`` where :func:`_norms` does."""
    norms = _norms(x, terms)
    if norms is None:
        return None
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts, grads, values, into = (_parts(t.squeeze(1)) for t in (x, grad, out.values, gradient))
    dens, sums, kept = out.den.split(len(norms[0])), [], []
    for part, by_row, norm, den, rows in zip(parts, grads, norms, dens, values, strict=True):
        scaled = by_row / (den * norm)  # r g
        inner = (scaled * rows).sum(1)  # −r h
        sums.append((_summed(part, scaled), torch.mv(part.t(), inner), torch.mv(scaled.t(), norm.squeeze(1))))
        kept.append((inner, scaled if len(parts) == 1 else None))
    by_outer, left, right = _added(sums)
    left, right = left.neg_(), right.mul_(terms.constant)
    outer, both = out.outer[0].t(), by_outer + by_outer.t()
    levels, bias = torch.stack([-out.left.flatten(), left]), terms.constant * out.right.flatten()
    for part, by_row, norm, den, found, (inner, known) in zip(parts, grads, norms, dens, into, kept, strict=True):
        unit, inverse = part / norm, norm.reciprocal()
        scaled = by_row / (den * norm) if known is None else known
        torch.addmm(right, torch.cat([inner.unsqueeze(1), inverse], 1), levels, out=found)
        found.addmm_(scaled, outer).addmm_(unit, both)
        along = (unit * found).sum(1).sub_(torch.mv(unit, right)).add_(inner, alpha=terms.constant * x.size(0))
        along.addcmul_(inverse.squeeze(1), torch.mv(unit, left)).sub_(torch.mv(scaled, bias))
        found.addcmul_(along.unsqueeze(1), unit, value=-0.5)
    return gradient


def _norms(x: Tensor, terms: Terms) -> list[Tensor] | None:
    """Return the norms of every block; ``None`` for other attention, or if squares may over- or underflow."""
    # With c of at least 1 no denominator is near zero.
    plain = terms.ptr is None and terms.unit and not terms.own and terms.constant >= 1 and x.dtype in ALREADY
    if not plain or x.size(1) != 1 or not x.numel():
        return None
    norms = [torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in _parts(x.squeeze(1))]
    for norm in norms:
        shortest, longest = norm.aminmax()
        if not (float(shortest) > LEAST and float(longest) < MOST):
            return None
    return norms


def _parts(x: Tensor) -> Sequence[Tensor]:
    return [x] if x.numel() <= SMALL else x.split(max(1, SMALL // (2 * x.size(1))))


def _summed(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(x.t(), y) if len(x) < 1024 else _contract(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def pool(k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """Return the sums of one graph, [[K, κ], [σ, n]]: [H, F + 1, D + 1]."""
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    return _Blockwise(k, v, terms).pool(k, v).state(k.size(1))


def pool_backward(grad: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    dk, dv = gradients = empty_like(k, v)
    dk, dv, k, v = (x.transpose(0, 1) for x in (dk, dv, k, v))
    _Blockwise(k, v, terms).pool_backward(dk, dv, _Sums.split(grad), k, v)
    return gradients


def read(q: Tensor, v: Tensor, sums: Tensor, terms: Terms) -> LinearRows:
    """Return rows from such sums, which may be those of more nodes."""
    values, den = _empty_results(v)
    out, out_den, queries, own = (x.transpose(0, 1) for x in (values, den, q, v))
    _Blockwise(queries, own, terms).read(out, out_den, queries, own, _Sums.split(sums), float(sums[0, -1, -1]))
    return LinearRows(values, den.squeeze(2), *_no_sums(sums, 0, q, v))


def read_backward(
    grad: Tensor, q: Tensor, v: Tensor, out: LinearRows, sums: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, of v if ``own`` is not zero (else no entry), and of the sums, zero for n."""
    dq, dv = empty_like(q), empty_like(v) if terms.own else v.new_empty(0)
    by_queries, gradient, queries, own, values, den = (
        x.transpose(0, 1) for x in (dq, grad, q, v, out.values, out.den.unsqueeze(2))
    )
    blockwise, nodes = _Blockwise(queries, gradient, terms), float(sums[0, -1, -1])
    by_sums = blockwise.read_backward(by_queries, gradient, queries, own, values, den, _Sums.split(sums), nodes)
    for rows in blockwise.blocks if terms.own else ():
        own = blockwise.own_gradient(gradient, den, rows, nodes)
        _some(dv.transpose(0, 1), rows).copy_(own)
    return dq, dv, by_sums.state(0.0)


def _empty_results(v: Tensor) -> tuple[Tensor, Tensor]:
    nodes, heads, _ = v.shape
    return v.new_empty(v.shape), v.new_empty(nodes, heads, 1, dtype=torch.promote_types(v.dtype, torch.float32))


def _no_sums(like: Tensor, heads: int, k: Tensor, v: Tensor) -> _Sums:
    features, channels = k.size(2), v.size(2)
    return _Sums(*[like.new_zeros(heads, *shape) for shape in ((features, channels), (features, 1), (1, channels))])


def _few(size: int, k: Tensor, v: Tensor) -> bool:
    """Return whether all pairs cost at most twice the steps of the sums; pairs need fewer calls and write less."""
    return size * (k.size(2) + v.size(2)) <= 4 * k.size(2) * v.size(2)


def _rows_at_once(k: Tensor, v: Tensor) -> int:
    return BLOCK // max(1, k.size(1) * max(k.size(2), v.size(2)))


class _Scores(NamedTuple):
    """Scores of receivers and senders before rows are normalised: C and S [b, n, n], and d [b, n, 1]."""

    q: Vectors
    k: Vectors
    inner: Tensor
    scores: Tensor
    den: Tensor


def _by_pairs(out: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None) -> None:
    """Write the result and the denominators of all pairs; ``mask`` [b, n, 1] is one for nodes and zero for padding."""
    if v.dtype != den.dtype:
        q, k, v = (x.to(den.dtype) for x in (q, k, v))
    rows = _scores(q, k, terms, mask)
    den.copy_(rows.den)
    _store_product(out, rows.scores.mul_(reciprocal(rows.den)), v)


def _by_pairs_backward(
    into: list[Tensor], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None
) -> None:
    """Write the gradients of q, k and v, or the sum of the three, of one tensor."""
    wide = torch.promote_types(v.dtype, torch.float32)
    if v.dtype != wide:
        grad, q, k, v = (x.to(wide) for x in (grad, q, k, v))
    rows = _scores(q, k, terms, mask)
    inverse = reciprocal(rows.den) if mask is None else reciprocal(rows.den).mul_(mask)
    attention = rows.scores.mul_(inverse)
    by_values = torch.bmm(attention.transpose(1, 2), grad)
    by_scores = torch.bmm(grad, v.transpose(1, 2))
    by_scores.sub_(attention.mul_(by_scores).sum(2, keepdim=True))
    _times_senders(by_scores.mul_(inverse.mul_(rows.q.scale)), rows.k.scale, terms, mask)
    turned = rows.inner.mul_(by_scores)
    roles = [(rows.q, rows.k, by_scores, turned), (rows.k, rows.q, by_scores.transpose(1, 2), turned.transpose(1, 2))]
    if len(into) == 1:
        roles = [(rows.q, rows.q, by_scores + roles[1][2], turned + roles[1][3])]
    for place, (x, y, p, p_turned) in enumerate(roles):
        gradient, inner = torch.bmm(p, y.entries), p_turned.sum(2, keepdim=True) if terms.unit else None
        _store_tangential(gradient if len(into) == 1 else into[place], gradient, inner, x)
    into[-1].copy_(by_values.add_(gradient) if len(into) == 1 else by_values)


def _scores(q: Tensor, k: Tensor, terms: Terms, mask: Tensor | None) -> _Scores:
    queries = vectors(q, terms.unit)
    keys = queries if k is q else vectors(k, terms.unit)
    inner = torch.bmm(queries.entries, keys.entries.transpose(1, 2))
    scores = _times_senders(inner * queries.scale, keys.scale, terms, mask)
    scores.add_(terms.constant if mask is None else terms.constant * mask.transpose(1, 2))
    if terms.own:
        scores.diagonal(dim1=1, dim2=2).add_(terms.own * (q.size(1) if mask is None else mask.sum(1)))
    return _Scores(queries, keys, inner, scores, scores.sum(2, keepdim=True))


def _times_senders(x: Tensor, scale: Tensor, terms: Terms, mask: Tensor | None) -> Tensor:
    """Multiply columns in place by β, zero for padding."""
    of_senders = scale if mask is None else scale * mask
    return x if mask is None and not terms.unit else x.mul_(of_senders.transpose(1, 2))


def _store_product(out: Tensor, x: Tensor, y: Tensor) -> None:
    if out.dtype == x.dtype:
        torch.bmm(x, y, out=out)
    else:
        out.copy_(torch.bmm(x, y))


class _Blockwise:
    """Graphs of nearly one size [b, n, F], a block of their rows at a time; ``mask`` [b, n, 1] is one for nodes."""

    def __init__(self, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None = None) -> None:
        self.terms, self.mask = terms, mask
        self.nodes: Tensor | float = k.size(1) if mask is None else mask.sum(1, keepdim=True)
        self.wide = torch.promote_types(v.dtype, torch.float32)
        # A block has an eighth of all nodes, to be small compared to the result, within the limits above.
        width = max(1, k.size(0) * max(k.size(2), v.size(2)))
        height = max(1, min(BLOCK, max(SMALL, k.size(1) * width // 8)) // width)
        self.blocks: list[Block] = [None]
        self.buffer = None
        if k.size(1) > height:
            self.blocks = [slice(first, first + height) for first in range(0, k.size(1), height)]
            self.buffer = Buffers(v, self.wide)
        # By the identity of tensors: the norms of one that is both q and k are computed once.
        self._known: dict[tuple[int, int], Vectors] = {}

    def pool(self, k: Tensor, v: Tensor) -> _Sums:
        sums = []
        for rows in self.blocks:
            unit, values = self._unit(k, rows), self._load(v, rows)
            right = values.sum(1, keepdim=True) if self.mask is None else _contract(_some(self.mask, rows), values)
            sums.append(_Sums(_contract(unit, values), unit.sum(1).unsqueeze(2), right))
        return _added(sums)

    def read(self, out: Tensor, den: Tensor, q: Tensor, v: Tensor, sums: _Sums, nodes: Tensor | float) -> None:
        """Write the result and the denominators, from the sums of ``nodes`` senders."""
        own = self.terms.own * nodes
        constant = self.terms.constant
        least, bias = constant * nodes + own, sums.right if constant == 1 else constant * sums.right
        for rows in self.blocks:
            unit = self._unit(q, rows)
            row = torch.bmm(unit, sums.left, out=den if rows is None else den[:, rows])
            inverse = reciprocal(row.add_(least))
            total = self._product(unit, sums.outer, out, rows, bias)
            if self.terms.own:
                total.add_(self._load(v, rows) * own)
            torch.mul(total, inverse, out=_some(out, rows))

    def read_backward(
        self, dq: Tensor, grad: Tensor, q: Tensor, v: Tensor, out: Tensor, den: Tensor, sums: _Sums,
        nodes: Tensor | float,
    ) -> _Sums:  # fmt: skip
        """Write ∂q, from the sums of ``nodes`` senders; return G, γ and b."""
        constant, own = self.terms.constant, self.terms.own * nodes
        by_sums, turned, left = [], sums.outer.transpose(1, 2), sums.left.transpose(1, 2)
        for rows in self.blocks:
            queries, gradient = self._vectors(q, rows), self._load(grad, rows)
            inverse = self._of_nodes(reciprocal(_some(den, rows)), rows)
            right = _contract(inverse, gradient)
            right = right if constant == 1 else right.mul_(constant)
            inner = self._inner(gradient, self._load(out, rows)).mul_(inverse).neg_()
            cosine = None
            if self.terms.unit:
                cosine = torch.bmm(gradient, sums.right.transpose(1, 2)).mul_(-constant)
                cosine = cosine.sub_(self._inner(gradient, self._load(v, rows)) * own) if self.terms.own else cosine
                cosine = cosine.mul_(inverse).sub_(inner * (constant * nodes + own))
            inverse, inner = inverse * queries.scale, inner * queries.scale
            grads = self._times("grads", gradient, inverse)
            by_sums.append(_Sums(_contract(queries.entries, grads), _contract(queries.entries, inner), right))
            by_queries = self._product(grads, turned, dq, rows).addcmul_(inner, left)
            _store_tangential(_some(dq, rows), by_queries, cosine, queries)
        return _added(by_sums)

    def pool_backward(
        self, dk: Tensor, dv: Tensor, by_sums: _Sums, k: Tensor, v: Tensor, own: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Write ∂k and ∂v from G, γ and b; ``own`` are grad and denominators, for the gradient of own values."""
        turned, left = by_sums.outer.transpose(1, 2), by_sums.left.transpose(1, 2)
        for rows in self.blocks:
            keys = self._vectors(k, rows)
            values = self._times("values", self._load(v, rows), keys.scale)
            by_keys = self._product(values, turned, dk, rows).addcmul_(keys.scale, left)
            cosine = self._inner(by_keys, keys.entries) if self.terms.unit else None
            _store_tangential(_some(dk, rows), by_keys, cosine, keys)
            total = self._product(keys.entries, by_sums.outer, dv, rows)
            torch.addcmul(by_sums.right, total, keys.scale, out=_some(dv, rows))
            if self.terms.own and own is not None:
                _some(dv, rows).add_(self.own_gradient(*own, rows, self.nodes))

    def own_gradient(self, grad: Tensor, den: Tensor, rows: Block, nodes: Tensor | float) -> Tensor:
        return self._load(grad, rows) * reciprocal(_some(den, rows)).mul_(self.terms.own * nodes)

    def _load(self, x: Tensor, rows: Block) -> Tensor:
        block = x if rows is None else x[:, rows]
        return block if block.dtype == self.wide else block.to(self.wide)

    def _vectors(self, x: Tensor, rows: Block) -> Vectors:
        if rows is not None and x.dtype != self.wide:  # a copy of the block
            return vectors(self._load(x, rows), self.terms.unit)
        key = id(x), 0 if rows is None else rows.start
        if key not in self._known:
            self._known[key] = vectors(self._load(x, rows), self.terms.unit)
        return self._known[key]

    def _unit(self, x: Tensor, rows: Block) -> Tensor:
        """Return x̃, zero for padding."""
        unit, scale, _ = self._vectors(x, rows)
        if self.mask is not None:
            scale = scale * _some(self.mask, rows)
        elif not self.terms.unit:
            return unit
        return unit * scale if self.buffer is None else torch.mul(unit, scale, out=self.buffer("unit", *unit.shape))

    def _of_nodes(self, x: Tensor, rows: Block) -> Tensor:
        return x if self.mask is None else x * _some(self.mask, rows)

    def _times(self, name: str, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor if self.buffer is None else torch.mul(x, factor, out=self.buffer(name, *x.shape))

    def _product(self, x: Tensor, y: Tensor, out: Tensor, rows: Block, bias: Tensor | None = None) -> Tensor:
        """Return x y + bias, written to ``out`` if that has its dtype."""
        into = _some(out, rows) if out.dtype == x.dtype else None
        if into is None and self.buffer is not None:
            into = self.buffer("product", x.size(0), x.size(1), y.size(2))
        return torch.bmm(x, y, out=into) if bias is None else torch.baddbmm(bias, x, y, out=into)

    def _inner(self, x: Tensor, y: Tensor) -> Tensor:
        return self._times("inner", x, y).sum(2, keepdim=True)


def _some(x: Tensor, rows: Block) -> Tensor:
    return x if rows is None else x[:, rows]


def _added(sums: list[T]) -> T:
    """Add the tensors of all to those of the first, in place."""
    for more in sums[1:]:
        for mine, its in zip(sums[0], more, strict=True):
            mine.add_(its)
    return sums[0]


def _contract(x: Tensor, y: Tensor) -> Tensor:
    """Return xᵀy; a single one as two halves, since torch divides no product among threads along its sum."""
    if x.size(0) > 1 or x.size(1) % 2 or x.size(1) < 1024 or torch.get_num_threads() == 1:
        return torch.bmm(x.transpose(1, 2), y)
    halves = torch.bmm(x.reshape(2, -1, x.size(2)).transpose(1, 2), y.reshape(2, -1, y.size(2)))
    return halves.sum(0, keepdim=True)


def linear_product(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None) -> Tensor:
    """Return q(kᵀv), or (qkᵀ)v for small graphs: whichever is cheaper, 2nFD or n²(F + D)."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    heads, features, channels = v.size(1), q.size(2), v.size(2)
    rows = BLOCK // max(1, heads * max(features, channels))
    for mask, (result,), (qs, ks, vs) in stacks(ptr, rows, [out], [q, k, v]):
        senders = ks if mask is None else ks * mask  # padding sends nothing
        if qs.size(1) * (features + channels) < 2 * features * channels:
            torch.bmm(torch.bmm(qs, senders.transpose(1, 2)), vs, out=result)
        else:
            torch.bmm(qs, torch.bmm(senders.transpose(1, 2), vs), out=result)
    return out
