"""Proposition 4 with the smallest non-zero eigenvalue (corrected): both rates hold, and the upper one is useful."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from energy_cases import from_dense, laplacian

from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.energies import spectrum
from diffusion_mp.energies.spectrum import (
    extreme_eigenvalues,
    largest_eigenvalue,
    spectral_interval,
)
from diffusion_mp.graph import Graph
from diffusion_mp.testing.problems import path_problem
from energy_forms import Explicit


@pytest.mark.parametrize("reach", [0.3, 1.0])
def test_proposition_4_holds_with_the_smallest_nonzero_eigenvalue(
    reach, symmetric_graph, ball, size
):
    """E falls by a factor between (1 − τλ₁)² and (1 − τμ)²; printed is μ = 0, which bounds nothing (D10)."""
    for _ in range(30):
        s = symmetric_graph(size(3, 15))
        eigenvalues = torch.linalg.eigvalsh(laplacian(s))
        assert eigenvalues[0].abs() < 1e-12
        tau = reach / float(eigenvalues[-1])
        upper, lower = ((1 - tau * eigenvalues[[1, -1]]) ** 2).tolist()
        energy = Explicit("quadratic", 0.7, coupling=s)
        states = [ball(s.num_nodes, 3)]
        for _ in range(4):
            states.append(states[-1] - tau * laplacian(s) @ states[-1])
        values = [float(energy(new, old)) for old, new in pairwise(states)]
        for before, after in pairwise(values):
            assert lower * before - 1e-12 <= after <= upper * before + 1e-12


@pytest.mark.parametrize("rtol", [1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize("num_nodes", [300, 1000])
def test_lanczos_is_moved_outwards_by_its_tolerance(num_nodes, rtol):
    """It approaches the ends from inside the spectrum; a step bound or an interval from there would be too short."""
    matrix = spectrum.laplacian(path_problem(num_nodes).coupling, 0, "conservative")
    top = 4 * math.sin(math.pi * (num_nodes - 1) / (2 * num_nodes)) ** 2
    # Sums over all nodes round, by processor and BLAS.
    most = top * (1 + rtol + num_nodes * np.finfo(float).eps)
    assert top <= largest_eigenvalue(matrix, rtol) <= most
    low, high = extreme_eigenvalues(matrix, rtol)
    assert top <= high <= most
    assert -4 * rtol * top <= low <= 0


def test_the_radius_of_a_star_is_bounded_closer_than_by_row_sums():
    leaf = torch.arange(1, 101)
    edges = torch.stack([leaf, torch.zeros_like(leaf)])
    star = Graph(101, torch.cat([edges, edges.flip(0)], 1))
    coupling = AdjacencyDiffusivity("sym")(torch.zeros(101, 1), star)
    # Its radius is one, and its largest row sum ten.
    assert 1.0 <= spectrum.spectral_radius_bound(coupling) < 1.3


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("num_nodes", [40, 400])
def test_interval_of_a_signed_coupling_holds_its_spectrum(num_nodes, form):
    matrix = path_problem(num_nodes).matrix.clone()
    matrix[0, 1] = matrix[1, 0] = -0.5
    coupling = from_dense(matrix, nonnegative=False)
    eigenvalues = np.linalg.eigvalsh(laplacian(coupling, form).numpy())
    low, high = spectral_interval(coupling, form)
    room = (
        1e-12 if num_nodes <= 256 else 0.0
    )  # a dense solver has no tolerance, only rounding
    assert eigenvalues[0] - 1e-7 <= low <= eigenvalues[0] + room
    assert eigenvalues[-1] - room <= high <= eigenvalues[-1] + 1e-7
