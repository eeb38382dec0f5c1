"""Laws that updates obey beyond `check_update`: linear, conserving, blind to graphs of other sizes in a batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import diffusion_mp as dm
from diffusion_mp.couplings import SparseCoupling
from diffusion_mp.energies import QuadraticPenalty
from diffusion_mp.graph import Graph
from diffusion_mp.testing import check_update
from diffusion_mp.testing.problems import Problem, cycle_problem, grid_problem, path_problem, random_problem
from diffusion_mp.updates.base import Positive
from diffusion_mp.updates.implicit import SolvedUpdate

FLOWS = [dm.ExplicitEuler(0.05), dm.ImplicitEuler(3.0), dm.CrankNicolson(3.0), dm.HeatKernel(2.0)]
CONSERVING = [*FLOWS, dm.Backtracking(QuadraticPenalty(), tau=0.1)]
LINEAR = [
    *FLOWS,
    *(dm.ExplicitEuler(0.3, "residual"), dm.ExplicitEuler(0.05, beta=0.7, leak=0.2), dm.HeatKernel(2.0, "residual")),
    *(step(3.0, "residual", beta=0.7, leak=0.2) for step in (dm.ImplicitEuler, dm.CrankNicolson)),
    *(dm.Equilibrium(leak=0.1), dm.Equilibrium("residual", beta=0.7, leak=0.2)),
    *(dm.CertifiedStep(beta) for beta in (0.0, 0.7)),
]
MOMENTUM = [dm.MomentumStep(0.3, 0.5, 3, "residual"), dm.MomentumStep(0.3, 0.5, steps=1)]
CONFINED = [dm.CertifiedStep(0.7, constraint=constraint) for constraint in ("nonnegative", "ball", "sphere")]
LEARNED = [dm.ExplicitEuler(nn.Parameter(torch.tensor(0.5))), dm.ExplicitEuler(Positive(0.3), beta=0.7)]
LEARNED.append(dm.CertifiedStep(Positive()))
ALL = [*LINEAR, *CONFINED, dm.Backtracking(QuadraticPenalty(), tau=0.1)]


def source_for(update: dm.StateUpdate, x: torch.Tensor) -> torch.Tensor | None:
    return x.roll(1, 0) if update.beta else None


@pytest.mark.parametrize("update", [*ALL, *LEARNED, *MOMENTUM], ids=repr)
def test_the_laws_for_everybody(update: dm.StateUpdate) -> None:
    searches = isinstance(update, (SolvedUpdate, dm.Backtracking))
    reason = "a search over the batch says that there is a NaN"
    check_update(update, skip={"poisoned batch mate": reason} if searches else {})


@pytest.mark.parametrize("update", CONSERVING, ids=repr)
@pytest.mark.parametrize("problem", [path_problem(), cycle_problem(), random_problem()], ids=lambda p: p.name)
def test_the_mean_is_kept(update: dm.StateUpdate, problem: Problem) -> None:
    after = update(problem.state, problem.coupling)
    torch.testing.assert_close(after.mean(0), problem.state.mean(0), rtol=1e-10, atol=1e-11)
    assert (after - problem.state).abs().max() > 1e-2


@pytest.mark.parametrize("update", LINEAR, ids=repr)
def test_linear_in_state_and_source(update: dm.StateUpdate) -> None:
    problem = random_problem(14, getattr(update, "form", "conservative"))
    x, y = problem.state, problem.state.flip(0)

    def apply(x: torch.Tensor) -> torch.Tensor:
        return update(x, problem.coupling, source=source_for(update, x))

    torch.testing.assert_close(apply(2.0 * x - 3.0 * y), 2.0 * apply(x) - 3.0 * apply(y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("update", [*ALL, dm.Backtracking(QuadraticPenalty(), tau=3.0)], ids=repr)
def test_a_graph_of_another_size_in_a_batch_is_a_graph_alone(update: dm.StateUpdate) -> None:
    form = getattr(update, "form", "conservative")
    parts = [path_problem(5, form), random_problem(13, form), grid_problem(2, 3, form)]
    x = torch.cat([part.state for part in parts])
    matrix = torch.block_diag(*(part.matrix for part in parts))
    receiver, sender = matrix.nonzero(as_tuple=True)
    sizes = torch.tensor([part.state.size(0) for part in parts])
    graph = Graph(len(x), torch.stack([sender, receiver]), batch=torch.repeat_interleave(torch.arange(3), sizes))
    coupling = SparseCoupling(graph, matrix[receiver, sender], symmetric=True, nonnegative=True)
    source = torch.cat([source_for(update, part.state) for part in parts]) if update.beta else None
    together = update(x, coupling, source=source)
    alone = [update(part.state, part.coupling, source=source_for(update, part.state)) for part in parts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("update", ALL, ids=repr)
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_without_edges_conservative_forms_leave_the_state_alone(update: dm.StateUpdate, num_nodes: int) -> None:
    x = torch.ones(num_nodes, 1, 2, dtype=torch.float64)
    coupling = SparseCoupling(Graph(num_nodes), x.new_zeros(0, 1), symmetric=True, nonnegative=True)
    got = update(x, coupling, source=x if update.beta else None)
    assert got.shape == x.shape
    assert torch.isfinite(got).all()
    if update in CONSERVING:
        assert torch.equal(got, x)


@pytest.mark.parametrize("update", [*ALL, *LEARNED], ids=repr)
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
