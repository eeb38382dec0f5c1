"""Linear attention cut in two: sums over the senders, and the rows that read them; differentiable once.

Attention with normalised rows goes by blocks on the CPU, as ``linear_attention`` does; else all of it is plain torch.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from diffusion_mp.kernels.dispatch import requested
from diffusion_mp.kernels.linear_attention import blocked
from diffusion_mp.kernels.linear_attention.reference import Terms
from diffusion_mp.kernels.precision import accumulating, without_autocast
from diffusion_mp.kernels.unit import quotient, unit_vectors


def pool(k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"]) -> Float[Tensor, "H F D"]:
    """Σ_j k_j v_jᵀ, in at least float32."""
    (k, v), _ = accumulating(k, v)
    with without_autocast(v):
        return k.permute(1, 2, 0) @ v.transpose(0, 1)


def read(q: Float[Tensor, "N H F"], sums: Float[Tensor, "H F D"]) -> Float[Tensor, "N H D"]:
    """q_i times the sums, in at least float32."""
    (q, sums), _ = accumulating(q, sums)
    with without_autocast(q):
        return (q.transpose(0, 1) @ sums).transpose(0, 1)


def pool_attention(
    k: Float[Tensor, "N H F"], v: Float[Tensor, "N H D"], unit: bool
) -> Float[Tensor, "H F_and_one D_and_one"]:
    """Σ_j [k_j, 1] [v_j, 1]ᵀ: KᵀV, Σk, Σv and the count, (F + 1)(D + 1) numbers for a head."""
    (k, v), _ = accumulating(k, v)
    if _by_blocks(v):
        sums: Tensor = _Pool.apply(k, v, unit)
        return sums
    k = unit_vectors(k) if unit else k
    sums = torch.cat([pool(k, v), v.sum(0).unsqueeze(1)], dim=1)
    ones = torch.cat([k.sum(0), k.new_full((k.size(1), 1), k.size(0))], dim=1)
    return torch.cat([sums, ones.unsqueeze(2)], dim=2)


def read_attention(
    q: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    sums: Float[Tensor, "H F_and_one D_and_one"],
    constant: float,
    own: float,
    unit: bool,
) -> Float[Tensor, "N H D"]:
    """(own n v_i + Σ_j (c + q_i·k_j) v_j) / (own n + Σ_j (c + q_i·k_j)) with the sums over all senders j."""
    dtype = v.dtype
    (q, v, sums), _ = accumulating(q, v, sums)
    if _by_blocks(v):
        out: Tensor = _Read.apply(q, v, sums, constant, own, unit)
        return out.to(dtype)
    q = unit_vectors(q) if unit else q
    total = read(q, sums[:, :-1]) + constant * sums[:, -1]
    own_weight = own * sums[:, -1, -1:]
    return quotient(total[..., :-1] + own_weight * v, total[..., -1:] + own_weight).to(dtype)


def _by_blocks(like: Tensor) -> bool:
    on_cpu = like.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_cpu and requested("linear_attention", "auto") != "reference"


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, unit: bool) -> Tensor:
        ctx.unit = unit
        ctx.save_for_backward(k, v)
        with without_autocast(v):
            return blocked.pool(k, v, Terms(unit=unit))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, v = ctx.saved_tensors
        with without_autocast(v):
            return (*blocked.pool_backward(grad, k, v, Terms(unit=ctx.unit)), None)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, v: Tensor, sums: Tensor, constant: float, own: float, unit: bool) -> Tensor:
        ctx.options = constant, own, unit
        with without_autocast(v):
            out, den = blocked.read(q, v, sums, Terms(None, constant, own, unit))
        ctx.save_for_backward(q, v, out, den, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, v, *_ = ctx.saved_tensors
        with without_autocast(v):
            q, v, out, den, sums = ctx.saved_tensors
            own = ctx.options[1]
            dq, dsums = blocked.read_backward(grad, *ctx.saved_tensors, Terms(None, *ctx.options))
            dv = own * sums[0, -1, -1] * quotient(grad, den.unsqueeze(2)) if own else None
            return dq, dv, dsums, None, None, None
