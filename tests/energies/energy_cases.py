"""What tests of energies share: a list of penalties, distances, and couplings of a matrix."""

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp import (
    GaussianPenalty,
    MixturePenalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
)
from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import ScorePenalty
from diffusion_mp.graph import Graph

PENALTIES = [
    QuadraticPenalty(),
    SimplePenalty(),
    SigmoidPenalty(),
    SoftmaxPenalty(3),
]
PENALTIES += [
    GaussianPenalty(0.4),
    MixturePenalty([0.2, 1.0], [3.0, 0.5]).requires_grad_(False),
]
every_penalty = pytest.mark.parametrize("penalty", PENALTIES, ids=repr)


class Negative(ScorePenalty):
    """f = 2.5 − z²/2, negative beyond z² = 5, though its domain has no end."""

    g = "linear"
    offset = 2.5

    def delta(self, z2: Tensor) -> Tensor:
        return z2 * (2.5 - z2 / 4)


class NotItsSlope(GaussianPenalty):
    """f is not δ′."""

    def delta(self, z2: Tensor) -> Tensor:
        return z2.log1p()


class LearnedSlope(nn.Module):
    """f = 1/(1 + a z²), which decreases as long as a has not become negative."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def forward(self, z2: Tensor) -> Tensor:
        return (1 + self.a.to(z2.dtype) * z2).reciprocal()


def squares(x: Tensor) -> Tensor:
    """‖x_i − x_j‖² of all pairs from explicit differences."""
    return (x[:, None] - x[None]).square().sum(2)


def from_dense(dense: Tensor, nonnegative: bool = True) -> SparseCoupling:
    """The entries of a symmetric matrix as edges j → i."""
    target, source = dense.nonzero().T
    graph = Graph(dense.size(0), torch.stack([source, target]))
    return SparseCoupling(
        graph, dense[target, source], symmetric=True, nonnegative=nonnegative
    )


def laplacian(s: SparseCoupling, form: str = "conservative") -> Tensor:
    """D̄ − S or I − S of one head, dense."""
    dense = s.to_dense()[0]
    return (
        torch.diag(dense.sum(1))
        if form == "conservative"
        else torch.eye(len(dense)).double()
    ) - dense
