"""Linear attention of small graphs by all pairs: n²(F + D) steps instead of 2 n F D, and fewer calls.

With C = QKᵀ, α_i = 1/‖q_i‖ and β_j = 1/‖k_j‖ (or 1), and A = diag(1/d) S, d the row sums of S,

    S = own n I + c 11ᵀ + diag(α) C diag(β),   out = A v,
    P = diag(α/d) (T − ((A∘T) 1) 1ᵀ) diag(β),   T = grad vᵀ,
    ∂v = Aᵀ grad,   ∂q = P k − diag(α² (P∘C) 1) q,   ∂k = Pᵀ q − diag(β² (P∘C)ᵀ 1) k,

the second terms only with norms. Padding sends nothing, c = β = 0, and receives no gradient, 1/d = 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diffusion_mp.kernels.linear_attention.reference import Terms

# Norms between which the squares of a vector, and products with those of others, stay within the range of float32.
LEAST, MOST = 1e-10, 1e10


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


def store_tangential(out: Tensor, gradient: Tensor, along: Tensor | None, x: Vectors) -> None:
    """Write ∂x from ∂x̃ / ‖x‖ and ``along``, (gradient·x) / ‖x‖², which is ``None`` for unchanged vectors."""
    if along is None:
        if out is not gradient:
            out.copy_(gradient)
        return
    if x.size is not None:
        gradient, along = gradient / x.size, along / x.size
    torch.addcmul(gradient, along, x.entries, value=-1, out=out)


def reciprocal(x: Tensor) -> Tensor:
    """Return 1/x, and 0 where that overflows."""
    return x.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)


class _Scores(NamedTuple):
    """Scores of receivers and senders before rows are normalised: C and S [b, n, n], and d [b, n, 1]."""

    q: Vectors
    k: Vectors
    inner: Tensor
    scores: Tensor
    den: Tensor


def forward(out: Tensor, den: Tensor, q: Tensor, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None) -> None:
    """Write the result and the denominators; ``mask`` [b, n, 1] is one for nodes and zero for padding."""
    q, k, v = (x.to(den.dtype) for x in (q, k, v))
    rows = _scores(q, k, terms, mask)
    den.copy_(rows.den)
    _store_product(out, rows.scores.mul_(reciprocal(rows.den)), v)


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None
) -> None:
    grad, q, k, v = (x.to(torch.promote_types(v.dtype, torch.float32)) for x in (grad, q, k, v))
    rows = _scores(q, k, terms, mask)
    inverse = reciprocal(rows.den) if mask is None else reciprocal(rows.den).mul_(mask)
    attention = rows.scores.mul_(inverse)
    _store_product(dv, attention.transpose(1, 2), grad)
    by_scores = torch.bmm(grad, v.transpose(1, 2))
    by_scores.sub_(attention.mul_(by_scores).sum(2, keepdim=True))
    _times_senders(by_scores.mul_(inverse.mul_(rows.q.scale)), rows.k.scale, terms, mask)
    turned = rows.inner.mul_(by_scores)
    of_rows, of_cols = (by_scores, turned), (by_scores.transpose(1, 2), turned.transpose(1, 2))
    for out, x, y, (p, p_turned) in ((dq, rows.q, rows.k, of_rows), (dk, rows.k, rows.q, of_cols)):
        along = None if not terms.unit else p_turned.sum(2, keepdim=True).mul_(x.scale).mul_(x.scale)
        store_tangential(out, torch.bmm(p, y.entries), along, x)


def _scores(q: Tensor, k: Tensor, terms: Terms, mask: Tensor | None) -> _Scores:
    queries, keys = vectors(q, terms.unit), vectors(k, terms.unit)
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
