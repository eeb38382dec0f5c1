"""Reweighted and symmetrically normalised couplings against dense matrices."""

# ruff: noqa: F403, F405 (everything public)
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp.couplings import *
from helpers import agree, close, randn, refuses

DOUBLE = torch.float64
N = 7
H = 3


def low_rank(heads: int) -> LowRankCoupling:
    return LowRankCoupling(
        randn(N, heads, 2, seed=1),
        randn(N, heads, 2, seed=2),
        torch.tensor([0, 3, 3, 4, 7]),
    )


ROW = randn(N, H, seed=3)
COLUMN = randn(N, 1, seed=4)


@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize(
    ("row", "column"), [(ROW, None), (None, COLUMN), (ROW, COLUMN), (None, None)]
)
def test_reweighting_formula(heads, row, column):
    expected = low_rank(heads).to_dense()
    if row is not None:
        expected = row.T.unsqueeze(2) * expected
    if column is not None:
        expected = expected * column.T.unsqueeze(1)
    coupling = ReweightedCoupling(low_rank(heads), row, column)
    close(coupling.to_dense(), expected)
    v = randn(N, 1, 2, seed=5)
    close(coupling @ v, torch.einsum("hij,jd->ihd", expected, v[:, 0]))


def test_reweighting_keeps_promises_and_empty_rows():
    key = torch.ones(3, 1, 1, dtype=DOUBLE)
    query = torch.tensor([2.0, 0.0, 5.0], dtype=DOUBLE).view(3, 1, 1).requires_grad_()
    coupling = row_normalized(LowRankCoupling(query, key, nonnegative=True))
    assert coupling.row_stochastic
    assert coupling.nonnegative
    degree = coupling.degree()
    assert_close(degree[:, 0].detach(), torch.tensor([1.0, 0.0, 1.0], dtype=DOUBLE))
    (gradient,) = torch.autograd.grad((coupling @ key).sum(), query)
    assert gradient.isfinite().all()
    coupling: Coupling = IdentityCoupling(N, dtype=DOUBLE)
    weight = randn(N, 1, seed=6)
    plain = ReweightedCoupling(coupling, weight)
    assert not any([plain.symmetric, plain.row_stochastic, plain.nonnegative])
    both = ReweightedCoupling(
        coupling, weight, weight, symmetric=True, nonnegative=True
    )
    assert both.T is both
    assert both.nonnegative


test_factors_of_another_shape_are_refused = refuses(
    (lambda: ReweightedCoupling(low_rank(H), torch.ones(N + 1, 1)), "row"),
    (lambda: ReweightedCoupling(low_rank(H), None, torch.ones(N, 2)), "column"),
    error=ValueError,
)
PTR = torch.tensor([0, 6, 6, 7, 13])
LOOP = torch.tensor([[0, 1, 1, 3, 8, 9, 6], [1, 0, 1, 3, 9, 8, 6]])

COUPLINGS: dict[str, Callable[[Tensor], Coupling]] = {
    "gaussian": lambda x: PairwiseCoupling(
        *distance_features(3 * x), PTR, normalize=False, symmetric=True
    ),
    "sigmoid": lambda x: PairwiseCoupling(
        x, x, PTR, "sigmoid", normalize=False, symmetric=True, mutual=True
    ),
    "graph": lambda x: SparseCoupling(
        Graph(13, LOOP, ptr=PTR), x[:7, :, 0], nonnegative=True
    ),
    "sum": lambda x: (
        0.5 * PairwiseCoupling(x, x, PTR, normalize=False, mutual=True)
        + SparseCoupling(Graph(13, LOOP, ptr=PTR), x[:7, :, 0], nonnegative=True)
    ),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_without_the_diagonal_row_sums_bound_the_laplacian(name):
    x = torch.rand(13, 2, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    x[1], x[5] = x[0], x[4]  # the edges of the graph have one weight in both directions
    bare = without_diagonal(COUPLINGS[name](x))
    for convex, factor in ((True, 1.0), (False, 2.0)):
        assert_close(
            bare.majorant(convex), factor * bare.to_dense().sum(2).T.float().double()
        )


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("name", COUPLINGS)
def test_symmetric_normalisation_is_the_dense_formula(name, diagonal, generator):
    """Values and gradients; empty rows are zero rows."""
    x = torch.rand(13, 2, 3, generator=generator, dtype=DOUBLE).requires_grad_()
    v = torch.randn(13, 2, 3, generator=generator, dtype=DOUBLE)
    dense = COUPLINGS[name](x).to_dense()
    if not diagonal:
        dense = dense * (1 - torch.eye(13, dtype=DOUBLE))
    degree = dense.sum(2)
    root = torch.where(degree == 0, 0.0, degree.clamp(min=1e-300).rsqrt())
    expected = torch.einsum(
        "hij,jhd->ihd", root[:, :, None] * dense * root[:, None, :], v
    )
    got = symmetric_normalized(COUPLINGS[name](x), diagonal=diagonal) @ v
    agree(got, expected, [x], (1e-11, 1e-12), (1e-9, 1e-11))


def test_a_kernel_too_sharp_for_float32_keeps_its_neighbours():
    """Entries of nodes three apart are e^−450, beside a diagonal of one: D^-½SD^-½ is that of a path.

    The last node is alone in its graph, and has a zero row.
    """
    q, k = distance_features(3 * torch.arange(8.0).view(8, 1, 1))
    scores = PairwiseCoupling(
        100 * q, k, torch.tensor([0, 7, 8]), normalize=False, symmetric=True
    )
    coupling = symmetric_normalized(scores, diagonal=False)
    path = torch.diag(torch.ones(6), 1) + torch.diag(torch.ones(6), -1)
    root = path.sum(1).rsqrt()
    expected = torch.zeros(8, 8)
    expected[:7, :7] = root[:, None] * path * root[None, :]
    rounding = 4 * 450 * 2**-24  # of exponents around 450
    for got in (
        coupling.to_dense()[0],
        (coupling @ torch.eye(8).unsqueeze(1)).squeeze(1),
    ):
        assert_close(got, expected, rtol=rounding, atol=0.0)
    assert not coupling.to_dense()[0, 7].any()


@pytest.mark.parametrize("normalize", [True, "symmetric"])
def test_row_sums_kept_under_no_grad_still_have_a_gradient(normalize, generator):
    """A solver that needs no gradient may be the first to compute the row sums, which the coupling keeps."""
    x = torch.rand(5, 1, 3, generator=generator).requires_grad_()
    pairs = torch.tensor([[0, 1], [2, 0]])
    grads = []
    for asks in (False, True):
        coupling = PairwiseCoupling(x, x, normalize=normalize, mutual=True)
        if asks:
            with torch.no_grad():
                coupling.at(pairs)
        grads += torch.autograd.grad(coupling.at(pairs).sum(), x)
    assert_close(*grads)


ROWS = torch.rand(5, 1, 3)
DIVIDED = r"Diffusivity has divided its rows .* "
test_couplings_without_symmetric_normalisation_are_refused = refuses(
    (
        lambda: symmetric_normalized(PairwiseCoupling(ROWS, ROWS, mutual=True)),
        CouplingMismatchError,
        r"before its rows .* row_st",
    ),
    (
        lambda: symmetric_normalized(
            LowRankCoupling(ROWS, ROWS, positive_semidefinite=True)
        ),
        CouplingMismatchError,
        r"nonnegative=True.*normalize='row'",
    ),
    (
        lambda: SymmetricDiffusivity(GaussianDiffusivity()),
        ValueError,
        f"Gaussian{DIVIDED}row_stochastic=False",
    ),
    (
        lambda: SymmetricDiffusivity(AdjacencyDiffusivity("row")),
        ValueError,
        f"Adjacency{DIVIDED}normalization='sum'",
    ),
    (lambda: without_diagonal("S"), TypeError, "coupling must be a Coupling"),
    (
        lambda: without_diagonal(UniformCoupling(6)),
        CouplingMismatchError,
        "a diagonal that can be left out",
    ),
)
