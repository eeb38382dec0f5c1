"""Linear attention, block by block, against its dense reference in double precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusion_mp.kernels.linear_attention import Terms, blocked, linear_attention, linear_pool, linear_read
from diffusion_mp.testing import tolerance

DIFFORMER: dict[str, Any] = {"constant": 1.0, "unit": True}
SGFORMER: dict[str, Any] = {"own": 1.0, "unit": True}
OPTIONS = {"difformer": DIFFORMER, "sgformer": SGFORMER, "plain": {"constant": 9.0, "own": 0.25}}

# Nodes of one graph, or of the graphs of a batch.
SIZES: dict[str, int | list[int]] = {
    "none": 0,
    "1": 1,
    "63": 63,
    "500": 500,
    "1000": 1000,
    "ragged": [3, 1, 1, 40, 3, 0, 17, 3, 70],
    "empty at both ends": [0, 0, 5, 0, 5, 12, 0],
}


def boundaries(sizes: int | list[int]) -> tuple[Tensor | None, int]:
    """``ptr`` and the number of nodes."""
    return (None, sizes) if isinstance(sizes, int) else (torch.tensor([0, *sizes]).cumsum(0), sum(sizes))


def randn(*shapes: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(
    inputs: list[Tensor], weight: Tensor, dtype: torch.dtype, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The result on inputs of ``dtype``, and the gradient of every input."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = linear_attention(*leaves, **options)
    return out.detach(), list(torch.autograd.grad(out, leaves, weight.to(dtype)))


def assert_equals_reference(
    inputs: list[Tensor], generator: torch.Generator, dtype: torch.dtype = torch.float64, **options: Any
) -> None:
    """Values and the gradient of every input, for the very same numbers of ``dtype``."""
    inputs = [x.to(dtype) for x in inputs]
    (weight,) = randn(tuple(inputs[2].shape), generator=generator, dtype=dtype)
    got, grads = with_gradients(inputs, weight, dtype, **options)
    expected, truth = with_gradients(inputs, weight, torch.float64, backend="reference", **options)
    names = ["product", "gradient", "gradient", "gradient"]
    for name, ours, theirs in zip(names, [got, *grads], [expected, *truth], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, **tolerance(name, dtype)._asdict())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(
    sizes: int | list[int],
    options: dict[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With blocks of about 64 nodes, so that graphs are cut, and others share a block."""
    monkeypatch.setattr(blocked, "BLOCK", 1024)
    ptr, n = boundaries(sizes)
    heads = 1 if n > 500 else 2
    inputs = randn((n, heads, 7), (n, heads, 7), (n, heads, 5), generator=generator)
    assert_equals_reference(inputs, generator, dtype, ptr=ptr, **options)


@pytest.mark.usefixtures("poisoned")
def test_many_blocks(generator: torch.Generator) -> None:
    inputs = randn(*[(4097, 1, 3)] * 3, generator=generator)
    for dtype in (torch.float64, torch.float32):
        assert_equals_reference(inputs, generator, dtype, **DIFFORMER)


@pytest.mark.usefixtures("poisoned", "two_threads")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", [1023, 1024, 1025, 2049])
def test_sums_that_two_threads_share(n: int, options: dict[str, Any], generator: torch.Generator) -> None:
    """In two halves where there are as many nodes in both: an odd number of them stays whole."""
    inputs = randn((n, 1, 7), (n, 1, 7), (n, 1, 5), generator=generator)
    for dtype in (torch.float64, torch.float32):
        assert_equals_reference(inputs, generator, dtype, **options)


@pytest.mark.parametrize(("features", "channels"), [(1, 1), (1, 33), (64, 1), (64, 64)])
def test_widths(features: int, channels: int, generator: torch.Generator) -> None:
    inputs = randn((63, 2, features), (63, 2, features), (63, 2, channels), generator=generator)
    for options in OPTIONS.values():
        assert_equals_reference(inputs, generator, **options)


def test_strided_and_expanded_tensors(generator: torch.Generator) -> None:
    """As they come from a projection that makes q, k and v at once, and from one head for all."""
    (packed,) = randn((40, 2, 12), generator=generator)
    before = packed.clone()
    assert_equals_reference(list(packed.split(4, dim=2)), generator, **DIFFORMER)
    one = [x[:, :1] for x in packed.split(4, dim=2)]
    assert_equals_reference([x.expand(-1, 3, -1) for x in one], generator, **SGFORMER)
    assert_equals_reference([*one[:2], packed], generator, **SGFORMER)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("unit", [False, True])
def test_rows_whose_sum_is_zero_are_zero_and_so_is_their_gradient(unit: bool) -> None:
    """q_0 has no product with any key but the opposite ones, of which there are as many."""
    q = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 3.0]], dtype=torch.float64).unsqueeze(1).requires_grad_()
    k = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0]], dtype=torch.float64).unsqueeze(1)
    v = torch.ones(3, 1, 2, dtype=torch.float64)
    for backend in ("cpu", "reference"):
        out = linear_attention(q, k, v, unit=unit, backend=backend)
        assert out[:, 0].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad[0].tolist() == [[0.0, 0.0]]
        assert grad.isfinite().all()


def test_a_zero_vector_stays_zero_and_so_does_its_gradient(generator: torch.Generator) -> None:
    """It has no direction to turn: 1/ε times the gradient of a unit vector would be infinite in half precision."""
    q, k, v, grad = randn(*[(4, 1, 3)] * 4, generator=generator)
    q[0], k[1] = 0.0, 0.0
    got, ours = with_gradients([q, k, v], grad, torch.float64, **DIFFORMER)
    expected, theirs = with_gradients([q, k, v], grad, torch.float64, backend="reference", **DIFFORMER)
    torch.testing.assert_close(got, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance("gradient", torch.float64)._asdict())
    assert not ours[0][0].any()
    assert not ours[1][1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_taken_in_float32(dtype: torch.dtype) -> None:
    """The mean of 5 000 ones is one; sums in half precision would stop at 2 048, in bfloat16 at 256."""
    one = torch.ones(5000, 1, 1, dtype=dtype)
    out, den, *_ = blocked.forward(one, one, one, Terms(constant=1.0, unit=True))
    assert torch.equal(out, one)
    assert torch.equal(den, torch.full((5000, 1), 10_000.0))


def test_autocast_does_not_reach_inside(generator: torch.Generator) -> None:
    q, k, v = randn(*[(30, 2, 4)] * 3, generator=generator, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_attention(q, k, v, **DIFFORMER)
        mixed = linear_attention(q.bfloat16(), k, v, **DIFFORMER)
    assert torch.equal(got, linear_attention(q, k, v, **DIFFORMER))
    assert mixed.dtype == torch.float32


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivatives(options: dict[str, Any], generator: torch.Generator) -> None:
    ptr, n = boundaries([0, 2, 1])
    inputs = [x.requires_grad_() for x in randn(*[(n, 1, 2)] * 3, generator=generator)]
    assert torch.autograd.gradgradcheck(partial(linear_attention, ptr=ptr, **options), inputs)


def test_second_derivatives_of_self_attention(generator: torch.Generator) -> None:
    """Equal tensors are told apart."""
    inputs = [x.requires_grad_() for x in randn((3, 1, 2), generator=generator)]
    assert torch.autograd.gradgradcheck(lambda x: linear_attention(x, x, x, **DIFFORMER), inputs)


def test_third_derivatives(generator: torch.Generator) -> None:
    """Of Σ out, by differences of the second."""
    x, direction = randn((5, 1, 2), (5, 1, 2), generator=generator)

    def second(at: Tensor) -> Tensor:
        at = at if at.requires_grad else at.requires_grad_()
        (first,) = torch.autograd.grad(linear_attention(at, at, at, **DIFFORMER).square().sum(), at, create_graph=True)
        return torch.autograd.grad((first * direction).sum(), at, create_graph=True)[0]

    leaf = x.clone().requires_grad_()
    (third,) = torch.autograd.grad((second(leaf) * direction).sum(), leaf)
    step = 1e-5 * direction
    slope = (second(x + step) - second(x - step)).mul(direction).sum() / 2e-5
    torch.testing.assert_close((third * direction).sum(), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ragged", [False, True])
def test_opcheck(ragged: bool, generator: torch.Generator) -> None:
    ptr = torch.tensor([0, 3, 3, 9]) if ragged else None
    q, k, v, grad = randn(*[(9, 2, 3)] * 4, generator=generator, dtype=torch.float32)
    ops, options = torch.ops.diffusion_mp, (ptr, 1.0, 0.5, True, "auto")
    out, den, *sums = ops.linear_attention(q, k, v, *options)
    torch.library.opcheck(ops.linear_attention_backward.default, (grad, q, k, v, out, den, *sums, *options))
    torch.library.opcheck(ops.linear_attention.default, (*(x.requires_grad_() for x in (q, k, v)), *options))


@pytest.mark.parametrize("own", [0.0, 0.5])
def test_opcheck_of_the_halves(own: float, generator: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in randn(*[(9, 2, 3)] * 3, generator=generator, dtype=torch.float32))
    ops, options = torch.ops.diffusion_mp, (None, 1.0, own, True, "auto")
    torch.library.opcheck(ops.linear_pool.default, (k, v, *options))
    sums = ops.linear_pool(k, v, *options).detach().requires_grad_()
    torch.library.opcheck(ops.linear_read.default, (q, v, sums, *options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_halves_are_the_whole(options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator) -> None:
    """From two parts of the senders, as every backend has them."""
    q, k, v = randn(*[(50, 2, 6)] * 3, generator=generator, dtype=dtype)
    terms = Terms(**options)
    expected = linear_attention(q.double(), k.double(), v.double(), backend="reference", **options)
    for backend in ("cpu", "reference"):
        parts = zip(k.split(30), v.split(30), strict=True)
        sums = sum(linear_pool(keys, values, terms, backend=backend) for keys, values in parts)
        got = linear_read(q, v, sums, terms, backend=backend).values
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, **tolerance("product", dtype)._asdict())


def test_nothing_is_kept_between_the_blocks(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one node, of some, and all nodes at once give the same."""
    inputs = randn(*[(100, 2, 6)] * 3, generator=generator)
    results = []
    for block in (1, 400, 1 << 18):
        monkeypatch.setattr(blocked, "BLOCK", block)
        results.append(with_gradients(inputs, inputs[0], torch.float64, **DIFFORMER))
    for out, grads in results[1:]:
        for ours, theirs in zip([out, *grads], [results[0][0], *results[0][1]], strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance("rearranged", torch.float64)._asdict())
