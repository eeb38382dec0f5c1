"""The GPU kernels of sparse flow, run by Triton's interpreter, against the sort in double precision."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from triton_cases import assert_close, assert_equals_reference, boundaries, randn

from diffusion_mp.kernels.sparse_flow import sparse_flow_potentials, sparse_flow_product
from diffusion_mp.testing import tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

# Nodes of one graph or of the graphs of a batch, heads, features, friction features, channels.
CASES: dict[str, tuple[int | list[int], int, int, int, int]] = {
    "no node": (0, 1, 3, 3, 3),
    "one node": (1, 2, 8, 8, 8),
    "odd": (63, 2, 7, 20, 33),
    "wide": (130, 1, 20, 0, 5),
    "ragged": ([3, 0, 1, 40, 3, 70], 1, 5, 2, 3),
}


def problem(
    n: int, heads: int, features: int, friction: int, channels: int, generator: torch.Generator
) -> list[Tensor]:
    """q, k, q̃, k̃, λ, 1/α and v; thresholds that close about a third of the entries."""
    widths = (features, features, friction, friction)
    q, k, fq, fk = (randn(n, heads, width, generator=generator) for width in widths)
    lam = randn(n, heads, generator=generator).exp() / max(1, n)
    leak = randn(n, heads, generator=generator).exp()
    return [0.5 * q / features**0.5, k, fq / max(1, friction) ** 0.5, fk, lam, leak, randn(n, heads, channels, generator=generator)]


def everything(
    q: Tensor, k: Tensor, fq: Tensor, fk: Tensor, lam: Tensor, leak: Tensor, v: Tensor, *, ptr: Tensor | None, backend: str
) -> Tensor:
    """Product, transposed product and log-potentials side by side."""
    rows = sparse_flow_potentials(q, k, fq, fk, lam, leak, ptr, backend=backend)
    there, back = (
        sparse_flow_product(q, k, fq, fk, v, lam, rows.a, rows.w, ptr, transpose=transpose, backend=backend)
        for transpose in (False, True)
    )
    return torch.cat([there, back, rows.log_mu.to(v.dtype).unsqueeze(2)], dim=2)


@pytest.mark.parametrize(("sizes", "heads", "features", "friction", "channels"), CASES.values(), ids=CASES)
def test_values_and_gradients(
    sizes: int | list[int], heads: int, features: int, friction: int, channels: int, generator: torch.Generator
) -> None:
    ptr, n = boundaries(sizes)
    inputs = problem(n, heads, features, friction, channels, generator)
    assert_equals_reference(partial(everything, ptr=ptr), inputs, generator)
    ours, truth = (
        sparse_flow_potentials(*(t.to(dtype) for t in inputs[:6]), ptr, backend=backend)
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference"))
    )
    for got, expected in zip(ours, truth, strict=True):
        assert_close(got, expected, "product", torch.float32)
