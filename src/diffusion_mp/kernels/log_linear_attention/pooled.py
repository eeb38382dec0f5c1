"""Attention through log features cut in two: sums over the senders with a shift, and the rows that read them.

With M_sr the largest log_k_jr + b_js of the senders at hand, the sums are
U_sr = Σ_j exp(log_k_jr + b_js − M_sr) [v_j, 1]. Sums over other senders have another M; times exp(M − M′) they are sums
with the shift M′. The factors [n, H, K, F] exist for a block of nodes at a time and are computed again in the backward
pass, by ``torch.utils.checkpoint``.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from diffusion_mp.kernels.precision import accumulating, without_autocast

# Entries of one block of factors over all heads: 8 MiB in float32.
BLOCK = 1 << 21


def pool(
    log_k: Float[Tensor, "N H F"], col_shift: Float[Tensor, "N H K"], v: Float[Tensor, "N H D"]
) -> tuple[Float[Tensor, "H K F D_and_one"], Float[Tensor, "H K F one"]]:
    """U and M; M is a constant in double precision, without a gradient, and is −∞ where there is no sender."""
    (log_k, col_shift, v), _ = accumulating(log_k, col_shift, v)
    heads, samples, features = log_k.size(1), col_shift.size(2), log_k.size(2)
    with without_autocast(v):
        shift = log_k.new_full((heads, samples, features), -torch.inf)
        origin = shift.double()
        if log_k.size(0):  # logarithms may be large and close together: differences first, they are nearly exact
            by_feature, by_sample = log_k.detach().amax(0), col_shift.detach().amax(0)
            log_k, col_shift = log_k - by_feature, col_shift - by_sample
            origin = by_sample.double().unsqueeze(2) + by_feature.double().unsqueeze(1)
        blocks = [block for block in zip(*_blocks(log_k, col_shift, v), strict=True) if block[0].size(0)]
        with torch.no_grad():
            for keys, weights, _ in blocks:
                shift = torch.maximum(shift, _exponents(keys, weights).amax(0))
        sums = log_k.new_zeros(heads, samples, features, v.size(2) + 1)
        for block in blocks:
            sums = sums + _recomputed(partial(_pooled, shift), *block)
    return sums, (origin + shift).unsqueeze(3)


def read(
    log_q: Float[Tensor, "N H F"],
    row_shift: Float[Tensor, "N H K"] | None,
    sums: Float[Tensor, "H K F D_and_one"],
    shift: Float[Tensor, "H K F one"],
) -> Float[Tensor, "N H D"]:
    """Σ_s e^{a_is} Σ_r φ_ir Σ_j ψ_jr e^{b_js} v_j; with a = ``None`` the mean over samples of normalised rows."""
    parts = [log_q] if row_shift is None else [log_q, row_shift]
    wide, _ = accumulating(*parts, sums)
    with without_autocast(sums):
        rows = zip(*_blocks(*wide[:-1], samples=sums.size(1)), strict=True)
        return torch.cat([_recomputed(partial(_read, shift), *block, wide[-1]) for block in rows])


def read_logsumexp(
    log_q: Float[Tensor, "N H F"], sums: Float[Tensor, "H K F D_and_one"], shift: Float[Tensor, "H K F one"]
) -> Float[Tensor, "N H K"]:
    """log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js), the log-normaliser of a row, for every sample s."""
    (log_q, sums), _ = accumulating(log_q, sums)
    counts, relative, base = sums[..., -1], *_split(shift, log_q.dtype)

    def block(queries: Tensor) -> Tensor:
        return base.squeeze(2) + (queries.unsqueeze(2) + (relative + counts.log())).logsumexp(3)

    return torch.cat([_recomputed(block, *parts) for parts in zip(*_blocks(log_q, samples=sums.size(1)), strict=True)])


def _pooled(shift: Tensor, log_k: Tensor, col_shift: Tensor, v: Tensor) -> Tensor:
    """Σ_j B_jsr [v_j, 1] over a block of nodes."""
    factors = (_exponents(log_k, col_shift) - shift).exp()
    values = pad(v, (0, 1), value=1.0).transpose(0, 1)
    return (factors.permute(1, 2, 3, 0).flatten(1, 2) @ values).unflatten(1, shift.shape[1:])


def _read(shift: Tensor, log_q: Tensor, *others: Tensor) -> Tensor:
    """The rows of a block: A_isr U_sr, with the largest factor of a row and sample at 1."""
    *row_shift, sums = others
    relative, base = _split(shift, log_q.dtype)
    exponents = log_q.unsqueeze(2) + relative
    top = exponents.detach().amax(3, keepdim=True)
    factors = (exponents - top).exp()
    total = torch.einsum("nhsf,hsfd->nhsd", factors, sums)
    if not row_shift:
        return (total[..., :-1] / total[..., -1:]).mean(2)
    return (total[..., :-1] * (top + base + row_shift[0].unsqueeze(3)).exp()).sum(2)


def _split(shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """M_sr − max_r M_sr [H, K, F] and max_r M_sr [H, K, 1]: the first is small, and cancels nothing."""
    base = shift.squeeze(3).amax(2, keepdim=True)
    return (shift.squeeze(3) - base).to(dtype), base.to(dtype)


def _exponents(log_features: Tensor, shift: Tensor) -> Tensor:
    """log_features_ir + shift_is, [n, H, K, F]."""
    return log_features.unsqueeze(2) + shift.unsqueeze(3)


def _blocks(log_features: Tensor, *others: Tensor, samples: int | None = None) -> list[tuple[Tensor, ...]]:
    """All tensors in blocks of nodes; one block, and an empty one, where there is no node."""
    width = log_features[:1].numel() * (others[0].size(2) if samples is None else samples)
    height = max(1, BLOCK // max(1, width))
    return [t.split(height) for t in (log_features, *others)]


def _recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The same with nothing kept for the backward pass but the arguments."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    out: Tensor = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return out
