"""diag(r) S diag(c) against its formula, written out densely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion_mp.couplings import (
    Coupling,
    IdentityCoupling,
    LowRankCoupling,
    ReweightedCoupling,
    row_normalized,
)
from diffusion_mp.testing import tolerance

N, H = 7, 3
PTR = torch.tensor([0, 3, 3, 4, 7])
RTOL, ATOL = tolerance("product", torch.float64)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(heads: int) -> LowRankCoupling:
    return LowRankCoupling(random(N, heads, 2, seed=1), random(N, heads, 2, seed=2), PTR)


@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("sides", ["row", "column", "both", "neither"])
def test_formula(heads: int, sides: str) -> None:
    inner = low_rank(heads)
    row = random(N, H, seed=3) if sides in ("row", "both") else None
    column = random(N, 1, seed=4) if sides in ("column", "both") else None
    coupling = ReweightedCoupling(inner, row, column)
    ones = torch.ones(N, coupling.heads, dtype=torch.float64)
    r, c = (ones if weight is None else ones * weight for weight in (row, column))
    expected = torch.einsum("ih,hij,jh->hij", r, inner.to_dense().expand(coupling.heads, -1, -1), c)
    assert coupling.heads == (H if row is not None else heads)
    v = random(N, 1, 2, seed=5)
    torch.testing.assert_close(coupling.to_dense(), expected, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(coupling @ v, torch.einsum("hij,jd->ihd", expected, v[:, 0]), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(coupling.degree(), expected.sum(2).T, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(coupling.T.to_dense(), expected.transpose(1, 2), rtol=RTOL, atol=ATOL)


def test_row_normalized_leaves_an_empty_row_empty() -> None:
    key = torch.ones(3, 1, 1, dtype=torch.float64)
    query = torch.tensor([2.0, 0.0, 5.0], dtype=torch.float64).view(3, 1, 1).requires_grad_()
    coupling = row_normalized(LowRankCoupling(query, key, nonnegative=True))
    assert coupling.row_stochastic
    assert coupling.nonnegative
    degree = coupling.degree()
    torch.testing.assert_close(degree[:, 0].detach(), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad((coupling @ key).sum(), query)
    assert gradient.isfinite().all()


def test_promises_are_those_of_the_caller() -> None:
    coupling: Coupling = IdentityCoupling(N, dtype=torch.float64)
    weight = random(N, 1, seed=6)
    plain = ReweightedCoupling(coupling, weight)
    assert not any([plain.symmetric, plain.row_stochastic, plain.nonnegative])
    both = ReweightedCoupling(coupling, weight, weight, symmetric=True, nonnegative=True)
    assert both.T is both
    assert both.nonnegative


@pytest.mark.parametrize("shape", [(N,), (N + 1, 1), (N, 2), (N, H, 1)])
@pytest.mark.parametrize("side", ["row", "column"])
def test_weights_of_another_shape(side: str, shape: tuple[int, ...], no_typecheck: None) -> None:
    with pytest.raises(ValueError, match=rf"{side} must be \[num_nodes, heads\] with 7 nodes .* got a float32 tensor"):
        ReweightedCoupling(low_rank(H), **{side: torch.ones(shape)})
