"""Proposition 4 with the smallest non-zero eigenvalue (corrected): both rates hold, and the upper one is useful."""

import math
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
import torch
from energy_cases import from_dense, laplacian
from torch import Tensor

from diffusion_mp.couplings import LowRankCoupling, SparseCoupling
from diffusion_mp.energies import GaussianPenalty, energy_bounds, spectrum
from diffusion_mp.energies.spectrum import (
    extreme_eigenvalues,
    largest_eigenvalue,
    spectral_interval,
)
from diffusion_mp.testing.problems import path_problem
from energy_forms import Explicit

dense_or_lanczos = pytest.mark.parametrize("dense_nodes", [5, 256], ids=["lanczos", "dense"])


@pytest.mark.parametrize("reach", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("cycle", [True, False])
def test_bounds_hold(reach: float, cycle: bool, symmetric_graph, ball, uniform, size) -> None:
    for _ in range(30):
        s = symmetric_graph(size(3, 15), 0.15 if not cycle else 0.3, cycle=cycle)
        probe = energy_bounds(s, 1e-3)
        if probe.largest == 0:
            continue
        tau = reach / probe.largest
        bounds = energy_bounds(s, tau)
        assert 0 <= bounds.lower <= bounds.upper < 1
        energy = Explicit("quadratic", uniform(0.1, 5), coupling=s)
        states = [ball(s.num_nodes, 3)]
        for _ in range(4):
            states.append(states[-1] - tau * laplacian(s) @ states[-1])
        values = [float(energy(new, old)) for old, new in pairwise(states)]
        for before, after in pairwise(values):
            assert bounds.lower * before - 1e-12 <= after <= bounds.upper * before + 1e-12


def test_bounds_are_reached(symmetric_graph) -> None:
    """By the eigenvectors at either end of the non-zero spectrum. The printed upper rate is 1 and bounds nothing."""
    s = symmetric_graph(10)
    eigenvalues, vectors = torch.linalg.eigh(laplacian(s))
    assert eigenvalues[0].abs() < 1e-12
    tau = 0.8 / float(eigenvalues[-1])
    bounds = energy_bounds(s, tau)
    assert bounds.upper == pytest.approx((1 - tau * float(eigenvalues[1])) ** 2)
    assert bounds.lower == pytest.approx((1 - tau * float(eigenvalues[-1])) ** 2)
    energy = Explicit("quadratic", 0.4, coupling=s)
    for column, rate in [(1, bounds.upper), (9, bounds.lower)]:
        x = vectors[:, column : column + 1]
        decay = 1 - tau * float(eigenvalues[column])
        first = energy(decay * x, x)
        second = energy(decay**2 * x, decay * x)
        assert float(second / first) == pytest.approx(rate)


def cliques(bridge: float, size: int = 6) -> Tensor:
    weight = torch.block_diag(*2 * [1 - torch.eye(size, dtype=torch.double)])
    weight[0, -1] = weight[-1, 0] = bridge
    return weight


def reached(weight: Tensor, tau: float, components: int) -> float:
    """The rate at which the slowest mode that decays at all does."""
    slowest = float(np.linalg.eigvalsh((weight.sum(1).diag() - weight).numpy())[components])
    return (1 - tau * slowest) ** 2


@dense_or_lanczos
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("weight", "components"),
    [
        (path_problem(20).matrix, 1),
        (cliques(1e-7), 1),
        (cliques(0.0), 2),
        (torch.block_diag(path_problem(20).matrix, torch.zeros(3, 3), cliques(1e-5)), 5),
    ],
    ids=["path", "bridge", "no bridge", "five components"],
)
def test_slow_modes_are_no_kernel(weight, components, dtype, dense_nodes, monkeypatch) -> None:
    """What does not decay at all is known by counting components; a threshold would take slow modes for it."""
    monkeypatch.setattr(spectrum, "DENSE_NODES", dense_nodes)
    weight = weight.to(dtype).double()
    bounds = energy_bounds(from_dense(weight.to(dtype)), 0.15)
    rate = reached(weight, 0.15, components)
    assert rate <= bounds.upper <= rate + 1e-9
    assert bounds.smallest_nonzero == pytest.approx((1 - rate**0.5) / 0.15, rel=1e-5, abs=1e-9)
    largest = float(np.linalg.eigvalsh((weight.sum(1).diag() - weight).numpy())[-1])
    assert bounds.largest == pytest.approx(largest, rel=1e-9)


def test_all_pairs_of_a_graph_are_joined(ball, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far apart two of them are: what cannot be told apart counts as one component, which is never too low."""
    x = torch.cat([ball(8, 2), ball(8, 2) + 3])
    for ptr, components in [(None, 1), (torch.tensor([0, 8, 16]), 2)]:
        omega = GaussianPenalty(0.5).coupling(x, ptr)
        dense = energy_bounds(omega, 0.05)
        assert dense.upper >= reached(omega.to_dense()[0], 0.05, components)
        with monkeypatch.context() as patch:
            patch.setattr(spectrum, "DENSE_NODES", 5)
            assert energy_bounds(omega, 0.05).upper == pytest.approx(dense.upper, rel=1e-9)


@dense_or_lanczos
def test_the_bounds_are_those_of_all_heads(
    dense_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first falls into two halves, so its slowest mode is faster than that of the second; the last has none."""
    monkeypatch.setattr(spectrum, "DENSE_NODES", dense_nodes)
    graph = path_problem(20).coupling.graph
    halved = 1.0 - (graph.edges < 10).sum(0).eq(1).double()
    heads = torch.stack([halved, 1.5 * torch.ones_like(halved), 0 * halved], 1)
    both, first, second = (
        energy_bounds(SparseCoupling(graph, weight, symmetric=True, nonnegative=True), 0.05)
        for weight in (heads, heads[:, :1], heads[:, 1:2])
    )
    assert first.smallest_nonzero > 2 * second.smallest_nonzero
    # The products of two heads may be summed in another order than those of one.
    assert astuple(both) == pytest.approx(astuple(second), rel=1e-12)


def test_refusals(generator: torch.Generator) -> None:
    q, k = (torch.rand(5, 1, 3, generator=generator) for _ in range(2))
    assert energy_bounds(path_problem(3).coupling, 1e300).upper == math.inf
    for coupling in (
        LowRankCoupling(q, k, nonnegative=True),
        LowRankCoupling(q - 1, q - 1, symmetric=True),
    ):
        with pytest.raises(ValueError, match="need a coupling that is symmetric and nonnegative"):
            energy_bounds(coupling, 0.1)


@pytest.mark.parametrize("rtol", [1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize("num_nodes", [300, 1000])
def test_lanczos_is_moved_outwards_by_its_tolerance(num_nodes: int, rtol: float) -> None:
    """It approaches the ends from inside the spectrum; a step bound or an interval from there would be too short."""
    matrix = spectrum.laplacian(path_problem(num_nodes).coupling, 0, "conservative")
    top = 4 * math.sin(math.pi * (num_nodes - 1) / (2 * num_nodes)) ** 2
    most = top * (
        1 + rtol + num_nodes * np.finfo(float).eps
    )  # sums over all nodes round, by processor and BLAS
    assert top <= largest_eigenvalue(matrix, rtol) <= most
    low, high = extreme_eigenvalues(matrix, rtol)
    assert top <= high <= most
    assert -4 * rtol * top <= low <= 0


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("num_nodes", [40, 400])
def test_interval_of_a_signed_coupling_holds_its_spectrum(num_nodes: int, form) -> None:
    matrix = path_problem(num_nodes).matrix.clone()
    matrix[0, 1] = matrix[1, 0] = -0.5
    coupling = from_dense(matrix, nonnegative=False)
    eigenvalues = np.linalg.eigvalsh(laplacian(coupling, form).numpy())
    low, high = spectral_interval(coupling, form)
    room = 1e-12 if num_nodes <= 256 else 0.0  # a dense solver has no tolerance, only rounding
    assert eigenvalues[0] - 1e-7 <= low <= eigenvalues[0] + room
    assert eigenvalues[-1] - room <= high <= eigenvalues[-1] + 1e-7
