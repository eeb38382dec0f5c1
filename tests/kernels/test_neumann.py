"""Stencils along sequences: the fast paths against the matrices, the matrices against the definition, the bases."""

import math
from functools import partial

import pytest
import torch
from kernel_cases import DOUBLE, assert_close, assert_same, boundaries, randn, stencils
from torch import Tensor

from diffusion_mp.kernels.neumann import (
    _inner,
    neighbours,
    neumann_function,
    neumann_product,
)
from diffusion_mp.kernels.neumann.stencil import Stencil

BOUNDARIES = ("symmetric", "replicate", "drop", "periodic", "causal")
# Lengths of one sequence or of the sequences of a batch.
BATCHES = {
    "one": 11,
    "one row": 1,
    "two rows": 2,
    "no row": 0,
    "equal lengths": [6, 6, 6],
    "equal, some empty": [0, 6, 0, 6, 0],
    "ragged": [3, 1, 7, 0, 3, 2, 12],
    "all empty": [0, 0],
}
STRIDES = {
    "one": (1,),
    "three": (1, 2, 4),
    "longer than the sequence": (3, 11, 12, 24, 37),
    "a stride twice": (2, 2),
}


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batch(request: pytest.FixtureRequest) -> tuple[Tensor | None, int]:
    return boundaries(request.param)


def neighbour(i: int, n: int, boundary: str) -> int | None:
    """Where position i, perhaps beyond the ends, lies among 0 … n − 1; None is nowhere. One step at a time."""
    if boundary == "periodic":
        while i not in range(n):
            i += n if i < 0 else -n
    elif boundary == "replicate":
        i = max(0, min(i, n - 1))
    elif boundary == "symmetric":
        while i not in range(n):  # x_{-1} = x_0, x_{-2} = x_1, …, and x_n = x_{n-1}, …
            i = -1 - i if i < 0 else 2 * n - 1 - i
    return i if i in range(n) else None


def written_out(n: int, stride: int, boundary: str) -> Tensor:
    """A_h = Δ_h + 2I by the definition."""
    matrix = torch.zeros(n, n, dtype=DOUBLE)
    for i in range(n):
        for j in (i - stride, i + stride):
            there = neighbour(j, n, boundary)
            if boundary == "causal" and j > i:
                there = i
            matrix[i, i if there is None else there] += 1
    return matrix


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_reference_is_the_definition(boundary, batch):
    (ptr, n), strides = batch, (1, 2, 3, 5, 12, 30)
    lengths = [n] if ptr is None else ptr.diff().tolist()
    for matrix, stride in zip(
        stencils(n, strides, boundary, ptr, torch.zeros(0, dtype=DOUBLE)),
        strides,
        strict=True,
    ):
        blocks = [written_out(size, stride, boundary) for size in lengths]
        assert torch.equal(matrix, torch.block_diag(*blocks))
        v = torch.arange(2.0 * n, dtype=DOUBLE).view(n, 2)
        sides = neighbours(n, (stride,), boundary, ptr, v.device)
        assert torch.equal(
            sum((v[side[0]] for side in sides), torch.zeros_like(v)), matrix @ v
        )


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("transpose", [False, True])
def test_products_equal_their_reference_and_the_matrices(
    batch, boundary, strides, transpose, generator
):
    ptr, n = batch
    v = randn(n, 2, 3, generator=generator)
    alpha = randn(len(strides), 2, generator=generator)
    matrices = stencils(n, strides, boundary, ptr, v.detach())
    weight = torch.randn(n, 2, 3, generator=generator).double()

    def by_matrices(v: Tensor, alpha: Tensor) -> Tensor:
        return torch.einsum(
            "kij,kh,jhd->ihd", matrices.mT if transpose else matrices, alpha, v
        )

    product = partial(
        neumann_product,
        strides=strides,
        boundary=boundary,
        ptr=ptr,
        transpose=transpose,
    )
    for backend in ("cpu", "reference"):
        assert_same(partial(product, backend=backend), by_matrices, [v, alpha])
        inner = _inner(
            weight, v, Stencil(list(strides), boundary, ptr), backend=backend
        )
        assert_close(
            inner,
            torch.einsum("ihd,kij,jhd->kh", weight, matrices, v),
            "product",
            DOUBLE,
        )


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_values_may_be_views(boundary, generator):
    v = randn(3, 2, 12, generator=generator).permute(2, 0, 1)
    alpha = randn(2, 3, generator=generator)
    expected = neumann_product(v.contiguous(), alpha, (1, 5), boundary)
    assert torch.equal(neumann_product(v, alpha, (1, 5), boundary), expected)


@pytest.mark.parametrize("length", range(1, 65))
def test_the_spectrum_is_that_of_the_cosines(length):
    """Lemma 4.1 at every stride: eigenvalues −4 sin²(πkh/2L), symmetric, mass-preserving, commuting."""
    strides = (1, 2, 4, 8, length, length + 1, 2 * length, 3 * length + 2)
    identity = torch.eye(length, dtype=DOUBLE)
    matrices = stencils(length, strides, "symmetric", None, identity)
    laplacians = matrices - 2 * identity
    mode = torch.arange(length, dtype=DOUBLE)
    cosines = torch.cos(math.pi * torch.outer(mode + 0.5, mode) / length)
    one = torch.ones(1, 1, dtype=DOUBLE)
    for laplacian, stride in zip(laplacians, strides, strict=True):
        expected = -4 * torch.sin(math.pi * mode * stride / (2 * length)).square()
        values = torch.linalg.eigvalsh(laplacian)
        assert (values - expected.sort().values).abs().max() < 1e-12
        assert (laplacian @ cosines - expected * cosines).abs().max() < 1e-12
        assert torch.equal(laplacian, laplacian.T)
        assert not laplacian.sum(0).any()
        for other in laplacians:  # of small integers: exact
            assert torch.equal(laplacian @ other, other @ laplacian)
        got = neumann_function(torch.neg, identity.unsqueeze(1), one, (stride,))
        assert (got.squeeze(1) - laplacian).abs().max() < 1e-12


@pytest.mark.parametrize("periodic", [False, True], ids=["symmetric", "periodic"])
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize(
    "function",
    [lambda x: torch.exp(-x), lambda x: 1 / (1 + x), torch.sin],
    ids=["exp", "inverse", "sin"],
)
def test_functions_of_the_laplacian_equal_those_of_its_matrix(
    batch, periodic, strides, function, generator
):
    ptr, n = batch
    v = randn(n, 2, 3, generator=generator)
    alpha = randn(len(strides), 2, generator=generator).detach().abs()
    matrices = stencils(
        n, strides, "periodic" if periodic else "symmetric", ptr, v.detach()
    )
    laplacian = torch.einsum(
        "kij,kh->hij", 2 * torch.eye(n, dtype=DOUBLE) - matrices, alpha
    )
    values, vectors = torch.linalg.eigh(laplacian)
    expected = torch.einsum(
        "him,hm,hjm,jhd->ihd", vectors, function(values), vectors, v
    )
    got = neumann_function(function, v, alpha, strides, ptr, periodic=periodic)
    assert_close(got, expected, "product", DOUBLE)


@pytest.mark.parametrize("shape", [(0, 2, 3), (5, 2, 0), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("periodic", [False, True])
def test_nothing_is_transformed_without_rows_or_channels(shape, periodic):
    v = torch.zeros(shape, requires_grad=True)
    alpha = torch.ones(1, shape[1], requires_grad=True)
    out = neumann_function(
        torch.exp, v, alpha, (1,), periodic=periodic
    ) + neumann_product(v, alpha, (1,))
    assert out.shape == shape
    assert torch.equal(
        torch.autograd.grad(out.sum(), alpha)[0], torch.zeros_like(alpha)
    )


def test_what_is_kept_of_a_batch_in_inference_serves_its_gradient(
    generator,
):
    """The neighbours of a length or a batch are cached."""
    for ptr in (None, torch.tensor([0, 4, 9, 13])):
        v = randn(13, 2, 3, generator=generator)
        alpha = randn(1, 2, generator=generator)
        with torch.inference_mode():
            first = neumann_product(v, alpha, (3,), "causal", ptr)
        out = neumann_product(v, alpha, (3,), "causal", ptr)
        assert torch.equal(out, first)
        expected = neumann_product(v, alpha, (3,), "causal", ptr, backend="reference")
        grads = (
            torch.autograd.grad(x.square().sum(), (v, alpha)) for x in (out, expected)
        )
        assert_close(*grads, "gradient", DOUBLE)
