"""The weights of pairs in log space, and the operations with the score matrix of every graph written out."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from diffusion_mp.kernels.operation import (
    FEW,
    Wide,
    few_numbers,
    heads_first,
    pulled_back,
)
from diffusion_mp.kernels.segments import slices
from diffusion_mp.runtime.cache import values_only
from diffusion_mp.runtime.precision import lies_in


def _times_sigmoid_slope(g: Tensor, s: Tensor) -> None:
    """Return g σ(−s), one beyond −s = 50, by the derivative of softplus: 1 − σ(s), rounded, has lost its digits."""
    torch.ops.aten.softplus_backward.grad_input(g, s, -1, 50.0, grad_input=g)


class Kernel(NamedTuple):
    """A positive function f of scores."""

    log: Callable[[Tensor], Tensor]
    # f(s) of ``scale`` s, with ``out``.
    weight: Callable[..., Tensor]
    scale: float
    # Multiplies g in place by (log f)′(s); None where that is one.
    times_slope: Callable[[Tensor, Tensor], None] | None


KERNELS = {
    # exp itself takes three times as long as exp2, whose factor the product of q and k takes for nothing.
    "exp": Kernel(lambda s: s, torch.exp2, math.log2(math.e), None),
    "sigmoid": Kernel(logsigmoid, torch.sigmoid, 1.0, _times_sigmoid_slope),
}

SCORES = tuple(KERNELS)
"""``"exp"`` is the softmax's score (with distance features, the Gaussian's); ``"sigmoid"`` is DIFFormer-a's.

Examples:
    >>> [pairwise_attention(q, k, torch.rand(6, 2, 4), score=score).shape for score in SCORES]
    [torch.Size([6, 2, 4]), torch.Size([6, 2, 4])]
"""


class Weighting(NamedTuple):
    """w_ij = f(q_i·k_j) e^{a_i + b_j} for nodes i and j of the same graph, apart from the features."""

    row_shift: Wide | None  # a [N, H]; None is zero
    col_shift: Wide | None  # b [N, H]; None is zero
    ptr: Tensor | None
    score: str
    loops: bool = True  # whether i and j may be the same node; otherwise w_ii = 0
    mutual: bool = False  # the promise that q_i·k_j = q_j·k_i


class PairwiseRows(NamedTuple):
    """Σ_j p_ij v_j [N, H, D], and log Σ_j f(q_i·k_j) [N, H], which is right only where it is asked for."""

    out: Tensor
    lse: Tensor


def log_score(s: Tensor, score: str) -> Tensor:
    """Return log f(s) of inner products s, for one of `SCORES`.

    Examples:
        >>> torch.allclose(log_score(x, "sigmoid"), x.sigmoid().log())
        True
    """
    return KERNELS[score].log(s)


def log_scores(q: Tensor, k: Tensor, score: str, loops: bool = True) -> Tensor:
    """Return log f(q_i·k_j), [H, n, n], for one graph; −∞ for i = j without ``loops``."""
    s = log_score(torch.einsum("ihf,jhf->hij", q, k), score)
    if loops:
        return s
    return s.masked_fill(
        torch.eye(len(q), dtype=torch.bool, device=q.device), -torch.inf
    )


def pairwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor | None,
    score: str,
    loops: bool,
    mutual: bool,
    log_sums: bool,
) -> PairwiseRows:
    """Σ_j p_ij v_j with p the softmax of log f(q_i·k_j) over row i, also for the sigmoid (D11 of docs/errata.md)."""
    if ptr is None and loops and not log_sums:
        return _attention_of_one_graph(q, k, v, score)
    return attention_by_logarithms(q, k, v, ptr, score, loops)


def attention_by_logarithms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor | None,
    score: str,
    loops: bool,
    *_: bool,
) -> PairwiseRows:
    """Return the rows and their sums, graph by graph."""
    logs = [
        (log_scores(q[rows], k[rows], score, loops), v[rows])
        for rows in slices(ptr, q.size(0))
    ]
    out = v
    if v.size(2):
        out = torch.cat(
            [torch.einsum("hij,jhd->ihd", s.softmax(2), values) for s, values in logs]
        )
    return PairwiseRows(out, torch.cat([_log_sums(s, loops).t() for s, _ in logs]))


def _log_sums(s: Tensor, loops: bool) -> Tensor:
    """Return the logarithms of the sums of rows, −∞ with a derivative of zero for a node that is alone."""
    if loops:
        return s.logsumexp(2)
    alone = (s == -torch.inf).all(2)
    return (
        s.masked_fill(alone.unsqueeze(2), 0.0)
        .logsumexp(2)
        .masked_fill(alone, -torch.inf)
    )


def _attention_of_one_graph(
    q: Tensor, k: Tensor, v: Tensor, score: str
) -> PairwiseRows:
    """Return the rows in as few calls as possible."""
    q, k, v = heads_first(q, k, v)
    scores = q @ k.mT
    if (
        score == "sigmoid"
        and not scores.requires_grad
        and _rows_are_present(scores, q is k)
    ):
        # Half the time of the softmax of logarithms, which is needed for rows that would vanish, and for a
        # gradient, since 1 − σ(s) loses the digits of the slope.
        weight = scores.sigmoid_()
        out = (weight @ v) / weight.sum(-1, keepdim=True)
    else:
        out = log_score(scores, score).softmax(-1) @ v
    if out.dim() == 2:
        out = out.unsqueeze(1)
    else:
        out = out.transpose(0, 1).contiguous()
    return PairwiseRows(out, out)


def _rows_are_present(scores: Tensor, same: bool) -> bool:
    """Return whether it is known that no row of sigmoids vanishes."""
    # The score of a vector with itself is its square: looking at all scores would take a sixth of the time.
    return (same and values_only()) or lies_in(scores, -20.0, math.inf)


def few_pairs(q: Tensor) -> bool:
    """Return whether all pairs at once are the fastest on the CPU, which more of them are when compiled."""
    most = 8 * FEW
    if torch.compiler.is_compiling():
        most = 32 * FEW
    return q.is_cpu and q.size(1) * q.size(0) ** 2 <= most


def few_in_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor | None,
    score: str,
    loops: bool,
    mutual: bool,
    log_sums: bool,
) -> bool:
    # Numbers first: they are never few for torch.export, to which the number of pairs is a symbol.
    return (
        ptr is None and loops and not log_sums and few_numbers(q, k, v) and few_pairs(q)
    )


def pairwise_backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, weighting: Weighting
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_i = Σ_j g_ij k_j, dk_j = Σ_i g_ij q_i and dv_j = Σ_i w_ij grad_i.

    Here g_ij = w_ij (grad_i·v_j − δ_i) φ_ij with φ = (log f)′, which is 1 for exp and σ(−s) for the sigmoid.
    """
    parts = []
    for rows in slices(weighting.ptr, q.size(0)):
        weight = _weights(q, k, weighting, rows)
        by_weights = torch.einsum("ihd,jhd->hij", grad[rows], v[rows])
        by_scores = weight * (by_weights - delta[rows].t().unsqueeze(2))
        if weighting.score == "sigmoid":
            s = torch.einsum("ihf,jhf->hij", q[rows], k[rows])
            # The slope σ(−s), not 1 − σ(s), which is zero in float32 from s = 17 on.
            by_scores = by_scores * logsigmoid(-s).exp()
        dq = torch.einsum("hij,jhf->ihf", by_scores, k[rows])
        dk = torch.einsum("hij,ihf->jhf", by_scores, q[rows])
        parts.append((dq, dk, torch.einsum("hij,ihd->jhd", weight, grad[rows])))
    dq, dk, dv = map(torch.cat, zip(*parts, strict=True))
    return dq, dk, dv


def softmax_gradients(
    of_q: Tensor,
    of_k: Tensor,
    of_v: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of softmax attention by this module; the first three are those that torch's kernel found."""
    gradients: tuple[Tensor, Tensor, Tensor] = pulled_back(
        lambda q, k, v: _attention_of_one_graph(q, k, v, "exp").out, (q, k, v), grad
    )
    return gradients


def pairwise_product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j."""
    graphs = slices(weighting.ptr, q.size(0))
    return torch.cat(
        [
            torch.einsum("hij,jhd->ihd", _weights(q, k, weighting, rows), v[rows])
            for rows in graphs
        ]
    )


def _weights(q: Tensor, k: Tensor, weighting: Weighting, rows: slice) -> Tensor:
    """Return w_ij of one graph, [H, n, n]."""
    logs = log_scores(q[rows], k[rows], weighting.score, weighting.loops)
    if weighting.row_shift is not None:
        logs = logs + weighting.row_shift[rows].t().unsqueeze(2)
    if weighting.col_shift is not None:
        logs = logs + weighting.col_shift[rows].t().unsqueeze(1)
    return logs.exp()
