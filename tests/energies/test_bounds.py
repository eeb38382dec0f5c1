"""Proposition 4 with the smallest non-zero eigenvalue (corrected): both rates hold, and the upper one is useful."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from diffusion_mp.couplings import LowRankCoupling
from diffusion_mp.energies import Energy, QuadraticPenalty, energy_bounds, spectrum


@pytest.mark.parametrize("reach", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("cycle", [True, False])
def test_bounds_hold(reach: float, cycle: bool, symmetric_graph, ball, uniform, size) -> None:
    """For connected and broken graphs, any λ, within 1/λ₁ and up to 2/λ₁."""
    for _ in range(30):
        s = symmetric_graph(size(3, 15), 0.15 if not cycle else 0.3, cycle=cycle)
        probe = energy_bounds(s, 1e-3)
        if probe.largest == 0:
            continue
        tau = reach / probe.largest
        bounds = energy_bounds(s, tau)
        assert 0 <= bounds.lower <= bounds.upper < 1
        laplacian = torch.diag(s.degree()[:, 0]) - s.to_dense()[0]
        energy = Energy("quadratic", uniform(0.1, 5), coupling=s)
        states = [ball(s.num_nodes, 3)]
        for _ in range(4):
            states.append(states[-1] - tau * laplacian @ states[-1])
        values = [float(energy(new, old)) for old, new in pairwise(states)]
        for before, after in pairwise(values):
            assert bounds.lower * before - 1e-12 <= after <= bounds.upper * before + 1e-12


def test_bounds_are_reached(symmetric_graph) -> None:
    """By the eigenvectors at either end of the non-zero spectrum. The printed upper rate is 1 and bounds nothing."""
    s = symmetric_graph(10)
    eigenvalues, vectors = torch.linalg.eigh(torch.diag(s.degree()[:, 0]) - s.to_dense()[0])
    assert eigenvalues[0].abs() < 1e-12
    tau = 0.8 / float(eigenvalues[-1])
    bounds = energy_bounds(s, tau)
    assert bounds.upper == pytest.approx((1 - tau * float(eigenvalues[1])) ** 2)
    assert bounds.lower == pytest.approx((1 - tau * float(eigenvalues[-1])) ** 2)
    energy = Energy("quadratic", 0.4, coupling=s)
    for column, rate in [(1, bounds.upper), (9, bounds.lower)]:
        x = vectors[:, column : column + 1]
        decay = 1 - tau * float(eigenvalues[column])
        first, second = energy(decay * x, x), energy(decay**2 * x, decay * x)
        assert float(second / first) == pytest.approx(rate)


def test_lanczos_finds_the_same_ends(symmetric_graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel of several dimensions too, one for every component."""
    s = symmetric_graph(40, 0.02, cycle=False)
    dense = energy_bounds(s, 0.01)
    monkeypatch.setattr(spectrum, "DENSE_NODES", 5)
    lanczos = energy_bounds(s, 0.01)
    assert lanczos.largest == pytest.approx(dense.largest, rel=1e-9)
    assert lanczos.smallest_nonzero == pytest.approx(dense.smallest_nonzero, rel=1e-6)


def test_refusals(ball, generator: torch.Generator) -> None:
    q, k = (torch.rand(5, 1, 3, generator=generator) for _ in range(2))
    with pytest.raises(ValueError, match="need a coupling that is symmetric and nonnegative"):
        energy_bounds(LowRankCoupling(q, k), 0.1)
    with pytest.raises(ValueError, match="tau must be finite and > 0"):
        energy_bounds(QuadraticPenalty().coupling(ball(4, 2)), 0.0)
