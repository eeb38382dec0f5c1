"""The variance of a node, against NumPy's inverse and against samples of the field."""

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
from diffusion_mp.diffusivities import GaussianDiffusivity, SimpleDiffusivity
from diffusion_mp.errors import CouplingMismatchError, SingularSystemError
from diffusion_mp.graph import Graph
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
    with pytest.raises(SingularSystemError, match="a node that couples with nobody"):
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
