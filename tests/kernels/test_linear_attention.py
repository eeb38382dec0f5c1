"""Linear attention, block by block, against its dense reference in double precision."""

from functools import partial
from typing import Any

import pytest
import torch
from kernel_cases import ATTENTION, OPTIONS, SIZES, assert_equals_reference, boundaries
from torch import Tensor

from diffusion_mp import SigmoidDiffusivity, SimpleDiffusivity, SoftmaxDiffusivity
from diffusion_mp.kernels.linear_attention import (
    Terms,
    blocked,
    linear_attention,
    linear_pool,
    linear_read,
)

DIFFORMER = OPTIONS["difformer"]
SGFORMER = OPTIONS["sgformer"]


def drawn(
    *shapes: tuple[int, ...],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def compare(inputs, generator, dtype=torch.float64, **options: Any):
    assert_equals_reference(
        partial(linear_attention, **options), inputs, generator, dtype, backend="cpu"
    )


@pytest.mark.usefixtures("poisoned", "two_threads")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", [1023, 1024, 1025, 2049])
def test_sums_that_two_threads_share(
    n: int, options: dict[str, Any], generator: torch.Generator
) -> None:
    """In two halves where there are as many nodes in both: an odd number is not split."""
    inputs = drawn((n, 1, 7), (n, 1, 7), (n, 1, 5), generator=generator)
    for dtype in (torch.float64, torch.float32):
        compare(inputs, generator, dtype, **options)


def test_strided_and_expanded_tensors(generator: torch.Generator) -> None:
    """As they come from a projection that makes q, k and v at once, and from one head for all."""
    (packed,) = drawn((40, 2, 12), generator=generator)
    before = packed.clone()
    compare(list(packed.split(4, dim=2)), generator, **DIFFORMER)
    one = [x[:, :1] for x in packed.split(4, dim=2)]
    compare([x.expand(-1, 3, -1) for x in one], generator, **SGFORMER)
    compare([*one[:2], packed], generator, **SGFORMER)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("unit", [False, True])
def test_rows_whose_sum_is_zero_are_zero_and_so_is_their_gradient(unit: bool) -> None:
    """q_0 has no product with any key but the opposite ones, of which there are as many."""
    q = (
        torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
        .unsqueeze(1)
        .requires_grad_()
    )
    k = torch.tensor(
        [[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0]], dtype=torch.float64
    ).unsqueeze(1)
    v = torch.ones(3, 1, 2, dtype=torch.float64)
    for backend in ("cpu", "reference"):
        out = linear_attention(q, k, v, unit=unit, backend=backend)
        assert out[:, 0].tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad[0].tolist() == [[0.0, 0.0]]
        assert grad.isfinite().all()


@pytest.mark.parametrize("sizes", [3, [0, 2, 1]], ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, "linear product"])
def test_second_derivatives(
    name: str, sizes: int | list[int], generator: torch.Generator
) -> None:
    """Of three tensors, and of one in all roles."""
    ptr, n = boundaries(sizes)
    run = partial(ATTENTION[name], ptr=ptr, backend="cpu")
    inputs = [x.requires_grad_() for x in drawn(*[(n, 1, 2)] * 3, generator=generator)]
    assert torch.autograd.gradgradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(lambda x: run(x, x, x), inputs[0])


@pytest.mark.usefixtures("poisoned", "two_threads")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        (1, 1),
        (63, 1),
        (300, 1),
        (2050, 1),
        (300, 2),
        (SIZES["ragged"], 1),
        (SIZES["large ones"], 1),
        ([0, 7, 0], 2),
        (0, 1),
    ],
)
def test_one_tensor_in_all_roles(
    sizes: int | list[int],
    heads: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradient is the sum of those of queries, keys and values, at once and in blocks."""
    ptr, n = boundaries(sizes)
    (x,) = drawn((n, heads, 6), generator=generator, dtype=dtype)

    def of_one(x: Tensor, backend: str) -> Tensor:
        return linear_attention(x, x, x, ptr, backend=backend, **options)

    for least in (blocked.BLOCK, 400):
        monkeypatch.setattr(blocked, "BLOCK", least)
        assert_equals_reference(of_one, [x], generator, dtype, backend="cpu")


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e25])
def test_one_tensor_with_rows_of_any_size(
    size: float, generator: torch.Generator
) -> None:
    (x,) = drawn((40, 1, 6), generator=generator, dtype=torch.float32)
    x[3] *= size
    leaf = x.clone().requires_grad_()
    truth = x.double().requires_grad_()
    out = linear_attention(leaf, leaf, leaf, **DIFFORMER)
    expected = linear_attention(truth, truth, truth, **DIFFORMER, backend="reference")
    weight = torch.randn(out.shape, generator=generator)
    grad = torch.autograd.grad(out, leaf, weight)[0].double()
    wanted = torch.autograd.grad(expected, truth, weight.double())[0]
    torch.testing.assert_close(
        out.double(), expected, rtol=1e-4, atol=1e-5 * max(1.0, size)
    )
    torch.testing.assert_close(
        grad[3], wanted[3], rtol=1e-4, atol=1e-5 / size if size else 1e-5
    )
    grad[3] = wanted[3] = 0.0
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5 * max(1.0, size))


def test_a_state_that_attends_to_itself_is_recognised(
    generator: torch.Generator,
) -> None:
    """``D(x) @ x`` has the values and gradients of ``D(x) @ y`` for an equal y."""
    (x,) = drawn((50, 4), generator=generator)
    kinds = [
        SigmoidDiffusivity(normalize=None),
        SoftmaxDiffusivity(4, row_stochastic=False),
    ]
    options = (
        {},
        {"normalize": None},
        {"normalize": "frobenius"},
        {"measure": "distance"},
    )
    for diffusivity in (*(SimpleDiffusivity(**each) for each in options), *kinds):
        found = []
        for value in (lambda at: at, lambda at: 1 * at):
            at = x.clone().requires_grad_()
            out = diffusivity(at) @ value(at)
            found.append([out, *torch.autograd.grad(out.square().sum(), at)])
        torch.testing.assert_close(*found)


class Scaled(SigmoidDiffusivity):
    def queries_and_keys(self, x, graph, **options):
        query = 2 * super().queries_and_keys(x, graph, **options)[0]
        return query, query


@pytest.mark.parametrize("kind", [SimpleDiffusivity, SigmoidDiffusivity, Scaled])
def test_a_view_of_the_state_stands_for_it_while_it_is_one(
    kind: Any, generator: torch.Generator
) -> None:
    """Not if it was taken without gradient, if ``x.data`` is another tensor since, or if a subclass changes it."""
    x, y = drawn((9, 4), (9, 4), generator=generator)
    coupling = kind(normalize=None)(x)
    matrix = coupling.to_dense()[0]
    before = matrix @ x
    torch.testing.assert_close(coupling @ x, before)
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(coupling @ x, x, y)[0], matrix.T @ y)
    with torch.no_grad():
        coupling = kind(normalize=None)(x)
    torch.testing.assert_close(torch.autograd.grad(coupling @ x, x, y)[0], matrix.T @ y)
    x.data = y
    torch.testing.assert_close(coupling @ x, matrix @ y)


@pytest.mark.parametrize("size", [9, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_opposite_numbers_sum_to_zero_exactly(
    size, dtype, generator: torch.Generator
) -> None:
    """With one feature 1 + cos is 0, so that the row is zero however it is computed, alone or in a batch."""
    q, v = drawn((size, 1, 1), (size, 1, 2), generator=generator, dtype=dtype)
    for ptr in (None, torch.tensor([0, 4, size])):
        found = linear_attention(
            q.abs() + 0.1, -q.abs() - 0.1, v, ptr, **DIFFORMER, backend="cpu"
        )
        assert torch.equal(found, torch.zeros_like(v))


def test_third_derivatives(generator: torch.Generator) -> None:
    """Of Σ out² in self-attention: equal tensors are distinguished."""
    (x,) = drawn((5, 1, 2), generator=generator)

    def first(x: Tensor) -> Tensor:
        out = linear_attention(x, x, x, **DIFFORMER, backend="cpu")
        return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(first, x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_pooling_and_reading(
    options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """From two parts of the senders, with the same gradients."""
    terms = Terms(**options)

    def halves(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        if backend == "reference":
            return linear_attention(q, k, v, backend=backend, **options)
        parts = zip(k.split(30), v.split(30), strict=True)
        return linear_read(
            q, v, sum(linear_pool(*part, terms) for part in parts), terms
        )

    assert_equals_reference(
        halves, drawn(*[(50, 2, 6)] * 3, generator=generator), generator, dtype
    )


def test_nothing_is_kept_between_the_blocks(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one node, of some, and all nodes at once."""
    inputs = drawn(*[(100, 2, 6)] * 3, generator=generator)
    for block in (1, 400, 1 << 18):
        monkeypatch.setattr(blocked, "BLOCK", block)
        compare(inputs, generator, **DIFFORMER)
