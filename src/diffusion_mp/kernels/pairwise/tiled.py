"""The fast path: row tiles against all columns of their graph, small graphs of equal size stacked."""

import torch
from torch import Tensor

from diffusion_mp.kernels.pairwise.scores import log_score
from diffusion_mp.kernels.precision import accumulating
from diffusion_mp.kernels.segments import Rows, gather, row_tiles, scatter

# Entries of one score tile over all heads: 4 MiB in float32, so that a tile stays in cache.
TILE = 1 << 20


def attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> tuple[Tensor, Tensor]:
    """Σ_j p_ij v_j, [N, H, D], in the dtype of v, and log Σ_j f(s_ij), [N, H], in at least float32."""
    (q, k, v), dtype = accumulating(q, k, v)
    lse = logsumexp(q, k, ptr, score)
    return product(q, k, v, -lse, torch.zeros_like(lse), ptr, score).to(dtype), lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ptr: Tensor | None, score: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its dtype."""
    dtype = q.dtype
    (grad, q, k, v, out), _ = accumulating(grad, q, k, v, out)
    zero, one = torch.zeros_like(lse), torch.ones_like(lse).unsqueeze(2)
    dq, dk, dv, _, _ = product_backward(grad, q, k, v, -lse, zero, ptr, score)
    inner = (grad * out).sum(2, keepdim=True)
    more_q, more_k, _, _, _ = product_backward(-inner, q, k, one, -lse, zero, ptr, score)
    return (dq + more_q).to(dtype), (dk + more_k).to(dtype), dv.to(dtype)


def logsumexp(q: Tensor, k: Tensor, ptr: Tensor | None, score: str) -> Tensor:
    """log Σ_j f(q_i·k_j), [N, H]."""
    out = q.new_empty(q.shape[:2])
    for rows, cols in row_tiles(ptr, q.size(0), q.size(1), q.device, TILE):
        s = gather(q, rows) @ gather(k, cols).transpose(2, 3)
        scatter(out.unsqueeze(2), rows, log_score(s, score).logsumexp(3, keepdim=True))
    return out


def _weights(
    q: Tensor, k: Tensor, row_shift: Tensor, col_shift: Tensor, rows: Rows, cols: Rows, score: str
) -> tuple[Tensor, Tensor]:
    """One tile of s_ij = q_i·k_j and w_ij = exp(log f(s_ij) + a_i + b_j)."""
    s = gather(q, rows) @ gather(k, cols).transpose(2, 3)
    shift = gather(row_shift.unsqueeze(2), rows) + gather(col_shift.unsqueeze(2), cols).transpose(2, 3)
    return s, log_score(s, score).add(shift).exp_()


def product(
    q: Tensor, k: Tensor, v: Tensor, row_shift: Tensor, col_shift: Tensor, ptr: Tensor | None, score: str
) -> Tensor:
    """Σ_j w_ij v_j, [N, H, D]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for rows, cols in row_tiles(ptr, q.size(0), q.size(1), q.device, TILE):
        _, w = _weights(q, k, row_shift, col_shift, rows, cols, score)
        scatter(out, rows, w @ gather(v, cols))
    return out


def product_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_shift: Tensor,
    col_shift: Tensor,
    ptr: Tensor | None,
    score: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a and b; every tile is computed anew, nothing of size N² is kept.

    With g_ij = w_ij (grad_i·v_j): da_i = Σ_j g_ij, db_j = Σ_i g_ij, dv_j = Σ_i w_ij grad_i and, through the score,
    dq_i = Σ_j g_ij φ_ij k_j, dk_j = Σ_i g_ij φ_ij q_i with φ = (log f)′ (1 for exp, σ(−s) for the sigmoid).
    """
    dq, dk, dv, da, db = (
        torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, row_shift, col_shift)
    )
    for rows, cols in row_tiles(ptr, q.size(0), q.size(1), q.device, TILE):
        s, w = _weights(q, k, row_shift, col_shift, rows, cols, score)
        grad_rows = gather(grad, rows)
        scatter(dv, cols, w.transpose(2, 3) @ grad_rows, add=True)
        g = w.mul_(grad_rows @ gather(v, cols).transpose(2, 3))
        scatter(da.unsqueeze(2), rows, g.sum(3, keepdim=True), add=True)
        scatter(db.unsqueeze(2), cols, g.sum(2).unsqueeze(3), add=True)
        if score == "sigmoid":
            g = g.mul_(torch.sigmoid(s.neg_()))
        scatter(dq, rows, g @ gather(k, cols), add=True)
        scatter(dk, cols, g.transpose(2, 3) @ gather(q, rows), add=True)
    return dq, dk, dv, da, db
