"""Low-rank couplings, solved and exponentiated in closed form: values and gradients against SciPy and dense algebra."""

import math
from functools import partial

import pytest
import torch
from dense_updates import DOUBLE, both, dense_update, largest, source_for
from torch.testing import assert_close

from diffusion_mp.couplings import (
    IdentityCoupling,
    LinearAttentionCoupling,
    LowRankCoupling,
    SparseCoupling,
    UniformCoupling,
    distance_features,
    row_normalized,
)
from diffusion_mp.couplings.weighted import symmetric_normalized
from diffusion_mp.diffusivities import SGFormerDiffusivity, SimpleDiffusivity
from diffusion_mp.errors import (
    ConvergenceError,
    CouplingMismatchError,
    SingularSystemError,
)
from diffusion_mp.graph import Graph
from diffusion_mp.updates import (
    CrankNicolson,
    Equilibrium,
    HeatKernel,
    ImplicitEuler,
)
from diffusion_mp.updates.linear_solve import conjugate_gradients
from helpers import agree, close, randn, refuses

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
Q = randn(40, 2, 6)
K = randn(40, 2, 6, seed=1)
X = randn(40, 2, 3, seed=2)
POSITIVE = Q.abs()


linear = partial(LinearAttentionCoupling, nonnegative=True)
low_rank = partial(LowRankCoupling, nonnegative=True)
attention = partial(linear, constant=1.0, unit=True)


def attraction(x):
    return linear(*distance_features(x), PTR, constant=2.0)


def silent_rows():
    """Two nodes to whom nobody sends, among others that hear them."""
    return linear(POSITIVE * (torch.arange(40) % 7 != 3).view(-1, 1, 1), K.abs(), PTR)


UP, DOWN = (torch.logspace(*ends, 6, dtype=DOUBLE) for ends in ((-8, 8), (6, -9)))
KINDS = {
    "difformer": lambda: attention(Q, K),
    "difformer-ragged": lambda: attention(Q, K, PTR),
    "tied-ragged": lambda: linear(POSITIVE, POSITIVE, PTR),
    "one-head": lambda: linear(POSITIVE[:, :1], K[:, :1].abs()),
    "silent-ragged": silent_rows,
    "distances": lambda: attraction(0.2 * Q),
    "signed": lambda: LinearAttentionCoupling(Q, K, PTR, constant=3.0, unit=True),
    "twice": lambda: row_normalized(
        low_rank(POSITIVE, K.abs()) + 0.5 * low_rank(K.exp(), Q.exp())
    ),
    "uniform": lambda: UniformCoupling(40, PTR, dtype=DOUBLE),
    "rescaled": lambda: linear(POSITIVE * UP, K.abs() * DOWN, PTR),
    "duplicates": lambda: linear(
        POSITIVE[:, :, [0, 0, 1, 1, 1]], K.abs()[:, :, [2, 2, 2, 3, 3]]
    ),
    "far-away": lambda: attraction(0.1 * Q.tanh() + 30.0),
    **{f"{n} nodes": lambda n=n: attention(Q[:n], K[:n]) for n in (0, 1, 3)},
}
# A diagonal beside the features, or one that varies: systems only.
APART = torch.logspace(-2, 2, 40, dtype=DOUBLE).view(-1, 1, 1)
SOLVED = {
    "sgformer-ragged": lambda: LinearAttentionCoupling(Q, K, PTR, own=1.0, unit=True),
    "symmetric": lambda: low_rank(POSITIVE, POSITIVE, PTR, positive_semidefinite=True),
    "degrees-apart": lambda: low_rank(
        POSITIVE * APART, POSITIVE * APART, positive_semidefinite=True
    ),
    "asymmetric": lambda: low_rank(0.1 * POSITIVE, K.abs()),
    "with-identity": lambda: (
        0.5 * silent_rows() + 0.5 * IdentityCoupling(40, dtype=DOUBLE)
    ),
    "symmetric-normalized": lambda: symmetric_normalized(
        low_rank(POSITIVE, POSITIVE, positive_semidefinite=True)
    ),
}


@every_update
@pytest.mark.parametrize("kind", KINDS)
def test_equals_expm_and_dense_solves(kind, update):
    coupling = KINDS[kind]()
    assert coupling.low_rank
    x = X[: coupling.num_nodes]
    got, expected = both(update, coupling, x)
    # 2 − ½z² of states 30 away from zero is what is left of terms a thousand times as large.
    atol = (1e-7 if kind == "far-away" else 1e-10) * largest(expected)
    assert_close(got, expected, rtol=0, atol=atol)


CONSERVATIVE = [
    ImplicitEuler(3.0, beta=0.5, leak=0.2),
    CrankNicolson(0.5),
    Equilibrium(beta=0.7, leak=0.1),
]


@pytest.mark.parametrize("update", CONSERVATIVE, ids=repr)
@pytest.mark.parametrize("kind", SOLVED)
def test_a_diagonal_beside_the_features_and_degrees_that_vary_are_solved_too(
    kind, update
):
    """Row by row to the last digits of what stands in the row; how far the solution is off, the condition says."""
    coupling = SOLVED[kind]()
    got = Equilibrium(leak=0.01)(X, coupling)
    s = coupling.to_dense()
    rates = torch.diag_embed(s.sum(2) + 0.01)
    by_head = got.transpose(0, 1)
    left_over = (rates - s) @ by_head - X.transpose(0, 1)
    scale = (rates + s.abs()) @ by_head.abs() + X.abs().transpose(0, 1)
    assert (left_over.abs() <= 1e-14 * scale).all()
    if kind != "degrees-apart":
        got, expected = both(update, coupling, X)
        assert (got - expected).abs().max() <= 1e-10 * largest(expected)


@pytest.mark.parametrize(
    "update", [UPDATES[0], UPDATES[3], UPDATES[4], UPDATES[7], UPDATES[9]], ids=repr
)
@pytest.mark.parametrize("kind", ["unit", "silent", "tied"])
def test_all_gradients_are_those_of_dense_algebra(kind, update):
    q, k, x = leaves = [t[:17].clone().requires_grad_() for t in (Q, K, X)]
    if kind == "unit":
        coupling = attention(q, k, PTR[:5])
    elif kind == "tied":
        coupling = attention(q, q)
    else:
        hears = (torch.arange(17) % 7 != 3).view(-1, 1, 1)
        coupling = linear(q.abs() * hears, k.abs(), PTR[:5])
    agree(*both(update, coupling, x), leaves, (1e-10, 1e-10), unused=True)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    "update", [HeatKernel(0.7), ImplicitEuler(2.0), Equilibrium(leak=0.3)], ids=repr
)
@pytest.mark.parametrize("nodes", [2, 5])
def test_closed_forms_differentiate_twice(update, nodes):
    def step(x, q, k):
        return update(x, attention(q, k))

    inputs = tuple(t[:nodes, :1, :3].clone().requires_grad_() for t in (X, Q, K))
    assert torch.autograd.gradcheck(step, inputs)
    assert torch.autograd.gradgradcheck(step, inputs, fast_mode=True)


@pytest.mark.parametrize("t", [1e-6, 1e-3, 0.01, 0.02, 0.03, 0.1, 1.0, 30.0])
def test_no_time_is_less_accurate_than_another(t):
    pairs = linear(POSITIVE, K.abs(), torch.arange(0, 41, 2))
    for coupling in (pairs, silent_rows(), KINDS["one-head"]()):
        assert_close(*both(HeatKernel(t), coupling, X), rtol=0, atol=1e-13)


@pytest.mark.filterwarnings(
    "ignore:.*entries are rounded"
)  # a small leak in half precision
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@every_update
def test_single_and_half_precision_are_solved_in_double(update, dtype, error):
    q, k, x = (t.to(dtype) for t in (Q, K, X))
    got = update(x, attention(q, k), source=source_for(update, x))
    assert got.dtype == dtype
    source = source_for(update, x)
    wide = None if source is None else source.double()
    expected = dense_update(update, attention(q.double(), k.double()), x.double(), wide)
    assert_close(got.double(), expected, rtol=error, atol=error * largest(expected))


def test_what_is_singular_indefinite_or_not_finite_is_an_error():
    for bad in (float("nan"), float("inf")):
        x = X.clone()
        x[3, 1, 0] = bad
        with pytest.raises(ConvergenceError, match="NaN or infinity"):
            ImplicitEuler(1.0)(x, attention(Q, K))
    one = torch.ones(8, 1, 1, dtype=DOUBLE)
    # S has the eigenvalue 2.
    with pytest.raises(ConvergenceError, match="a low-rank system is singular"):
        Equilibrium("residual", leak=1.0)(
            randn(8, 1, 2), LowRankCoupling(0.25 * one, one.clone())
        )
    feature = 3.0 * Q[:, :1]
    indefinite = LowRankCoupling(feature, -feature, symmetric=True) * -1.0
    with pytest.raises(ConvergenceError, match="not positive definite"):
        ImplicitEuler(1.0)(
            X,
            indefinite + LowRankCoupling(feature, feature, positive_semidefinite=True),
        )


SGFORMER = SGFormerDiffusivity(projection=None, heads=2)(X.flatten(1))
SEPARATE = SimpleDiffusivity(6, projection="separate", heads=2).double()(X.flatten(1))
EDGE = SparseCoupling(Graph(40, torch.tensor([[0, 1], [1, 0]])), X.new_ones(2))
test_what_has_no_closed_form_is_refused = refuses(
    (
        lambda: HeatKernel(1.0)(X, SGFORMER),
        CouplingMismatchError,
        "HeatKernel needs a reversible",
    ),
    (lambda: Equilibrium()(X, SEPARATE), SingularSystemError, "no unique steady state"),
    (
        lambda: Equilibrium("residual")(X, SEPARATE),
        SingularSystemError,
        "not reversible",
    ),
    *(
        (
            lambda u=u: u(X, attention(Q, K) + EDGE),
            CouplingMismatchError,
            "got a SumCoupling",
        )
        for u in (HeatKernel(1.0), ImplicitEuler(1.0), Equilibrium(leak=0.1))
    ),
)


def apply(matrix):
    return lambda v: torch.einsum("ij,jhd->ihd", matrix, v)


solved = partial(conjugate_gradients, least=1.0)
B = randn(30, 2, 3, seed=1)


def system(condition=100.0):
    """A matrix with eigenvalues from 1 to ``condition``, and its solution for B."""
    basis, _ = torch.linalg.qr(randn(30, 30))
    matrix = (
        basis
        @ torch.logspace(0, math.log10(condition), 30, dtype=DOUBLE).diag()
        @ basis.T
    )
    return matrix, torch.linalg.solve(matrix, B.flatten(1)).view_as(B)


def test_columns_of_any_size_are_solved_and_the_input_is_left_alone():
    """Each column has its own tolerance: scaling one scales its answer and touches no other."""
    matrix, exact = system()
    b = B.clone()
    got = solved(apply(matrix), b)
    assert_close(got, exact, rtol=1e-10, atol=1e-12)
    assert torch.equal(b, B)
    scale = torch.tensor([1e-30, 1.0, 1e30], dtype=DOUBLE)
    scaled = solved(apply(matrix), b * scale)
    assert_close(scaled, got * scale, rtol=1e-9, atol=0)
    single = solved(apply(matrix), b * 1e-30, dtype=torch.float32)
    assert_close(single * 1e30, exact, rtol=1e-4, atol=1e-5)
    b[:, 1] = 0.0
    got = solved(apply(matrix), b)
    assert not got[:, 1].any()
    assert got[:, 0].abs().min() > 0
    assert solved(lambda v: v, torch.zeros(0, 1, 2)).shape == (0, 1, 2)


def test_what_has_no_answer_is_an_error():
    with pytest.raises(
        ConvergenceError, match=r"relative error of .* in max_iter=3 iterations"
    ):
        solved(apply(system(1e6)[0]), B, max_iter=3)
    matrix, _ = system()
    with pytest.raises(ConvergenceError, match="not positive definite"):
        solved(apply(matrix - 50 * torch.eye(30, dtype=DOUBLE)), B)
    for bad in (math.nan, math.inf):
        b = B.clone()
        b[3, 0, 0] = bad
        with pytest.raises(ConvergenceError, match="NaN or infinity"):
            solved(apply(matrix), b)


def test_a_metric_over_four_decades():
    root = randn(30, 30)
    metric = torch.logspace(-2, 2, 30, dtype=DOUBLE).unsqueeze(1)
    matrix = (root @ root.T + torch.eye(30, dtype=DOUBLE)) / metric
    exact = apply(torch.linalg.inv(matrix))
    least = float(torch.linalg.eigvals(matrix).real.min())
    in_metric = partial(
        conjugate_gradients, apply(matrix), B, metric=metric, least=least
    )
    close(in_metric(), exact(B), "solve")
    at_once = in_metric(preconditioner=exact, max_iter=3)
    close(at_once, exact(B), "solve")
    with pytest.raises(ConvergenceError):
        conjugate_gradients(apply(matrix), B, least=least)


def test_a_heat_kernel_of_unequal_degrees_has_a_closed_form_in_the_residual_form_only():
    coupling = 0.05 * low_rank(POSITIVE, K.abs())
    got, expected = both(HeatKernel(1.0, "residual"), coupling, X)
    assert_close(got, expected, rtol=0, atol=1e-10 * largest(expected))
    with pytest.raises(CouplingMismatchError, match="needs a reversible coupling"):
        HeatKernel(1.0)(X, coupling)
