"""The variance of a node against an inverse and samples; Theorem T6 at steady states and elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusion_mp import posterior_variance
from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    LowRankCoupling,
    SparseCoupling,
    UniformCoupling,
    row_normalized,
)
from diffusion_mp.diagnostics import smoothing_floor
from diffusion_mp.diffusivities import GaussianDiffusivity, SimpleDiffusivity
from diffusion_mp.energies import (
    GaussianPenalty,
    Penalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    get_constraint,
)
from diffusion_mp.errors import CouplingMismatchError, SingularSystemError
from diffusion_mp.graph import Graph
from diffusion_mp.testing.problems import path_problem
from diffusion_mp.updates import Equilibrium

DOUBLE = torch.float64
PTR = torch.tensor([0, 4, 4, 5, 30])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


FEATURE, X = random(30, 2, 6).abs(), random(30, 4, seed=1)


def ring(size: int = 30) -> SparseCoupling:
    node = torch.arange(size)
    edges = torch.stack([node, node.roll(1)])
    weight = random(size, seed=2).exp().repeat(2)
    return SparseCoupling(Graph(size, torch.cat([edges, edges.flip(0)], 1), weight), nonnegative=True)


KINDS: dict[str, Callable[[], Coupling]] = {
    "low-rank": lambda: LowRankCoupling(FEATURE, FEATURE, symmetric=True, nonnegative=True),
    "ragged": lambda: LowRankCoupling(FEATURE, FEATURE, PTR, symmetric=True, nonnegative=True),
    "simple": lambda: SimpleDiffusivity(heads=2, row_stochastic=False)(X),
    "gaussian": lambda: GaussianDiffusivity(normalize=None, measure="distance", row_stochastic=False)(X),
    "ring": ring,
    "both": lambda: 0.5 * LowRankCoupling(FEATURE, FEATURE, symmetric=True, nonnegative=True) + ring(),
    "with-loops": lambda: (
        LowRankCoupling(FEATURE, FEATURE, PTR, symmetric=True, nonnegative=True)
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


def test_is_the_variance_of_samples_whose_mean_is_the_steady_state() -> None:
    """x = Q⁻¹(βD̄h) + L⁻ᵀ ε for Q = LLᵀ."""
    coupling, leak, h = KINDS["both"](), 0.3, random(30, 2, 1, seed=3)
    root = np.linalg.cholesky(precision_matrix(coupling, leak)[0])
    mean = Equilibrium("residual", beta=0.5, leak=leak)(h, row_normalized(coupling))[:, 0]
    matrix = torch.from_numpy(root @ root.T)
    torch.testing.assert_close(matrix @ mean, 0.5 * coupling.degree()[:, :1] * h[:, 0])
    samples = np.linalg.solve(root.T, np.random.default_rng(0).standard_normal((30, 40_000)))
    variance = posterior_variance(coupling, leak)[:, 0]
    torch.testing.assert_close(torch.from_numpy(samples.var(1)), variance, rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", ["low", "pairs"])
def test_gradients_are_those_of_the_inverse(kind: str) -> None:
    feature = random(9, 1, 3, seed=4).requires_grad_()

    def coupling() -> Coupling:
        if kind == "pairs":
            return GaussianDiffusivity(normalize=None, measure="distance", row_stochastic=False)(feature[:, 0])
        positive = feature.abs()
        return LowRankCoupling(positive, positive, symmetric=True, nonnegative=True)

    dense = coupling().to_dense()
    expected = torch.linalg.inv(1.2 * torch.diag_embed(dense.sum(2)) - dense).diagonal(dim1=1, dim2=2).t()
    weight = random(9, 1, seed=5)
    got = torch.autograd.grad((posterior_variance(coupling(), 0.2) * weight).sum(), feature)
    torch.testing.assert_close(got, torch.autograd.grad((expected * weight).sum(), feature), rtol=1e-9, atol=1e-9)


def test_single_precision_is_computed_in_double() -> None:
    feature = FEATURE.float()
    coupling = LowRankCoupling(feature, feature, symmetric=True, nonnegative=True)
    double = LowRankCoupling(*2 * [feature.double()], symmetric=True, nonnegative=True)
    got = posterior_variance(coupling, 1e-3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, posterior_variance(double, 1e-3).float(), rtol=1e-6, atol=0)


def test_no_node() -> None:
    nothing = torch.zeros(0, 2, 3)
    assert posterior_variance(LowRankCoupling(nothing, nothing, symmetric=True, nonnegative=True), 0.1).shape == (0, 2)


@pytest.mark.usefixtures("no_typecheck")
def test_refusals() -> None:
    with pytest.raises(CouplingMismatchError, match=r"symmetric and nonnegative.*Make it with row_stochastic=False"):
        posterior_variance(SimpleDiffusivity()(X), 0.1)
    with pytest.raises(CouplingMismatchError, match="symmetric and nonnegative"):
        posterior_variance(LowRankCoupling(FEATURE, FEATURE, symmetric=True), 0.1)
    with pytest.raises(SingularSystemError, match="got a zero row"):
        posterior_variance(SparseCoupling(Graph(3, torch.tensor([[0, 1], [1, 0]])), nonnegative=True), 0.1)
    with pytest.raises(ValueError, match="leak must be finite and > 0"):
        posterior_variance(ring(), 0.0)
    with pytest.raises(TypeError, match="coupling must be a Coupling"):
        posterior_variance(torch.eye(3), 0.1)  # type: ignore[arg-type]
    query = random(12, 1, 3)
    false = LowRankCoupling(query, query, symmetric=True, nonnegative=True) + ring(12)
    with pytest.raises(SingularSystemError, match=r"positive row sums|not positive definite"):
        posterior_variance(false, 0.01)
    many = SparseCoupling(Graph(5000, torch.arange(5000).expand(2, -1)), nonnegative=True)
    with pytest.raises(CouplingMismatchError, match=r"densely, up to 16,777,216 entries; got 25,000,000\. Take"):
        posterior_variance(many, 0.1)


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
            d, rows = weight[start:stop], x[start:stop, head]
            off = torch.eye(len(d), dtype=x.dtype) - torch.ones(len(d), 1, dtype=x.dtype) * d / d.sum()
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


def test_any_state_is_above_what_its_residual_leaves() -> None:
    omega, h = GaussianPenalty(0.3).coupling(draw(0), BATCH), draw(1)
    for leak in (0.0, 0.3):
        near = steady(omega, h, 0.5, 0.3) + 1e-2 * draw(3)
        for state in (near, draw(4), torch.zeros_like(h)):
            found = smoothing_floor(omega, state, h, beta=0.5, leak=leak)
            assert found.spread >= found.floor >= 0
    assert smoothing_floor(omega, torch.zeros_like(h), h).floor == 0


def test_the_roughest_source_reaches_it() -> None:
    """Two nodes that hardly hear themselves: 2 is nearly the eigenvalue of I − Ŝ, so no larger floor would hold."""
    problem = path_problem(2)
    h = torch.tensor([[[1.0]], [[-1.0]]], dtype=torch.float64)
    z = h / (2 + 0.1)
    found = smoothing_floor(problem.coupling, z, h, leak=0.1)
    assert found.spread == pytest.approx(found.floor, rel=1e-12)
    assert found.residual < 1e-12


def test_one_graph_of_rows_and_channels() -> None:
    x = draw(0)[:, 0]
    found = smoothing_floor(SigmoidPenalty().coupling(x), x, x.float())
    assert found.spread == pytest.approx(found.source, rel=1e-6)


def test_a_node_that_nobody_sends_to_weighs_nothing() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    omega = SparseCoupling(Graph(3, edges), torch.ones(2, dtype=torch.float64), symmetric=True, nonnegative=True)
    x = torch.tensor([[1.0], [3.0], [100.0]], dtype=torch.float64)
    assert smoothing_floor(omega, x, x).spread == pytest.approx(2**0.5)
    assert smoothing_floor(0.0 * omega, x, x).spread == 0


def test_refusals_of_the_floor(no_typecheck: None) -> None:
    x = draw(0)
    with pytest.raises(ValueError, match=r"source must have the shape \[11, 2, 3\] of the state x"):
        smoothing_floor(SigmoidPenalty().coupling(x), x, x[..., :2])
    with pytest.raises(CouplingMismatchError, match="symmetric and nonnegative.*got Pairwise"):
        smoothing_floor(SigmoidPenalty().coupling(x, normalize=True), x, x)
    with pytest.raises(CouplingMismatchError, match="got LowRankCoupling"):
        smoothing_floor(LowRankCoupling(x, x, symmetric=True), x, x)
    with pytest.raises(ValueError, match="leak must be finite and >= 0"):
        smoothing_floor(SigmoidPenalty().coupling(x), x, x, leak=-1.0)
    with pytest.raises(ValueError, match="source must have 11 rows"):
        smoothing_floor(SigmoidPenalty().coupling(x), x, x[:3])
