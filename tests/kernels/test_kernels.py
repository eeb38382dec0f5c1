"""Every fast path against its plain reference in double precision: values, all gradients, odd sizes, ragged batches."""

import pytest
import torch
from torch import Tensor

from diffusion_mp.graph import Graph
from diffusion_mp.graph.pattern import Compressed, Pattern
from diffusion_mp.kernels.linear_attention import linear_product
from diffusion_mp.kernels.linear_attention import reference as linear_reference
from diffusion_mp.kernels.pairwise import pairwise_logsumexp, pairwise_product
from diffusion_mp.kernels.spmm import Entries, sddmm, spmm
from diffusion_mp.testing import tolerance

DOUBLE = torch.float64

# Sizes of the graphs of a batch; None is one graph that was not declared a batch.
BATCHES = {
    "one node": (None, 1),
    "one graph": (None, 63),
    "odd": (None, 257),
    "ragged": ([3, 1, 1, 40, 3, 0, 17, 3, 70], 138),
    "empty at both ends": ([0, 0, 5, 0, 5, 12, 0], 22),
    "no node": (None, 0),
}


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batch(request) -> tuple[Tensor | None, int]:
    sizes, num_nodes = request.param
    return None if sizes is None else torch.tensor([0, *sizes]).cumsum(0), num_nodes


def randn(*shape: int, generator: torch.Generator, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True)


def assert_same(fast, reference, inputs: list[Tensor], generator: torch.Generator) -> None:
    """Values and the gradient of every input agree."""
    got, expected = fast(*inputs), reference(*inputs)
    torch.testing.assert_close(got, expected, **tolerance("product", DOUBLE)._asdict())
    weight = torch.randn(got.shape, generator=generator, dtype=DOUBLE)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, **tolerance("gradient", DOUBLE)._asdict())


@pytest.mark.parametrize("channels", [1, 8, 33])
def test_linear_product_equals_its_reference(batch, channels, generator):
    ptr, n = batch
    inputs = [randn(n, 2, 7, generator=generator), randn(n, 2, 7, generator=generator)]
    inputs.append(randn(n, 2, channels, generator=generator))
    assert_same(
        lambda q, k, v: linear_product(q, k, v, ptr),
        lambda q, k, v: linear_reference.linear_product(q, k, v, ptr),
        inputs,
        generator,
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 0), (1, 2), (63, 200), (500, 2049)])
def test_sparse_products_equal_their_references(heads, nodes, edges, generator):
    edge_index = torch.randint(0, nodes, (2, edges), generator=generator)
    pattern = Graph(nodes, edge_index).pattern
    weight, v = randn(edges, heads, generator=generator), randn(nodes, 3, 5, generator=generator)
    assert_same(
        lambda w, v: spmm(pattern, w, v), lambda w, v: spmm(pattern, w, v, backend="reference"), [weight, v], generator
    )
    weight, v = randn(edges, 7, generator=generator), randn(nodes, 7, 1, generator=generator)  # one for every channel
    assert_same(
        lambda w, v: spmm(pattern, w, v), lambda w, v: spmm(pattern, w, v, backend="reference"), [weight, v], generator
    )
    a, b = (randn(nodes, heads, 5, generator=generator) for _ in range(2))
    assert_same(
        lambda a, b: sddmm(pattern, a, b), lambda a, b: sddmm(pattern, a, b, backend="reference"), [a, b], generator
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("rows", "cols", "entries"), [(5, 12, 30), (12, 5, 30), (5, 3, 0), (1, 9, 4)])
def test_sparse_products_of_a_matrix_that_is_not_square(rows, cols, entries, heads, generator):
    row, col = (torch.randint(0, size, (entries,), generator=generator) for size in (rows, cols))
    pattern = Pattern(Compressed(row, col, rows), Compressed(col, row, cols))
    weight = randn(entries, heads, generator=generator)
    v, a = randn(cols, 3, 5, generator=generator), randn(rows, 3, 5, generator=generator)
    dense = torch.zeros(rows, cols, heads, dtype=weight.dtype).index_put((row, col), weight, accumulate=True)
    expected = dense.permute(2, 0, 1).expand(3, -1, -1) @ v.transpose(0, 1)
    torch.testing.assert_close(spmm(pattern, weight, v).transpose(0, 1), expected)
    for function, inputs in ((spmm, [weight, v]), (sddmm, [a, v])):
        assert_same(
            lambda x, y, f=function: f(pattern, x, y),
            lambda x, y, f=function: f(pattern, x, y, backend="reference"),
            inputs,
            generator,
        )
        if entries:
            assert torch.autograd.gradgradcheck(lambda x, y, f=function: f(pattern, x, y), inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_accumulates_in_float32(dtype, generator):
    """A sum of 5 000 ones is exact in float32; in half precision it would stop at 2 048, in bfloat16 at 256."""
    n = 5000
    one = torch.ones(n, 1, 1, dtype=dtype)
    zero = torch.zeros(n, 1)
    expected = torch.full((n, 1, 1), float(n)).to(dtype)
    assert torch.equal(linear_product(one, one, one), expected)
    small = torch.zeros(n, 1, 1, dtype=dtype)
    torch.testing.assert_close(pairwise_product(small, small, one, zero, zero), expected)
    edge_index = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)])
    assert spmm(Graph(n, edge_index).pattern, one.view(n, 1), one)[0].item() == expected[0].item()


def test_linear_product_differentiates_twice_and_pairwise_says_that_it_does_not(generator):
    q, k, v = (randn(4, 1, 2, generator=generator) for _ in range(3))
    assert torch.autograd.gradgradcheck(linear_product, (q, k, v), fast_mode=True)
    (grad,) = torch.autograd.grad(pairwise_logsumexp(q, k).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("ragged", [False, True])
def test_registered_operations_pass_opcheck(ragged, generator):
    ptr = torch.tensor([0, 3, 3, 9]) if ragged else None
    q, k, v = (randn(9, 2, 3, generator=generator, dtype=torch.float32) for _ in range(3))
    ops = torch.ops.diffusion_mp
    torch.library.opcheck(ops.linear_product.default, (q, k, v, ptr, "auto"))
    pattern = Graph(9, torch.randint(0, 9, (2, 20), generator=generator)).pattern
    entries = Entries.of(pattern, by_row=True, by_col=ragged)
    torch.library.opcheck(ops.spmm.default, (*entries, torch.rand(20, 2, requires_grad=True), v, "auto"))
    torch.library.opcheck(ops.sddmm.default, (*entries, q, k, "auto"))
    torch.library.opcheck(ops.batch_pointers.default, (torch.tensor([0, 0, 2, 2, 3]),))
