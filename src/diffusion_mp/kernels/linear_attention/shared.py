"""DIFFormer-s of x = q = k = v on the CPU, one head of one graph: every norm, sum and gradient is computed once.

In the notation of blocked.py, with r_i = 1/‖x_i‖ and u_i = r_i x_i, the gradient of all roles together is

    ∂x_i = r_i (K g_i + h_i κ + γ) + (G + Gᵀ) u_i + b − s_i u_i,

where s_i is the part along u_i of what passes through the norm: r_i (γ·u_i − c σ·g_i − c n h_i), as there, and
u_i·G u_i, half of u_i·(G + Gᵀ) u_i. A small graph takes as long as it has calls of torch, so these are few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusion_mp.kernels.linear_attention import blocked
from diffusion_mp.kernels.linear_attention.blocked import LEAST, MOST
from diffusion_mp.kernels.linear_attention.reference import LinearRows, Terms
from diffusion_mp.kernels.precision import ALREADY

# Entries of the largest state that is computed at once, and of a block of a larger one.
SMALL, BLOCK = 1 << 18, 1 << 17


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> LinearRows:
    """Return the rows of attention; of anything else than such an x those of blocked.py."""
    norms = _norms(v, terms) if q is k and k is v else None
    if norms is None:
        return blocked.forward(q, k, v, terms)
    x, count, sums = v.squeeze(1), terms.constant * v.size(0), []
    parts, single = _blocks(x), len(norms) == 1
    for part, norm in zip(parts, norms, strict=True):
        unit = part / norm
        sums.append((_summed(unit, part), unit.sum(0), part.sum(0)))
    outer, left, right = _added(sums)
    bias = right if terms.constant == 1 else terms.constant * right
    if single:
        den = torch.mv(unit, left).add_(count)
        values = torch.addmm(bias, unit, outer).div_(den.unsqueeze(1))
    else:
        values, den = x.new_empty(x.shape), x.new_empty(len(x))
        for part, norm, out, row in zip(parts, norms, _blocks(values), den.split(len(norms[0])), strict=True):
            unit = part / norm
            torch.mv(unit, left, out=row).add_(count)
            torch.addmm(bias, unit, outer, out=out).div_(row.unsqueeze(1))
    of_heads = outer.unsqueeze(0), left.view(1, -1, 1), right.view(1, 1, -1)
    return LinearRows(values.unsqueeze(1), den.unsqueeze(1), *of_heads)


def backward(grad: Tensor, x: Tensor, out: LinearRows, terms: Terms) -> Tensor:
    """Return the gradient of x."""
    norms = _norms(x, terms)
    if norms is None:
        return blocked.self_backward(grad, x, out, terms)
    gradient, state = torch.empty_like(x, memory_format=torch.contiguous_format), x.squeeze(1)
    parts, grads, single, sums, kept = _blocks(state), _blocks(grad.squeeze(1)), len(norms) == 1, [], []
    rows = zip(parts, grads, norms, _blocks(out.values.squeeze(1)), out.den.split(len(norms[0])), strict=True)
    for part, by_row, norm, values, den in rows:
        scaled = by_row / (den * norm)  # r g
        inner = (scaled * values).sum(1)  # −r h
        sums.append((_summed(part, scaled), torch.mv(part.t(), inner), torch.mv(scaled.t(), norm.squeeze(1))))
        kept.append((inner, scaled if single else None))
    by_outer, left, right = _added(sums)
    left, right = left.neg_(), right.mul_(terms.constant)
    outer, both = out.outer[0].t(), by_outer + by_outer.t()
    levels, bias = torch.stack([-out.left.flatten(), left]), terms.constant * out.right.flatten()
    rows = zip(parts, grads, norms, kept, out.den.split(len(norms[0])), _blocks(gradient.squeeze(1)), strict=True)
    for part, by_row, norm, (inner, scaled), den, into in rows:
        unit, inverse = part / norm, norm.reciprocal()
        scaled = by_row / (den * norm) if scaled is None else scaled
        torch.addmm(right, torch.cat([inner.unsqueeze(1), inverse], 1), levels, out=into)
        into.addmm_(scaled, outer).addmm_(unit, both)
        along = (unit * into).sum(1).sub_(torch.mv(unit, right)).add_(inner, alpha=terms.constant * len(state))
        along.addcmul_(inverse.squeeze(1), torch.mv(unit, left)).sub_(torch.mv(scaled, bias))
        into.addcmul_(along.unsqueeze(1), unit, value=-0.5)
    return gradient


def _norms(x: Tensor, terms: Terms) -> list[Tensor] | None:
    """Return the norms of every block; ``None`` for other attention, or if squares may over- or underflow."""
    # With c of at least 1 no denominator is near zero.
    plain = terms.ptr is None and terms.unit and not terms.own and terms.constant >= 1 and x.dtype in ALREADY
    if not plain or x.size(1) != 1 or not x.numel():
        return None
    norms = [torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in _blocks(x.squeeze(1))]
    for norm in norms:
        shortest, longest = norm.aminmax()
        if not (float(shortest) > LEAST and float(longest) < MOST):
            return None
    return norms


def _blocks(x: Tensor) -> Sequence[Tensor]:
    return [x] if x.numel() <= SMALL else x.split(max(1, BLOCK // x.size(1)))


def _summed(x: Tensor, y: Tensor) -> Tensor:
    """Return xᵀy."""
    if len(x) < 1024 or torch.get_num_threads() == 1:
        return torch.mm(x.t(), y)
    return blocked.contract(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


def _added(sums: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return sums[0] if len(sums) == 1 else tuple(map(sum, zip(*sums, strict=True)))
