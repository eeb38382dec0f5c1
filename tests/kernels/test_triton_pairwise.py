"""The GPU kernels of pairwise attention, run by Triton's interpreter, against the reference in double precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from triton_cases import CASES, DEVICE, assert_equals_reference, boundaries, randn

from diffusion_mp.kernels.pairwise import SCORES, pairwise_attention, pairwise_logsumexp, pairwise_product
from diffusion_mp.testing import tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

# A program meets all columns, 64 at a time or, in the wide case, 32: with more blocks nothing new happens but time.
SMALL = {name: CASES[name] for name in ("no node", "one node", "odd", "wide")} | {
    "ragged": ([0, 3, 1, 0, 70, 0], 1, 5, 3)
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("sizes", "heads", "features", "channels"), SMALL.values(), ids=SMALL)
def test_values_and_gradients(
    sizes: int | list[int], heads: int, features: int, channels: int, score: str, generator: torch.Generator
) -> None:
    ptr, n = boundaries(sizes)
    q, k, v = (randn(n, heads, width, generator=generator) for width in (features, features, channels))
    scale = features**-0.25
    inputs = [scale * q, scale * k, v]
    assert_equals_reference(partial(pairwise_attention, ptr=ptr, score=score), inputs, generator)
    shifts = [randn(n, heads, generator=generator) - 2 for _ in range(2)]
    for loops in (True, False):
        product = partial(pairwise_product, ptr=ptr, score=score, loops=loops)
        assert_equals_reference(product, [*inputs, *shifts], generator)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.slow) for n in (500, 1000, 4097)])
def test_many_blocks_of_columns(n: int, score: str, generator: torch.Generator) -> None:
    inputs = [randn(n, 1, width, generator=generator) for width in (3, 3, 2)]
    assert_equals_reference(partial(pairwise_attention, score=score), inputs, generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", SCORES)
def test_half_precision(score: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    inputs = [randn(70, 1, width, generator=generator) for width in (9, 9, 20)]
    assert_equals_reference(partial(pairwise_attention, score=score), inputs, generator, dtype)


@pytest.mark.parametrize("score", SCORES)
def test_the_normaliser(score: str, generator: torch.Generator) -> None:
    ptr, n = boundaries([40, 0, 65])
    inputs = [randn(n, 2, 5, generator=generator) for _ in range(2)]
    for loops in (True, False):
        assert_equals_reference(partial(pairwise_logsumexp, ptr=ptr, score=score, loops=loops), inputs, generator)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_scores_far_from_zero(shift: float, score: str, generator: torch.Generator) -> None:
    """No score overflows, and a row of scores far below zero does not vanish."""
    q, k, v = (randn(20, 1, width, generator=generator) for width in (3, 3, 2))
    constant = torch.ones(20, 1, 1, device=DEVICE)
    q, k = torch.cat([q, shift * constant], dim=2), torch.cat([k, constant], dim=2)
    results: list[list[Tensor]] = []
    # Scores of 300 have lost two digits before anything is computed, so both are in single precision.
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = pairwise_attention(*leaves, score=score, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance("gradient", torch.float32)._asdict())


def test_inputs_are_read_where_they_lie(generator: torch.Generator) -> None:
    wide = randn(40, 2, 12, generator=generator)
    q, k = wide[:, :1, :5].expand(-1, 2, -1), wide[..., 5:10]
    v = randn(40, 3, 2, generator=generator).transpose(1, 2)
    got = pairwise_attention(q, k, v, score="sigmoid", backend="triton")
    torch.testing.assert_close(got, pairwise_attention(q, k, v, score="sigmoid", backend="reference"))


def test_registered_operations_pass_opcheck(generator: torch.Generator) -> None:
    ptr = torch.tensor([0, 2, 2, 5])
    q, k, v = (randn(5, 1, 3, generator=generator).requires_grad_() for _ in range(3))
    a, b = (randn(5, 1, generator=generator).requires_grad_() for _ in range(2))
    ops = torch.ops.diffusion_mp
    torch.library.opcheck(ops.pairwise_attention.default, (q, k, v, ptr, "sigmoid", "triton"))
    torch.library.opcheck(ops.pairwise_product.default, (q, k, v, a, b, ptr, "exp", False, "triton"))
