"""All-pair attention with a nonlinear score, tile by tile: O(N²) time, O(N) memory, also in the backward pass."""

from functools import partial
from typing import TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_mp.checks import check_choice
from diffusion_mp.kernels import gpu
from diffusion_mp.kernels.operation import (
    Backend,
    Narrow,
    empty_like,
    few_numbers,
    operation,
    requested,
)
from diffusion_mp.kernels.pairwise import fused, scores, tiled
from diffusion_mp.kernels.pairwise.scores import (
    SCORES,
    PairwiseRows,
    Weighting,
    log_score,
)
from diffusion_mp.runtime.precision import accumulating, wide_dtype, without_autocast

__all__ = [
    "SCORES",
    "log_score",
    "pairwise_attention",
    "pairwise_logsumexp",
    "pairwise_product",
    "pairwise_rows",
]

FAMILY = "pairwise"
declare = partial(operation, family=FAMILY)
on_gpu = partial(gpu.kernel, "diffusion_mp.kernels.pairwise.triton")


@declare(
    "pairwise_attention",
    formula=scores.pairwise_attention,
    cpu=tiled.attention,
    triton=on_gpu("attention"),
    dtype="v",
)
def _attention(q: Narrow, k: Narrow, v: Narrow, weighting: Weighting) -> PairwiseRows:
    return PairwiseRows(empty_like(v), _empty_rows(q))


@declare(
    "pairwise_product",
    formula=scores.pairwise_product,
    cpu=tiled.product,
    triton=on_gpu("product"),
    dtype="v",
)
def _product(q: Narrow, k: Narrow, v: Narrow, weighting: Weighting) -> Tensor:
    return empty_like(v)


@declare(
    "pairwise_backward",
    formula=scores.pairwise_backward,
    cpu=tiled.backward,
    triton=on_gpu("backward"),
)
def _backward(
    grad: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q, k, v)


def _of_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
    out: Tensor,
    lse: Tensor,
    backend: str,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, ...]:
    # With p_ij = f_ij exp(−lse_i), the derivative of lse by log f, Σ_j p_ij (grad_i·v_j) is grad_i·out_i.
    delta = _inner(grad_out, out) - grad_lse
    # A node that is alone has no pair: its level is −∞, and its gradient has to be zero, not 0 · ∞.
    level = lse.masked_fill(lse == -torch.inf, 0.0)
    weighting = weighting._replace(row_shift=-level)
    return _backward(grad_out, delta, q, k, v, weighting, backend=backend)


def _of_product(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
    out: Tensor,
    backend: str,
) -> tuple[Tensor | None, ...]:
    # Rows are not normalised, so nothing is subtracted.
    delta = torch.zeros_like(_empty_rows(q))
    dq, dk, dv = _backward(grad, delta, q, k, v, weighting, backend=backend)
    # The shifts need no pass over the pairs: with g_ij = w_ij (grad_i·v_j) the row sums, da, are
    # grad_i·out_i, and the column sums, db, are v_j·dv_j.
    da = db = None
    if weighting.row_shift is not None:
        da = _inner(grad, out).to(weighting.row_shift)
    if weighting.col_shift is not None:
        db = _inner(v, dv).to(weighting.col_shift)
    return dq, dk, dv, da, db


def _empty_rows(q: Tensor) -> Tensor:
    """Return an uninitialised number per row and head, in at least float32."""
    return q.new_empty(q.shape[:2], dtype=wide_dtype(q.dtype))


def _inner(a: Tensor, b: Tensor) -> Tensor:
    # A sum over channels, of which half precision would lose digits that a difference then needs.
    (a, b), _ = accumulating(a, b)
    return (a * b).sum(2)


_attention.derivatives({"q k v": _of_attention})
_product.derivatives({"q k v weighting.row_shift weighting.col_shift": _of_product})


class Options(TypedDict, total=False):
    """The options that all functions except :func:`pairwise_attention` take besides tensors."""

    score: str
    loops: bool
    mutual: bool
    backend: Backend


def _weighting(
    ptr: Tensor | None,
    score: str = "exp",
    loops: bool = True,
    mutual: bool = False,
    backend: Backend = "auto",
) -> tuple[Weighting, Backend]:
    """Return the weighting without shifts, and the backend."""
    check_choice(score, "score", SCORES)
    return Weighting(None, None, ptr, score, loops, mutual), backend


def pairwise_attention(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    *,
    score: str = "exp",
    mutual: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""Return attention over all pairs of a graph with a nonlinear score f (Wu, Wipf & Yan 2025, Eq. 17).

        out_i = Σ_j f(q_i·k_j) v_j / Σ_j f(q_i·k_j)

    The sums run over the nodes j of i's graph. No score overflows, and no row vanishes. The function can be
    differentiated any number of times; derivatives beyond the first hold all pairs in memory. The result has the dtype
    of ``v``.

    Args:
        q: features of the receivers.
        k: features of the senders.
        v: values of the senders.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        score: ``"exp"``, f = exp as in the softmax, or ``"sigmoid"``, f = σ.
        mutual: the promise that q_i·k_j = q_j·k_i. Large graphs then compute half of the scores.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        q, k: [N, H, F].
        v, output: [N, H, D].

    Examples:
        >>> softmax = torch.einsum("ihf,jhf->hij", q, k).softmax(2)
        >>> torch.allclose(pairwise_attention(q, k, k), torch.einsum("hij,jhd->ihd", softmax, k), atol=1e-6)
        True
    """
    check_choice(score, "score", SCORES)
    requested_backend = requested(FAMILY, backend)
    small = ptr is None and requested_backend == "auto" and few_numbers(q, k, v)
    # Numbers first: they are never few for torch.export, to which the number of pairs is a symbol.
    if small and scores.few_pairs(q):
        with without_autocast(q):
            # A call of the operation takes longer than the arithmetic here.
            return scores.attention_of_few(q, k, v, score)
    # Tiles compute one gradient of a tensor in both roles, which takes less time on the CPU than torch's kernel.
    one = q is k and q.is_cpu and q.requires_grad and torch.is_grad_enabled()
    # torch's kernel has no name of its own: to a user it is part of the fast path.
    if (
        not one
        and requested_backend in ("auto", "cpu")
        and fused.fits(q, k, v, ptr, score)
    ):
        return fused.attention(q, k, v)
    weighting = Weighting(None, None, ptr, score, mutual=mutual)
    return _attention(q, k, v, weighting, backend=backend).out


def pairwise_rows(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    ptr: Tensor | None = None,
    **options: Unpack[Options],
) -> PairwiseRows:
    """Return the result of :func:`pairwise_attention` and the result of :func:`pairwise_logsumexp`, in one pass.

    With ``loops=False`` the result of a node that is alone in its graph is zero.

    Args:
        q: features of the receivers [N, H, F].
        k: features of the senders [N, H, F].
        v: values of the senders [N, H, D].
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        options: ``score``, ``mutual`` and ``backend`` of :func:`pairwise_attention`, and ``loops`` of
            :func:`pairwise_logsumexp`.

    Examples:
        >>> rows = pairwise_rows(q, k, torch.rand(6, 2, 4))
        >>> torch.allclose(rows.lse, pairwise_logsumexp(q, k))
        True
    """
    weighting, backend = _weighting(ptr, **options)
    return _attention(q, k, v, weighting, backend=backend)


def pairwise_logsumexp(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    ptr: Tensor | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "N H"]:
    """Return the logarithm of a row's sum of scores, log Σ_j f(q_i·k_j), in at least float32.

    Args:
        q: features of the receivers [N, H, F].
        k: features of the senders [N, H, F].
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        options: ``score``, ``mutual`` and ``backend`` of :func:`pairwise_attention`. With ``loops=False`` the pair j =
            i does not count, and the result is −∞ for a node that is alone in its graph.

    Examples:
        >>> torch.allclose(pairwise_logsumexp(q, k), torch.einsum("ihf,jhf->ihj", q, k).logsumexp(2), atol=1e-6)
        True
    """
    # Values without channels cost nothing.
    return pairwise_rows(q, k, q[:, :, :0], ptr, **options).lse


def pairwise_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    v: Float[Tensor, "N H D"],
    row_shift: Float[Tensor, "N H"] | None = None,
    col_shift: Float[Tensor, "N H"] | None = None,
    ptr: Tensor | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "N H D"]:
    r"""Multiply values by the scores of all pairs of a graph, with shifts of rows and columns.

        out_i = Σ_j exp(log f(q_i·k_j) + a_i + b_j) v_j

    The sum runs over the nodes j of i's graph, and the shifts are added in log space. With a = 0, b = −logsumexp, and q
    and k exchanged, the matrix is the transpose of :func:`pairwise_attention`'s.

    Args:
        q: features of the receivers [N, H, F].
        k: features of the senders [N, H, F].
        v: values of the senders [N, H, D].
        row_shift: a [N, H]; by default zero.
        col_shift: b [N, H]; by default zero.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        options: ``score``, ``mutual`` and ``backend`` of :func:`pairwise_attention`; ``mutual`` halves the scores where
            a is b. With ``loops=False`` the pair j = i does not count.

    Examples:
        >>> pairwise_product(q, k, torch.rand(6, 2, 4)).shape
        torch.Size([6, 2, 4])
    """
    weighting, backend = _weighting(ptr, **options)
    weighting = weighting._replace(row_shift=row_shift, col_shift=col_shift)
    return _product(q, k, v, weighting, backend=backend)
