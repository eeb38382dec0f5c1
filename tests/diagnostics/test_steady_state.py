"""The variance of a node is a diagonal entry of an inverse, in closed form and densely."""

# ruff: noqa: F403, F405 (everything public)
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp.couplings import (
    IdentityCoupling,
    LowRankCoupling,
    SparseCoupling,
    UniformCoupling,
)
from diffusion_mp.diagnostics import posterior_variance
from helpers import agree, randn, refuses

DOUBLE = torch.float64
PTR = torch.tensor([0, 4, 4, 5, 30])

FEATURE = randn(30, 2, 6).abs()
X = randn(30, 4, seed=1)


def ring(size: int = 30) -> SparseCoupling:
    node = torch.arange(size)
    edges = torch.stack([node, node.roll(1)])
    weight = randn(size, seed=2).exp().repeat(2)
    return SparseCoupling(
        Graph(size, torch.cat([edges, edges.flip(0)], 1), weight), nonnegative=True
    )


KINDS: dict[str, Callable[[], Coupling]] = {
    "low-rank": lambda: LowRankCoupling(
        FEATURE, FEATURE, nonnegative=True, positive_semidefinite=True
    ),
    "ragged": lambda: LowRankCoupling(
        FEATURE, FEATURE, PTR, nonnegative=True, positive_semidefinite=True
    ),
    "simple": lambda: SimpleDiffusivity(heads=2, row_stochastic=False)(X),
    "gaussian": lambda: GaussianDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    )(X),
    "ring": ring,
    "both": lambda: (
        0.5
        * LowRankCoupling(
            FEATURE, FEATURE, nonnegative=True, positive_semidefinite=True
        )
        + ring()
    ),
    "with-loops": lambda: (
        LowRankCoupling(
            FEATURE, FEATURE, PTR, nonnegative=True, positive_semidefinite=True
        )
        + 2.0 * IdentityCoupling(30, dtype=DOUBLE)
    ),
    "uniform": lambda: UniformCoupling(30, PTR, dtype=DOUBLE),
}


def precision_matrix(coupling: Coupling, leak: float) -> np.ndarray:
    omega = coupling.to_dense().numpy()
    return np.stack([(1 + leak) * np.diag(head.sum(1)) - head for head in omega])


@pytest.mark.parametrize("leak", [1e-4, 0.1, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_inverse(kind, leak):
    coupling = KINDS[kind]()
    inverse = np.linalg.inv(precision_matrix(coupling, leak))
    expected = torch.from_numpy(np.diagonal(inverse, axis1=1, axis2=2).T.copy())
    assert_close(posterior_variance(coupling, leak), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("low_rank", [True, False])
def test_gradients_are_those_of_the_inverse(low_rank):
    feature = randn(9, 1, 3, seed=4).requires_grad_()
    positive = feature.abs()
    coupling = GaussianPenalty().coupling(feature)
    if low_rank:
        coupling = LowRankCoupling(
            positive, positive, nonnegative=True, positive_semidefinite=True
        )
    dense = coupling.to_dense()
    expected = (
        torch.linalg.inv(1.2 * torch.diag_embed(dense.sum(2)) - dense)
        .diagonal(dim1=1, dim2=2)
        .t()
    )
    agree(posterior_variance(coupling, 0.2), expected, [feature], (1e-9, 1e-9))


def test_single_precision_is_computed_in_double():
    feature = FEATURE.float()
    single, double = (
        LowRankCoupling(f, f, nonnegative=True, positive_semidefinite=True)
        for f in (feature, feature.double())
    )
    got = posterior_variance(single, 1e-3)
    assert got.dtype == torch.float32
    assert_close(got, posterior_variance(double, 1e-3).float(), rtol=1e-6, atol=0)
    rounded = (
        SigmoidPenalty().coupling(X.float()),
        SigmoidPenalty().coupling(X.float().double()),
    )
    # Its entries are rounded by 1e-7, too.
    got, expected = (posterior_variance(coupling, 1e-7) for coupling in rounded)
    assert_close(got, expected.float(), rtol=1e-6, atol=0)
    none = FEATURE[:0]
    assert posterior_variance(
        LowRankCoupling(none, none, nonnegative=True, positive_semidefinite=True),
        0.1,
    ).shape == (0, 2)


Z = randn(11, 2, 3) / 4
OMEGA = SigmoidPenalty().coupling(Z)
UNSIGNED = LowRankCoupling(Z, Z, positive_semidefinite=True)
FALSE = LowRankCoupling(
    *2 * [randn(12, 1, 3)], symmetric=True, nonnegative=True
) + ring(12)
PAIR = SparseCoupling(Graph(3, torch.tensor([[0, 1], [1, 0]])), nonnegative=True)
MANY = SparseCoupling(Graph(5000, torch.arange(5000).expand(2, -1)), nonnegative=True)
test_refusals = refuses(
    (lambda: posterior_variance(UNSIGNED, 0.1), CouplingMismatchError, "nonnegative"),
    (
        lambda: posterior_variance(MANY, 0.1),
        CouplingMismatchError,
        "16,777,216 entries",
    ),
    (lambda: posterior_variance(PAIR, 0.1), SingularSystemError, "zero row"),
    (
        lambda: posterior_variance(FALSE, 0.01),
        SingularSystemError,
        "row sums|cannot invert",
    ),
    (lambda: posterior_variance(OMEGA, 1e-18), SingularSystemError, "Raise the leak"),
    (lambda: posterior_variance(KINDS["simple"](), 1e-18), SingularSystemError, "leak"),
)
