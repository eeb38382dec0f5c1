"""exp(−tΔ) against SciPy's matrix exponential and against modes known in closed form."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm

from diffusion_mp.couplings import IdentityCoupling, LowRankCoupling, SparseCoupling
from diffusion_mp.energies.spectrum import laplacian_extremes, spectral_interval, spectral_radius_bound
from diffusion_mp.graph import Graph
from diffusion_mp.testing.problems import (
    Problem,
    complete_problem,
    cosine_mode,
    exact_problems,
    path_problem,
    problem_on_graph,
    random_problem,
)
from diffusion_mp.updates import HeatKernel
from diffusion_mp.updates.heat_kernel import chebyshev_weights


@pytest.mark.parametrize("t", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
def test_equals_the_matrix_exponential(problem: Problem, t: float) -> None:
    got = HeatKernel(t, problem.form)(problem.state, problem.coupling)
    assert (got - problem.heat(t)).abs().max() <= 1e-8


def test_single_precision_reaches_its_own_resolution() -> None:
    problem = random_problem()
    coupling = SparseCoupling(problem.coupling.graph, problem.coupling.weight.float(), symmetric=True, nonnegative=True)
    got = HeatKernel(3.0)(problem.state.float(), coupling)
    assert got.dtype == torch.float32
    assert (got - problem.heat(3.0)).abs().max() < 1e-4


def test_half_precision_state_is_advanced_in_single() -> None:
    problem = path_problem()
    got = HeatKernel(3.0)(problem.state.bfloat16(), problem.coupling)
    assert got.dtype == torch.bfloat16
    assert (got - problem.heat(3.0)).abs().max() < 2e-2


@pytest.mark.parametrize("k", [0, 1, 5, 15])
def test_neumann_cosine_modes_decay_at_their_own_rate(k: int) -> None:
    mode, eigenvalue = cosine_mode(16, k)
    got = HeatKernel(2.0)(mode, path_problem(16).coupling)
    torch.testing.assert_close(got, math.exp(-2.0 * eigenvalue) * mode, rtol=1e-11, atol=1e-12)


def test_complete_graph_in_closed_form() -> None:
    problem = complete_problem(9)
    mean = problem.state.mean(0, keepdim=True)
    got = HeatKernel(0.1)(problem.state, problem.coupling)
    torch.testing.assert_close(got, mean + math.exp(-0.9) * (problem.state - mean), rtol=1e-12, atol=1e-12)


def test_signed_coupling_takes_its_interval_from_lanczos() -> None:
    problem = path_problem(260)

    matrix = problem.matrix.clone()
    matrix[0, 1] = matrix[1, 0] = -0.5
    receiver, sender = matrix.nonzero(as_tuple=True)
    graph = Graph(260, torch.stack([sender, receiver]))
    coupling = SparseCoupling(graph, matrix[receiver, sender], symmetric=True)
    laplacian = matrix.sum(1).diag() - matrix
    exact = torch.einsum("ij,jhd->ihd", torch.from_numpy(expm(-2.0 * laplacian.numpy())), problem.state)
    torch.testing.assert_close(HeatKernel(2.0)(problem.state, coupling), exact, rtol=1e-9, atol=1e-9)
    low, high = laplacian_extremes(coupling, "conservative")
    eigenvalues = np.linalg.eigvalsh(laplacian.numpy())
    assert low == pytest.approx(eigenvalues[0], abs=1e-7)
    assert high == pytest.approx(eigenvalues[-1], abs=1e-7)


def test_star_has_radius_one_though_its_largest_row_sum_is_ten() -> None:
    adjacency = torch.zeros(101, 101, dtype=torch.float64)
    adjacency[0, 1:] = adjacency[1:, 0] = 1.0
    problem = problem_on_graph("star", adjacency, "residual")
    assert problem.matrix.sum(1).max() == pytest.approx(10.0)
    assert 1.0 <= spectral_radius_bound(problem.coupling) < 1.6
    got = HeatKernel(20.0, "residual")(problem.state, problem.coupling)
    assert (got - problem.heat(20.0)).abs().max() <= 1e-8


@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
def test_interval_holds_the_spectrum(problem: Problem) -> None:
    low, high = spectral_interval(problem.coupling, problem.form)
    eigenvalues = torch.linalg.eigvalsh(problem.laplacian)
    assert low <= eigenvalues[0] + 1e-12
    assert high >= eigenvalues[-1] - 1e-12


@pytest.mark.parametrize("z", [1e-6, 0.3, 10.0, 1e4])
@pytest.mark.parametrize("tol", [1e-3, 1e-15])
def test_chebyshev_series_is_as_long_as_needed(z: float, tol: float) -> None:
    weights = chebyshev_weights(z, tol)
    points = np.cos(np.linspace(0, np.pi, 101))
    series = np.polynomial.chebyshev.chebval(points, weights)
    assert np.abs(series - np.exp(-z * (points + 1))).max() <= tol + 5e-14
    assert len(weights) <= 2 + 2 * math.sqrt(z * (math.log(1 / tol) + 5)) + 2 * (math.log(1 / tol) + 5)


def test_no_coupling_at_all_leaves_the_state_alone() -> None:
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    empty = SparseCoupling(Graph(4), symmetric=True, nonnegative=True)
    assert torch.equal(HeatKernel(2.0)(x, empty), x)
    torch.testing.assert_close(HeatKernel(2.0, "residual")(x, empty), math.exp(-2.0) * x)
    torch.testing.assert_close(HeatKernel(2.0)(x, IdentityCoupling(4)), x)


def test_gradients_in_state_and_edge_weights() -> None:
    problem = path_problem(5)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    graph = Graph(5, torch.cat([edges, edges.flip(0)], 1))

    def evolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        coupling = SparseCoupling(graph, weight.repeat(2), symmetric=True, nonnegative=True)
        return HeatKernel(0.7, tol=1e-10)(x, coupling)

    weight = torch.tensor([0.5, 1.0, 1.5, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(evolve, (problem.state[:, :1, :2].clone().requires_grad_(), weight))


def test_matrix_free_on_an_all_pair_coupling() -> None:
    generator = torch.Generator().manual_seed(0)
    feature = torch.rand(20, 2, 3, dtype=torch.float64, generator=generator)
    coupling = LowRankCoupling(feature, feature, symmetric=True, nonnegative=True)
    x = torch.randn(20, 2, 4, dtype=torch.float64, generator=generator)
    dense = coupling.to_dense()
    kernel = torch.linalg.matrix_exp(-0.3 * (torch.diag_embed(dense.sum(2)) - dense))
    torch.testing.assert_close(
        HeatKernel(0.3)(x, coupling), torch.einsum("hij,jhd->ihd", kernel, x), rtol=1e-10, atol=1e-10
    )
