"""The score functions f of an inner product s, in log space."""

from torch import Tensor
from torch.nn.functional import logsigmoid

# "exp" is the softmax's score (with distance features, the Gaussian's); "sigmoid" is DIFFormer-a's.
SCORES = ("exp", "sigmoid")


def log_score(s: Tensor, score: str) -> Tensor:
    """log f(s)."""
    return logsigmoid(s) if score == "sigmoid" else s
