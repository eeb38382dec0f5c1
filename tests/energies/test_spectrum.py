"""Ends of spectra: known in closed form for a path, and never too short an interval."""

import math

import numpy as np
import pytest
import torch

from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies.spectrum import extreme_eigenvalues, laplacian, largest_eigenvalue, spectral_interval
from diffusion_mp.graph import Graph
from diffusion_mp.testing.problems import path_problem


@pytest.mark.parametrize("rtol", [1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize("num_nodes", [300, 1000])
def test_lanczos_is_moved_outwards_by_its_tolerance(num_nodes: int, rtol: float) -> None:
    """It approaches the ends from inside the spectrum; a step bound or an interval from there would be too short."""
    matrix = laplacian(path_problem(num_nodes).coupling, 0, "conservative")
    top = 4 * math.sin(math.pi * (num_nodes - 1) / (2 * num_nodes)) ** 2
    most = top * (1 + rtol + num_nodes * np.finfo(float).eps)  # sums over all nodes round, by processor and BLAS
    assert top <= largest_eigenvalue(matrix, rtol) <= most
    low, high = extreme_eigenvalues(matrix, rtol)
    assert top <= high <= most
    assert -4 * rtol * top <= low <= 0


@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("num_nodes", [40, 400])
def test_interval_of_a_signed_coupling_holds_its_spectrum(num_nodes: int, form) -> None:
    matrix = path_problem(num_nodes).matrix.clone()
    matrix[0, 1] = matrix[1, 0] = -0.5
    receiver, sender = matrix.nonzero(as_tuple=True)
    graph = Graph(num_nodes, torch.stack([sender, receiver]))
    coupling = SparseCoupling(graph, matrix[receiver, sender], symmetric=True)
    diagonal = matrix.sum(1) if form == "conservative" else torch.ones(num_nodes, dtype=torch.float64)
    eigenvalues = np.linalg.eigvalsh((diagonal.diag() - matrix).numpy())
    low, high = spectral_interval(coupling, form)
    room = 1e-12 if num_nodes <= 256 else 0.0  # a dense solver has no tolerance, only rounding
    assert eigenvalues[0] - 1e-7 <= low <= eigenvalues[0] + room
    assert eigenvalues[-1] - room <= high <= eigenvalues[-1] + 1e-7
