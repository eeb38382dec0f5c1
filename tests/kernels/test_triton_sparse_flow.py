"""The GPU kernels of sparse flow, run by Triton's interpreter, against the sort in double precision."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICE, assert_close, assert_equals_reference, boundaries, randn

from diffusion_mp.errors import BackendError
from diffusion_mp.kernels.sparse_flow import sparse_flow_potentials, sparse_flow_product
from diffusion_mp.testing import tolerance

pytestmark = pytest.mark.usefixtures("poisoned")

# Nodes of one graph or of the graphs of a batch, heads, features, friction features, channels.
CASES: dict[str, tuple[int | list[int], int, int, int, int]] = {
    "no node": (0, 1, 3, 3, 3),
    "one node": (1, 2, 8, 8, 8),
    "odd": (63, 2, 7, 20, 33),
    "constant friction": (130, 1, 20, 0, 5),
    "ragged": ([3, 0, 70, 0], 2, 5, 2, 3),
}


def problem(
    n: int, heads: int, features: int, friction: int, channels: int, generator: torch.Generator
) -> list[Tensor]:
    """q, k, q̃, k̃, v, λ and 1/α, with scores of unit variance or less."""
    widths = (features, features, friction, friction)
    scores = [randn(n, heads, width, generator=generator) / max(1, width) ** 0.25 for width in widths]
    lam, leak = (randn(n, heads, generator=generator).exp() for _ in range(2))
    return [*scores, randn(n, heads, channels, generator=generator), lam / max(1, n), leak]


def everything(
    q: Tensor, k: Tensor, fq: Tensor, fk: Tensor, v: Tensor, lam: Tensor, leak: Tensor,
    *, ptr: Tensor | None = None, backend: str,
) -> Tensor:  # fmt: skip
    """Product, transposed product and log-potentials side by side."""
    rows = sparse_flow_potentials(q, k, fq, fk, lam, leak, ptr, backend=backend)
    there, back = (
        sparse_flow_product(q, k, fq, fk, v, rows.terms, ptr, transpose=transpose, backend=backend)
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
        sparse_flow_potentials(*(t.to(dtype) for t in (*inputs[:4], *inputs[5:])), ptr, backend=backend)
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference"))
    )
    for got, expected in zip(ours, truth, strict=True):
        assert_close(got, expected.double(), "product", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("n", [500, 1000, 4097])
def test_many_blocks_of_columns(n: int, generator: torch.Generator) -> None:
    inputs = problem(n, 1, 3, 2, 2, generator)
    assert_equals_reference(everything, inputs, generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Of the features: λ and α are numbers of rows, whose gradients are differences of large numbers."""
    *features, lam, leak = problem(70, 1, 9, 5, 20, generator)
    assert_equals_reference(partial(everything, lam=lam, leak=leak), features, generator, dtype)


def test_without_friction_it_is_softmax(generator: torch.Generator) -> None:
    """Also in the gradient of λ, which is one-sided there."""
    q, k, fq, fk, v, lam, leak = problem(20, 2, 3, 2, 4, generator)
    assert_equals_reference(everything, [q, k, fq, fk, v, 0 * lam, leak], generator)
    got = everything(q, k, fq, fk, v, 0 * lam, 0 * leak, backend="triton")[..., :4]
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), scale=1.0)
    torch.testing.assert_close(got, expected.transpose(0, 1), **tolerance("product", torch.float32)._asdict())


def test_rows_in_which_nothing_flows(generator: torch.Generator) -> None:
    """Every threshold is above α: the potential stays at α."""
    *features, lam, leak = problem(20, 1, 3, 2, 4, generator)
    assert_equals_reference(everything, [*features, 1000 + lam, 10 + leak], generator)


def test_a_support_far_below_the_largest_conductance(generator: torch.Generator) -> None:
    """The best conductor is closed by friction, and all others conduct e⁻⁶⁵ of it."""
    *_, v, lam, leak = problem(20, 1, 1, 1, 4, generator)
    one = torch.ones(20, 1, 1, device=DEVICE)
    k, fk = (randn(20, 1, 1, generator=generator) for _ in range(2))
    k[0], fk[0] = 65.0, 30.0
    rows = sparse_flow_potentials(one, k, one, fk, lam + 1, leak, backend="triton")
    assert rows.support.eq(19).all()
    inputs = [one, k, one, fk, v, lam + 1, leak]
    expected = everything(*(t.double() for t in inputs), backend="reference")
    assert_close(everything(*inputs, backend="triton"), expected, "product", torch.float32)


@pytest.mark.parametrize("alpha", [0.1, math.inf])
def test_wild_scores_stay_finite_and_conserve_the_flow(alpha: float, generator: torch.Generator) -> None:
    """With scores in the hundreds conductances overflow, yet rows sum to one: to the rounding of the scores."""
    n, spread = 33, 10.0
    features = [spread * randn(n, 1, 1, generator=generator) for _ in range(4)]
    lam, leak = (torch.full((n, 1), value, device=DEVICE) for value in (1 / n, 1 / alpha))
    rows = sparse_flow_potentials(*features, lam, leak, backend="triton")
    assert all(t.isfinite().all() for t in rows._replace(reach=rows.rho))
    z = sparse_flow_product(*features, torch.eye(n, device=DEVICE).unsqueeze(1), rows.terms, backend="triton")
    assert z.ge(0).all()
    rounding = 100 * torch.finfo(torch.float32).eps * spread**2
    assert (z.sum(2) + rows.log_mu.exp() / alpha - 1).abs().max() < rounding


def test_inputs_are_read_where_they_lie(generator: torch.Generator) -> None:
    """A head axis that is expanded, columns of a wider tensor, and rows that are not side by side."""
    *_, lam, leak = problem(40, 2, 1, 1, 1, generator)
    wide = 0.5 * randn(40, 2, 12, generator=generator)
    q, k = wide[:, :1, :5].expand(-1, 2, -1), wide[..., 5:10]
    v = randn(40, 3, 2, generator=generator).transpose(1, 2)
    lam = lam[:, :1].expand(-1, 2) / 40
    got, expected = (everything(q, k, k, q, v, lam, leak, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, expected, **tolerance("product", torch.float32)._asdict())


def test_wide_features_are_declined(generator: torch.Generator) -> None:
    with pytest.raises(BackendError, match="at most 128 channels, and a tensor has 129"):
        everything(*problem(3, 1, 4, 129, 2, generator), backend="triton")


def test_registered_operations_pass_opcheck(generator: torch.Generator) -> None:
    ptr = torch.tensor([0, 2, 2, 5])
    *features, v, lam, leak = (t.requires_grad_() for t in problem(5, 1, 3, 2, 4, generator))
    ops = torch.ops.diffusion_mp
    torch.library.opcheck(ops.sparse_flow_potentials.default, (*features, lam, leak, ptr, "triton"))
    rows = sparse_flow_potentials(*features, lam, leak, ptr, backend="triton")
    terms = [t.detach().requires_grad_() for t in rows.terms[:4]]
    arguments = (*features, v, *terms, *rows.terms[4:], ptr, True, "triton")
    torch.library.opcheck(ops.sparse_flow_product.default, arguments)
