"""Sparse products at every order of the edges and in every shape, in double and in single precision."""

from functools import partial

import pytest
import torch
from kernel_cases import assert_same, randn
from torch import Tensor

from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import Compressed, Pattern
from diffusion_mp.kernels.spmm import at_rows, edge_softmax, row_sums, sddmm, spmm
from diffusion_mp.layers import GATConv


def _pattern(nodes, count, order, generator):
    edge_index = torch.randint(0, nodes, (2, count), generator=generator)
    ends = {"none": None, "by row": 1, "by column": 0}[order]
    return Graph(
        nodes,
        edge_index
        if ends is None
        else edge_index[:, edge_index[ends].argsort(stable=True)],
    ).pattern


@pytest.mark.parametrize("order", ["none", "by row", "by column"])
@pytest.mark.parametrize(
    ("shared", "heads", "channels"),
    [(True, 1, 1), (True, 3, 7), (False, 3, 7), (False, 8, 16)],
)
@pytest.mark.parametrize(("nodes", "count"), [(1, 3), (2, 4), (61, 500), (300, 997)])
def test_single_precision_agrees_with_double(
    nodes, count, shared, heads, channels, order, generator
):
    pattern = _pattern(nodes, count, order, generator)
    weight, a, b = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in [
            (count, 1 if shared else heads),
            (nodes, heads, channels),
            (nodes, heads, channels),
        ]
    )
    for run, inputs in ((spmm, [weight, b]), (sddmm, [a, b])):
        results = []
        for dtype, backend in (
            (torch.float32, "auto"),
            (torch.float64, "reference"),
        ):
            leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
            out = run(pattern, *leaves, backend=backend)
            direction = torch.arange(out.numel()).cos().view_as(out).to(dtype)
            results.append([out, *torch.autograd.grad(out, leaves, direction)])
        for mine, theirs in zip(*results, strict=True):
            assert mine.dtype == torch.float32
            atol = 1e-5 * float(theirs.detach().abs().max())
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=atol)


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
def test_matrices_of_any_shape(rows, cols, count, heads, channels, generator):
    row, col = (
        torch.randint(0, size, (count,), generator=generator) for size in (rows, cols)
    )
    pattern = Pattern(Compressed(row, col, rows), Compressed(col, row, cols))
    weight = randn(count, heads, generator=generator)
    v = randn(cols, 3, channels, generator=generator)
    a = randn(rows, 3, channels, generator=generator)
    dense = torch.zeros(rows, cols, heads, dtype=weight.dtype).index_put(
        (row, col), weight, accumulate=True
    )
    expected = dense.permute(2, 0, 1).expand(3, -1, -1) @ v.transpose(0, 1)
    torch.testing.assert_close(spmm(pattern, weight, v).transpose(0, 1), expected)
    for run, inputs in ((spmm, [weight, v]), (sddmm, [a, v])):
        fast = partial(run, pattern)
        assert_same(fast, partial(fast, backend="reference"), inputs)
        if count:
            assert torch.autograd.gradgradcheck(fast, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_reaches_its_receivers_only(dtype, generator):
    pattern = _pattern(40, 90, "none", generator)
    v = torch.randn(40, 2, 3, generator=generator, dtype=dtype)
    v[int(pattern.by_col.node[0]), 1, 2] = torch.nan
    out = spmm(pattern, torch.rand(90, 2, generator=generator, dtype=dtype), v)
    reached = torch.zeros(40, dtype=torch.bool)
    reached[pattern.by_row.node[pattern.by_col.node == pattern.by_col.node[0]]] = True
    assert torch.equal(out.isnan().any(2).any(1), reached)
    assert not out[:, 0].isnan().any()


def test_views_that_are_not_contiguous_are_read_as_they_are(generator):
    pattern = _pattern(30, 100, "none", generator)
    weight = torch.randn(3, 100, generator=generator).t()
    a, b = (
        torch.randn(5, 3, 30, generator=generator).permute(2, 1, 0) for _ in range(2)
    )
    torch.testing.assert_close(
        spmm(pattern, weight, b), spmm(pattern, weight, b, backend="reference")
    )
    torch.testing.assert_close(
        sddmm(pattern, a, b), sddmm(pattern, a, b, backend="reference")
    )


SIZES = [(1, 0), (1, 3), (4, 7), (63, 200), (257, 2049)]


def edges(nodes: int, count: int, ordered: bool, generator: torch.Generator) -> Graph:
    edge_index = torch.randint(nodes, (2, count), generator=generator)
    return Graph(
        nodes,
        edge_index[:, edge_index[1].argsort(stable=True)] if ordered else edge_index,
    )


def one_by_one(graph: Graph, logits: Tensor, prior: Tensor) -> Tensor:
    """The definition, row by row."""
    out = torch.zeros_like(logits)
    for row in range(graph.num_nodes):
        entries = ((graph.edges[1] == row) & (prior[:, 0] != 0)).nonzero().squeeze(1)
        weighted = logits[entries] + prior[entries].log()
        out = out.index_put((entries,), weighted.softmax(0))
    return out


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("nodes", "count"), SIZES)
def test_softmax_and_sums_of_every_row(
    nodes: int, count: int, ordered: bool, generator: torch.Generator
) -> None:
    graph = edges(nodes, count, ordered, generator)
    logits = (100 * randn(count, 3, generator=generator)).detach().requires_grad_()
    ones = torch.ones(count, 1, dtype=torch.float64)
    some = torch.rand(count, 1, generator=generator, dtype=torch.float64) * (
        torch.arange(count) % 4 > 0
    ).unsqueeze(1)
    x = randn(count, 3, generator=generator)
    y = randn(nodes, 3, generator=generator)
    for compressed, node in ((graph.csr, graph.edges[1]), (graph.csc, graph.edges[0])):
        sums = torch.zeros(nodes, 3, dtype=torch.float64).index_add(0, node, x)
        torch.testing.assert_close(row_sums(compressed, x), sums, rtol=0, atol=1e-12)
        assert torch.equal(at_rows(compressed, y), y[node])
    weight = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    for prior, given in ((ones, None), (ones, ones), (some, some)):
        got = edge_softmax(graph.csr, logits, given)
        expected = one_by_one(graph, logits, prior)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        grads = [
            torch.autograd.grad((out * weight).sum(), logits)[0]
            for out in (got, expected)
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_the_gradient_of_weights_that_are_learned(generator: torch.Generator) -> None:
    graph = edges(5, 20, False, generator)
    logits = randn(20, 2, generator=generator)
    prior = (
        torch.rand(20, 1, generator=generator, dtype=torch.float64) + 0.1
    ).requires_grad_()
    weight = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    for leaf in (logits, prior):
        outs = edge_softmax(graph.csr, logits, prior), one_by_one(graph, logits, prior)
        grads = [torch.autograd.grad((out * weight).sum(), leaf)[0] for out in outs]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ordered", [False, True])
def test_second_derivatives(ordered: bool, generator: torch.Generator) -> None:
    graph = edges(4, 9, ordered, generator)
    assert torch.autograd.gradgradcheck(
        partial(edge_softmax, graph.csr), randn(9, 2, generator=generator)
    )
    for take in (row_sums, at_rows):
        x = randn(9 if take is row_sums else 4, 2, generator=generator)
        assert torch.autograd.gradcheck(lambda x, take=take: take(graph.csr, x), x)
        assert torch.autograd.gradgradcheck(
            lambda x, take=take: take(graph.csr, x).pow(2), x
        )


def test_extreme_rows(generator: torch.Generator) -> None:
    """A row in which nothing counts is zero; logits that overflow as exponentials, and minus infinity, are none."""
    graph = Graph(4, torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 2, 2]]))
    logits = torch.tensor([1e4, 1e4, -torch.inf, -torch.inf, -3e38, 3e38]).unsqueeze(1)
    expected = [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    assert edge_softmax(graph.csr, logits).squeeze(1).tolist() == expected
    prior = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0]).unsqueeze(1)
    for given in (
        prior,
        prior.clone().requires_grad_(),
    ):  # learned, it is computed in another way
        assert edge_softmax(graph.csr, logits, given).squeeze(1).tolist() == [
            1.0,
            0.0,
            0.0,
            0.0,
            1.0,
            0.0,
        ]
    assert edge_softmax(graph.csr, torch.zeros(6, 1), 0 * prior).abs().sum() == 0
    half = torch.zeros(6, 1, dtype=torch.bfloat16)
    # Sums are taken in float32 at least.
    assert edge_softmax(graph.csr, half).dtype == torch.float32


def test_the_order_by_source_is_found_for_a_gradient_only() -> None:
    layer = GATConv(4, 4)
    x = torch.rand(6, 4)
    graph = Graph(6, torch.tensor([[3, 0, 2], [1, 4, 5]]))
    looped = graph.with_self_loops(layer.diffusivity.self_loops)
    with torch.no_grad():
        evaluated = layer(x, graph)
    assert not looped.csc.is_sorted
    torch.testing.assert_close(layer(x, graph), evaluated)
    assert looped.csc.is_sorted
