"""What a model computes for a part's own nodes is what it computes for them in the whole graph, for every loader."""

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from test_partition_loader import example
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.transforms import ToUndirected

from diffusion_mp import (
    AdjacencyDiffusivity,
    CertifiedConv,
    CertifiedDIFFormer,
    DIFFormer,
    DiffusionConv,
    GATConv,
    GCNConv,
    GINConv,
    Graph,
    auxiliary_loss,
)
from diffusion_mp.data import (
    PartOf,
    RandomPartitionLoader,
    ToDiffusionGraph,
    find_clusters,
)
from helpers import built

DATA = example(edges=180)
DATA.x = torch.randn(DATA.num_nodes, 4, generator=torch.Generator().manual_seed(0))

#: Layers whose output at a node depends on the edges that arrive there, and on degrees.
OF_EDGES: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(4, 3),
    "GAT": lambda: GATConv(4, 3, heads=2),
    "GIN": lambda: GINConv(4, nn.Linear(4, 3)),
    "row": lambda: DiffusionConv(
        4, 3, AdjacencyDiffusivity("row", self_loops="remaining")
    ),
    "directed": lambda: DiffusionConv(4, 3, AdjacencyDiffusivity("sym")),
    "certified": lambda: CertifiedConv(4, penalty=None),
}
#: Models whose attention reaches all nodes: only one part that is the whole graph can equal it.
OF_PAIRS: dict[str, Callable[[], nn.Module]] = {
    "DIFFormer": lambda: DIFFormer(4, 8, 3, num_layers=2),
    "CertifiedDIFFormer": lambda: CertifiedDIFFormer(4, 8, 3, num_layers=2),
}
CLUSTERS = find_clusters(DATA, 6, seed=0)
METHODS: dict[str, dict[str, Any]] = {
    "random": {},
    "metis": {"clusters": CLUSTERS},
}


Loader = Callable[[Data], Iterable[Data]]


class TwoHops(BaseSampler):
    """What NeighborLoader(num_neighbors=[-1, -1]) takes; that of PyG needs pyg-lib or torch-sparse."""

    edge_permutation = None

    def __init__(self, data: Data) -> None:
        self.data = data

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        edges = self.data.edge_index
        nodes = index.node
        for _hop in range(2):
            mask = torch.isin(edges[1], nodes)
            nodes = torch.tensor(
                list(dict.fromkeys(torch.cat([nodes, edges[0, mask]]).tolist()))
            )
        local = torch.full((self.data.num_nodes,), -1).index_copy(
            0, nodes, torch.arange(len(nodes))
        )
        taken = mask.nonzero().flatten()
        return SamplerOutput(
            nodes, *local[edges[:, mask]], taken, metadata=(index.input_id, index.time)
        )

    def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
        raise NotImplementedError


def random_parts(**options: Any) -> Loader:
    return lambda data: RandomPartitionLoader(
        data, halo=True, degrees="full", **options
    )


def of_pyg(workers: int) -> Loader:
    return lambda data: NodeLoader(
        data,
        TwoHops(data),
        transform=PartOf(data, degrees="full"),
        batch_size=7,
        num_workers=workers,
    )


#: Every loader that gives a node all the edges that arrive there, and the degrees of the whole graph.
LOADERS: dict[str, Loader] = {
    "random": random_parts(num_parts=5),
    "workers": random_parts(num_parts=5, num_workers=2),
    "by size": random_parts(batch_size=13, allow_unlabelled=True),
    "metis": random_parts(num_parts=5, **METHODS["metis"]),
    "of PyG": of_pyg(0),
    "of PyG, with workers": of_pyg(2),
}
GRAPHS = {"directed": DATA, "undirected": ToUndirected(reduce="mean")(DATA)}


def moved(batch: Data) -> Iterator[Data]:
    """The batch as a training loop may hold it."""
    yield batch
    yield batch.clone()
    yield copy.copy(batch)
    yield copy.deepcopy(batch)
    yield batch.to("cpu", non_blocking=True)
    yield batch.contiguous()
    yield pickle.loads(pickle.dumps(batch))


@pytest.mark.parametrize("name", OF_EDGES)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_own_nodes_come_out_as_in_the_whole_graph(
    name: str, loader: str, kind: str
) -> None:
    if name == "certified" and kind == "directed" and "PyG" in loader:
        return  # it reads edges in both directions, and a sampler of PyG takes those that arrive
    data = GRAPHS[kind]
    layer = built(OF_EDGES[name]).eval()
    expected = layer(data.x, data.edge_index, data.edge_weight)
    rows = 0
    for batch in LOADERS[loader](data):
        own = batch.batch_size
        right = expected[batch.n_id[:own]]
        for held in moved(batch):
            out = layer(held.x, Graph.from_data(held))
            torch.testing.assert_close(out[:own], right, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                layer(held.x, ToDiffusionGraph()(held).graph), out
            )
        rows += own
    assert rows == data.num_nodes


@pytest.mark.parametrize("name", [*OF_EDGES, *OF_PAIRS])
@pytest.mark.parametrize("degrees", ["batch", "full"])
@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_one_part_is_the_whole_graph(
    name: str, degrees: str, halo: bool, method: str
) -> None:
    layer = built((OF_EDGES | OF_PAIRS)[name]).eval()
    options = METHODS[method] | {"degrees": degrees, "halo": halo}
    (batch,) = RandomPartitionLoader(DATA, 1, **options)
    out = layer(batch.x, Graph.from_data(batch))
    expected = layer(DATA.x, DATA.edge_index, DATA.edge_weight)[batch.n_id]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_halo_kept_edges_have_the_entries_of_the_whole_graph(
    workers: int,
) -> None:
    diffusivity = AdjacencyDiffusivity("sym")
    whole = diffusivity(DATA.x, Graph.from_data(DATA)).to_dense()[0]
    layer = built(lambda: DiffusionConv(4, 3, diffusivity, transform=True)).eval()
    for batch in RandomPartitionLoader(DATA, 4, degrees="full", num_workers=workers):
        part = whole[batch.n_id][:, batch.n_id]
        _, coupling = layer(batch.x, Graph.from_data(batch), return_coupling=True)
        torch.testing.assert_close(coupling.to_dense()[0], part, rtol=1e-5, atol=1e-6)


def test_clusters_of_pyg_are_parts_too() -> None:
    """ClusterLoader numbers no nodes; n_id, an attribute of the whole graph, does, and all nodes are the part's own."""
    data = copy.copy(DATA)
    data.n_id = torch.arange(DATA.num_nodes)
    part = PartOf(data, degrees="full")
    whole = AdjacencyDiffusivity("row")(DATA.x, Graph.from_data(DATA)).to_dense()[0]
    for cluster in range(6):
        batch = part(data.subgraph(CLUSTERS.eq(cluster)))  # as ClusterLoader cuts it
        graph = Graph.from_data(batch)
        entries = AdjacencyDiffusivity("row")(batch.x, graph).to_dense()[0]
        expected = whole[batch.n_id][:, batch.n_id]
        torch.testing.assert_close(entries, expected, rtol=1e-5, atol=1e-6)


def test_training_as_documented_has_the_gradients_of_the_whole_graph() -> None:
    layer = built(OF_EDGES["GCN"])
    weights = torch.randn(DATA.num_nodes, 3, generator=torch.Generator().manual_seed(1))
    (layer(DATA.x, DATA.edge_index, DATA.edge_weight) * weights).sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    for batch in RandomPartitionLoader(DATA, 5, halo=True, degrees="full"):
        out = layer(batch.x, Graph.from_data(batch))[: batch.batch_size]
        (
            (out * weights[batch.n_id[: batch.batch_size]]).sum()
            + auxiliary_loss(layer)
        ).backward()
    for parameter, right in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, right, rtol=1e-4, atol=1e-5)


def test_a_batch_of_parts_has_the_degrees_of_all() -> None:
    parts = list(RandomPartitionLoader(DATA, 3, halo=True, degrees="full"))
    layer = built(OF_EDGES["GCN"])
    joined = Batch.from_data_list(parts)
    out = layer(joined.x, Graph.from_data(joined))
    expected = torch.cat([layer(part.x, Graph.from_data(part)) for part in parts])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
