"""The weights of pairs: a score function of an inner product, and shifts of rows and columns, in log space."""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from diffusion_mp.kernels.operation import Wide

SCORES = ("exp", "sigmoid")
"""``"exp"`` is the softmax's score (with distance features, the Gaussian's); ``"sigmoid"`` is DIFFormer-a's.

Examples:
    >>> [pairwise_attention(q, k, torch.rand(6, 2, 4), score=score).shape for score in SCORES]
    [torch.Size([6, 2, 4]), torch.Size([6, 2, 4])]
"""


class Weighting(NamedTuple):
    """w_ij = f(q_i·k_j) e^{a_i + b_j} for nodes i and j of the same graph: all but the features."""

    row_shift: Wide
    """a [N, H]."""
    col_shift: Wide | None
    """b [N, H]; ``None`` is zero."""
    ptr: Tensor | None
    score: str
    loops: bool = True
    """Whether i and j may be the same node; otherwise w_ii = 0."""


class Attended(NamedTuple):
    """Σ_j p_ij v_j [N, H, D]; and log Σ_j f(q_i·k_j) [N, H] if a kernel needs it for its derivative, else nothing."""

    out: Tensor
    lse: Tensor


def log_score(s: Tensor, score: str) -> Tensor:
    """log f(s).

    Args:
        s: inner products.
        score: one of `SCORES`.

    Examples:
        >>> torch.allclose(log_score(x, "sigmoid"), x.sigmoid().log())
        True
    """
    return logsigmoid(s) if score == "sigmoid" else s
