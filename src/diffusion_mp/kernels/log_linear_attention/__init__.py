"""Attention through positive features given by their logarithms, with samples of log weights: O(N), safe in float32."""

from diffusion_mp.kernels.log_linear_attention.op import (
    log_linear_entries,
    log_linear_logsumexp,
    log_linear_pool,
    log_linear_product,
    log_linear_read,
)
from diffusion_mp.kernels.log_linear_attention.reference import Pooled, Receivers, Senders

__all__ = [
    "Pooled",
    "Receivers",
    "Senders",
    "log_linear_entries",
    "log_linear_logsumexp",
    "log_linear_pool",
    "log_linear_product",
    "log_linear_read",
]
