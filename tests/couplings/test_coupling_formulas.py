"""Each kind of coupling against its formula, written out by hand."""

# ruff: noqa: F403, F405 (everything public)
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp import plot
from diffusion_mp.couplings import *
from helpers import close, randn, refuses


def block(ptr: Tensor) -> Tensor:
    member = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff())
    return (member[:, None] == member[None, :]).double()


PTR = torch.tensor([0, 3, 3, 4, 9])


def test_an_edge_is_an_entry_of_its_targets_row_and_parallel_ones_add_up():
    coupling = SparseCoupling(Graph(3, torch.tensor([[0], [2]])), torch.tensor([5.0]))
    assert coupling.to_dense()[0].tolist() == [[0, 0, 0], [0, 0, 0], [5, 0, 0]]
    graph = Graph(
        2, torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([0.5, 0.25, 2.0])
    )
    assert SparseCoupling(graph).to_dense()[0].tolist() == [[0, 0], [0.75, 2]]
    pair = Graph(2, torch.tensor([[0, 1], [1, 0]]))
    by_head = SparseCoupling(pair, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert by_head.to_dense().tolist() == [[[0, 3], [1, 0]], [[0, 4], [2, 0]]]


@pytest.mark.parametrize("heads", [1, 2])
def test_a_state_far_from_the_origin_keeps_the_digits_of_its_dirichlet_form(
    heads,
):
    """A shift costs nothing, though its squares are a million times as large as the differences."""
    weight = randn(9, heads).abs()
    x = 1e3 + randn(6, 3).float()
    edges = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 5, 2], [1, 5, 0, 3, 4, 1, 0, 2, 2]])
    coupling = SparseCoupling(Graph(6, edges), weight)
    square = (x.double().unsqueeze(1) - x.double()).square().sum(2)
    expected = (coupling.to_dense() * square).sum((1, 2))
    assert_close(
        coupling.to(torch.float32).dirichlet(x).double(), expected, rtol=1e-5, atol=0
    )


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("ihf,jhf->hij", q, k)


def cosines(q: Tensor, k: Tensor) -> Tensor:
    return scores(q / q.norm(dim=2, keepdim=True), k / k.norm(dim=2, keepdim=True))


OWN = torch.diag(block(PTR).sum(1))  # n, on the diagonal
# The coupling, and its entries before rows are divided by their sums (if they are).
FORMULAS: dict[str, tuple[Callable[..., Coupling], Callable[..., Tensor], bool]] = {
    "mean": (
        lambda q, k: UniformCoupling(9, PTR, dtype=q.dtype),
        lambda q, k: torch.ones(1, 9, 9),
        True,
    ),
    "sum": (
        lambda q, k: UniformCoupling(9, PTR, normalize=False),
        lambda q, k: torch.ones(1, 9, 9),
        False,
    ),
    "low rank": (lambda q, k: LowRankCoupling(q, k, PTR), scores, False),
    "linear": (lambda q, k: LinearAttentionCoupling(q, k, PTR), scores, True),
    "DIFFormer-s": (
        lambda q, k: LinearAttentionCoupling(q, k, PTR, constant=1.0, unit=True),
        lambda q, k: 1 + cosines(q, k),
        True,
    ),
    "SGFormer": (
        lambda q, k: LinearAttentionCoupling(q, k, PTR, own=1.0, unit=True),
        lambda q, k: OWN + cosines(q, k),
        True,
    ),
    "both": (
        lambda q, k: LinearAttentionCoupling(q, k, PTR, constant=0.3, own=0.7),
        lambda q, k: 0.3 + 0.7 * OWN + scores(q, k),
        True,
    ),
    "exp": (
        lambda q, k: PairwiseCoupling(q, k, PTR, normalize=False),
        lambda q, k: scores(q, k).exp(),
        False,
    ),
    "softmax": (
        lambda q, k: PairwiseCoupling(q, k, PTR),
        lambda q, k: scores(q, k).exp(),
        True,
    ),
    "sigmoid": (
        lambda q, k: PairwiseCoupling(q, k, PTR, "sigmoid"),
        lambda q, k: scores(q, k).sigmoid(),
        True,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_entries_and_products_are_those_of_the_formula(name):
    build, formula, normalize = FORMULAS[name]
    q = randn(9, 2, 4, seed=1).abs()
    k = randn(9, 2, 4, seed=2).abs()
    v = randn(9, 2, 3, seed=3)
    expected = formula(q, k) * block(PTR)
    if normalize:
        expected = expected / expected.sum(2, keepdim=True)
    coupling = build(q, k)
    close(coupling.to_dense(), expected.to(coupling.dtype))
    expected = expected.expand(2, -1, -1)
    products = (
        torch.einsum("hij,jhd->ihd", expected, v),
        torch.einsum("hji,jhd->ihd", expected, v),
    )
    for of, product in zip(build(q, k).both(v, v), products, strict=True):
        close(of, product)


def test_a_row_of_linear_attention_without_mass_is_zero():
    """DIFFormer-s where every key is the opposite of a query: 1 + q̃·k̃ = 0."""
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).unsqueeze(1)
    k = torch.tensor([[-3.0, 0.0], [-1.0, 0.0]]).unsqueeze(1)
    coupling = LinearAttentionCoupling(q, k, constant=1.0, unit=True)
    assert coupling.degree().tolist() == [[0.0], [1.0]]
    assert coupling.to_dense().tolist() == [[[0.0, 0.0], [0.5, 0.5]]]
    assert (coupling @ q).flatten().tolist() == [0.0, 0.0, 0.5, 1.0]


def test_entries_between_graphs_are_zero_however_large_the_scores():
    ptr = torch.tensor([0, 2, 4])
    q = (
        torch.tensor([30.0, 31.0, -30.0, -31.0], dtype=torch.float64)
        .reshape(4, 1, 1)
        .requires_grad_()
    )
    coupling = PairwiseCoupling(q, q.flip(0), ptr)
    across = coupling.at(torch.tensor([[2, 3, 0], [0, 0, 3]]))
    assert across.tolist() == [[0], [0], [0]]
    dense = coupling.to_dense()
    assert dense.isfinite().all()
    assert (dense[0, :2, 2:] == 0).all()
    (grad,) = torch.autograd.grad(dense.sum() + across.sum(), q)
    assert grad.isfinite().all()


def test_a_mean_over_many_nodes_keeps_its_digits():
    v = 1 + torch.rand(10_001, 1, 8, generator=torch.Generator().manual_seed(0))
    exact = v.double().mean(0)
    mean = (UniformCoupling(len(v)) @ v)[0].double()
    assert (mean - exact).abs().max() <= 2 * torch.finfo(
        torch.float32
    ).eps * exact.max()


def test_to_dense_warns_when_it_is_large():
    big = IdentityCoupling(8193)
    with pytest.warns(UserWarning, match="67,125,249 entries"):
        big.to_dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IdentityCoupling(100).to_dense()


def test_a_coupling_of_one_head_is_used_as_a_matrix():
    q = randn(7, 1, 3, seed=1)
    k = randn(7, 1, 3, seed=2)
    other = UniformCoupling(7, dtype=torch.float64)
    coupling = LowRankCoupling(q, k)
    dense = coupling.to_dense()[0]
    assert coupling.shape == coupling.to_dense().shape
    for v in (randn(7), randn(7, 4), randn(7, 0)):
        close(coupling @ v, dense @ v)
    close((coupling - other).to_dense()[0], dense - other.to_dense()[0])
    close((-coupling) @ randn(7), -dense @ randn(7))
    assert not (-coupling).nonnegative


ONES = torch.ones(3, 3)
QUERY = torch.ones(3, 2, 2)
PAIR = LowRankCoupling(QUERY, QUERY)
test_matrices_and_sums_that_do_not_fit_are_refused = refuses(
    (
        lambda: DenseCoupling(ONES, torch.tensor([0, 2, 3])),
        ValueError,
        "matrix",
    ),
    (
        lambda: PAIR + LowRankCoupling(*2 * [torch.ones(3, 3, 2)]),
        ValueError,
        "one number of heads",
    ),
    (lambda: row_normalized(ONES), TypeError, "coupling"),
    (lambda: merged([]), ValueError, "parts"),
    (lambda: DistanceCoupling(torch.sum, QUERY, QUERY) @ QUERY, ValueError, "function"),
    (
        lambda: DistanceCoupling(lambda z2: 1.0, QUERY, QUERY).at([[0], [1]]),
        ValueError,
        "function",
    ),
    (lambda: distance_features(QUERY, QUERY[1:]), ValueError, "x and y"),
    (lambda: with_constant(ONES, 1.0), ValueError, "features"),
    (lambda: plot.neighbours(PAIR, 0, names=["a"]), ValueError, "names"),
    (lambda: plot.uncertainty(PAIR, ONES[:, :1]), ValueError, "points"),
    # type: ignore[operator]
)


def test_a_dense_coupling_examines_its_entries_on_first_access():
    rows = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) + 0.1
    stochastic = DenseCoupling(rows / rows.sum(2, keepdim=True))
    assert stochastic.row_stochastic
    assert stochastic.nonnegative
    assert not stochastic.symmetric
    assert DenseCoupling(rows + rows.mT).symmetric
    assert not DenseCoupling(rows - 0.5).nonnegative
    half = DenseCoupling(torch.diag(torch.tensor([1.0, 1, 0, 0, 0])))
    assert half.symmetric
    assert half.row_stochastic  # the last three rows are zero


@pytest.mark.parametrize("normalize", [True, False])
def test_features_as_logarithms_are_averaged_over_samples(normalize):
    log_query, log_key, log_weight = (
        randn(5, 1, 3),
        randn(5, 1, 3, seed=1),
        randn(5, 1, 4),
    )
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for sample in log_weight.unbind(2):
        entries = log_query[:, 0].exp() @ (log_key[:, 0] + sample).exp().T
        if normalize:
            entries = entries / entries.sum(1, keepdim=True)
        expected += entries / 4
    coupling = LogLowRankCoupling(
        log_query, log_key, log_weight=log_weight, normalize=normalize
    )
    close(coupling.to_dense()[0], expected)
    close((coupling @ randn(5, 1, 2))[:, 0], expected @ randn(5, 1, 2)[:, 0])
