"""``ProjectedCoupling`` against the matrix over nodes and channels that it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import IdentityCoupling, LowRankCoupling, ProjectedCoupling
from diffusion_mp.energies import GaussianPenalty
from diffusion_mp.errors import CouplingMismatchError


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(dense: Tensor, w: Tensor) -> Tensor:
    """Σ_h S_h ⊗ W_hᵀW_h, nodes first."""
    gram = torch.einsum("hdc,hde->hce", w, w)
    return sum(torch.kron(s, g) for s, g in zip(dense.expand(len(w), -1, -1), gram, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("heads", [1, 3])
def test_product_laplacian_and_majorant(heads: int) -> None:
    """S of three heads, or of one that all projections share; p bounds the Laplacian over nodes and channels."""
    coupling = GaussianPenalty().coupling(randn(6, heads, 2))
    w, v = randn(3, 2, 4, seed=1), randn(6, 1, 4, seed=2)
    projected = ProjectedCoupling(coupling, w)
    dense = coupling.to_dense()
    laplacian = matrix(torch.diag_embed(dense.sum(2)) - dense, w)
    torch.testing.assert_close((projected @ v).flatten(), matrix(dense, w) @ v.flatten())
    torch.testing.assert_close((projected.T @ v).flatten(), matrix(dense, w) @ v.flatten())
    torch.testing.assert_close(projected.laplacian(v).flatten(), laplacian @ v.flatten())
    for convex, factor in ((True, 2.0), (False, 1.0)):
        p = projected.majorant(convex)
        assert p.shape == (6, 1)
        bound = torch.diag(factor * p.flatten().repeat_interleave(4))
        assert torch.linalg.eigvalsh(bound - laplacian).min() > -1e-12


def test_a_sum_with_a_projection_has_a_majorant() -> None:
    query, projection, state = randn(7, 2, 3).abs(), randn(2, 3, 5), randn(7, 1, 5)
    projected = ProjectedCoupling(LowRankCoupling(query, query, symmetric=True, nonnegative=True), projection)
    both = 0.5 * projected + IdentityCoupling(7, dtype=torch.float64)
    for convex in (True, False):
        torch.testing.assert_close(both.majorant(convex), both.majorized(state, convex)[1].squeeze(2))


def test_what_it_does_not_have_is_refused_in_sentences(no_typecheck: None) -> None:
    one = torch.ones(6, 1, 1, dtype=torch.float64)
    projected = ProjectedCoupling(LowRankCoupling(one, one, symmetric=True, nonnegative=True), randn(2, 3, 4))
    assert projected.symmetric
    assert projected.nonnegative
    assert projected.positive_semidefinite
    with pytest.raises(CouplingMismatchError, match="has no row sums: it mixes channels"):
        projected.degree()
    for entries in (projected.to_dense, lambda: projected.at(torch.tensor([[0], [1]]))):
        with pytest.raises(CouplingMismatchError, match="has no entries: it mixes channels"):
            entries()
    with pytest.raises(ValueError, match="v must be a state of one head with the 4 channels that the projection reads"):
        projected @ randn(6, 1, 5)
    with pytest.raises(ValueError, match=r"projection must be \[heads, head_channels, channels\]"):
        ProjectedCoupling(projected.coupling, randn(3, 4))


def test_nan_goes_on_as_nan() -> None:
    coupling = GaussianPenalty().coupling(randn(6, 1, 2))
    lost = ProjectedCoupling(coupling, torch.full((2, 3, 4), torch.nan, dtype=torch.float64))
    assert lost.laplacian(randn(6, 1, 4)).isnan().all()
    assert lost.majorant(False).isnan().all()
