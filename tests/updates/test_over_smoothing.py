"""Depth 256: neither no source nor a pure source keeps nodes apart, a source with a leak does (D22, docs/errata.md)."""

import torch

from diffusion_mp.testing.problems import Problem, random_problem
from diffusion_mp.updates import Equilibrium, ExplicitEuler
from helpers import close, randn

DEPTH = 256
#: A connected random graph of 60 nodes, S = D^-½AD^-½, in the conservative form (Eq. 6); features share a mean.
STATE = randn(60, 1, 8, seed=1) + 1.0
COUPLING = Problem(
    "over-smoothing", random_problem(60, "residual").matrix, STATE
).coupling


def spread(x):
    """1 − mean cosine between the states of two different nodes."""
    unit = torch.nn.functional.normalize(x.flatten(1), dim=1)
    n = unit.size(0)
    return 1.0 - float((unit.sum(0).square().sum() - n) / (n * (n - 1)))


def run(update, depth=DEPTH):
    x = STATE
    for _ in range(depth):
        x = update(x, COUPLING, source=STATE)
    return x


def test_a_source_with_a_leak_alone_keeps_directions_apart():
    assert spread(run(ExplicitEuler(0.5), 1)) > 0.05
    assert spread(run(ExplicitEuler(0.5))) < 1e-6
    pure = ExplicitEuler(0.5, beta=0.5)
    assert spread(run(pure)) < 0.01 * spread(run(pure, 1))
    growth = [
        float(run(pure, depth).norm(dim=2).mean()) for depth in (1, DEPTH // 2, DEPTH)
    ]
    assert growth[2] > 10 * growth[0]
    assert 1.8 < growth[2] / growth[1] < 2.2  # linearly, along the constants
    leaking = ExplicitEuler(0.5, beta=0.5, leak=0.5)
    assert spread(run(leaking)) > 0.1 * spread(run(leaking, 1))
    close(run(leaking), Equilibrium(beta=0.5, leak=0.5)(STATE, COUPLING))
