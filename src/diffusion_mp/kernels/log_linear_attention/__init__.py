"""Attention through positive features given by their logarithms, with samples of log weights: O(N), safe in float32."""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffusion_mp.kernels.log_linear_attention import blocked, reference
from diffusion_mp.kernels.log_linear_attention.reference import (
    LogLinearRows,
    Pooled,
    Receivers,
    Senders,
)
from diffusion_mp.kernels.operation import Backend, empty_like, operation
from diffusion_mp.kernels.precision import accumulating

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

FAMILY = "log_linear_attention"
CHUNK = 1 << 20  # entries of log features that are gathered at once, 4 MiB in float32


@operation(FAMILY, formula=reference.attention, cpu=blocked.attention)
def _attention(receivers: Receivers, senders: Senders, ptr: Tensor | None) -> LogLinearRows:
    return blocked.empty_results(receivers, senders.col_shift.size(2), senders.v.size(2))


@operation(
    f"{FAMILY}_backward",
    family=FAMILY,
    formula=reference.attention_backward,
    cpu=blocked.attention_backward,
)
def _attention_backward(
    grad: LogLinearRows, receivers: Receivers, senders: Senders, ptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (*blocked.empty_gradients(receivers, senders.col_shift.size(2)), *empty_like(*senders))


@operation("log_linear_pool", family=FAMILY, formula=reference.pool, cpu=blocked.pool)
def log_linear_pool(senders: Senders) -> Pooled:
    """Return the sums that all rows of attention read, for one graph or a part of it.

    Examples:
        >>> pooled = log_linear_pool(Senders(k.log(), torch.zeros(6, 2, 1), torch.rand(6, 2, 4)))
        >>> pooled.sums.shape  # [heads, samples, features, channels + 1]
        torch.Size([2, 1, 3, 5])
    """
    log_k, col_shift, v = senders
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    return Pooled(v.new_empty(*shape, v.size(2) + 1), v.new_empty(*shape, 1, dtype=torch.float64))


@operation(
    "log_linear_pool_backward",
    family=FAMILY,
    formula=reference.pool_backward,
    cpu=blocked.pool_backward,
)
def _pool_backward(
    grad_sums: Tensor, senders: Senders, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(*senders)


@operation("log_linear_read", family=FAMILY, formula=reference.read, cpu=blocked.read)
def log_linear_read(receivers: Receivers, pooled: Pooled) -> LogLinearRows:
    """Return the rows of :func:`log_linear_product`, ``values`` [n, H, D], for some receivers and all senders' sums.

    In at least float32. Without given shifts also the log-normalisers of the rows.

    Examples:
        >>> v, zero = torch.rand(6, 2, 4), torch.zeros(6, 2, 1)
        >>> pooled = log_linear_pool(Senders(k.log(), zero, v))
        >>> rows = log_linear_read(Receivers(q[:2].log(), None), pooled).values
        >>> torch.allclose(rows, log_linear_product(q.log(), k.log(), v, None, zero)[:2], atol=1e-6)
        True
    """
    return blocked.empty_results(receivers, pooled.sums.size(1), pooled.sums.size(3) - 1)


@operation(
    "log_linear_read_backward",
    family=FAMILY,
    formula=reference.read_backward,
    cpu=blocked.read_backward,
)
def _read_backward(
    grad: LogLinearRows, receivers: Receivers, pooled: Pooled
) -> tuple[Tensor, Tensor, Tensor]:
    return (*blocked.empty_gradients(receivers, pooled.sums.size(1)), empty_like(pooled.sums))


_attention.derivatives({"receivers senders": _attention_backward})
log_linear_pool.derivatives({"senders": _pool_backward})
log_linear_read.derivatives({"receivers pooled.sums": _read_backward})


def log_linear_product(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H K"] | None,
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""out_i = Σ_s Σ_j Σ_r exp(log_q_ir + log_k_jr + a_is + b_js) v_j over the nodes j of i's graph.

    Without a it is −logsumexp − log K, and the result the mean over K samples of row-normalised kernel attention
    (Algorithm 1 of the slides, with Gumbel noise b = g/τ). With q and k, a and b exchanged, it is the transpose. All is
    done in log space until the largest exponent of a feature and sample is subtracted. O(N K F D) time and
    O(N (K + F + D)) memory, also in the backward pass.

    Args:
        log_q, log_k, v: logarithms of the positive features of receivers and senders, and values.
        row_shift, col_shift: a and b per node, head and sample; without a, rows of a sample are divided by their sum.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        backend: how it is computed; see `kernels.operation`.

    Examples:
        >>> v, zero = torch.rand(6, 2, 4), torch.zeros(6, 2, 1)
        >>> found = log_linear_product(q.log(), k.log(), v, zero, zero)
        >>> torch.allclose(found, torch.einsum("ihf,jhf,jhd->ihd", q, k, v), atol=1e-5)
        True
    """
    rows = _attention(
        Receivers(log_q, row_shift), Senders(log_k, col_shift, v), ptr, backend=backend
    )
    return rows.values.to(v.dtype)


def log_linear_logsumexp(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H K"]:
    """L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js) over the nodes j of i's graph, for every sample s.

    The log-normaliser of a row of :func:`log_linear_product`, in at least float32, in O(N K F) time.

    Examples:
        >>> found = log_linear_logsumexp(q.log(), k.log(), torch.zeros(6, 2, 1))
        >>> torch.allclose(found, torch.einsum("ihf,jhf->ih", q, k).log().unsqueeze(2), atol=1e-5)
        True
    """
    return _attention(
        Receivers(log_q, None), Senders(log_k, col_shift, log_q[:, :, :0]), ptr, backend=backend
    ).log_sum


def log_linear_entries(
    edge_index: Int[Tensor, "two E"], log_q: Float[Tensor, "N H F"], log_k: Float[Tensor, "N H F"]
) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r) for every edge e = (source, target), in O(E H F) time.

    In plain torch and at least float32; memory is O(E H), since sums are computed again in the backward pass.

    Examples:
        >>> log_linear_entries(edge_index, q.log(), k.log()).shape  # one number per edge and head
        torch.Size([12, 2])
    """
    (log_q, log_k), _ = accumulating(log_q, log_k)
    most = max(1, CHUNK // max(1, log_q[:1].numel()))
    if edge_index.size(1) <= most or torch.compiler.is_compiling():
        return reference.entries(edge_index, log_q, log_k)
    again = partial(checkpoint, reference.entries, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(part, log_q, log_k) for part in edge_index.split(most, 1)])
