"""Declarations: attention through log features, its two halves, and single entries. All are once differentiable."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_mp.kernels.dispatch import Backend
from diffusion_mp.kernels.log_linear_attention import blocked, reference
from diffusion_mp.kernels.log_linear_attention import entries as chunked
from diffusion_mp.kernels.operation import Wide, empty_like, once_differentiable, operation

FAMILY = "log_linear_attention"


class Rows(NamedTuple):
    """The result [N, H, D], and the log-normalisers of its rows [N, H, K]; [0, H, K] where shifts of rows are given."""

    out: Tensor
    log_sum: Tensor


class Pooled(NamedTuple):
    """Sums over senders [H, K, F, D + 1], to be multiplied by exp(shift) [H, K, F, 1]."""

    sums: Tensor
    shift: Tensor


def _optional(row_shift: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A gradient for row shifts that may not be given: [0, …] then."""
    return like.new_empty(0 if row_shift is None else shape[0], *shape[1:])


# ---------------------------------------------------------------- attention


@operation(FAMILY, family=FAMILY, reference=reference.attention, cpu=blocked.forward, dtype="v")
def _attention(log_q: Wide, log_k: Wide, v: Wide, row_shift: Wide | None, col_shift: Wide, ptr: Tensor | None) -> Rows:
    return Rows(empty_like(v), col_shift.new_empty(len(v) if row_shift is None else 0, *col_shift.shape[1:]))


@operation(f"{FAMILY}_backward", family=FAMILY, cpu=blocked.backward)
def _attention_backward(
    grad: Tensor,
    grad_log_sum: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor | None,
    col_shift: Tensor,
    ptr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, db = empty_like(log_q, log_k, v, col_shift)
    return dq, dk, dv, _optional(row_shift, db.shape, db), db


def _gradients(
    grad_out: Tensor,
    grad_log_sum: Tensor,
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    row_shift: Tensor | None,
    col_shift: Tensor,
    ptr: Tensor | None,
    backend: str,
) -> tuple[Tensor | None, ...]:
    args = (log_q, log_k, v, row_shift, col_shift, ptr)
    dq, dk, dv, da, db = _attention_backward(grad_out, grad_log_sum, *args, backend=backend)
    return dq, dk, dv, None if row_shift is None else da, db


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
    (Algorithm 1 of the slides, with Gumbel noise b = g/τ); with q and k exchanged, and a and b, its transpose. Nothing
    leaves log space before the largest exponent of every feature and sample is subtracted.

    Args:
        log_q, log_k: logarithms of the positive features of receivers and senders.
        v: values.
        row_shift: a, one number per node, head and sample; ``None`` divides each row of each sample by its sum.
        col_shift: b, likewise, of the senders.
        ptr: row boundaries of a ragged batch on the CPU; ``None`` is one graph.
        backend: how it is computed; see `kernels.dispatch`.

    Returns:
        The result in the dtype of ``v``, in O(N K F D) time and O(N (K + F + D)) memory, also in the backward pass: the
        [N, H, K F] factors exist for a block of nodes at a time. Once differentiable.
    """
    return _attention(log_q, log_k, v, row_shift, col_shift, ptr, backend=backend).out


def log_linear_logsumexp(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H K"]:
    """L_is = log Σ_j Σ_r exp(log_q_ir + log_k_jr + b_js) over the nodes j of i's graph, for every sample s.

    The log-normaliser of a row, always in at least float32: attention without any channel of values. O(N K F) time,
    O(N (K + F)) memory, also in the backward pass; once differentiable.
    """
    return _attention(log_q, log_k, log_q[:, :, :0], None, col_shift, ptr, backend=backend).log_sum


# ---------------------------------------------------------------- its halves, for one graph


@operation("log_linear_pool", family=FAMILY, reference=reference.pool, cpu=blocked.pool)
def _pool(log_k: Wide, col_shift: Wide, v: Wide) -> Pooled:
    shape = (log_k.size(1), col_shift.size(2), log_k.size(2))
    return Pooled(v.new_empty(*shape, v.size(2) + 1), v.new_empty(*shape, 1, dtype=torch.float64))


@operation("log_linear_pool_backward", family=FAMILY, cpu=blocked.pool_backward)
def _pool_backward(grad: Tensor, log_k: Tensor, col_shift: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dk, db, dv = empty_like(log_k, col_shift, v)
    return dk, db, dv


@operation("log_linear_read", family=FAMILY, reference=reference.read, cpu=blocked.read)
def _read(log_q: Wide, row_shift: Wide | None, sums: Wide, shift: Tensor) -> Rows:
    nodes, heads, samples = len(log_q), *sums.shape[:2]
    log_sum = log_q.new_empty(nodes if row_shift is None else 0, heads, samples)
    return Rows(log_q.new_empty(nodes, heads, sums.size(3) - 1), log_sum)


@operation("log_linear_read_backward", family=FAMILY, cpu=blocked.read_backward)
def _read_backward(
    grad: Tensor, grad_log_sum: Tensor, log_q: Tensor, row_shift: Tensor | None, sums: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dsums = empty_like(log_q, sums)
    return dq, _optional(row_shift, (len(log_q), *sums.shape[:2]), sums), dsums


def _row_gradients(
    grad_out: Tensor,
    grad_log_sum: Tensor,
    log_q: Tensor,
    row_shift: Tensor | None,
    sums: Tensor,
    shift: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor]:
    dq, da, dsums = _read_backward(grad_out, grad_log_sum, log_q, row_shift, sums, shift, backend=backend)
    return dq, None if row_shift is None else da, dsums


def log_linear_pool(
    log_k: Float[Tensor, "N H F"], col_shift: Float[Tensor, "N H K"], v: Float[Tensor, "N H D"]
) -> Pooled:
    """U_sr = Σ_j exp(log_k_jr + b_js − M_sr) [v_j, 1] over the nodes of one graph, and M: what all rows read.

    Sums over other senders have another M; times exp(M − M′) they are sums with the shift M′, and so they merge. M is in
    double precision, has no gradient, and is −∞ where there is no sender.
    """
    return _pool(log_k, col_shift, v)


def log_linear_read(
    log_q: Float[Tensor, "N H F"],
    row_shift: Float[Tensor, "N H K"] | None,
    sums: Float[Tensor, "H K F D_and_one"],
    shift: Float[Tensor, "H K F one"],
) -> Rows:
    """The rows of ``log_linear_product`` for some receivers, from the sums over all senders, in at least float32.

    Without given shifts their log-normalisers too.
    """
    return _read(log_q, row_shift, sums, shift)


# ---------------------------------------------------------------- single entries


@operation("log_linear_entries", family=FAMILY, reference=reference.entries, cpu=chunked.forward)
def _entries(edge_index: Tensor, log_q: Wide, log_k: Wide) -> Tensor:
    return log_q.new_empty(edge_index.size(1), log_q.size(1))


@operation("log_linear_entries_backward", family=FAMILY, cpu=chunked.backward)
def _entries_backward(
    grad: Tensor, out: Tensor, edge_index: Tensor, log_q: Tensor, log_k: Tensor
) -> tuple[Tensor, Tensor]:
    dq, dk = empty_like(log_q, log_k)
    return dq, dk


def log_linear_entries(
    edge_index: Int[Tensor, "two E"],
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "E H"]:
    """log Σ_r exp(log_q_target(e),r + log_k_source(e),r) for every edge e = (source, target), in O(E H F) time.

    In at least float32; once differentiable.
    """
    return _entries(edge_index, log_q, log_k, backend=backend)


_attention.derivatives({"log_q log_k v row_shift col_shift": _gradients})
_pool.derivatives(
    {
        "log_k col_shift v": lambda grad_sums, log_k, col_shift, v, backend: _pool_backward(
            grad_sums, log_k, col_shift, v, backend=backend
        )
    }
)
_read.derivatives({"log_q row_shift sums": _row_gradients})
_entries.derivatives(
    {
        "log_q log_k": lambda grad, out, edge_index, log_q, log_k, backend: _entries_backward(
            grad, out, edge_index, log_q, log_k, backend=backend
        )
    }
)
for _backward in (_attention_backward, _pool_backward, _read_backward, _entries_backward):
    _backward.derivatives(
        once_differentiable("attention through log features", instead="use a low-rank diffusivity (SimpleDiffusivity)")
    )
