"""The weights of pairs: a score function of an inner product, and shifts of rows and columns, in log space."""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from diffusion_mp.kernels.operation import Wide
from diffusion_mp.kernels.precision import accumulating

# "exp" is the softmax's score (with distance features, the Gaussian's); "sigmoid" is DIFFormer-a's.
SCORES = ("exp", "sigmoid")


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
    """log f(s)."""
    return logsigmoid(s) if score == "sigmoid" else s


def inner(a: Tensor, b: Tensor) -> Tensor:
    """a_i·b_i of rows [N, H, D]: [N, H], in at least float32."""
    (a, b), _ = accumulating(a, b)
    return (a * b).sum(2)


def row_term(grad: Tensor, out: Tensor | None, grad_lse: Tensor | None) -> Tensor | None:
    """δ [N, H] of g_ij = w_ij (grad_i·v_j − δ_i): what a row divided by its sum takes off, or its log-sum adds."""
    if out is not None:
        return inner(grad, out)
    return None if grad_lse is None else -grad_lse
