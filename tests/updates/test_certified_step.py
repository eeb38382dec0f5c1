"""``CertifiedStep`` against its formula, dense and in double; and zeros, half precision, refusals."""

import pytest
import torch
from dense_updates import DOUBLE
from torch.testing import assert_close

from diffusion_mp import AdjacencyDiffusivity, SimpleDiffusivity
from diffusion_mp.couplings import (
    LowRankCoupling,
    ScaledCoupling,
    SparseCoupling,
)
from diffusion_mp.diffusivities import Positive
from diffusion_mp.energies import (
    Ball,
    Energy,
    Nonnegative,
    Sphere,
    Unconstrained,
    get_constraint,
    get_penalty,
)
from diffusion_mp.energies.terms import CouplingTerm, PairTerm, SourceTerm
from diffusion_mp.errors import CouplingMismatchError
from diffusion_mp.graph import Graph
from diffusion_mp.updates import CertifiedStep
from helpers import agree, close, randn, refuses

PTR = torch.tensor([0, 4, 4, 5, 11])
PENALTIES = {
    name: get_penalty(name) for name in ("simple", "sigmoid", "gaussian", "quadratic")
}
SIMPLE = PENALTIES["simple"]
PROJECT = {
    None: lambda y: y,
    "nonnegative": lambda y: y.clamp(min=0),
    "ball": lambda y: y / y.norm(dim=-1, keepdim=True).clamp(min=1),
    "sphere": lambda y: y / y.norm(dim=-1, keepdim=True),
}


def entries(graph, weight):
    return SparseCoupling(graph, weight, symmetric=True, nonnegative=True)


PAIR = entries(Graph(2, torch.tensor([[0, 1], [1, 0]])), torch.ones(2, dtype=DOUBLE))


def undirected(num_nodes, ptr=None):
    """A ring within every graph, with one node that has no edges where there is room."""
    bounds = torch.tensor([0, num_nodes]) if ptr is None else ptr
    spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    edges = [(i, i + 1) for start, stop in spans for i in range(start, stop - 2)]
    edge_index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T
    return Graph(num_nodes, torch.cat([edge_index, edge_index.flip(0)], 1), ptr=ptr)


def leaves(heads, constraint, nodes=11):
    """State within the constraint and the ball, source, metric, edge weights, β, λ, μ."""
    x = PROJECT["ball"](0.6 * randn(nodes, heads, 3))
    numbers = {
        "x": PROJECT[constraint](x),
        "h": randn(nodes, heads, 3, seed=1),
        "m": randn(nodes, heads, seed=2).exp(),
        "a": randn(nodes, seed=3).exp(),
        "beta": randn().exp(),
        "lam": randn(seed=1).exp(),
        "mu": randn(seed=2).exp(),
    }
    return {name: number.requires_grad_() for name, number in numbers.items()}


def ours(free, penalty, constraint, ptr):
    graph = undirected(len(free["x"]), ptr)
    source, target = graph.edges
    weight = free["a"][source] * free["a"][target]
    inside = get_constraint(
        "ball" if constraint in (None, "nonnegative") else constraint
    )
    omega = PENALTIES[penalty].coupling(free["x"], ptr, constraint=inside)
    parts = (("lam", omega), ("mu", entries(graph, weight)))
    terms = [ScaledCoupling(free[name], term, nonnegative=True) for name, term in parts]
    step = CertifiedStep(Positive(), constraint=constraint)
    step.source_weight.forward = lambda: free["beta"]
    return step(free["x"], terms[0] + terms[1], source=free["h"], metric=free["m"])


def plain(free, penalty, constraint, ptr):
    x = free["x"]
    nodes = len(free["x"])
    bounds = torch.tensor([0, nodes]) if ptr is None else ptr
    member = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    source, target = undirected(nodes, ptr).edges
    graph_term = torch.zeros(nodes, nodes, dtype=x.dtype)
    graph_term = graph_term.index_put(
        (target, source), free["a"][source] * free["a"][target]
    )
    heads = []
    for head in range(x.size(1)):
        z = x[:, head]
        h = free["h"][:, head]
        m = free["m"][:, head]
        squares = (z.unsqueeze(1) - z.unsqueeze(0)).square().sum(2)
        omega = (
            free["lam"]
            * PENALTIES[penalty].f(squares)
            * (member.unsqueeze(1) == member)
        )
        edges = free["mu"] * graph_term
        definite = penalty != "sigmoid"
        w = (omega + edges).sum(1)
        if constraint != "sphere":
            p = w
        else:
            p = omega.sum(1) * (1 if definite else 2) + 2 * edges.sum(1)
        anchor = (free["beta"] * m).unsqueeze(1)
        y = (anchor * h + (p - w).unsqueeze(1) * z + (omega + edges) @ z) / (
            anchor + p.unsqueeze(1)
        )
        heads.append(PROJECT[constraint](y))
    return torch.stack(heads, 1)


@pytest.mark.parametrize("ptr", [None, PTR], ids=["one", "ragged"])
@pytest.mark.parametrize("constraint", PROJECT)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_step_is_its_formula_in_value_and_all_gradients(penalty, constraint, ptr):
    free = leaves(2, constraint)
    got, expected = (
        formula(free, penalty, constraint, ptr) for formula in (ours, plain)
    )
    close(got, expected, "entries")
    weight = randn(*got.shape, seed=9)
    mine, theirs = (
        dict(
            zip(
                free,
                torch.autograd.grad((out * weight).sum(), list(free.values())),
                strict=True,
            )
        )
        for out in (got, expected)
    )
    # The plain formula also differentiates f off the sphere, where the state never is.
    if constraint == "sphere":
        x = free["x"].detach()
        for slopes in (mine, theirs):
            slopes["x"] = slopes["x"] - (slopes["x"] * x).sum(2, keepdim=True) * x
    assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_projected_heads_move_one_state_together():
    """Against Σ_h W_hᵀ L_h W_h written out."""
    h = randn(9, 1, 4, seed=1)
    w = randn(3, 2, 4, seed=2).requires_grad_()
    penalty = get_penalty("gaussian")
    graph = undirected(9)
    edges = entries(graph, torch.ones(graph.num_edges, 1, dtype=h.dtype))
    energy = Energy(
        [
            2.0 * PairTerm(penalty, w),
            0.5 * CouplingTerm(edges),
            0.3 * SourceTerm(h),
        ],
        "sphere",
    )
    x = energy.constraint.project(randn(9, 1, 4))
    got = energy.step(x)
    dense = penalty.coupling(torch.einsum("hdc,nc->nhd", w, x[:, 0])).to_dense()
    laplacians = torch.diag_embed(dense.sum(2)) - dense
    adjacency = edges.to_dense()[0]
    z = x[:, 0]
    pull = 2.0 * torch.einsum("hdc,hnm,hde,me->nc", w, laplacians, w, z)
    pull = pull + 0.5 * (adjacency.sum(1, keepdim=True) * z - adjacency @ z)
    squares = torch.linalg.matrix_norm(w, 2).square()
    p = 2.0 * squares @ dense.sum(2) + adjacency.sum(1)
    y = z + (0.3 * (h[:, 0] - z) - pull) / (0.3 + p.unsqueeze(1))
    expected = y / y.norm(dim=1, keepdim=True)
    agree(got[:, 0], expected, [w], (1e-12, 1e-12), (1e-9, 1e-11))


@pytest.mark.parametrize("constraint", PROJECT)
def test_a_node_that_nothing_pulls_at_stays_and_has_finite_gradients(constraint):
    coupling = entries(
        Graph(3, torch.tensor([[0, 1], [1, 0]])), torch.ones(2, dtype=DOUBLE)
    )
    step = CertifiedStep(0.0, constraint=constraint)
    x = step.constraint.project(randn(3, 1, 2)).requires_grad_()
    moved = step(x, coupling)
    assert torch.allclose(moved[2], x[2], rtol=1e-15)
    assert_close(Energy([CouplingTerm(coupling)], constraint).descent(x)(x), moved)
    (gradient,) = torch.autograd.grad(moved.square().sum() + moved[2].sum(), x)
    assert gradient.isfinite().all()


def test_on_a_sphere_a_row_of_zeros_keeps_its_direction_and_the_energy_does_not_rise():
    """Two nodes on opposite sides: twice the row sums bring both exactly to the centre."""
    x = torch.tensor([[[0.0, 2.0]], [[0.0, -2.0]]], dtype=DOUBLE, requires_grad=True)
    step = CertifiedStep(0.0, constraint="sphere", radius=2.0)
    assert (x - PAIR.laplacian(x) / PAIR.majorant(False).unsqueeze(2) == 0).all()
    moved = step(x, PAIR)
    assert torch.equal(moved, x)
    (gradient,) = torch.autograd.grad(moved.sum(), x)
    assert gradient.isfinite().all()
    assert Sphere(2.0).holds(step(torch.zeros(2, 1, 2, dtype=DOUBLE), PAIR))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype):
    """20 000 neighbours with a weight of 10: a sum in half precision would be infinite, or lose its last neighbours."""
    ones = torch.ones(20_000, 1, 1, dtype=dtype)
    pairs = LowRankCoupling(ones, ones, nonnegative=True, positive_semidefinite=True)
    x = randn(20_000, 1, 2).to(dtype)
    got = CertifiedStep()(x, 10.0 * pairs, source=x)
    assert got.dtype == dtype
    wide = x.double()
    expected = (wide + 10 * wide.sum(0)) / (1 + 200_000)
    assert_close(got.double(), expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("constraint", ["ball", "sphere"])
def test_a_row_at_rest_stays_up_to_rounding(constraint):
    x = PROJECT["sphere"](randn(200, 1, 3).float())
    alone = entries(Graph(200, torch.zeros(2, 0, dtype=torch.long)), torch.ones(0))
    moved = CertifiedStep(1.0, constraint=constraint)(x, alone, source=x)
    assert_close(moved, x, rtol=0, atol=2 * torch.finfo(x.dtype).eps)


def of_ones(**promises):
    return LowRankCoupling(torch.ones(5, 1, 1), torch.ones(5, 1, 1), **promises)


MISMATCH = CouplingMismatchError
STEP = CertifiedStep()
ONES = torch.ones(5, 1, 2)
GOOD = of_ones(symmetric=True, nonnegative=True)
BOTH = "symmetric or nonnegative"
WAY = "Take row_stochastic=False"
ONE_WAY = Graph(5, torch.tensor([[0, 1, 2], [1, 2, 3]]))
test_what_does_not_fit_is_refused_in_sentences = refuses(
    *(
        (
            lambda p=kept: STEP(ONES, of_ones(**p), source=ONES),
            MISMATCH,
            rf"does not promise to be {missing}\. {WAY}",
        )
        for missing, kept in {
            "symmetric": {"nonnegative": True},
            "nonnegative": {"symmetric": True},
            BOTH: {},
        }.items()
    ),
    (
        lambda: STEP(
            ONES, AdjacencyDiffusivity("sym")(ONES[:, 0], ONE_WAY), source=ONES
        ),
        MISMATCH,
        r"does not promise to be symmetric.*graph.to_undirected\(\)",
    ),
    (
        lambda: STEP(ONES, GOOD, ONES.clone(), ONES),
        "CertifiedStep moves the state itself; got other values",
    ),
    (lambda: STEP(ONES, GOOD), "beta=1.0 weighs a source, but none came"),
    (
        lambda: CertifiedStep(Positive(2.0))(ONES, GOOD),
        r"beta=Positive\(initial=2\) weighs a source, but none came",
    ),
    (
        lambda: STEP(ONES, GOOD, source=ONES, metric=torch.ones(5, 3)),
        r"metric must be \[5\] or \[5, heads\]",
    ),
    error=ValueError,
)


def test_the_state_may_come_as_its_values():
    assert_close(STEP(ONES, GOOD, ONES, ONES), STEP(ONES, GOOD, source=ONES))


@pytest.mark.parametrize(
    ("constraint", "nonnegative"),
    [
        (Unconstrained(), False),
        (Nonnegative(), False),
        (Ball(), True),
        (Sphere(), True),
        (Sphere(0.5), True),
        (Sphere(1.01), False),
    ],
    ids=repr,
)
def test_the_simple_penalty_is_nonnegative_where_rows_lie_together(
    constraint, nonnegative
):
    x = constraint.project(randn(5, 1, 2))
    options = {"normalize": None, "measure": "distance", "row_stochastic": False}
    for coupling in (
        SIMPLE.coupling(x, constraint=constraint),
        SimpleDiffusivity(constraint=constraint, **options)(x[:, 0]),
    ):
        assert coupling.nonnegative is nonnegative
        assert coupling.positive_semidefinite is isinstance(constraint, Sphere)
        assert_close(coupling.to_dense(), SIMPLE.coupling(x).to_dense())
