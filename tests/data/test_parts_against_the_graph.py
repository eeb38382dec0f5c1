"""What a model computes for a part's own nodes is what it computes for them in the whole graph, for every loader."""

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from test_partition_loader import example
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.transforms import ToUndirected
from torch_geometric.utils import dropout_edge

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
from diffusion_mp.graph import PartEdgeIndex
from helpers import built, randn

DATA = example(edges=180)
DATA.x = randn(DATA.num_nodes, 4).float()

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
    "label propagation": {
        "clusters": find_clusters(DATA, method="label_propagation", seed=0)
    },
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
    "label propagation": random_parts(num_parts=5, **METHODS["label propagation"]),
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
def test_own_nodes_come_out_as_in_the_whole_graph(name, loader, kind):
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
            out = layer(held.x, held.edge_index, held.edge_weight)
            assert_close(out[:own], right, rtol=1e-5, atol=1e-6)
            assert_close(layer(held.x, Graph.from_data(held)), out)
            assert_close(layer(held.x, ToDiffusionGraph()(held).graph), out)
        rows += own
    assert rows == data.num_nodes


@pytest.mark.parametrize("name", [*OF_EDGES, *OF_PAIRS])
@pytest.mark.parametrize("degrees", ["batch", "full"])
@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_one_part_is_the_whole_graph(name, degrees, halo, method):
    layer = built((OF_EDGES | OF_PAIRS)[name]).eval()
    options = METHODS[method] | {"degrees": degrees, "halo": halo}
    (batch,) = RandomPartitionLoader(DATA, 1, **options)
    out = layer(batch.x, batch.edge_index, batch.edge_weight)
    expected = layer(DATA.x, DATA.edge_index, DATA.edge_weight)[batch.n_id]
    assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_halo_kept_edges_have_the_entries_of_the_whole_graph(
    workers,
):
    diffusivity = AdjacencyDiffusivity("sym")
    whole = diffusivity(DATA.x, Graph.from_data(DATA)).to_dense()[0]
    layer = built(lambda: DiffusionConv(4, 3, diffusivity, transform=True)).eval()
    for batch in RandomPartitionLoader(DATA, 4, degrees="full", num_workers=workers):
        part = whole[batch.n_id][:, batch.n_id]
        _, coupling = layer(
            batch.x, batch.edge_index, batch.edge_weight, return_coupling=True
        )
        assert_close(coupling.to_dense()[0], part, rtol=1e-5, atol=1e-6)


def test_clusters_of_pyg_are_parts_too():
    """ClusterLoader numbers no nodes; n_id, an attribute of the whole graph, does, and all nodes are the part's own."""
    data = copy.copy(DATA)
    data.n_id = torch.arange(DATA.num_nodes)
    part = PartOf(data, degrees="full")
    whole = AdjacencyDiffusivity("row")(DATA.x, Graph.from_data(DATA)).to_dense()[0]
    for cluster in range(6):
        batch = part(data.subgraph(CLUSTERS.eq(cluster)))  # as ClusterLoader cuts it
        graph = Graph(batch.num_nodes, batch.edge_index, batch.edge_weight)
        entries = AdjacencyDiffusivity("row")(batch.x, graph).to_dense()[0]
        expected = whole[batch.n_id][:, batch.n_id]
        assert_close(entries, expected, rtol=1e-5, atol=1e-6)


def test_training_as_documented_has_the_gradients_of_the_whole_graph():
    layer = built(OF_EDGES["GCN"])
    weights = randn(DATA.num_nodes, 3).float()
    (layer(DATA.x, DATA.edge_index, DATA.edge_weight) * weights).sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    for batch in RandomPartitionLoader(DATA, 5, halo=True, degrees="full"):
        out = layer(batch.x, batch.edge_index, batch.edge_weight)[: batch.batch_size]
        (
            (out * weights[batch.n_id[: batch.batch_size]]).sum()
            + auxiliary_loss(layer)
        ).backward()
    for parameter, right in zip(layer.parameters(), expected, strict=True):
        assert_close(parameter.grad, right, rtol=1e-4, atol=1e-5)


@pytest.mark.unwatched  # compiled code has no shape checks
def test_compiled_models_read_the_degrees():
    layer = built(OF_EDGES["GCN"]).eval()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for batch in RandomPartitionLoader(DATA, 2, halo=True, degrees="full"):
        out = layer(batch.x, batch.edge_index, batch.edge_weight)
        assert_close(compiled(batch.x, batch.edge_index, batch.edge_weight), out)
        alone = layer(batch.x, batch.edge_index.as_tensor(), batch.edge_weight)
        assert not torch.allclose(out, alone)
        assert_close(
            compiled(batch.x, batch.edge_index.as_tensor(), batch.edge_weight), alone
        )


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "fewer": lambda edges: edges[:, 1:],
    "turned": lambda edges: edges.flip(0),
    "dropped": lambda edges: dropout_edge(edges, 0.5, training=True)[0],
    "joined": lambda edges: torch.cat([edges, edges], dim=1),
    "shifted": lambda edges: edges + 0,
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_edges_computed_from_those_of_a_part_are_refused_in_one_sentence(
    change,
):
    batch = next(iter(RandomPartitionLoader(DATA, 2, halo=True, degrees="full")))
    layer = built(OF_EDGES["GCN"])
    edges = CHANGES[change](batch.edge_index)
    with pytest.raises(ValueError, match="edge_index was computed from"):
        layer(batch.x, edges)
    batch.edge_index = edges
    batch.edge_weight = None
    graph = Graph.from_data(batch)
    assert torch.equal(graph.full_degree, batch.full_degree)
    assert layer(batch.x, graph).isfinite().all()
    assert layer(batch.x, edges.as_tensor()).isfinite().all()


def test_edges_of_a_part_are_a_tensor():
    edges = PartEdgeIndex.of(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.rand(3, 2))
    assert isinstance(edges, Tensor)
    source, target = edges
    assert type(source) is type(target) is type(edges[0]) is Tensor
    assert type(edges.max(dim=1).values) is Tensor
    assert edges.shape == (2, 3)
    assert type(edges.as_tensor()) is Tensor
    for same in (
        edges.to(torch.int32),
        edges.clone(),
        edges.detach(),
        edges.cpu(),
        copy.copy(edges),
        edges.to("meta"),
    ):
        assert same.full_degree.device == same.device
    assert type(torch.zeros(3).to(edges)) is Tensor
    with pytest.raises(
        ValueError, match=r"full_degree must be floating point \[4, 2\]"
    ):
        Graph(4, edges)


def test_the_graph_of_a_part_is_made_once():
    batch = next(iter(RandomPartitionLoader(DATA, 2, halo=True, degrees="full")))
    graph = Graph.coerce(batch.x, batch.edge_index, batch.edge_weight)
    assert Graph.coerce(batch.x, batch.edge_index, batch.edge_weight) is graph
    batch.full_degree.mul_(2)
    assert Graph.coerce(batch.x, batch.edge_index, batch.edge_weight) is not graph


def test_a_loader_of_lists_of_parts_is_refused_rather_than_different():
    """PyG's collation joins the edges of several parts; Graph.from_data has the degrees of all of them."""
    parts = list(RandomPartitionLoader(DATA, 3, halo=True, degrees="full"))
    layer = built(OF_EDGES["GCN"])
    joined = Batch.from_data_list(parts)
    out = layer(joined.x, Graph.from_data(joined))
    expected = torch.cat(
        [layer(part.x, part.edge_index, part.edge_weight) for part in parts]
    )
    assert_close(out, expected, rtol=1e-5, atol=1e-6)
    loader = DataLoader(parts, batch_size=None)
    for part, again in zip(parts, loader, strict=True):
        assert torch.equal(part.edge_index.full_degree, again.edge_index.full_degree)
