"""What tests of energies share: a list of penalties, distances, and couplings of a matrix."""

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp import (
    FunctionPenalty,
    GaussianPenalty,
    MixturePenalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
)
from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import Ball, Constraint, EnergyTerm, MLPTerm, ScorePenalty
from diffusion_mp.graph import Graph

DOUBLE = torch.float64
PENALTIES = [
    QuadraticPenalty(),
    SimplePenalty(),
    SigmoidPenalty(),
    SoftmaxPenalty(3),
    GaussianPenalty(0.4),
    MixturePenalty([0.2, 1.0], [3.0, 0.5]).requires_grad_(False),
    FunctionPenalty(lambda z2: 1 / (1 + z2)),
]
every_penalty = pytest.mark.parametrize("penalty", PENALTIES, ids=repr)


class Negative(ScorePenalty):
    """f = 2.5 − z²/2, negative beyond z² = 5, though its domain has no end."""

    g = "linear"
    offset = 2.5

    def delta(self, z2):
        return z2 * (2.5 - z2 / 4)


class NotItsSlope(GaussianPenalty):
    """f is not δ′."""

    def delta(self, z2):
        return z2.log1p()


class LearnedSlope(nn.Module):
    """f = 1/(1 + a z²), which decreases as long as a has not become negative."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def forward(self, z2):
        return (1 + self.a.to(z2.dtype) * z2).reciprocal()


class Huber(EnergyTerm):
    """The sum over edges of a Huber function of the distance of their ends, with a share of the bound that it needs."""

    def __init__(self, share=1.0):
        self.share = share

    def value(self, z, graph):
        r = (z.double()[graph.edges[0]] - z.double()[graph.edges[1]]).norm(dim=2)
        return torch.where(r < 1, r * r / 2, r - 0.5).sum()

    def half_gradient(self, z, graph):
        away = z[graph.edges[0]] - z[graph.edges[1]]
        unit = away / away.norm(dim=2, keepdim=True).clamp(min=1)
        return torch.zeros_like(z).index_add(0, graph.edges[0], unit)

    def bound(self, z, graph):
        return self.share * graph.degree("out", DOUBLE).to(z)[:, None, None]


class LongerMLP(MLPTerm):
    def half_gradient(self, z, graph):
        return 2 * super().half_gradient(z, graph)


class Shrinking(Constraint):
    """It says that it is a ball, and projects to half of it."""

    def project(self, y, start=None):
        return Ball(0.5).project(y)

    def holds(self, x):
        return Ball(1.0).holds(x)


class TooFar(SparseCoupling):
    """The bound that it says it has is a share of its row sums."""

    share = 0.25

    def majorant(self, convex, degree=None):
        return self.share * super().majorant(convex, degree)


class HalfSpace(Constraint):
    """Rows whose first entry is at most ½; the projection is right, or too short."""

    def __init__(self, end=0.5):
        self.end = end

    def project(self, y, start=None):
        first = torch.where(y[..., :1] > 0.5, self.end, y[..., :1])
        return torch.cat([first, y[..., 1:]], -1)

    def holds(self, x):
        return (x[..., 0] <= 0.5).all()


def squares(x: Tensor) -> Tensor:
    """‖x_i − x_j‖² of all pairs from explicit differences."""
    return (x[:, None] - x[None]).square().sum(-1)


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
