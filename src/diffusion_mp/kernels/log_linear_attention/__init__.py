"""Attention through positive features given by their logarithms, with samples of log weights: O(N), safe in float32.

For every sample this is linear attention. With M_r = max_j (log k_jr + b_j) over the senders of a graph, the features

    K_jr = exp(log k_jr + b_j − M_r),  Q_ir = exp(log q_ir + M_r − max_r (log q_ir + M_r))

have the same entries after row normalisation. None overflows, and no row underflows: with the largest feature r of row
i, Q_ir = 1 and Σ_j K_jr ≥ 1. Samples are heads of linear attention; a large graph takes a few samples at a time.
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
from diffusion_mp.kernels.operation import Backend
from diffusion_mp.runtime.precision import accumulating, without_autocast
from diffusion_mp.runtime.torch_private import differentiated_inside

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

    def normalised(log_q: Tensor, log_k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        query, key, _ = _features(log_q, log_k, b, ptr)
        rows = linear_attention(query, key, _by_sample(v, b), ptr, backend=backend)
        return rows.unflatten(1, b.shape[1:]).sum(2)

    def weighted(
        log_q: Tensor, log_k: Tensor, v: Tensor, b: Tensor, a: Tensor
    ) -> Tensor:
        query, key, top = _features(log_q, log_k, b, ptr)
        rows = linear_product(query, key, _by_sample(v, b), ptr, backend=backend)
        weight = (a + top).exp().unsqueeze(3)
        return (weight * rows.unflatten(1, b.shape[1:])).sum(2)

    with without_autocast(values):
        if row_shift is None:
            # The mean over all samples, which the groups hold in parts.
            total = sum(_in_groups(normalised, (log_q, log_k, values), col_shift))
            return (total / col_shift.size(2)).to(dtype)
        row_shift = row_shift.to(log_q.dtype)
        return sum(
            _in_groups(weighted, (log_q, log_k, values), col_shift, row_shift)
        ).to(dtype)


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

    def log_sum(log_q: Tensor, log_k: Tensor, b: Tensor) -> Tensor:
        query, key, top = _features(log_q, log_k, b, ptr)
        # A row's sum is its product with ones.
        one = torch.ones_like(key[:, :, :1])
        count = linear_product(query, key, one, ptr, backend=backend)
        return count.view_as(top).log() + top

    with without_autocast(log_q):
        return torch.cat(_in_groups(log_sum, (log_q, log_k), col_shift), dim=2)


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

    def pool(log_k: Tensor, values: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        # A row more, since the maximum over no sender is not defined.
        exponents = pad(
            log_k.unsqueeze(2) + b.unsqueeze(3),
            (0, 0, 0, 0, 0, 0, 0, 1),
            value=-torch.inf,
        )
        shift = exponents.detach().amax(0)
        key = (exponents[:-1] - _finite(shift)).exp()
        return torch.einsum("jhsr,jhd->hsrd", key, values), shift

    with without_autocast(v):
        parts = _in_groups(pool, (log_k, values), col_shift)
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
        query, top = _queries(log_q, shift.squeeze(3).to(log_q.dtype))
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

    def entries(edge_index: Tensor, log_q: Tensor, log_k: Tensor) -> Tensor:
        source, target = edge_index
        return (
            log_q.index_select(0, target) + log_k.index_select(0, source)
        ).logsumexp(2)

    most = max(1, CHUNK // max(1, log_q[:1].numel()))
    if torch.compiler.is_compiling() or edge_index.size(1) <= most:
        return entries(edge_index, log_q, log_k)
    run = _again_in_backward(entries)
    return torch.cat([run(part, log_q, log_k) for part in edge_index.split(most, 1)])


def _features(
    log_q: Tensor, log_k: Tensor, b: Tensor, ptr: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and K with samples as heads, and the logarithm of the factor by which Q was divided, [N, H, K]."""
    exponents = log_k.unsqueeze(2) + b.unsqueeze(3)
    shift = max_rows(exponents.detach(), ptr)
    query, top = _queries(log_q, shift)
    return query.flatten(1, 2), (exponents - _finite(shift)).exp().flatten(1, 2), top


def _queries(log_q: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    # A feature that no sender has keeps its shift of −∞, so that it is zero and never the largest.
    exponents = log_q.unsqueeze(2) + shift
    top = _finite(exponents.detach().amax(3))
    return (exponents - top.unsqueeze(3)).exp(), top


def _by_sample(v: Tensor, b: Tensor) -> Tensor:
    return v.unsqueeze(2).expand(-1, -1, b.size(2), -1).flatten(1, 2)


def _finite(shift: Tensor) -> Tensor:
    """Replace −∞ by zero, since −∞ − (−∞) is NaN."""
    return shift.masked_fill(shift.isneginf(), 0.0)


def _in_groups(
    run: Callable[..., Any], features: tuple[Tensor, ...], *of_samples: Tensor
) -> list[Any]:
    """Call ``run`` with as many samples at a time as :data:`CHUNK` holds, and return its results."""
    entries = features[0].numel()
    samples = of_samples[0].size(2)
    # A size that torch traces decides nothing; what a compiled program keeps is for its compiler to choose.
    if torch.compiler.is_compiling() or entries * samples <= CHUNK:
        return [run(*features, *of_samples)]
    # By samples, which meet in a sum at the end, and not by nodes, which all meet each other.
    groups = [x.split(max(1, CHUNK // entries), dim=2) for x in of_samples]
    again = _again_in_backward(run)
    return [again(*features, *group) for group in zip(*groups, strict=True)]


def _again_in_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with a backward pass that computes it again, so that memory does not grow with the calls."""
    # The transforms of torch.func take no checkpoint.
    if differentiated_inside() or not torch.is_grad_enabled():
        return run
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
