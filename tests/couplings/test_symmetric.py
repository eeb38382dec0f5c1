"""D^-½SD^-½ with and without the diagonal, against dense matrices and where the diagonal is nearly everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffusion_mp import AdjacencyDiffusivity, CouplingMismatchError, GaussianDiffusivity, Graph, SimpleDiffusivity
from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    LowRankCoupling,
    PairwiseCoupling,
    SparseCoupling,
    distance_features,
    symmetric_normalized,
    without_diagonal,
)
from diffusion_mp.diffusivities import SymmetricDiffusivity
from diffusion_mp.testing import tolerance

DOUBLE = torch.float64
PTR = torch.tensor([0, 6, 6, 7, 13])
LOOP = torch.tensor([[0, 1, 1, 3, 8, 9, 6], [1, 0, 1, 3, 9, 8, 6]])


def positive(generator: torch.Generator, heads: int = 2) -> Tensor:
    return torch.rand(13, heads, 3, generator=generator, dtype=DOUBLE).requires_grad_()


COUPLINGS: dict[str, Callable[[Tensor], Coupling]] = {
    "gaussian": lambda x: PairwiseCoupling(*distance_features(3 * x), PTR, normalize=False, symmetric=True),
    "sigmoid": lambda x: PairwiseCoupling(x, x, PTR, "sigmoid", normalize=False, symmetric=True),
    "low-rank": lambda x: LowRankCoupling(x, x, PTR, symmetric=True, nonnegative=True),
    "graph": lambda x: SparseCoupling(Graph(13, LOOP, ptr=PTR), x[:7, :, 0], nonnegative=True),
    "sum": lambda x: (
        0.5 * LowRankCoupling(x, x, PTR, symmetric=True, nonnegative=True)
        + SparseCoupling(Graph(13, LOOP, ptr=PTR), x[:7, :, 0], nonnegative=True)
    ),
    "identity": lambda x: IdentityCoupling(13, dtype=DOUBLE),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_without_the_diagonal_row_sums_bound_the_laplacian(name: str) -> None:
    x = torch.rand(13, 2, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    x[1], x[5] = x[0], x[4]  # the edges of the graph have one weight in both directions
    bare = without_diagonal(COUPLINGS[name](x))
    for convex, factor in ((True, 1.0), (False, 2.0)):
        torch.testing.assert_close(bare.majorant(convex), factor * bare.to_dense().sum(2).T.float().double())


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("name", COUPLINGS)
def test_it_is_what_is_written_out(name: str, diagonal: bool, generator: torch.Generator) -> None:
    """Values and gradients; empty rows are zero rows."""
    x = positive(generator)
    v = torch.randn(13, 2, 3, generator=generator, dtype=DOUBLE)
    dense = COUPLINGS[name](x).to_dense()
    if not diagonal:
        dense = dense * (1 - torch.eye(13, dtype=DOUBLE))
    degree = dense.sum(2)
    root = torch.where(degree == 0, 0.0, degree.clamp(min=1e-300).rsqrt())
    expected = torch.einsum("hij,jhd->ihd", root[:, :, None] * dense * root[:, None, :], v)
    got = symmetric_normalized(COUPLINGS[name](x), diagonal=diagonal) @ v
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    if not expected.requires_grad:
        return
    weight = torch.randn(v.shape, generator=generator, dtype=DOUBLE)
    grads = [torch.autograd.grad((weight * out).sum(), x)[0] for out in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", COUPLINGS)
def test_it_promises_what_holds(name: str, generator: torch.Generator) -> None:
    coupling = COUPLINGS[name](positive(generator))
    for diagonal in (True, False):
        normalized = symmetric_normalized(coupling, diagonal=diagonal)
        dense = normalized.to_dense().detach()
        assert normalized.nonnegative
        assert not normalized.row_stochastic
        assert normalized.symmetric == coupling.symmetric == bool(torch.allclose(dense, dense.mT))
        values = torch.linalg.eigvalsh(0.5 * (dense + dense.mT))
        if coupling.symmetric:
            assert values.max() <= 1 + 1e-12
        assert not normalized.positive_semidefinite or values.min() > -1e-12
    kernel = PairwiseCoupling(*distance_features(torch.rand(5, 1, 2)), normalize=False, positive_semidefinite=True)
    assert symmetric_normalized(kernel).positive_semidefinite
    assert not symmetric_normalized(kernel, diagonal=False).positive_semidefinite


def test_a_kernel_too_sharp_for_float32_keeps_its_neighbours() -> None:
    """Nodes three apart weigh e^−450 for each other beside a diagonal of one: D^-½SD^-½ is that of a path.

    The last node is alone in its graph, and has a zero row.
    """
    q, k = distance_features(3 * torch.arange(8.0).view(8, 1, 1))
    scores = PairwiseCoupling(100 * q, k, torch.tensor([0, 7, 8]), normalize=False, symmetric=True)
    coupling = symmetric_normalized(scores, diagonal=False)
    path = torch.diag(torch.ones(6), 1) + torch.diag(torch.ones(6), -1)
    root = path.sum(1).rsqrt()
    expected = torch.zeros(8, 8)
    expected[:7, :7] = root[:, None] * path * root[None, :]
    rounding = 4 * 450 * 2**-24  # of exponents around 450
    for got in (coupling.to_dense()[0], (coupling @ torch.eye(8).unsqueeze(1)).squeeze(1)):
        torch.testing.assert_close(got, expected, rtol=rounding, atol=0.0)
    assert not coupling.to_dense()[0, 7].any()


def test_where_the_diagonal_was_everything_rounding_is_nobodys_neighbour(generator: torch.Generator) -> None:
    """Orthogonal features: off the diagonal is nothing, and what subtracting leaves must not be normalised."""
    directions = torch.linalg.qr(torch.randn(40, 40, generator=generator)).Q
    x = (directions * 3 * torch.rand(40, 1, generator=generator)).unsqueeze(1).requires_grad_()
    coupling = symmetric_normalized(LowRankCoupling(x, x, symmetric=True, nonnegative=True), diagonal=False)
    out = coupling @ torch.rand(40, 1, 2, generator=generator)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("normalize", [True, "symmetric"])
def test_who_needs_no_gradient_takes_it_from_nobody_else(normalize, generator: torch.Generator) -> None:
    """Sums of rows are kept from the first who asks, a solver that wants no gradient for instance."""
    x, pairs = torch.rand(5, 1, 3, generator=generator).requires_grad_(), torch.tensor([[0, 1], [2, 0]])
    grads = []
    for asks in (False, True):
        coupling = PairwiseCoupling(x, x, normalize=normalize)
        if asks:
            with torch.no_grad():
                coupling.at(pairs)
        grads += torch.autograd.grad(coupling.at(pairs).sum(), x)
    torch.testing.assert_close(*grads)


def test_of_a_graph_it_is_the_normalised_adjacency(generator: torch.Generator) -> None:
    edge_index = torch.randint(9, (2, 30), generator=generator)
    x, graph = torch.rand(9, 2), Graph(9, edge_index, torch.rand(30, generator=generator))
    for diagonal, loops in ((True, "keep"), (False, "remove")):
        ours = SymmetricDiffusivity(AdjacencyDiffusivity("sum", direction="undirected"), diagonal)(x, graph)
        theirs = AdjacencyDiffusivity("sym", direction="undirected", self_loops=loops)(x, graph)
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), **tolerance("entries", x.dtype)._asdict())
        assert ours.symmetric


def test_what_has_no_such_normalisation_is_refused_with_the_way_out(no_typecheck: None) -> None:
    x = torch.rand(5, 1, 3)
    with pytest.raises(CouplingMismatchError, match=r"before its rows are divided .* row_stochastic=False"):
        symmetric_normalized(PairwiseCoupling(x, x))
    with pytest.raises(CouplingMismatchError, match=r"nonnegative=False.*normalize='row'"):
        symmetric_normalized(LowRankCoupling(x, x, symmetric=True))
    with pytest.raises(ValueError, match=r"GaussianDiffusivity has divided its rows .* row_stochastic=False"):
        SymmetricDiffusivity(GaussianDiffusivity())
    with pytest.raises(ValueError, match=r"AdjacencyDiffusivity has divided its rows .* normalization='sum'"):
        SymmetricDiffusivity(AdjacencyDiffusivity("row"))
    with pytest.raises(TypeError, match="coupling must be a Coupling"):
        without_diagonal("S")
    assert SymmetricDiffusivity(SimpleDiffusivity(row_stochastic=False)).symmetric
