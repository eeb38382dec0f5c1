"""The operations on log features."""

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.graph import Pattern
from diffusion_mp.kernels.log_linear_attention import reference
from diffusion_mp.kernels.precision import accumulating


def log_linear_logsumexp(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
) -> Float[Tensor, "N H K"]:
    """L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js) over the nodes j of i's graph; in at least float32."""
    (log_q, log_k, col_shift), _ = accumulating(log_q, log_k, col_shift)
    return reference.log_linear_logsumexp(log_q, log_k, col_shift, ptr)


def log_linear_product(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H K"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
) -> Float[Tensor, "N H D"]:
    """out_i = Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j over the nodes j of i's graph."""
    (log_q, log_k, row_shift, col_shift, v), dtype = accumulating(log_q, log_k, row_shift, col_shift, v)
    return reference.log_linear_product(log_q, log_k, v, row_shift, col_shift, ptr).to(dtype)


def log_linear_entries(
    pattern: Pattern, log_q: Float[Tensor, "N H F"], log_k: Float[Tensor, "N H F"]
) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_row(e),r + log_k_col(e),r), the logarithm of the entry of every pair e."""
    (log_q, log_k), _ = accumulating(log_q, log_k)
    return reference.log_linear_entries(pattern.row, pattern.col, log_q, log_k)
