"""Every update, in each of its forms, obeys the laws of `check_update`, and says in its repr what was chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import diffusion_mp as dm
from diffusion_mp.energies import QuadraticPenalty
from diffusion_mp.testing import check_update
from diffusion_mp.testing.problems import Problem
from diffusion_mp.updates.base import Positive
from diffusion_mp.updates.implicit import SolvedUpdate

FIXED = [
    *(dm.ExplicitEuler(0.05), dm.ImplicitEuler(3.0), dm.CrankNicolson(3.0), dm.HeatKernel(2.0)),
    *(dm.ExplicitEuler(0.3, "residual"), dm.ExplicitEuler(0.05, beta=0.7, leak=0.2), dm.HeatKernel(2.0, "residual")),
    *(step(3.0, "residual", beta=0.7, leak=0.2) for step in (dm.ImplicitEuler, dm.CrankNicolson)),
    *(dm.Equilibrium(leak=0.1), dm.Equilibrium("residual", beta=0.7, leak=0.2)),
    *(dm.CertifiedStep(beta) for beta in (0.0, 0.7)),
    *(dm.CertifiedStep(0.7, constraint=constraint) for constraint in ("nonnegative", "ball", "sphere")),
    dm.Backtracking(QuadraticPenalty(), tau=0.1),
]
MOMENTUM = [dm.MomentumStep(0.3, 0.5, 3, "residual"), dm.MomentumStep(0.3, 0.5, steps=1)]
LEARNED = [dm.ExplicitEuler(nn.Parameter(torch.tensor(0.5))), dm.ExplicitEuler(Positive(0.3), beta=0.7)]
LEARNED.append(dm.CertifiedStep(Positive()))


@pytest.mark.parametrize("update", [*FIXED, *LEARNED, *MOMENTUM], ids=repr)
def test_the_laws_for_everybody(update: dm.StateUpdate) -> None:
    searches = isinstance(update, (SolvedUpdate, dm.Backtracking))
    reason = "a search over the batch says that there is a NaN"
    check_update(update, skip={"poisoned batch mate": reason} if searches else {})


@pytest.mark.parametrize("update", [*FIXED, *LEARNED], ids=repr)
def test_the_state_dict_has_what_is_learned_and_repr_names_the_choices(update: dm.StateUpdate) -> None:
    assert update in LEARNED or not update.state_dict()
    assert ("constraint=" if isinstance(update, dm.CertifiedStep) else "form=") in repr(update)


@given(num_nodes=st.integers(1, 8), seed=st.integers(0, 1000), density=st.floats(0.0, 1.0), leak=st.floats(0.05, 3.0))
def test_any_graph_ends_in_its_equilibrium(num_nodes: int, seed: int, density: float, leak: float) -> None:
    """Disconnected, isolated, with self-loops: an implicit step of enormous τ is the steady state."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(num_nodes, num_nodes, dtype=torch.float64, generator=generator)
    weight = weight * (torch.rand(num_nodes, num_nodes, generator=generator) < density)
    x = torch.randn(num_nodes, 1, 2, dtype=torch.float64, generator=generator)
    problem = Problem("any", weight + weight.T, x)
    limit = dm.Equilibrium(leak=leak)(x, problem.coupling)
    torch.testing.assert_close(limit, problem.steady_state(x, leak=leak), rtol=1e-9, atol=1e-9)
    step = dm.ImplicitEuler(1e9, beta=1.0, leak=leak)(x, problem.coupling, source=x)
    torch.testing.assert_close(step, limit, rtol=1e-6, atol=1e-6)
