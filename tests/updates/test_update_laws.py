"""Every update, in each of its forms, obeys the laws of `check_update`, and says in its repr what was chosen."""

import pytest
import torch
from dense_updates import DOUBLE
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from diffusion_mp import (
    CertifiedStep,
    CrankNicolson,
    Equilibrium,
    ExplicitEuler,
    HeatKernel,
    ImplicitEuler,
    MomentumStep,
)
from diffusion_mp.couplings import LowRankCoupling, SparseCoupling
from diffusion_mp.diffusivities import Positive
from diffusion_mp.distributed.couplings import SummedCoupling
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.testing import check_update
from diffusion_mp.testing.problems import Problem
from diffusion_mp.updates.implicit import SolvedUpdate
from helpers import close, refuses

FIXED = [
    *(
        ExplicitEuler(0.05),
        ImplicitEuler(3.0),
        CrankNicolson(3.0),
        HeatKernel(2.0),
    ),
    *(
        ExplicitEuler(0.3, "residual"),
        ExplicitEuler(0.05, beta=0.7, leak=0.2),
        HeatKernel(2.0, "residual"),
    ),
    *(
        step(3.0, "residual", beta=0.7, leak=0.2)
        for step in (ImplicitEuler, CrankNicolson)
    ),
    *(Equilibrium(leak=0.1), Equilibrium("residual", beta=0.7, leak=0.2)),
    *(CertifiedStep(beta) for beta in (0.0, 0.7)),
    *(
        CertifiedStep(0.7, constraint=constraint)
        for constraint in ("nonnegative", "ball", "sphere")
    ),
]
MOMENTUM = [
    MomentumStep(0.3, 0.5, 3, "residual"),
    MomentumStep(0.3, 0.5, steps=1),
]
LEARNED = [
    ExplicitEuler(nn.Parameter(torch.tensor(0.5))),
    ExplicitEuler(Positive(0.3), beta=0.7),
]
LEARNED.append(CertifiedStep(Positive()))


@pytest.mark.parametrize("update", [*FIXED, *LEARNED, *MOMENTUM], ids=repr)
def test_the_laws_for_everybody(update):
    searches = isinstance(update, SolvedUpdate)
    reason = "a search over the batch says that there is a NaN"
    check_update(update, skip={"poisoned batch mate": reason} if searches else {})


@pytest.mark.parametrize("update", [*FIXED, *LEARNED], ids=repr)
def test_the_state_dict_has_what_is_learned_and_repr_names_the_choices(update):
    assert update in LEARNED or not update.state_dict()
    assert ("constraint=" if isinstance(update, CertifiedStep) else "form=") in repr(
        update
    )


@given(
    num_nodes=st.integers(1, 8),
    seed=st.integers(0, 1000),
    density=st.floats(0.0, 1.0),
    leak=st.floats(0.05, 3.0),
)
def test_any_graph_ends_in_its_equilibrium(num_nodes, seed, density, leak):
    """Disconnected, isolated, with self-loops: an implicit step of enormous τ is the steady state."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(num_nodes, num_nodes, dtype=DOUBLE, generator=generator)
    weight = weight * (torch.rand(num_nodes, num_nodes, generator=generator) < density)
    x = torch.randn(num_nodes, 1, 2, dtype=DOUBLE, generator=generator)
    problem = Problem("any", weight + weight.T, x)
    limit = Equilibrium(leak=leak)(x, problem.coupling)
    system = problem.laplacian + leak * torch.eye(num_nodes, dtype=DOUBLE)
    expected = torch.linalg.solve(system, x.flatten(1)).view_as(x)
    close(limit, expected, "layer")
    step = ImplicitEuler(1e9, beta=1.0, leak=leak)(x, problem.coupling, source=x)
    assert_close(step, limit, rtol=1e-6, atol=1e-6)


SOLVERS = [
    ImplicitEuler(1.0),
    CrankNicolson(1.0),
    HeatKernel(1.0),
    Equilibrium(leak=0.1),
]
solvers = pytest.mark.parametrize(
    "update", SOLVERS, ids=lambda update: type(update).__name__
)


TWO = SparseCoupling(Graph(3, torch.tensor([[0, 1], [1, 0]])), torch.ones(2, 2))


EULER = ExplicitEuler(0.1, beta=1.0)
X = torch.zeros(3, 2, 3)
test_what_does_not_fit_is_refused = refuses(
    (lambda: EULER(torch.zeros(3, 3, 1), TWO, source=X), "x must have 2 heads"),
    (lambda: EULER(torch.zeros(3, 5), TWO, source=X), "2 heads must divide .* x"),
    (lambda: EULER(X, TWO, X[:, :, 1:], X), "values must match the state x"),
    (lambda: EULER(X, TWO, torch.zeros(3, 3, 3), X), "values must have 2 heads"),
    (lambda: EULER(X, TWO, source=X[:, :, 1:]), "source must match the state x"),
    (lambda: EULER(X.tolist(), TWO, source=X), TypeError, "x must be a tensor"),
    (lambda: ExplicitEuler(torch.tensor(-0.5)), "tau"),
    (lambda: ExplicitEuler(torch.tensor([0.5])), "tau must be one number"),
    (lambda: ExplicitEuler(torch.tensor(1)), "tau"),
)


class Untouchable(SparseCoupling):
    """A coupling that must not be multiplied with."""

    def _product(self, v):
        raise AssertionError("arithmetic before the check")

    degree = _transpose = _product


@solvers
def test_an_asymmetric_coupling_is_found_before_any_arithmetic(update):
    directed = Untouchable(Graph(3, torch.tensor([[0, 1], [1, 2]])), torch.ones(2))
    x = torch.zeros(3, 1, 1)
    sentence = r"needs a reversible coupling.*got a \w+ that declares symmetric=False and knows no metric."
    with pytest.raises(
        CouplingMismatchError, match=f"{type(update).__name__} {sentence} Use Adja"
    ):
        update(x, directed)
    with pytest.raises(CouplingMismatchError):
        update.check(directed)
    with pytest.raises(
        AssertionError, match="arithmetic before"
    ):  # a step that takes any coupling
        ExplicitEuler(0.1)(x, directed)


@solvers
def test_rows_of_one_rank_are_not_all_rows(update):
    """The sums in a solver would be over those alone."""
    feature = torch.rand(3, 1, 2)
    part = SummedCoupling(
        LowRankCoupling(feature, feature, nonnegative=True, positive_semidefinite=True),
        lambda v: v,
        None,
    )
    for coupling in (part, 0.5 * part, part + part):
        with pytest.raises(
            CouplingMismatchError,
            match=r"solves for all rows at once; got .* rows of one rank",
        ):
            update(torch.ones(3, 1, 1), coupling)
