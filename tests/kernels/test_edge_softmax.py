"""Softmax and sums along rows of entries, against a dense computation in double precision."""

import pytest
import torch
from torch import Tensor

from diffusion_mp.graph import Graph
from diffusion_mp.kernels.spmm import at_rows, edge_softmax, row_sums
from diffusion_mp.layers import GATConv

SIZES = [(1, 0), (1, 3), (4, 7), (63, 200), (257, 2049)]


def edges(nodes: int, count: int, ordered: bool, generator: torch.Generator) -> Graph:
    edge_index = torch.randint(nodes, (2, count), generator=generator)
    return Graph(nodes, edge_index[:, edge_index[1].argsort(stable=True)] if ordered else edge_index)


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


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
def test_the_softmax_of_every_row(nodes: int, count: int, ordered: bool, generator: torch.Generator) -> None:
    graph = edges(nodes, count, ordered, generator)
    logits = (100 * randn(count, 3, generator=generator)).detach().requires_grad_()
    ones = torch.ones(count, 1, dtype=torch.float64)
    some = torch.rand(count, 1, generator=generator, dtype=torch.float64) * (torch.arange(count) % 4 > 0).unsqueeze(1)
    weight = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    for prior, given in ((ones, None), (ones, ones), (some, some)):
        got, expected = edge_softmax(graph.csr, logits, given), one_by_one(graph, logits, prior)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        grads = [torch.autograd.grad((out * weight).sum(), logits)[0] for out in (got, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_the_gradient_of_weights_that_are_learned(generator: torch.Generator) -> None:
    graph, logits = edges(5, 20, False, generator), randn(20, 2, generator=generator)
    prior = (torch.rand(20, 1, generator=generator, dtype=torch.float64) + 0.1).requires_grad_()
    weight = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    for leaf in (logits, prior):
        grads = [
            torch.autograd.grad((out * weight).sum(), leaf)[0]
            for out in (edge_softmax(graph.csr, logits, prior), one_by_one(graph, logits, prior))
        ]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ordered", [False, True])
def test_second_derivatives(ordered: bool, generator: torch.Generator) -> None:
    graph = edges(4, 9, ordered, generator)
    assert torch.autograd.gradgradcheck(
        lambda logits: edge_softmax(graph.csr, logits), randn(9, 2, generator=generator)
    )
    for take in (row_sums, at_rows):
        x = randn(9 if take is row_sums else 4, 2, generator=generator)
        assert torch.autograd.gradcheck(lambda x, take=take: take(graph.csr, x), x)
        assert torch.autograd.gradgradcheck(lambda x, take=take: take(graph.csr, x).pow(2), x)


@pytest.mark.parametrize(("nodes", "count"), SIZES)
def test_sums_along_rows_and_what_entries_get_of_them(nodes: int, count: int, generator: torch.Generator) -> None:
    graph = edges(nodes, count, False, generator)
    x, y = randn(count, 3, generator=generator), randn(nodes, 3, generator=generator)
    for compressed, node in ((graph.csr, graph.edges[1]), (graph.csc, graph.edges[0])):
        sums = torch.zeros(nodes, 3, dtype=torch.float64).index_add(0, node, x)
        torch.testing.assert_close(row_sums(compressed, x), sums, rtol=0, atol=1e-12)
        assert torch.equal(at_rows(compressed, y), y[node])


def test_extreme_rows(generator: torch.Generator) -> None:
    """A row in which nothing counts is zero; logits that overflow as exponentials, and minus infinity, are none."""
    graph = Graph(4, torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 2, 2]]))
    logits = torch.tensor([1e4, 1e4, -torch.inf, -torch.inf, -3e38, 3e38]).unsqueeze(1)
    expected = [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    assert edge_softmax(graph.csr, logits).squeeze(1).tolist() == expected
    prior = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0]).unsqueeze(1)
    assert edge_softmax(graph.csr, logits, prior).squeeze(1).tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert edge_softmax(graph.csr, torch.zeros(6, 1), 0 * prior).abs().sum() == 0
    half = torch.zeros(6, 1, dtype=torch.bfloat16)
    assert edge_softmax(graph.csr, half).dtype == torch.float32  # sums are taken in float32 at least


def test_the_order_by_source_is_found_for_a_gradient_only() -> None:
    layer, x, graph = GATConv(4, 4), torch.rand(6, 4), Graph(6, torch.tensor([[3, 0, 2], [1, 4, 5]]))
    looped = graph.with_self_loops(layer.diffusivity.self_loops)
    with torch.no_grad():
        evaluated = layer(x, graph)
    assert not looped.csc.found
    torch.testing.assert_close(layer(x, graph), evaluated)
    assert looped.csc.found
