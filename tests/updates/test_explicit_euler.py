"""The explicit step: its formula in both forms, its order, and what it costs."""

import pytest
import torch
from torch.testing import assert_close

from diffusion_mp.testing.problems import exact_problems, random_problem
from diffusion_mp.updates import ExplicitEuler


@pytest.mark.parametrize("problem", exact_problems(), ids=lambda problem: problem.name)
@pytest.mark.parametrize(
    ("beta", "leak"), [(0.0, 0.0), (0.7, 0.0), (0.0, 0.3), (0.7, 0.3)]
)
def test_node_by_node(problem, beta, leak):
    x = problem.state
    s = problem.matrix
    tau = 0.1
    values = x.flip(0)
    source = x.roll(1, 0)
    expected = torch.empty_like(x)
    for i in range(x.size(0)):
        d = s[i].sum() if problem.form == "conservative" else 1.0
        moved = sum(s[i, j] * values[j] for j in range(x.size(0)))
        expected[i] = (
            (1 - tau * (d + leak)) * x[i] + tau * moved + tau * beta * source[i]
        )
    step = ExplicitEuler(tau, problem.form, beta=beta, leak=leak)
    assert_close(step(x, problem.coupling, values, source if beta else None), expected)


def test_gcn_step_keeps_roots_of_degrees_not_constants():
    """With S = D^-½AD^-½, √d is the kernel of I − S, whose energy the residual step descends (D4 in docs/errata.md)."""
    problem = random_problem(form="residual")
    step = ExplicitEuler(0.5, "residual")
    root = random_problem().matrix.sum(1).sqrt()[:, None, None]
    assert_close(step(root, problem.coupling), root)
    ones = torch.ones_like(root)
    assert (step(ones, problem.coupling) - ones).abs().max() > 1e-2
