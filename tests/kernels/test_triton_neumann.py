"""The GPU kernels along sequences, run by Triton's interpreter, against the matrices in double precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from triton_cases import assert_close, assert_equals_reference, boundaries, randn

from diffusion_mp.kernels.neumann import _inner, neumann_product
from diffusion_mp.kernels.neumann.stencil import Stencil

pytestmark = pytest.mark.usefixtures("poisoned")

BOUNDARIES = ("symmetric", "replicate", "drop", "periodic", "causal")
# Lengths of the sequences, heads, channels, strides: shorter and longer than a run of rows and than the sequence.
CASES: dict[str, tuple[int | list[int], int, int, tuple[int, ...]]] = {
    "one row": (1, 1, 2, (1, 3)),
    "two runs": (130, 2, 3, (1, 70, 500)),
    "ragged": ([3, 1, 0, 12, 70], 1, 20, (2, 2, 37)),
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("sizes", "heads", "channels", "strides"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("transpose", [False, True])
def test_products(
    sizes: int | list[int],
    heads: int,
    channels: int,
    strides: tuple[int, ...],
    boundary: str,
    transpose: bool,
    generator: torch.Generator,
) -> None:
    """Values and the gradients of values and weights."""
    ptr, n = boundaries(sizes)
    inputs = [randn(n, heads, channels, generator=generator), randn(len(strides), heads, generator=generator)]
    run = partial(neumann_product, strides=strides, boundary=boundary, ptr=ptr, transpose=transpose)
    assert_equals_reference(run, inputs, generator)


@pytest.mark.parametrize("boundary", ["symmetric", "causal"])
def test_inner_products(boundary: str, generator: torch.Generator) -> None:
    """Over more channels than one program has, and none at all."""
    for n in (0, 70):
        g, v = (randn(n, 2, 40, generator=generator) for _ in range(2))
        got = _inner(g, v, Stencil([1, 4], boundary, None), backend="triton")
        expected = _inner(g.double(), v.double(), Stencil([1, 4], boundary, None), backend="reference")
        assert_close(got, expected, "gradient", torch.float32)


def test_registered_operations_pass_opcheck(generator: torch.Generator) -> None:
    v, alpha = (randn(*shape, generator=generator).requires_grad_() for shape in ((9, 2, 3), (2, 2)))
    ptr = torch.tensor([0, 3, 3, 9])
    ops = torch.ops.diffusion_mp
    torch.library.opcheck(ops.neumann_product.default, (v, alpha, [1, 2], "replicate", ptr, True, "triton"))
    torch.library.opcheck(ops.neumann_inner.default, (v, v, [1, 2], "replicate", ptr, "triton"))
