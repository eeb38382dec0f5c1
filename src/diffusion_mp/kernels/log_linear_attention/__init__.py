"""Attention through positive features given by their logarithms, with samples of log weights: O(N), safe in float32.

For every sample this is linear attention. With M_r = max_j (log k_jr + b_j) over the senders of a graph, the features

    K_jr = exp(log k_jr + b_j − M_r),  Q_ir = exp(log q_ir + M_r − max_r (log q_ir + M_r))

have the same entries after row normalisation. None overflows, and no row underflows: with the largest feature r of row
i, Q_ir = 1 and Σ_j K_jr ≥ 1. Samples are heads of linear attention; a large graph takes a few samples at a time.

On the CPU, samples that are not far apart share their exponentials, since M_sr = max_j log k_jr + max_j b_js is then
near the maximum. So K_jsr = w_js k_jr, rows are divided by factors x_is, and with one matrix for all samples

    out_i = Σ_j Σ_sr (x_is q_ir) (w_js k_jr) v_j.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from diffusion_mp.graph.ops import max_rows
from diffusion_mp.kernels.linear_attention import linear_attention, linear_product
from diffusion_mp.kernels.operation import Backend, heads_first
from diffusion_mp.kernels.segments import nodes_first
from diffusion_mp.runtime.precision import (
    accumulating,
    finite_shift,
    reciprocal,
    without_autocast,
)
from diffusion_mp.runtime.torch_private import differentiated_inside, values_only

__all__ = [
    "log_linear_entries",
    "log_linear_logsumexp",
    "log_linear_pool",
    "log_linear_product",
    "log_linear_read",
]

#: Entries of features that are held at once, 4 MiB in float32: calls of torch cost nothing beside the arithmetic of so
#: many, and memory does not grow with the samples of a graph beyond.
CHUNK = 1 << 20
#: Nats by which one shift of all samples may exceed the maximum of a sample: float32 has 87 below one.
SLACK = 40.0


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
    r"""Multiply values by kernel attention whose features are given by their logarithms, averaged over samples.

    For every node i, with the sum over the K samples s, the nodes j of i's graph and the features r:

        out_i = Σ_s Σ_j Σ_r exp(log q_ir + log k_jr + a_is + b_js) v_j

    Without ``row_shift``, a is −logsumexp − log K, and the result is the mean over K samples of row-normalised kernel
    attention (Algorithm 1 of the slides, with Gumbel noise b = g/τ). With q and k exchanged, and a and b exchanged, the
    matrix is transposed.

    A sample is one linear attention. All take O(N K F D) time and O(N (K + F + D)) memory, also in the backward pass.

    Args:
        log_q: logarithms of the positive features of the receivers.
        log_k: logarithms of the positive features of the senders.
        v: values of the senders.
        row_shift: a per node, head and sample. ``None`` divides every row of a sample by its sum.
        col_shift: b per node, head and sample.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        backend: backend of linear attention; see `kernels.operation`.

    Shapes:
        log_q, log_k: [N, H, F].
        row_shift, col_shift: [N, H, K].
        v, output: [N, H, D].

    Examples:
        >>> v, zero = torch.rand(6, 2, 4), torch.zeros(6, 2, 1)
        >>> out = log_linear_product(q.log(), k.log(), v, zero, zero)
        >>> torch.allclose(out, torch.einsum("ihf,jhf,jhd->ihd", q, k, v), atol=1e-5)
        True
    """
    (log_q, log_k, col_shift, values), dtype = accumulating(log_q, log_k, col_shift, v)

    def some_samples(b: Tensor, a: Tensor | None = None) -> Tensor:
        query, key, top = _features(log_q, log_k, b, ptr)
        by_sample = values.unsqueeze(2).expand(-1, -1, b.size(2), -1).flatten(1, 2)
        product = linear_attention if a is None else linear_product
        rows = product(query, key, by_sample, ptr, backend=backend)
        rows = rows.unflatten(1, b.shape[1:])
        if a is not None:
            rows = (a + top).exp().unsqueeze(3) * rows
        return rows.sum(2)

    with without_autocast(values):
        shifts = [col_shift]
        if row_shift is not None:
            shifts.append(row_shift.to(log_q.dtype))
        factors = _factors(log_q, log_k, col_shift, ptr, backend)
        if factors is None:
            total = sum(_by_samples(some_samples, log_q, *shifts))
        else:
            total = _all_samples(*factors, values, ptr, *shifts[1:])
        if row_shift is None:
            # The mean over all samples, which the parts hold in sums.
            total = total / col_shift.size(2)
        return total.to(dtype)


def log_linear_logsumexp(
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "N H K"]:
    """Return the logarithm of a row's sum in :func:`log_linear_product`, for every sample s.

        L_is = log Σ_j Σ_r exp(log q_ir + log k_jr + b_js)

    The sum runs over the nodes j of i's graph, in at least float32 and O(N K F) time.

    Args:
        log_q: logarithms of the positive features of the receivers.
        log_k: logarithms of the positive features of the senders.
        col_shift: b per node, head and sample.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        backend: backend of linear attention; see `kernels.operation`.

    Shapes:
        log_q, log_k: [N, H, F].
        col_shift, output: [N, H, K].

    Examples:
        >>> log_sum = log_linear_logsumexp(q.log(), k.log(), torch.zeros(6, 2, 1))
        >>> torch.allclose(log_sum, torch.einsum("ihf,jhf->ih", q, k).log().unsqueeze(2), atol=1e-5)
        True
    """
    (log_q, log_k, col_shift), _ = accumulating(log_q, log_k, col_shift)

    def log_sum(b: Tensor) -> Tensor:
        query, key, top = _features(log_q, log_k, b, ptr)
        # A row's sum is its product with ones.
        one = torch.ones_like(key[:, :, :1])
        count = linear_product(query, key, one, ptr, backend=backend)
        return count.view_as(top).log() + top

    with without_autocast(log_q):
        factors = _factors(log_q, log_k, col_shift, ptr, backend)
        if factors is not None:
            query, key, weight, top = factors
            return linear_product(query, key, weight, ptr).log() + top
        return torch.cat(_by_samples(log_sum, log_q, col_shift), dim=2)


def log_linear_pool(
    log_k: Float[Tensor, "N H F"],
    col_shift: Float[Tensor, "N H K"],
    v: Float[Tensor, "N H D"],
) -> tuple[Float[Tensor, "H K F E"], Float[Tensor, "H K F one"]]:
    """Return the sums over senders that :func:`log_linear_read` needs: U and their shift M.

        U_sr = Σ_j exp(log k_jr + b_js − M_sr) [v_j, 1]

    The sum runs over the nodes of one graph, or of a part of it. Sums of parts merge, since exp(M − M′) U has the shift
    M′. M is in double precision and has no gradient.

    Args:
        log_k: logarithms of the positive features of the senders.
        col_shift: b per node, head and sample.
        v: values of the senders.

    Shapes:
        log_k: [N, H, F].
        col_shift: [N, H, K].
        v: [N, H, D].
        U: [H, K, F, D + 1].
        M: [H, K, F, 1].

    Examples:
        >>> sums, shift = log_linear_pool(k.log(), torch.zeros(6, 2, 1), torch.rand(6, 2, 4))
        >>> sums.shape, shift.shape  # [heads, samples, features, channels + 1]
        (torch.Size([2, 1, 3, 5]), torch.Size([2, 1, 3, 1]))
    """
    (log_k, col_shift, v), _ = accumulating(log_k, col_shift, v)
    # A channel of ones, whose sums normalise the rows.
    values = pad(v, (0, 1), value=1.0)

    def pool(b: Tensor) -> tuple[Tensor, Tensor]:
        key, shift = _keys(log_k, b, None)
        return torch.einsum("jhsr,jhd->hsrd", key, values), shift.squeeze(0)

    with without_autocast(v):
        parts = _by_samples(pool, log_k, col_shift)
    sums, shifts = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return sums, shifts.double().unsqueeze(3)


def log_linear_read(
    log_q: Float[Tensor, "N H F"],
    row_shift: Float[Tensor, "N H K"] | None,
    sums: Float[Tensor, "H K F E"],
    shift: Float[Tensor, "H K F one"],
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N H K"]]:
    """Return the rows of :func:`log_linear_product` for some receivers, and L of :func:`log_linear_logsumexp`.

    Args:
        log_q: logarithms of the positive features of the receivers.
        row_shift: a per node, head and sample. ``None`` divides every row of a sample by its sum.
        sums: U of all senders, from :func:`log_linear_pool`.
        shift: M of all senders, from :func:`log_linear_pool`.

    Shapes:
        log_q: [N, H, F].
        row_shift: [N, H, K].
        sums: [H, K, F, D + 1].
        shift: [H, K, F, 1].
        rows: [N, H, D].
        L: [N, H, K].

    Examples:
        >>> v, zero = torch.rand(6, 2, 4), torch.zeros(6, 2, 1)
        >>> rows, _ = log_linear_read(q[:2].log(), None, *log_linear_pool(k.log(), zero, v))
        >>> torch.allclose(rows, log_linear_product(q.log(), k.log(), v, None, zero)[:2], atol=1e-6)
        True
    """
    (log_q, sums), _ = accumulating(log_q, sums)

    with without_autocast(log_q):
        query, top = _queries(log_q.unsqueeze(2), shift.squeeze(3).to(log_q.dtype))
        total = torch.einsum("ihsr,hsrd->ihsd", query, sums)
        values = total[..., :-1]
        count = total[..., -1]
        log_sum = count.log() + top
        if row_shift is None:
            return (values / count.unsqueeze(3)).mean(2), log_sum
        weight = (row_shift.to(log_q.dtype) + top).exp()
        return (weight.unsqueeze(3) * values).sum(2), log_sum


def log_linear_entries(
    edge_index: Int[Tensor, "two E"],
    log_q: Float[Tensor, "N H F"],
    log_k: Float[Tensor, "N H F"],
) -> Float[Tensor, "E H"]:
    """Return the logarithm of the kernel at every edge e = (j, i), log Σ_r exp(log q_ir + log k_jr), in O(E H F) time.

    The function runs in plain torch, in at least float32. Memory is O(E H), since sums are computed again in the
    backward pass.

    Args:
        edge_index: pairs of sender and receiver.
        log_q: logarithms of the positive features of the receivers.
        log_k: logarithms of the positive features of the senders.

    Shapes:
        edge_index: [2, E].
        log_q, log_k: [N, H, F].
        output: [E, H].

    Examples:
        >>> log_linear_entries(edge_index, q.log(), k.log()).shape  # one number per edge and head
        torch.Size([12, 2])
    """
    (log_q, log_k), _ = accumulating(log_q, log_k)

    def entries(edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return (
            log_q.index_select(0, target) + log_k.index_select(0, source)
        ).logsumexp(2)

    return torch.cat(_in_parts(entries, log_q[:1].numel(), edge_index, dim=1))


def _features(
    log_q: Tensor,
    log_k: Tensor,
    b: Tensor,
    ptr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and K with samples as heads, and the logarithm of the factor by which Q was divided, [N, H, K]."""
    key, shift = _keys(log_k, b, ptr)
    query, top = _queries(log_q.unsqueeze(2), shift)
    return query.flatten(1, 2), key.flatten(1, 2), top


def _keys(log_k: Tensor, b: Tensor, ptr: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return K [N, H, K, F] and its shift M, without gradient."""
    exponents = log_k.unsqueeze(2) + b.unsqueeze(3)
    shift = max_rows(exponents.detach(), ptr)
    return (exponents - finite_shift(shift)).exp(), shift


def _queries(log_q: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    # A feature that no sender has keeps its shift of −∞, so that it is zero and never the largest.
    exponents = log_q + shift
    top = finite_shift(exponents.detach().amax(-1))
    return (exponents - top.unsqueeze(-1)).exp(), top


def _factors(
    log_q: Tensor,
    log_k: Tensor,
    b: Tensor,
    ptr: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return q, k, w ≤ 1 and t with exp(log q_ir + log k_jr + b_js) = q_ir k_jr w_js exp(t_is).

    ``None`` if some sample and feature has no w_js k_jr of at least exp(−SLACK).
    """
    # A GPU has a kernel for samples as heads.
    if b.size(2) == 1 or backend != "auto" or not (log_k.is_cpu and values_only()):
        return None
    most = max_rows(log_k.detach(), ptr)
    heaviest = finite_shift(max_rows(b.detach(), ptr))
    log_key = log_k - finite_shift(most)
    log_weight = b - heaviest
    # One sender that has all features is enough.
    least = log_key.detach().amin(2, keepdim=True) + log_weight.detach()
    if bool((max_rows(least, ptr) < -SLACK).any()):
        return None
    query, top = _queries(log_q, most)
    return query, log_key.exp(), log_weight.exp(), top.unsqueeze(2) + heaviest


def _all_samples(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    top: Tensor,
    v: Tensor,
    ptr: Tensor | None,
    a: Tensor | None = None,
) -> Tensor:
    """Return the sum over all samples from the factors of :func:`_factors`."""
    x = reciprocal(linear_product(q, k, w, ptr)) if a is None else (a + top).exp()

    def some_samples(x: Tensor, w: Tensor) -> Tensor:
        return linear_product(_outer(x, q), _outer(w, k), v, ptr)

    def pool(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _outer(w, k).transpose(0, 1).mT @ v.transpose(0, 1)

    def read(x: Tensor, q: Tensor) -> Tensor:
        return (_outer(x, q).transpose(0, 1) @ pooled).transpose(0, 1)

    if ptr is not None:
        return sum(_by_samples(some_samples, q, x, w))
    # All pairs of few nodes are fewer steps than all pairs of samples and features.
    if 2 * len(q) <= q.size(2) * x.size(2):
        x, q, w, k, v = heads_first(x, q, w, k, v)
        weight = (x @ w.mT) * (q @ k.mT)
        return nodes_first(weight @ v)
    entries = q[:1].numel() * x.size(2)
    pooled = sum(_in_parts(pool, entries, w, k, v, dim=0))
    return torch.cat(_in_parts(read, entries, x, q, dim=0))


def _outer(weights: Tensor, features: Tensor) -> Tensor:
    """Return all products of weights [N, H, K] and features [N, H, F], [N, H, K F]."""
    return (weights.unsqueeze(3) * features.unsqueeze(2)).flatten(2)


def _by_samples(
    run: Callable[..., Any],
    features: Tensor,
    *of_samples: Tensor,
) -> list[Any]:
    return _in_parts(run, features.numel(), *of_samples, dim=2)


def _in_parts(
    run: Callable[..., Any],
    entries: int,
    *tensors: Tensor,
    dim: int,
) -> list[Any]:
    """Call ``run`` with as many rows of ``entries`` each at a time as :data:`CHUNK` holds, and return its results."""
    # A size that torch traces decides nothing; what a compiled program keeps is for its compiler to choose.
    if torch.compiler.is_compiling() or entries * tensors[0].size(dim) <= CHUNK:
        return [run(*tensors)]
    # The results of a part are computed again in the backward pass, so that memory does not grow with the parts. The
    # transforms of torch.func take no checkpoint.
    if torch.is_grad_enabled() and not differentiated_inside():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    parts = [x.split(max(1, CHUNK // entries), dim=dim) for x in tensors]
    return [run(*part) for part in zip(*parts, strict=True)]
