"""Low-rank couplings, solved and exponentiated in closed form: values and gradients against SciPy and dense algebra."""

import time

import pytest
import torch
from dense_updates import DOUBLE, both, dense_update, gradients, random, source_for
from torch import Tensor

import diffusion_mp as dm
from diffusion_mp.couplings import distance_features, row_normalized
from diffusion_mp.couplings.weighted import symmetric_normalized
from diffusion_mp.diffusivities import SGFormerDiffusivity, SimpleDiffusivity
from diffusion_mp.errors import ConvergenceError, CouplingMismatchError, SingularSystemError
from diffusion_mp.graph import Graph
from diffusion_mp.updates import CrankNicolson, Equilibrium, HeatKernel, ImplicitEuler, StateUpdate
from diffusion_mp.updates.linear_solve import conjugate_gradients

# Graphs with more nodes than features, and with fewer; an empty one and a single node.
PTR = torch.tensor([0, 4, 4, 5, 17, 40])
FORMS = ("conservative", "residual")
UPDATES = [
    *(HeatKernel(t, form) for t in (0.3, 20.0) for form in FORMS),
    *(
        step(3.0, form, beta=0.5, leak=0.2)
        for step in (ImplicitEuler, CrankNicolson)
        for form in FORMS
    ),
    ImplicitEuler(1e4),
    Equilibrium(beta=0.7, leak=0.1),
    Equilibrium("residual", leak=1e-3),
]
every_update = pytest.mark.parametrize("update", UPDATES, ids=repr)
Q = random(40, 2, 6)
K = random(40, 2, 6, seed=1)
X = random(40, 2, 3, seed=2)
POSITIVE = Q.abs()


def attention(
    q: Tensor = Q, k: Tensor = K, ptr: Tensor | None = None
) -> dm.couplings.LinearAttentionCoupling:
    return dm.couplings.LinearAttentionCoupling(
        q, k, ptr, constant=1.0, unit=True, nonnegative=True
    )


def attraction(x: Tensor) -> dm.Coupling:
    return dm.couplings.LinearAttentionCoupling(
        *distance_features(x), PTR, constant=2.0, nonnegative=True
    )


def silent_rows() -> dm.Coupling:
    """Two nodes to whom nobody sends, among others that hear them."""
    query = Q.abs() * (torch.arange(40) % 7 != 3).view(-1, 1, 1)
    return dm.couplings.LinearAttentionCoupling(query, K.abs(), PTR, nonnegative=True)


KINDS = {
    "difformer": attention,
    "difformer-ragged": lambda: attention(ptr=PTR),
    "tied-ragged": lambda: dm.couplings.LinearAttentionCoupling(
        POSITIVE, POSITIVE, PTR, nonnegative=True, mutual=True
    ),
    "one-head": lambda: dm.couplings.LinearAttentionCoupling(
        Q[:, :1].abs(), K[:, :1].abs(), nonnegative=True
    ),
    "silent-ragged": silent_rows,
    "distances": lambda: attraction(0.2 * Q),
    "signed": lambda: dm.couplings.LinearAttentionCoupling(Q, K, PTR, constant=3.0, unit=True),
    "twice": lambda: row_normalized(
        dm.couplings.LowRankCoupling(Q.abs(), K.abs(), nonnegative=True)
        + 0.5 * dm.couplings.LowRankCoupling(K.exp(), Q.exp(), nonnegative=True)
    ),
    "uniform": lambda: dm.couplings.UniformCoupling(40, PTR, dtype=DOUBLE),
    "rescaled": lambda: dm.couplings.LinearAttentionCoupling(
        Q.abs() * torch.logspace(-8, 8, 6, dtype=DOUBLE),
        K.abs() * torch.logspace(6, -9, 6, dtype=DOUBLE),
        PTR,
        nonnegative=True,
    ),
    "duplicates": lambda: dm.couplings.LinearAttentionCoupling(
        Q.abs()[:, :, [0, 0, 1, 1, 1]], K.abs()[:, :, [2, 2, 2, 3, 3]], nonnegative=True
    ),
    "far-away": lambda: attraction(0.1 * Q.tanh() + 30.0),
}
# A diagonal beside the features, or one that varies: systems only.
APART = torch.logspace(-2, 2, 40, dtype=DOUBLE).view(-1, 1, 1)
SOLVED = {
    "sgformer-ragged": lambda: dm.couplings.LinearAttentionCoupling(Q, K, PTR, own=1.0, unit=True),
    "symmetric": lambda: dm.couplings.LowRankCoupling(
        POSITIVE, POSITIVE, PTR, nonnegative=True, positive_semidefinite=True
    ),
    "degrees-apart": lambda: dm.couplings.LowRankCoupling(
        *2 * [POSITIVE * APART], symmetric=True, nonnegative=True
    ),
    "asymmetric": lambda: dm.couplings.LowRankCoupling(0.1 * POSITIVE, K.abs(), nonnegative=True),
    "with-identity": lambda: (
        0.5 * silent_rows() + 0.5 * dm.couplings.IdentityCoupling(40, dtype=DOUBLE)
    ),
    "off-diagonal": lambda: symmetric_normalized(
        dm.couplings.LowRankCoupling(
            POSITIVE, POSITIVE, nonnegative=True, positive_semidefinite=True
        ),
        diagonal=False,
    ),
}


@every_update
@pytest.mark.parametrize("kind", KINDS)
def test_equals_expm_and_dense_solves(kind: str, update: StateUpdate) -> None:
    coupling = KINDS[kind]()
    assert coupling.low_rank
    got, expected = both(update, coupling, X)
    # 2 − ½z² of states 30 away from zero is what is left of terms a thousand times as large.
    atol = (1e-7 if kind == "far-away" else 1e-10) * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


CONSERVATIVE = [
    ImplicitEuler(3.0, beta=0.5, leak=0.2),
    CrankNicolson(0.5),
    Equilibrium(beta=0.7, leak=0.1),
]


@pytest.mark.parametrize("update", CONSERVATIVE, ids=repr)
@pytest.mark.parametrize("kind", SOLVED)
def test_a_diagonal_beside_the_features_and_degrees_that_vary_are_solved_too(
    kind: str, update: StateUpdate
) -> None:
    """Row by row to the last digits of what stands in the row; how far the solution is off, the condition says."""
    coupling = SOLVED[kind]()
    got = Equilibrium(leak=0.01)(X, coupling)
    s = coupling.to_dense()
    rates = torch.diag_embed(s.sum(2) + 0.01)
    left_over = ((rates - s) @ got.transpose(0, 1)).transpose(0, 1) - X
    scale = ((rates + s.abs()) @ got.abs().transpose(0, 1)).transpose(0, 1) + X.abs()
    assert (left_over.abs() <= 1e-14 * scale).all()
    if kind != "degrees-apart":
        got, expected = both(update, coupling, X)
        assert (got - expected).abs().max() <= 1e-10 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    "update", [UPDATES[0], UPDATES[3], UPDATES[4], UPDATES[7], UPDATES[9]], ids=repr
)
@pytest.mark.parametrize("kind", ["unit", "silent", "tied"])
def test_all_gradients_are_those_of_dense_algebra(kind: str, update: StateUpdate) -> None:
    q, k, x, source = leaves = [t[:17].clone().requires_grad_() for t in (Q, K, X, X.cos())]
    mask = (torch.arange(17) % 7 != 3).view(-1, 1, 1)
    coupling = {
        "unit": lambda: attention(q, k, PTR[:5]),
        "silent": lambda: dm.couplings.LinearAttentionCoupling(
            q.abs() * mask, k.abs(), PTR[:5], nonnegative=True
        ),
        "tied": lambda: attention(q, q),
    }[kind]()
    given = source if update.beta else None
    outs = update(x, coupling, source=given), dense_update(update, coupling, x, given)
    torch.testing.assert_close(*gradients(outs, leaves), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    "update", [HeatKernel(0.7), ImplicitEuler(2.0), Equilibrium(leak=0.3)], ids=repr
)
@pytest.mark.parametrize("nodes", [2, 5])
def test_closed_forms_differentiate_twice(update: StateUpdate, nodes: int) -> None:
    def step(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return update(x, attention(q, k))

    inputs = tuple(t[:nodes, :1, :3].clone().requires_grad_() for t in (X, Q, K))
    assert torch.autograd.gradcheck(step, inputs)
    assert torch.autograd.gradgradcheck(step, inputs, fast_mode=True)


@pytest.mark.parametrize("t", [1e-6, 1e-3, 0.01, 0.02, 0.03, 0.1, 1.0, 30.0])
def test_no_time_is_less_accurate_than_another(t: float) -> None:
    pairs = dm.couplings.LinearAttentionCoupling(
        POSITIVE, K.abs(), torch.arange(0, 41, 2), nonnegative=True
    )
    for coupling in (pairs, silent_rows(), KINDS["one-head"]()):
        torch.testing.assert_close(*both(HeatKernel(t), coupling, X), rtol=0, atol=1e-13)


@every_update
@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_few_nodes(update: StateUpdate, nodes: int) -> None:
    got, expected = both(update, attention(Q[:nodes], K[:nodes]), X[:nodes])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "update", [HeatKernel(1e4), ImplicitEuler(1e8), Equilibrium(beta=1e-8, leak=1e-8)], ids=repr
)
def test_long_times_and_small_leaks_end_in_the_average_that_the_metric_weighs(
    update: StateUpdate,
) -> None:
    """Of a connected reversible coupling: Σ d̄_i x_i / Σ d̄_i. What is lost is the unit of rounding times t, or by κ."""
    coupling = dm.couplings.LinearAttentionCoupling(
        POSITIVE, POSITIVE, nonnegative=True, mutual=True
    )
    metric = coupling.metric
    average = (metric.unsqueeze(2) * X).sum(0) / metric.sum(0).unsqueeze(1)
    torch.testing.assert_close(update(X, coupling), average.expand_as(X), rtol=0, atol=2e-7)


@pytest.mark.filterwarnings("ignore:.*entries are rounded")  # a small leak in half precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_update
def test_single_and_half_precision_are_solved_in_double(
    update: StateUpdate, dtype: torch.dtype
) -> None:
    q, k, x = (t.to(dtype) for t in (Q, K, X))
    got = update(
        x,
        dm.couplings.LinearAttentionCoupling(q, k, constant=1.0, unit=True),
        source=source_for(update, x),
    )
    exact = dm.couplings.LinearAttentionCoupling(q.double(), k.double(), constant=1.0, unit=True)
    expected = dense_update(
        update, exact, x.double(), None if (s := source_for(update, x)) is None else s.double()
    )
    assert got.dtype == dtype
    rtol = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        got.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().max())
    )


def test_the_heat_kernel_refuses_rows_that_keep_different_shares_of_themselves() -> None:
    sgformer = SGFormerDiffusivity(projection=None, heads=2)(X.flatten(1))
    with pytest.raises(
        CouplingMismatchError, match="HeatKernel needs a reversible coupling, or features without a"
    ):
        HeatKernel(1.0)(X, sgformer)
    torch.testing.assert_close(*both(ImplicitEuler(1.0), sgformer, X), rtol=1e-10, atol=1e-10)


def test_without_a_leak_the_steady_state_of_attention_is_refused() -> None:
    separate = SimpleDiffusivity(6, projection="separate", heads=2).double()(X.flatten(1))
    with pytest.raises(SingularSystemError, match="no unique steady state"):
        Equilibrium()(X, separate)
    with pytest.raises(SingularSystemError, match=r"not reversible.*Pass leak > 0"):
        Equilibrium("residual")(X, separate)


def test_what_is_singular_indefinite_or_not_finite_is_an_error() -> None:
    for bad in (float("nan"), float("inf")):
        x = X.clone()
        x[3, 1, 0] = bad
        with pytest.raises(ConvergenceError, match="NaN or infinity"):
            ImplicitEuler(1.0)(x, attention())
    one = torch.ones(8, 1, 1, dtype=DOUBLE)
    with pytest.raises(
        ConvergenceError, match="a low-rank system is singular"
    ):  # S has the eigenvalue 2
        Equilibrium("residual", leak=1.0)(
            random(8, 1, 2), dm.couplings.LowRankCoupling(0.25 * one, one.clone())
        )
    feature = 3.0 * Q[:, :1]
    indefinite = dm.couplings.LowRankCoupling(feature, -feature, symmetric=True) * -1.0
    with pytest.raises(ConvergenceError, match="not positive definite"):
        ImplicitEuler(1.0)(
            X,
            indefinite + dm.couplings.LowRankCoupling(feature, feature, positive_semidefinite=True),
        )


def test_features_beside_edges_are_not_all_of_the_coupling() -> None:
    edges = dm.couplings.SparseCoupling(
        Graph(40, torch.tensor([[0, 1], [1, 0]])), torch.ones(2, dtype=DOUBLE)
    )
    both = attention() + edges
    assert not both.low_rank
    assert both.low_rank_form(DOUBLE) is not None
    assert not (attention() + attention(ptr=PTR)).low_rank  # over other graphs
    for update in (HeatKernel(1.0), ImplicitEuler(1.0), Equilibrium(leak=0.1)):
        with pytest.raises(
            CouplingMismatchError,
            match="got a SumCoupling that declares symmetric=False and knows no",
        ):
            update(X, both)


@pytest.mark.slow
def test_two_hundred_thousand_nodes_take_seconds() -> None:
    q, k, x = (random(200_000, 1, 32, seed=seed) for seed in range(3))
    coupling = attention(q, k)
    for update in (HeatKernel(2.0), ImplicitEuler(5.0), Equilibrium(leak=0.1)):
        start = time.process_time()
        got = update(x, coupling)
        assert time.process_time() - start < 15.0
        if isinstance(update, ImplicitEuler):
            torch.testing.assert_close(got + 5.0 * (got - coupling @ got), x, rtol=0, atol=1e-11)


def system(num_nodes: int = 30, condition: float = 100.0) -> tuple[Tensor, Tensor, Tensor]:
    basis, _ = torch.linalg.qr(random(num_nodes, num_nodes))
    eigenvalues = torch.logspace(
        0, torch.log10(torch.tensor(condition)).item(), num_nodes, dtype=DOUBLE
    )
    matrix = basis @ eigenvalues.diag() @ basis.T
    b = random(num_nodes, 2, 3, seed=1)
    return matrix, b, torch.linalg.solve(matrix, b.flatten(1)).view_as(b)


def apply(matrix: Tensor):
    return lambda v: torch.einsum("ij,jhd->ihd", matrix, v)


def test_columns_of_any_size_are_solved_and_the_input_is_left_alone() -> None:
    """Each column has its own tolerance: scaling one scales its answer and touches no other."""
    matrix, b, exact = system()
    before = b.clone()
    got = conjugate_gradients(apply(matrix), b)
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
    assert torch.equal(b, before)
    scale = torch.tensor([1e-30, 1.0, 1e30], dtype=DOUBLE)
    torch.testing.assert_close(
        conjugate_gradients(apply(matrix), b * scale), got * scale, rtol=1e-9, atol=0
    )
    single = conjugate_gradients(apply(matrix.float()), (b * 1e-30).float())
    torch.testing.assert_close(single.double() * 1e30, exact, rtol=1e-4, atol=1e-5)
    b[:, 1] = 0.0
    got = conjugate_gradients(apply(matrix), b)
    assert torch.equal(got[:, 1], torch.zeros_like(got[:, 1]))
    assert got[:, 0].abs().min() > 0
    assert conjugate_gradients(lambda v: v, torch.zeros(0, 1, 2)).shape == (0, 1, 2)


def test_what_has_no_answer_is_an_error() -> None:
    matrix, b, _ = system(condition=1e6)
    with pytest.raises(
        ConvergenceError, match=r"relative residual of .* in max_iter=3 iterations.*Raise max_iter"
    ):
        conjugate_gradients(apply(matrix), b, max_iter=3)
    matrix, b, _ = system()
    with pytest.raises(ConvergenceError, match="not positive definite"):
        conjugate_gradients(
            apply(matrix - 50 * torch.eye(30, dtype=DOUBLE)), b, what="the test system"
        )
    for bad in (float("nan"), float("inf")):
        b[3, 0, 0] = bad
        with pytest.raises(ConvergenceError, match="NaN or infinity"):
            conjugate_gradients(apply(matrix), b)


def test_a_metric_over_four_decades() -> None:
    root = random(25, 25)
    b = random(25, 2, 3, seed=1)
    metric = torch.logspace(-2, 2, 25, dtype=DOUBLE).unsqueeze(1)
    matrix = (root @ root.T + torch.eye(25, dtype=DOUBLE)) / metric
    exact = apply(torch.linalg.inv(matrix))
    got = conjugate_gradients(apply(matrix), b, metric=metric)
    assert ((apply(matrix)(got) - b).norm(dim=0) <= 1e-10 * b.norm(dim=0)).all()
    with pytest.raises(ConvergenceError):
        conjugate_gradients(apply(matrix), b)
    got = conjugate_gradients(apply(matrix), b, metric=metric, preconditioner=exact, max_iter=3)
    torch.testing.assert_close(got, exact(b), rtol=1e-8, atol=1e-8)
