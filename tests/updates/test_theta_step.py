"""What the steps with θ ≥ ½ have in common: none expands a state, however long it is."""

import pytest

from diffusion_mp.testing.problems import random_problem
from diffusion_mp.updates import CrankNicolson, ImplicitEuler


@pytest.mark.parametrize("tau", [0.1, 1.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("form", ["conservative", "residual"])
@pytest.mark.parametrize("step", [ImplicitEuler, CrankNicolson])
def test_never_expands(step, form, tau):
    problem = random_problem(form=form)
    x, rounding = problem.state, 1e-11 + 1e-14 * tau  # the condition number grows with τ
    for _ in range(3):
        after = step(tau, problem.form)(x, problem.coupling)
        assert (after.norm(dim=0) <= x.norm(dim=0) * (1 + rounding)).all()
        x = after
