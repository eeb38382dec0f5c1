"""Laplacian encodings, `ToDiffusionGraph` and `pad`: values, devices, workers and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as BatchLoader
from torch_geometric.transforms import Compose, NormalizeFeatures
from torch_geometric.utils import to_undirected

from diffusion_mp.data import AddLaplacianPE, ToDiffusionGraph, pad, transforms
from diffusion_mp.layers import DIFFormerConv, GCNConv
from helpers import refuses


def random_graph(num_nodes, seed=0, weighted=False, p=0.15):
    """Connected, with eigenvalues that differ."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.triu_indices(num_nodes, num_nodes, 1)
    kept = (torch.rand(pairs.size(1), generator=generator) < p) | (
        pairs[1] == pairs[0] + 1
    )
    edges = pairs[:, kept]
    if not weighted:
        return Data(edge_index=to_undirected(edges), num_nodes=num_nodes)
    weight = torch.rand(edges.size(1), generator=generator, dtype=torch.float64) + 0.5
    edges, weight = to_undirected(edges, weight)
    return Data(edge_index=edges, edge_weight=weight, num_nodes=num_nodes)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_they_are_the_lowest_eigenvectors(monkeypatch, dense, weighted):
    """Of I − D^-½AD^-½, written out; repeatable, and without a draw from the global state."""
    if not dense:
        monkeypatch.setattr(transforms, "_DENSE", 0)
    data = random_graph(60, weighted=weighted)
    before = torch.get_rng_state()
    weight = (
        torch.ones(data.num_edges) if data.edge_weight is None else data.edge_weight
    )
    adjacency = torch.zeros(60, 60).index_put(tuple(data.edge_index), weight)
    scale = adjacency.sum(1).rsqrt()
    laplacian = torch.eye(60) - scale[:, None] * adjacency * scale
    out = AddLaplacianPE(5)(data)
    vectors = out.laplacian_eigenvectors
    values = out.laplacian_eigenvalues[0]
    assert torch.allclose(laplacian @ vectors, vectors * values, rtol=0, atol=1e-10)
    assert torch.allclose(vectors.T @ vectors / 60, torch.eye(5), rtol=0, atol=1e-10)
    assert torch.allclose(
        values, torch.linalg.eigvalsh(laplacian)[1:6], rtol=0, atol=1e-10
    )
    assert out.laplacian_mask.all()
    assert (out.laplacian_eigenvalues == values).all()
    assert torch.equal(AddLaplacianPE(5)(data).laplacian_eigenvectors, vectors)
    assert torch.equal(before, torch.get_rng_state())
    assert "laplacian_eigenvectors" not in data


def test_they_are_on_the_device_of_the_graph_whatever_the_default_is():
    data = random_graph(12)
    expected = AddLaplacianPE(5)(data)
    with torch.device("meta"):
        out = AddLaplacianPE(5)(data)
    for name in ("eigenvectors", "eigenvalues", "mask"):
        assert torch.equal(out[f"laplacian_{name}"], expected[f"laplacian_{name}"])


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 4])
@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("dense", [0, 9])
def test_small_graphs_are_padded(monkeypatch, num_nodes, edges, dense):
    monkeypatch.setattr(transforms, "_DENSE", dense)
    pairs = torch.combinations(torch.arange(num_nodes)).T.reshape(2, -1)
    if not edges:
        pairs = pairs[:, :0]
    out = AddLaplacianPE(5)(Data(edge_index=to_undirected(pairs), num_nodes=num_nodes))
    count = max(num_nodes - 1, 0)
    assert (
        out.laplacian_eigenvectors.shape
        == out.laplacian_eigenvalues.shape
        == (num_nodes, 5)
    )
    assert (out.laplacian_mask == (torch.arange(5) < count)).all()
    assert (out.laplacian_eigenvectors[:, count:] == 0).all()
    assert (out.laplacian_eigenvalues[:, count:] == 0).all()
    assert out.laplacian_eigenvectors.isfinite().all()
    if num_nodes == 4 and edges:  # the complete graph: L = (n I − 1 1ᵀ)/(n − 1)
        assert torch.allclose(out.laplacian_eigenvalues[:, :3], torch.tensor(4 / 3))


def molecule(nodes: int) -> Data:
    generator = torch.Generator().manual_seed(nodes)
    edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
    return Data(
        x=torch.rand(nodes, 4, generator=generator),
        edge_index=edges,
        edge_weight=torch.rand(3 * nodes),
    )


MOLECULES = [molecule(nodes) for nodes in (3, 7, 5, 4)]


@pytest.mark.parametrize("self_loops", [None, "remaining"])
def test_one_graph_is_prepared_once_for_all_layers_and_steps(self_loops):
    data = Compose([NormalizeFeatures(), ToDiffusionGraph(self_loops)])(MOLECULES[1])
    layer = GCNConv(4, 4)
    assert_close(
        layer(data.x, data.graph),
        layer(data.x, data.edge_index, data.edge_weight),
        rtol=0,
        atol=0,
    )
    looped = data.graph.with_self_loops("remaining")
    assert looped.csc.is_sorted or self_loops is None
    layer(data.x, data.graph)
    assert data.graph.with_self_loops("remaining") is looped


ONE_WAY = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
BOTH_WAYS = torch.tensor([[0, 1], [1, 0]])
ONE = torch.tensor([1])


def encoded(edges: Any, **options: Any) -> Any:
    return lambda: AddLaplacianPE(2)(Data(edge_index=edges, num_nodes=3, **options))


def padded(*items: Any) -> Any:
    return lambda: pad(list(items))


test_what_does_not_fit_is_refused = refuses(
    (
        encoded(BOTH_WAYS, edge_weight=torch.tensor([1.0, 2.0])),
        ValueError,
        "undirected",
    ),
    (
        lambda: AddLaplacianPE(2)(Batch.from_data_list([ONE_WAY] * 2)),
        ValueError,
        "one graph",
    ),
    (lambda: ToDiffusionGraph()([]), TypeError, "data"),
    (lambda: ToDiffusionGraph()([1]), TypeError, "data"),
    (padded(), ValueError, "batch must hold at least one item"),
    (padded((ONE, 0.5)), TypeError, "label"),
    (padded((ONE, 0), torch.tensor([1, 0])), TypeError, "every item of batch"),
    (padded((ONE, 0), (ONE, ONE, 0)), TypeError, "every item of batch"),
)


BATCHES: dict[str, Callable[[], Any]] = {
    "a batch": lambda: ToDiffusionGraph()(Batch.from_data_list(MOLECULES)),
    "a list": lambda: ToDiffusionGraph()(MOLECULES),
    "a loader": lambda: next(
        iter(DataLoader(MOLECULES, 4, collate_fn=ToDiffusionGraph()))
    ),
    "a worker": lambda: next(
        iter(
            DataLoader(
                MOLECULES, 4, collate_fn=ToDiffusionGraph("remaining"), num_workers=1
            )
        )
    ),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_has_a_graph_of_its_own(batch):
    layer = DIFFormerConv(4, 4)
    alone = torch.cat(
        [layer(data.x, data.edge_index, data.edge_weight) for data in MOLECULES]
    )
    together = BATCHES[batch]()
    assert together.graph.num_graphs == 4
    assert_close(layer(together.x, together.graph), alone)


def test_graphs_of_single_data_do_not_make_a_batch(no_typecheck):
    dataset = [ToDiffusionGraph()(data) for data in MOLECULES]
    batch = next(iter(BatchLoader(dataset, 4)))
    with pytest.raises(TypeError, match="edge_index"):
        GCNConv(4, 4)(batch.x, batch.graph)


def test_the_graph_moves_with_its_data():
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


def test_pad():
    items = [(torch.full((n,), n - 1), n % 2) for n in (2, 4, 1)]
    tokens, mask, labels = pad(items)
    assert tokens.tolist() == [[1, 1, 0, 0], [3, 3, 3, 3], [0, 0, 0, 0]]
    assert mask.tolist() == [
        [True, True, False, False],
        [True] * 4,
        [True] + [False] * 3,
    ]
    assert labels.tolist() == [0, 0, 1]
    assert tokens.dtype == labels.dtype == torch.long
    assert pad(items[:2], max_length=3)[0].tolist() == [[1, 1, 0], [3, 3, 3]]
    assert pad(items[:1], max_length=3)[0].shape == (1, 2)  # never longer than needed


def test_pad_pairs_of_sequences():
    sequences = torch.tensor([98, 99, 100]).split([2, 1])
    tokens, mask, other, other_mask, labels = pad(
        [(*sequences, 1), (*reversed(sequences), 0)]
    )
    assert tokens.tolist() == [[98, 99], [100, 0]]
    assert other.tolist() == [[100, 0], [98, 99]]
    assert torch.equal(mask, tokens > 0)
    assert torch.equal(other_mask, other > 0)
    assert labels.tolist() == [1, 0]
