"""`ToDiffusionGraph`: the graph on the data is the one that layers would have made, and what they find stays on it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as BatchLoader
from torch_geometric.transforms import Compose, NormalizeFeatures

from diffusion_mp import Graph
from diffusion_mp.data import ToDiffusionGraph
from diffusion_mp.layers import DIFFormerConv, GCNConv


def molecule(nodes: int) -> Data:
    generator = torch.Generator().manual_seed(nodes)
    edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
    return Data(x=torch.rand(nodes, 4, generator=generator), edge_index=edges, edge_weight=torch.rand(3 * nodes))


MOLECULES = [molecule(nodes) for nodes in (3, 7, 5, 4)]


@pytest.mark.parametrize("self_loops", [None, "remaining"])
def test_one_graph_is_prepared_once_for_all_layers_and_steps(self_loops: Any) -> None:
    data = Compose([NormalizeFeatures(), ToDiffusionGraph(self_loops)])(MOLECULES[1])
    layer = GCNConv(4, 4)
    torch.testing.assert_close(
        layer(data.x, data.graph), layer(data.x, data.edge_index, data.edge_weight), rtol=0, atol=0
    )
    looped = data.graph.with_self_loops("remaining")
    assert looped.csc.found or self_loops is None
    layer(data.x, data.graph)
    assert data.graph.with_self_loops("remaining") is looped


def batches() -> Iterator[tuple[str, Any]]:
    yield "a batch", ToDiffusionGraph()(Batch.from_data_list(MOLECULES))
    yield "a list", ToDiffusionGraph()(MOLECULES)
    for workers in (0, 1):
        loader = DataLoader(MOLECULES, 4, collate_fn=ToDiffusionGraph("remaining"), num_workers=workers)
        yield f"{workers} workers", next(iter(loader))


def test_a_batch_has_a_graph_of_its_own() -> None:
    layer = DIFFormerConv(4, 4)
    alone = torch.cat([layer(data.x, data.edge_index, data.edge_weight) for data in MOLECULES])
    for name, batch in batches():
        assert batch.graph.num_graphs == 4, name
        torch.testing.assert_close(layer(batch.x, batch.graph), alone, msg=lambda text, name=name: f"{name}: {text}")


def test_graphs_that_were_made_before_the_batch_are_refused(no_typecheck: None) -> None:
    dataset = [ToDiffusionGraph()(data) for data in MOLECULES]
    batch = next(iter(BatchLoader(dataset, 4)))
    with pytest.raises(TypeError, match=r"graph of the batch; got a list of 4 graphs.*collate_fn=ToDiffusionGraph\(\)"):
        GCNConv(4, 4)(batch.x, batch.graph)


@pytest.mark.parametrize("data", [None, HeteroData(), torch.zeros(3), [], [1]])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        ToDiffusionGraph()(data)


def test_the_graph_moves_with_its_data() -> None:
    batch = ToDiffusionGraph("remaining")(MOLECULES)
    assert batch.to("cpu").graph is batch.graph
    graph = batch.graph.prepare()
    ptr = graph.ptr.tolist()
    moved = batch.to("meta").graph
    assert all(t.is_meta for t in (moved.edge_index, moved.edge_weight))
    assert moved.csr.node.is_meta
    assert moved.with_self_loops().edges.is_meta
    assert moved.ptr.tolist() == ptr
    assert not graph.edges.is_meta


def test_a_pickled_graph_keeps_what_was_found() -> None:
    graph = Graph(5, torch.randint(5, (2, 9)))
    graph.with_self_loops("remaining").prepare()
    again = pickle.loads(pickle.dumps(graph))
    looped = again.with_self_loops("remaining")
    assert torch.equal(looped.csc.order, graph.with_self_loops("remaining").csc.order)
    assert looped.reweighted("twice", lambda: looped._own_weights() * 2).pattern is looped.pattern


def test_prepared_forms_do_not_change_what_is_computed() -> None:
    data = MOLECULES[2]
    plain, prepared = Graph.from_data(data), Graph.from_data(data).prepare()
    layer, x = GCNConv(4, 4), data.x.clone().requires_grad_()

    def grad(graph: Graph) -> Tensor:
        return torch.autograd.grad(layer(x, graph).square().sum(), x)[0]

    assert torch.equal(grad(plain), grad(prepared))
