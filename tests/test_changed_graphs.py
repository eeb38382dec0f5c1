"""A `Graph` whose tensors have been written to gives what a new one of the same tensors gives."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from diffusion_mp import (
    GPS,
    CertifiedConv,
    DIFFormer,
    GATConv,
    GatedGCNConv,
    GCNConv,
    GINConv,
    Graph,
    NodeFormer,
    SFiFormer,
)
from helpers import built, randn

X = randn(9, 4).float()


def tensors() -> dict[str, Tensor]:
    """Edges within two graphs, weights of their own, the batch, and degrees larger than those here."""
    return {
        "edge_index": torch.tensor(
            [[0, 1, 2, 3, 3, 5, 6, 7, 8, 8], [1, 2, 0, 1, 3, 6, 5, 8, 7, 7]]
        ),
        "edge_weight": torch.linspace(0.5, 2.0, 10),
        "batch": torch.tensor([0] * 4 + [1] * 5),
        "full_degree": 3.0 + torch.arange(18.0).view(9, 2),
    }


def graph_of(parts: dict[str, Tensor]) -> Graph:
    return Graph(9, **parts)


def fresh(parts: dict[str, Tensor]) -> Graph:
    return Graph(9, **{name: value.clone() for name, value in parts.items()})


def optimize(parts: dict[str, Tensor]) -> None:
    parts["edge_weight"].grad = torch.ones(10)
    torch.optim.SGD([parts["edge_weight"]], lr=0.1).step()


WRITES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "weights in place": lambda parts: parts["edge_weight"].mul_(2),
    "one weight": lambda parts: parts["edge_weight"][3:4].fill_(5.0),
    "a weight becomes one": lambda parts: parts["edge_weight"].fill_(1.0),
    "an optimizer": optimize,
    "edges": lambda parts: parts["edge_index"][1, 0].fill_(3),
    "the batch": lambda parts: parts["batch"].copy_(
        torch.tensor([0] * 4 + [1] + [2] * 4)
    ),
    "degrees": lambda parts: parts["full_degree"].mul_(2),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(4, 4),
    "GAT": lambda: GATConv(4, 4),
    "GIN": lambda: GINConv(4, nn.Linear(4, 4)),
    "gated": lambda: GatedGCNConv(4),
    "certified": lambda: CertifiedConv(4),
    "DIFFormer": lambda: DIFFormer(4, 8, 3),
    "NodeFormer": lambda: NodeFormer(4, 8, 3),
    "SFiFormer": lambda: SFiFormer(4, 8, 3),
    "GPS": lambda: GPS(4, 8, 3),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("write", WRITES)
def test_layers_see_what_was_written(layer, write):
    parts = tensors()
    if write != "degrees":
        del parts["full_degree"]
    model = built(LAYERS[layer]).eval()
    graph = graph_of(parts)
    copies = [graph, copy.copy(graph), graph.to("cpu")]
    before = [model(X, each) for each in copies]
    WRITES[write](parts)
    expected = model(X, fresh(parts))
    for each, old in zip(copies, before, strict=True):
        assert torch.equal(model(X, each), expected)
        assert torch.equal(model(X, each), expected)
        assert each.num_graphs == fresh(parts).num_graphs
        if layer == "GCN" and write not in ("degrees", "the batch"):
            assert not torch.equal(old, expected)


ANSWERS: dict[str, Callable[[Graph], Any]] = {
    "is_symmetric": lambda graph: graph.is_symmetric,
    "weighted": lambda graph: graph.weighted,
    "num_graphs": lambda graph: graph.num_graphs,
    "ptr": lambda graph: graph.ptr.tolist(),
    "degree": lambda graph: graph.degree().tolist(),
    "out-degree": lambda graph: graph.degree("out").tolist(),
    "to_undirected": lambda graph: graph.to_undirected().degree().tolist(),
    "symmetric_part": lambda graph: graph.symmetric_part().degree().tolist(),
    "with_self_loops": lambda graph: (
        graph.with_self_loops("remaining").degree().tolist()
    ),
    "remove": lambda graph: graph.with_self_loops("remove").degree().tolist(),
    "within": lambda graph: graph.within(2).edges.tolist(),
    "reverse": lambda graph: graph.reverse().degree().tolist(),
    "csr": lambda graph: [part.tolist() for part in (graph.csr.ptr, graph.csr.other)],
    "csc": lambda graph: [part.tolist() for part in (graph.csc.ptr, graph.csc.other)],
}


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_answers_for_what_its_tensors_hold(question, write, weighted):
    parts = tensors()
    if not weighted and write in ("edges", "the batch", "degrees"):
        del parts["edge_weight"]
    ask = ANSWERS[question]
    graph = graph_of(parts).prepare()
    ask(graph)
    WRITES[write](parts)
    assert ask(graph) == ask(fresh(parts))


def test_attributes_that_are_replaced_are_seen():
    parts = tensors()
    graph = Graph(9, parts["edge_index"])
    layer = built(lambda: GCNConv(4, 4))
    layer(X, graph)
    graph.edge_weight = parts["edge_weight"]
    assert torch.equal(
        layer(X, graph), layer(X, parts["edge_index"], parts["edge_weight"])
    )
    graph.edge_index = parts["edge_index"].flip(1)
    assert torch.equal(
        layer(X, graph), layer(X, graph.edge_index, parts["edge_weight"])
    )


def test_what_is_written_in_inference_mode_is_seen():
    layer = built(lambda: GCNConv(4, 4)).eval()
    with torch.inference_mode():
        parts = tensors()
        graph = Graph(9, parts["edge_index"], parts["edge_weight"])
        layer(X, graph)
        derived = graph.with_self_loops("remaining")
        assert graph.with_self_loops("remaining") is derived
        parts["edge_weight"].mul_(torch.linspace(1, 2, 10))
        expected = layer(X, parts["edge_index"].clone(), parts["edge_weight"].clone())
        assert torch.equal(layer(X, graph), expected)


WRONG: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "edge_weight must be non-negative": lambda parts: parts["edge_weight"].neg_(),
    "edge_weight must be finite": lambda parts: parts["edge_weight"][0].fill_(
        torch.nan
    ),
    "edge_index must lie": lambda parts: parts["edge_index"].add_(5),
    "edge_index joins": lambda parts: parts["edge_index"][1, 0].fill_(8),
    "batch must be sorted": lambda parts: parts["batch"][0].fill_(4),
}


@pytest.mark.parametrize("message", WRONG)
def test_values_are_checked_again(message):
    parts = tensors()
    graph = graph_of(parts)
    layer = built(lambda: GCNConv(4, 4))
    layer(X, graph)
    WRONG[message](parts)
    for _call in range(2):
        with pytest.raises(ValueError, match=message):
            layer(X, graph)


def test_what_was_not_checked_is_not_checked_again():
    layer = built(lambda: GCNConv(4, 4))
    weight = torch.tensor([1.0])
    graph = Graph(9, torch.tensor([[0], [1]]), weight, validate=False)
    layer(X, graph)
    weight.neg_()
    layer(X, graph)


def test_a_derived_graph_stays_what_it_was():
    parts = tensors()
    graph = Graph(9, parts["edge_index"], parts["edge_weight"])
    looped = graph.with_self_loops("add")
    degree = looped.degree().clone()
    parts["edge_weight"].mul_(2)
    assert torch.equal(looped.degree(), degree)
    assert torch.equal(graph.with_self_loops("add").degree() - 1, 2 * (degree - 1))


def test_caches_survive_copies_and_processes():
    parts = tensors()
    parts["edge_weight"].mul_(
        2
    )  # its version is 1, and that of a tensor in another process is 0
    graph = graph_of(parts)
    looped = graph.with_self_loops("remaining").prepare()
    assert graph.with_self_loops("remaining") is looped
    assert copy.copy(graph).with_self_loops("remaining") is looped
    there = pickle.loads(pickle.dumps(graph))
    assert there._derived["remaining"].csc.is_sorted
    assert there.with_self_loops("remaining") is there._derived["remaining"]
    there.edge_weight.mul_(2)
    assert (
        there.with_self_loops("remaining").edge_weight.max() > looped.edge_weight.max()
    )


def test_learned_weights_are_neither_cached_nor_checked_again():
    weight = torch.ones(10, requires_grad=True)
    graph = Graph(9, tensors()["edge_index"], weight)
    layer = built(lambda: GCNConv(4, 4))
    for _step in range(3):
        layer(X, graph).sum().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        same = Graph(
            9, graph.edge_index.clone(), weight.detach().clone(), validate=False
        )
        assert_close(layer(X, graph), layer(X, same))
