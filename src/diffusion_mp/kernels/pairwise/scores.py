"""The weights of pairs in log space, and the operations with the score matrix of every graph written out."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from diffusion_mp.kernels.operation import (
    FEW,
    Wide,
    heads_first,
    pulled_back,
)
from diffusion_mp.kernels.segments import nodes_first, slices
from diffusion_mp.runtime.precision import lies_in


def _times_sigmoid_slope(g: Tensor, s: Tensor) -> None:
    """Multiply g by σ(−s), or by one beyond −s = 50, in place.

    The derivative of softplus computes it: 1 − σ(s), rounded, has lost its digits.
    """
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
"""The names of the scores: ``"exp"`` is the softmax (with distance features, the Gaussian), ``"sigmoid"`` DIFFormer-a.

Examples:
    >>> [pairwise_attention(q, k, torch.rand(6, 2, 4), score=score).shape for score in SCORES]
    [torch.Size([6, 2, 4]), torch.Size([6, 2, 4])]
"""


class Weighting(NamedTuple):
    """The weights w_ij = f(q_i·k_j) e^{a_i + b_j} of nodes i and j of the same graph, apart from the features."""

    row_shift: Wide | None  # a [N, H]; None is zero
    col_shift: Wide | None  # b [N, H]; None is zero
    ptr: Tensor | None
    score: str
    loops: bool = True  # whether i and j may be the same node; otherwise w_ii = 0
    mutual: bool = False  # the promise that q_i·k_j = q_j·k_i


class PairwiseRows(NamedTuple):
    """Σ_j p_ij v_j [N, H, D], and log Σ_j f(q_i·k_j) [N, H]."""

    out: Tensor
    lse: Tensor


def log_score(s: Tensor, score: str) -> Tensor:
    """Return log f(s) of inner products s.

    Args:
        s: a tensor of inner products.
        score: the name of f, one of `SCORES`.

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
    itself = torch.eye(len(q), dtype=torch.bool, device=q.device)
    return s.masked_fill(itself, -torch.inf)


def pairwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
) -> PairwiseRows:
    """Return Σ_j p_ij v_j, p the softmax of log f(q_i·k_j) over row i, also for the sigmoid (D11 of docs/errata.md)."""
    results = []
    sums = []
    for rows in slices(weighting.ptr, q.size(0)):
        logs = log_scores(q[rows], k[rows], weighting.score, weighting.loops)
        # A node that is alone, without loops, has no pair: its sum is −∞, and the derivative of that zero.
        alone = (logs == -torch.inf).all(2)
        lse = logs.masked_fill(alone.unsqueeze(2), 0.0).logsumexp(2)
        p = (logs - lse.unsqueeze(2)).exp()
        results.append(torch.einsum("hij,jhd->ihd", p, v[rows]))
        sums.append(lse.masked_fill(alone, -torch.inf).t())
    return PairwiseRows(torch.cat(results), torch.cat(sums))


def attention_of_few(q: Tensor, k: Tensor, v: Tensor, score: str) -> Tensor:
    """Return the rows of one graph in as few calls as possible, since calls take the time where pairs are few."""
    q, k, v = heads_first(q, k, v)
    scores = q @ k.mT
    # −20 and above, no row of sigmoids vanishes, and they take half the time of the softmax of logarithms. A gradient
    # needs the logarithms, since 1 − σ(s) loses the digits of the slope.
    if (
        score == "sigmoid"
        and not scores.requires_grad
        and lies_in(scores, -20.0, math.inf)
    ):
        weight = scores.sigmoid_()
        out = (weight @ v) / weight.sum(-1, keepdim=True)
    else:
        out = log_score(scores, score).softmax(-1) @ v
    return nodes_first(out).contiguous()


def few_pairs(q: Tensor) -> bool:
    """Return whether computing all pairs at once is the fastest way on the CPU; compiled, it is for more pairs."""
    most = 8 * FEW
    if torch.compiler.is_compiling():
        most = 32 * FEW
    return q.is_cpu and q.size(1) * q.size(0) ** 2 <= most


def pairwise_backward(
    grad: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_i = Σ_j g_ij k_j, dk_j = Σ_i g_ij q_i and dv_j = Σ_i w_ij grad_i.

    Here g_ij = w_ij (grad_i·v_j − δ_i) φ_ij with φ = (log f)′. With a channel of ones in v, to which the gradient −δ
    belongs, it is the derivative of the product.
    """

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pairwise_product(q, k, pad(v, (0, 1), value=1.0), weighting)

    pulled = torch.cat([grad, -delta.unsqueeze(2)], 2)
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = pulled_back(product, (q, k, v), pulled)
    return gradients


def pairwise_product(q: Tensor, k: Tensor, v: Tensor, weighting: Weighting) -> Tensor:
    """Σ_j w_ij v_j."""
    parts = []
    for rows in slices(weighting.ptr, q.size(0)):
        weight = _weights(q, k, weighting, rows)
        parts.append(torch.einsum("hij,jhd->ihd", weight, v[rows]))
    return torch.cat(parts)


def _weights(q: Tensor, k: Tensor, weighting: Weighting, rows: slice) -> Tensor:
    """Return w_ij of one graph, [H, n, n]."""
    logs = log_scores(q[rows], k[rows], weighting.score, weighting.loops)
    if weighting.row_shift is not None:
        logs = logs + weighting.row_shift[rows].t().unsqueeze(2)
    if weighting.col_shift is not None:
        logs = logs + weighting.col_shift[rows].t().unsqueeze(1)
    return logs.exp()
