"""Depth 256: neither no source nor a pure source keeps nodes apart, a source with a leak does (D22, docs/errata.md)."""

import torch

from diffusion_mp.testing.problems import Problem, random_problem
from diffusion_mp.updates import Equilibrium, ExplicitEuler

DEPTH = 256


def spread(x: torch.Tensor) -> float:
    """1 − mean cosine between the states of two different nodes."""
    unit = torch.nn.functional.normalize(x.flatten(1), dim=1)
    n = unit.size(0)
    return 1.0 - float((unit.sum(0).square().sum() - n) / (n * (n - 1)))


def system() -> Problem:
    """A connected random graph of 60 nodes, S = D^-½AD^-½, in the conservative form (Eq. 6); features share a mean."""
    normalised = random_problem(60, "residual").matrix
    state = torch.randn(60, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1.0
    return Problem("over-smoothing", normalised, state)


def run(update: ExplicitEuler, depth: int) -> torch.Tensor:
    problem = system()
    x, coupling = problem.state, problem.coupling
    for _ in range(depth):
        x = update(x, coupling, source=problem.state)
    return x


def test_without_a_source_the_directions_collapse() -> None:
    update = ExplicitEuler(0.5)
    assert spread(run(update, 1)) > 0.05
    assert spread(run(update, DEPTH)) < 1e-6


def test_with_a_pure_source_they_collapse_too_and_the_state_runs_off() -> None:
    update = ExplicitEuler(0.5, beta=0.5)
    assert spread(run(update, DEPTH)) < 0.01 * spread(run(update, 1))
    growth = [float(run(update, depth).norm(dim=2).mean()) for depth in (1, DEPTH // 2, DEPTH)]
    assert growth[2] > 10 * growth[0]
    assert 1.8 < growth[2] / growth[1] < 2.2  # linearly, along the constants


def test_with_source_and_leak_they_stay_apart() -> None:
    update = ExplicitEuler(0.5, beta=0.5, leak=0.5)
    deep = run(update, DEPTH)
    assert spread(deep) > 0.1 * spread(run(update, 1))
    problem = system()
    limit = Equilibrium(beta=0.5, leak=0.5)(problem.state, problem.coupling)
    torch.testing.assert_close(deep, limit, rtol=1e-10, atol=1e-10)
