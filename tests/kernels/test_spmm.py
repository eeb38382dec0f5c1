"""Sparse products at every order of the edges and in every shape, in double and in single precision.

Their second derivatives are in `test_function_transforms.py`.
"""

from functools import partial

import pytest
import torch
from kernel_cases import DOUBLE, assert_same, randn
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import Compressed, Pattern
from diffusion_mp.kernels.spmm import at_rows, edge_softmax, row_sums, sddmm, spmm
from diffusion_mp.layers import GATConv


def random_graph(
    nodes: int, count: int, order: str, generator: torch.Generator
) -> Graph:
    edges = torch.randint(0, nodes, (2, count), generator=generator)
    if order == "by row":
        edges = edges[:, edges[1].argsort(stable=True)]
    if order == "by column":
        edges = edges[:, edges[0].argsort(stable=True)]
    return Graph(nodes, edges)


@pytest.mark.parametrize("order", ["none", "by row", "by column"])
@pytest.mark.parametrize(
    ("shared", "heads", "channels"),
    [(True, 1, 1), (True, 3, 7), (False, 3, 7), (False, 8, 16)],
)
@pytest.mark.parametrize(("nodes", "count"), [(1, 3), (2, 4), (61, 500), (300, 997)])
def test_single_precision_agrees_with_double(
    nodes,
    count,
    shared,
    heads,
    channels,
    order,
    generator,
):
    pattern = random_graph(nodes, count, order, generator).pattern
    weight = torch.randn(count, 1 if shared else heads, generator=generator)
    a, b = torch.randn(2, nodes, heads, channels, generator=generator)
    for operation, inputs in ((spmm, [weight, b]), (sddmm, [a, b])):
        results = []
        for dtype, backend in ((torch.float32, "auto"), (DOUBLE, "reference")):
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
            out = operation(pattern, *leaves, backend=backend)
            direction = torch.arange(out.numel()).cos().view_as(out).to(dtype)
            results.append([out, *torch.autograd.grad(out, leaves, direction)])
        for single, double in zip(*results, strict=True):
            assert single.dtype == torch.float32
            atol = 1e-5 * float(double.detach().abs().max())
            assert_close(single.double(), double, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(("heads", "channels"), [(1, 5), (3, 5), (3, 1)])
@pytest.mark.parametrize(
    ("rows", "cols", "count"),
    [
        (5, 12, 30),
        (12, 5, 30),
        (5, 3, 0),
        (1, 9, 4),
        (1, 1, 0),
        (1, 1, 2),
        (63, 63, 200),
        (500, 500, 2049),
    ],
)
def test_matrices_of_any_shape(
    rows,
    cols,
    count,
    heads,
    channels,
    generator,
):
    row = torch.randint(0, rows, (count,), generator=generator)
    col = torch.randint(0, cols, (count,), generator=generator)
    pattern = Pattern(Compressed(row, col, rows), Compressed(col, row, cols))
    weight = randn(count, heads, generator=generator)
    v = randn(cols, 3, channels, generator=generator)
    a = randn(rows, 3, channels, generator=generator)
    dense = torch.zeros(rows, cols, heads, dtype=DOUBLE)
    dense = dense.index_put((row, col), weight, accumulate=True)
    expected = dense.permute(2, 0, 1).expand(3, -1, -1) @ v.transpose(0, 1)
    assert_close(spmm(pattern, weight, v).transpose(0, 1), expected)
    for operation, inputs in ((spmm, [weight, v]), (sddmm, [a, v])):
        fast = partial(operation, pattern)
        assert_same(fast, partial(fast, backend="reference"), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_nan_reaches_its_receivers_only(dtype, generator):
    graph = random_graph(40, 90, "none", generator)
    source, target = graph.edges
    v = torch.randn(40, 2, 3, generator=generator, dtype=dtype)
    v[source[0], 1, 2] = torch.nan
    weight = torch.rand(90, 2, generator=generator, dtype=dtype)
    out = spmm(graph.pattern, weight, v)
    reached = torch.zeros(40, dtype=torch.bool)
    reached[target[source == source[0]]] = True
    assert torch.equal(out[:, 1, 2].isnan(), reached)
    assert out.isnan().sum() == reached.sum()


def test_views_that_are_not_contiguous_are_read_as_they_are(
    generator,
):
    pattern = random_graph(30, 100, "none", generator).pattern
    weight = torch.randn(3, 100, generator=generator).t()
    a, b = torch.randn(2, 5, 3, 30, generator=generator).permute(0, 3, 2, 1)
    for operation, inputs in ((spmm, (weight, b)), (sddmm, (a, b))):
        expected = operation(pattern, *inputs, backend="reference")
        assert_close(operation(pattern, *inputs), expected)


def one_by_one(graph: Graph, logits: Tensor, prior: Tensor) -> Tensor:
    """The definition, row by row."""
    out = torch.zeros_like(logits)
    for row in range(graph.num_nodes):
        entries = ((graph.edges[1] == row) & (prior[:, 0] != 0)).nonzero().squeeze(1)
        weighted = logits[entries] + prior[entries].log()
        out = out.index_put((entries,), weighted.softmax(0))
    return out


@pytest.mark.parametrize("order", ["none", "by row"])
@pytest.mark.parametrize(
    ("nodes", "count"), [(1, 0), (1, 3), (4, 7), (63, 200), (257, 2049)]
)
def test_softmax_and_sums_of_every_row(nodes, count, order, generator):
    graph = random_graph(nodes, count, order, generator)
    x = randn(count, 3, generator=generator)
    y = randn(nodes, 3, generator=generator)
    for compressed, node in ((graph.csr, graph.edges[1]), (graph.csc, graph.edges[0])):
        sums = torch.zeros(nodes, 3, dtype=DOUBLE).index_add(0, node, x)
        assert_close(row_sums(compressed, x), sums, rtol=0, atol=1e-12)
        assert torch.equal(at_rows(compressed, y), y[node])
    logits = (100 * randn(count, 3, generator=generator)).detach().requires_grad_()
    weight = torch.randn(count, 3, generator=generator, dtype=DOUBLE)
    ones = torch.ones(count, 1, dtype=DOUBLE)
    learned = (torch.rand(count, 1, generator=generator) + 0.1).double()
    some = learned * (torch.arange(count) % 4 > 0).unsqueeze(1)
    for prior, taken, leaves in (
        (ones, None, [logits]),
        (ones, ones, [logits]),
        (some, some, [logits]),
        (learned, learned, [logits, learned.requires_grad_()]),
    ):
        results = []
        for out in (
            edge_softmax(graph.csr, logits, taken),
            one_by_one(graph, logits, prior),
        ):
            results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
        assert_close(*results, rtol=0, atol=1e-12)


def test_extreme_rows():
    """A row in which nothing counts is zero; logits that overflow as exponentials, and minus infinity, are none."""
    graph = Graph(4, torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 2, 2]]))
    logits = torch.tensor([1e4, 1e4, -torch.inf, -torch.inf, -3e38, 3e38]).unsqueeze(1)
    expected = [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    assert edge_softmax(graph.csr, logits).squeeze(1).tolist() == expected
    prior = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0]).unsqueeze(1)
    expected = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    # Learned, it is computed in another way.
    for learned in (False, True):
        weight = prior.clone().requires_grad_(learned)
        assert edge_softmax(graph.csr, logits, weight).squeeze(1).tolist() == expected
    assert edge_softmax(graph.csr, torch.zeros(6, 1), 0 * prior).abs().sum() == 0
    half = torch.zeros(6, 1, dtype=torch.bfloat16)
    # Sums are taken in float32 at least.
    assert edge_softmax(graph.csr, half).dtype == torch.float32


def test_the_order_by_source_is_found_for_a_gradient_only():
    layer = GATConv(4, 4)
    x = torch.rand(6, 4)
    graph = Graph(6, torch.tensor([[3, 0, 2], [1, 4, 5]]))
    looped = graph.with_self_loops(layer.diffusivity.self_loops)
    with torch.no_grad():
        evaluated = layer(x, graph)
    assert not looped.csc.is_sorted
    assert_close(layer(x, graph), evaluated)
    assert looped.csc.is_sorted
