"""Laws that every update obeys: linear, permutation equivariant, and blind to the other graphs of a batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diffusion_mp.couplings import ScaledCoupling, SparseCoupling
from diffusion_mp.energies import QuadraticPenalty
from diffusion_mp.graph import Graph
from diffusion_mp.testing import check_update
from diffusion_mp.testing.problems import Problem, cycle_problem, grid_problem, path_problem, random_problem
from diffusion_mp.updates import (
    Backtracking,
    CertifiedStep,
    CrankNicolson,
    Equilibrium,
    ExplicitEuler,
    HeatKernel,
    ImplicitEuler,
    MomentumStep,
    StateUpdate,
)
from diffusion_mp.updates.base import Positive
from diffusion_mp.updates.implicit import SolvedUpdate

CONSERVING = [
    ExplicitEuler(0.05),
    ImplicitEuler(3.0),
    CrankNicolson(3.0),
    HeatKernel(2.0),
    Backtracking(QuadraticPenalty(), tau=0.1),
]
LINEAR = [
    ExplicitEuler(0.05),
    ExplicitEuler(0.3, "residual"),
    ExplicitEuler(0.05, beta=0.7, leak=0.2),
    ImplicitEuler(3.0),
    ImplicitEuler(3.0, "residual", beta=0.7, leak=0.2),
    CrankNicolson(3.0),
    CrankNicolson(3.0, "residual", beta=0.7, leak=0.2),
    HeatKernel(2.0),
    HeatKernel(2.0, "residual"),
    Equilibrium(leak=0.1),
    Equilibrium("residual", beta=0.7, leak=0.2),
    CertifiedStep(0.0),
    CertifiedStep(0.7),
]
CONFINED = [CertifiedStep(0.7, constraint=constraint) for constraint in ("nonnegative", "ball", "sphere")]
LEARNED = [
    ExplicitEuler(nn.Parameter(torch.tensor(0.5))),
    ExplicitEuler(Positive(0.3), beta=0.7),
    CertifiedStep(Positive()),
]
ALL = [*LINEAR, *CONFINED, Backtracking(QuadraticPenalty(), tau=0.1)]


def problem_for(update: StateUpdate, num_nodes: int = 14) -> Problem:
    return random_problem(num_nodes, getattr(update, "form", "conservative"))


def source_for(update: StateUpdate, x: torch.Tensor) -> torch.Tensor | None:
    return x.roll(1, 0) if getattr(update, "beta", 0.0) else None


@pytest.mark.parametrize(
    "update", [*ALL, *LEARNED, MomentumStep(0.3, 0.5, 3, "residual"), MomentumStep(0.3, 0.5, steps=1)], ids=repr
)
def test_the_laws_for_everybody(update: StateUpdate) -> None:
    searches = isinstance(update, (SolvedUpdate, Backtracking))
    check_update(
        update, skip={"poisoned batch mate": "a search over the batch says that there is a NaN"} if searches else {}
    )


@pytest.mark.parametrize("update", CONSERVING, ids=repr)
@pytest.mark.parametrize("problem", [path_problem(), cycle_problem(), random_problem()], ids=lambda p: p.name)
def test_a_constant_is_a_fixed_point_and_the_mean_is_kept(update: StateUpdate, problem: Problem) -> None:
    constant = torch.full_like(problem.state, 1.7)
    torch.testing.assert_close(update(constant, problem.coupling), constant, rtol=1e-11, atol=1e-11)
    after = update(problem.state, problem.coupling)
    torch.testing.assert_close(after.mean(0), problem.state.mean(0), rtol=1e-10, atol=1e-11)
    assert (after - problem.state).abs().max() > 1e-2


@pytest.mark.parametrize("update", LINEAR, ids=repr)
def test_linear_in_state_and_source(update: StateUpdate) -> None:
    problem = problem_for(update)
    x, y = problem.state, problem.state.flip(0)

    def apply(x: torch.Tensor) -> torch.Tensor:
        return update(x, problem.coupling, source=source_for(update, x))

    torch.testing.assert_close(apply(2.0 * x - 3.0 * y), 2.0 * apply(x) - 3.0 * apply(y), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("update", ALL, ids=repr)
def test_permutation_equivariant(update: StateUpdate) -> None:
    problem = problem_for(update)
    order = torch.randperm(problem.state.size(0), generator=torch.Generator().manual_seed(1))
    permuted = Problem("permuted", problem.matrix[order][:, order], problem.state[order], problem.form)
    source = source_for(update, problem.state)
    got = update(permuted.state, permuted.coupling, source=None if source is None else source[order])
    expected = update(problem.state, problem.coupling, source=source)[order]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("update", [*ALL, Backtracking(QuadraticPenalty(), tau=3.0)], ids=repr)
def test_a_graph_in_a_batch_is_a_graph_alone(update: StateUpdate) -> None:
    form = getattr(update, "form", "conservative")
    parts = [path_problem(5, form), random_problem(13, form), grid_problem(2, 3, form)]
    x = torch.cat([part.state for part in parts])
    matrix = torch.block_diag(*(part.matrix for part in parts))
    receiver, sender = matrix.nonzero(as_tuple=True)
    sizes = torch.tensor([part.state.size(0) for part in parts])
    graph = Graph(len(x), torch.stack([sender, receiver]), batch=torch.repeat_interleave(torch.arange(3), sizes))
    coupling = SparseCoupling(graph, matrix[receiver, sender], symmetric=True, nonnegative=True)
    source = torch.cat([part.state.roll(1, 0) for part in parts]) if source_for(update, x) is not None else None
    together = update(x, coupling, source=source)
    alone = [update(part.state, part.coupling, source=source_for(update, part.state)) for part in parts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("update", ALL, ids=repr)
def test_inputs_and_global_randomness_are_left_alone(update: StateUpdate) -> None:
    problem = problem_for(update)
    inputs = [problem.state.clone(), problem.state.flip(0).clone()]
    source = source_for(update, problem.state)
    before, state = [tensor.clone() for tensor in inputs], torch.get_rng_state()
    values = None if isinstance(update, CertifiedStep) else inputs[1]  # it takes no others than the state
    first = update(inputs[0], problem.coupling, values, source)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(first, update(inputs[0], problem.coupling, values, source))


@pytest.mark.parametrize("update", ALL, ids=repr)
def test_one_head_broadcasts_on_either_side(update: StateUpdate) -> None:
    problem = problem_for(update)
    coupling, x = problem.coupling, problem.state[:, :1]
    weight = torch.cat([coupling.weight, 0.5 * coupling.weight], 1)
    two = SparseCoupling(coupling.graph, weight, symmetric=True, nonnegative=True)
    half = SparseCoupling(coupling.graph, 0.5 * coupling.weight, symmetric=True, nonnegative=True)
    source = source_for(update, x)
    got = update(x, two, source=source)
    expected = [update(x, one, source=source) for one in (coupling, half)]
    torch.testing.assert_close(got, torch.cat(expected, 1), rtol=1e-9, atol=1e-9)
    wide = update(x.expand(-1, 3, -1), coupling, source=source)
    torch.testing.assert_close(wide, expected[0].expand(-1, 3, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("update", ALL, ids=repr)
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_empty_single_and_isolated_nodes(update: StateUpdate, num_nodes: int) -> None:
    """Without edges, S = 0: the conservative forms without leak leave the state alone, all others scale it."""
    x = torch.ones(num_nodes, 1, 2, dtype=torch.float64)
    coupling = SparseCoupling(Graph(num_nodes), x.new_zeros(0, 1), symmetric=True, nonnegative=True)
    got = update(x, coupling, source=x if getattr(update, "beta", 0.0) else None)
    assert got.shape == x.shape
    assert torch.isfinite(got).all()
    if update in CONSERVING:
        assert torch.equal(got, x)


@pytest.mark.parametrize("update", ALL, ids=repr)
def test_state_dict_is_empty_and_repr_names_the_choices(update: StateUpdate) -> None:
    assert not update.state_dict()
    choice = f"constraint={update.constraint}" if isinstance(update, CertifiedStep) else f"form={update.form!r}"  # type: ignore[attr-defined]
    assert choice in repr(update)


@given(num_nodes=st.integers(1, 8), seed=st.integers(0, 1000), density=st.floats(0.0, 1.0), leak=st.floats(0.05, 3.0))
def test_any_graph_ends_in_its_equilibrium(num_nodes: int, seed: int, density: float, leak: float) -> None:
    """Disconnected, isolated, with self-loops: an implicit step of enormous τ is the steady state."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(num_nodes, num_nodes, dtype=torch.float64, generator=generator)
    weight = weight * (torch.rand(num_nodes, num_nodes, generator=generator) < density)
    x = torch.randn(num_nodes, 1, 2, dtype=torch.float64, generator=generator)
    problem = Problem("any", weight + weight.T, x)
    limit = Equilibrium(leak=leak)(x, problem.coupling)
    torch.testing.assert_close(limit, problem.steady_state(x, leak=leak), rtol=1e-9, atol=1e-9)
    step = ImplicitEuler(1e9, beta=1.0, leak=leak)(x, problem.coupling, source=x)
    torch.testing.assert_close(step, limit, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("update", ALL, ids=repr)
def test_a_flat_state_is_cut_into_the_heads_of_the_coupling(update: StateUpdate) -> None:
    problem = path_problem(form=getattr(update, "form", "conservative"))
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(problem.coupling.num_nodes, 6, generator=generator, dtype=torch.float64)
    source = x.flip(0) if update.takes_source and getattr(update, "beta", 0.0) else None
    two = ScaledCoupling(torch.ones(2, dtype=torch.float64), problem.coupling, nonnegative=True)
    flat = update(x, two, None, source)
    heads = update(x.unflatten(1, (2, 3)), two, None, None if source is None else source.unflatten(1, (2, 3)))
    assert torch.equal(flat, heads.flatten(1))
    with pytest.raises(ValueError, match="2 heads must divide the channels of x"):
        update(x[:, :5], two)
