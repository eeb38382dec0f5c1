"""The variance of a node against an inverse and samples; Theorem T6 at steady states and elsewhere."""

# ruff: noqa: F403, F405 (everything public)
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusion_mp import *
from diffusion_mp.couplings import (
    IdentityCoupling,
    LowRankCoupling,
    SparseCoupling,
    UniformCoupling,
)
from diffusion_mp.diagnostics import posterior_variance, smoothing_floor
from diffusion_mp.energies import get_constraint
from diffusion_mp.testing.problems import path_problem
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
        0.5 * LowRankCoupling(FEATURE, FEATURE, nonnegative=True, positive_semidefinite=True)
        + ring()
    ),
    "with-loops": lambda: (
        LowRankCoupling(FEATURE, FEATURE, PTR, nonnegative=True, positive_semidefinite=True)
        + 2.0 * IdentityCoupling(30, dtype=DOUBLE)
    ),
    "uniform": lambda: UniformCoupling(30, PTR, dtype=DOUBLE),
}


def precision_matrix(coupling: Coupling, leak: float) -> np.ndarray:
    omega = coupling.to_dense().numpy()
    return np.stack([(1 + leak) * np.diag(head.sum(1)) - head for head in omega])


@pytest.mark.parametrize("leak", [1e-4, 0.1, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_inverse(kind: str, leak: float) -> None:
    coupling = KINDS[kind]()
    inverse = np.linalg.inv(precision_matrix(coupling, leak))
    expected = torch.from_numpy(np.diagonal(inverse, axis1=1, axis2=2).T.copy())
    torch.testing.assert_close(posterior_variance(coupling, leak), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("low_rank", [True, False])
def test_gradients_are_those_of_the_inverse(low_rank: bool) -> None:
    feature = randn(9, 1, 3, seed=4).requires_grad_()
    positive = feature.abs()
    coupling = GaussianPenalty().coupling(feature)
    if low_rank:
        coupling = LowRankCoupling(positive, positive, nonnegative=True, positive_semidefinite=True)
    dense = coupling.to_dense()
    expected = (
        torch.linalg.inv(1.2 * torch.diag_embed(dense.sum(2)) - dense).diagonal(dim1=1, dim2=2).t()
    )
    agree(posterior_variance(coupling, 0.2), expected, [feature], (1e-9, 1e-9))


def test_single_precision_is_computed_in_double() -> None:
    feature = FEATURE.float()
    single, double = (
        LowRankCoupling(f, f, nonnegative=True, positive_semidefinite=True)
        for f in (feature, feature.double())
    )
    got = posterior_variance(single, 1e-3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, posterior_variance(double, 1e-3).float(), rtol=1e-6, atol=0)
    rounded = SigmoidPenalty().coupling(X.float()), SigmoidPenalty().coupling(X.float().double())
    got, expected = (
        posterior_variance(coupling, 1e-7) for coupling in rounded
    )  # its entries are rounded by 1e-7, too
    torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=0)
    none = FEATURE[:0]
    assert posterior_variance(
        LowRankCoupling(none, none, nonnegative=True, positive_semidefinite=True),
        0.1,
    ).shape == (0, 2)
    found = smoothing_floor(SigmoidPenalty().coupling(X), X, X.float())  # [N, C]
    assert found.spread == pytest.approx(found.source, rel=1e-6)


PENALTIES = [QuadraticPenalty(), SimplePenalty(), SigmoidPenalty(), GaussianPenalty(0.3)]
BATCH = torch.tensor([0, 4, 4, 11])


def draw(seed: int) -> Tensor:
    x = torch.randn(11, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / (1 + x.norm(dim=2, keepdim=True))


def steady(omega: Coupling, h: Tensor, beta: float, leak: float) -> Tensor:
    """(I − D̄⁻¹Ω + κ)⁻¹ βH, densely."""
    dense = omega.to_dense()
    system = (1 + leak) * torch.eye(len(h), dtype=h.dtype) - dense / dense.sum(2, keepdim=True)
    return torch.linalg.solve(system, beta * h.transpose(0, 1)).transpose(0, 1)


def projected(omega: Coupling, x: Tensor) -> float:
    """‖Πx‖_D̄, with Π as a matrix."""
    total = 0.0
    for head, weight in enumerate(omega.to_dense().sum(2)[: x.size(1)].expand(x.size(1), -1)):
        for start, stop in [(0, 4), (4, 11)]:
            d = weight[start:stop]
            rows = x[start:stop, head]
            off = (
                torch.eye(len(d), dtype=x.dtype)
                - torch.ones(len(d), 1, dtype=x.dtype) * d / d.sum()
            )
            total += float(torch.einsum("i,ic->", d, (off @ rows).square()))
    return total**0.5


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
@pytest.mark.parametrize(("beta", "leak"), [(1.0, 0.01), (-0.3, 0.5), (5.0, 10.0)])
def test_a_steady_state_is_above_its_floor(penalty: Penalty, beta: float, leak: float) -> None:
    for seed in range(5):
        omega = penalty.coupling(draw(seed), BATCH, constraint=get_constraint("ball"))
        h = draw(seed + 50)
        z = steady(omega, h, beta, leak)
        found = smoothing_floor(omega, z, h, beta=beta, leak=leak)
        assert found.spread == pytest.approx(projected(omega, z), rel=1e-10)
        assert found.source == pytest.approx(projected(omega, h), rel=1e-10)
        assert found.residual < 1e-10 * found.source * abs(beta)
        assert found.floor == pytest.approx(abs(beta) / (2 + leak) * found.source, rel=1e-9)
        assert found.spread >= found.floor


def test_states_and_nodes_at_the_ends() -> None:
    omega = GaussianPenalty(0.3).coupling(draw(0), BATCH)
    h = draw(1)
    for leak in (0.0, 0.3):
        near = steady(omega, h, 0.5, 0.3) + 1e-2 * draw(3)
        for state in (near, draw(4), torch.zeros_like(h)):
            found = smoothing_floor(omega, state, h, beta=0.5, leak=leak)
            assert found.spread >= found.floor >= 0
    assert smoothing_floor(omega, torch.zeros_like(h), h).floor == 0
    # Two nodes that hardly hear themselves: 2 is nearly the eigenvalue of I − Ŝ, so no larger floor would hold.
    problem = path_problem(2)
    h = torch.tensor([[[1.0]], [[-1.0]]], dtype=torch.float64)
    z = h / (2 + 0.1)
    found = smoothing_floor(problem.coupling, z, h, leak=0.1)
    assert found.spread == pytest.approx(found.floor, rel=1e-12)
    assert found.residual < 1e-12
    edges = torch.tensor([[0, 1], [1, 0]])
    omega = SparseCoupling(
        Graph(3, edges), torch.ones(2, dtype=torch.float64), symmetric=True, nonnegative=True
    )
    x = torch.tensor([[1.0], [3.0], [100.0]], dtype=torch.float64)
    assert smoothing_floor(omega, x, x).spread == pytest.approx(2**0.5)
    assert smoothing_floor(0.0 * omega, x, x).spread == 0


OMEGA = SigmoidPenalty().coupling(draw(0))
Z = draw(0)
NORMALIZED = SigmoidPenalty().coupling(Z, normalize=True)
UNSIGNED = LowRankCoupling(Z, Z, positive_semidefinite=True)
FALSE = LowRankCoupling(*2 * [randn(12, 1, 3)], symmetric=True, nonnegative=True) + ring(12)
PAIR = SparseCoupling(Graph(3, torch.tensor([[0, 1], [1, 0]])), nonnegative=True)
MANY = SparseCoupling(Graph(5000, torch.arange(5000).expand(2, -1)), nonnegative=True)
test_refusals = refuses(
    (
        lambda: posterior_variance(NORMALIZED, 0.1),
        CouplingMismatchError,
        r"nonnegative.* with row_stochastic=False",
    ),
    (lambda: posterior_variance(UNSIGNED, 0.1), CouplingMismatchError, "symmetric and nonnegative"),
    (lambda: posterior_variance(PAIR, 0.1), SingularSystemError, "got a zero row"),
    (
        lambda: posterior_variance(FALSE, 0.01),
        SingularSystemError,
        r"positive row sums|cannot invert",
    ),
    (
        lambda: posterior_variance(OMEGA, 1e-18),
        SingularSystemError,
        "rounding loses the leak. Raise the leak",
    ),
    (
        lambda: posterior_variance(KINDS["simple"](), 1e-18),
        SingularSystemError,
        "rounding loses the leak",
    ),
    (
        lambda: posterior_variance(MANY, 0.1),
        CouplingMismatchError,
        "up to 16,777,216 entries; got 25,000,000. Take",
    ),
    (
        lambda: smoothing_floor(OMEGA, Z, Z[..., :2]),
        ValueError,
        r"must have the shape \[11, 2, 3\] of the state x",
    ),
    (
        lambda: smoothing_floor(NORMALIZED, Z, Z),
        CouplingMismatchError,
        r"symmetric and nonnegative.*got Pairwise",
    ),
    (lambda: smoothing_floor(UNSIGNED, Z, Z), CouplingMismatchError, "got LowRankCoupling"),
    (lambda: smoothing_floor(OMEGA, Z, Z[:3]), ValueError, "source must have 11 rows"),
)
