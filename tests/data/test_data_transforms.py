"""Laplacian encodings, `ToDiffusionGraph` and `pad`: values, devices, workers and refusals."""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as BatchLoader
from torch_geometric.transforms import Compose, NormalizeFeatures
from torch_geometric.utils import to_undirected

from diffusion_mp import Graph
from diffusion_mp.data import AddLaplacianPE, ToDiffusionGraph, pad, transforms
from diffusion_mp.layers import DIFFormerConv, GCNConv
from diffusion_mp_experiments.sequences import ListOps, Pathfinder, SequenceDataset
from diffusion_mp_experiments.sequences.dataset import byte_tokens, item_random
from helpers import refuses


def random_graph(num_nodes, seed=0, weighted=False, p=0.15):
    """Connected, with eigenvalues that differ."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.triu_indices(num_nodes, num_nodes, 1)
    kept = (torch.rand(pairs.size(1), generator=generator) < p) | (pairs[1] == pairs[0] + 1)
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
    weight = torch.ones(data.num_edges) if data.edge_weight is None else data.edge_weight
    adjacency = torch.zeros(60, 60).index_put(tuple(data.edge_index), weight)
    scale = adjacency.sum(1).rsqrt()
    laplacian = torch.eye(60) - scale[:, None] * adjacency * scale
    out = AddLaplacianPE(5)(data)
    vectors = out.laplacian_eigenvectors
    values = out.laplacian_eigenvalues[0]
    assert torch.allclose(laplacian @ vectors, vectors * values, rtol=0, atol=1e-10)
    assert torch.allclose(vectors.T @ vectors / 60, torch.eye(5), rtol=0, atol=1e-10)
    assert torch.allclose(values, torch.linalg.eigvalsh(laplacian)[1:6], rtol=0, atol=1e-10)
    assert out.laplacian_mask.all()
    assert (out.laplacian_eigenvalues == values).all()
    assert torch.equal(AddLaplacianPE(5)(data).laplacian_eigenvectors, vectors)
    assert torch.equal(before, torch.get_rng_state())
    assert "laplacian_eigenvectors" not in data


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 4])
@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("dense", [True, False])
def test_small_graphs_are_padded(monkeypatch, num_nodes, edges, dense):
    monkeypatch.setattr(transforms, "_DENSE", 9 if dense else 0)
    if num_nodes > 1 and edges:
        pairs = torch.combinations(torch.arange(num_nodes)).T
    else:
        pairs = torch.zeros(2, 0).long()
    out = AddLaplacianPE(5)(Data(edge_index=to_undirected(pairs), num_nodes=num_nodes))
    found = max(num_nodes - 1, 0)
    assert out.laplacian_eigenvectors.shape == out.laplacian_eigenvalues.shape == (num_nodes, 5)
    assert (out.laplacian_mask == (torch.arange(5) < found)).all()
    assert (out.laplacian_eigenvectors[:, found:] == 0).all()
    assert (out.laplacian_eigenvalues[:, found:] == 0).all()
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


SINGLE = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
UNEQUAL = Data(
    edge_index=torch.tensor([[0, 1], [1, 0]]), edge_weight=torch.tensor([1.0, 2.0]), num_nodes=2
)


def of_three(edges: Any) -> Any:
    return lambda: AddLaplacianPE(2)(Data(edge_index=torch.tensor(edges), num_nodes=3))


def padded(*items: Any) -> Any:
    return lambda: pad(list(items))


ONE = torch.tensor([1])
REFUSALS = [
    (lambda: AddLaplacianPE(2)(Data(num_nodes=3)), ValueError, "needs edge_index"),
    (
        lambda: AddLaplacianPE(2)(Batch.from_data_list([SINGLE, SINGLE])),
        ValueError,
        "takes one graph",
    ),
    (lambda: AddLaplacianPE(2)(SINGLE), ValueError, r"undirected graph.*ToUndirected\(\)"),
    (lambda: AddLaplacianPE(2)(UNEQUAL), ValueError, "with one weight"),
    (lambda: AddLaplacianPE(2)(None), TypeError, "data must be a torch_geometric Data"),
    (of_three([[0, 9], [9, 0]]), ValueError, r"edge_index must lie in \[0, 2\]"),
    (of_three([[0, -1], [-1, 0]]), ValueError, "edge_index must lie in"),
    (of_three([[0.0, 1.0], [1.0, 0.0]]), TypeError, "edge_index must hold integers"),
    (of_three([[0, 1], [1, 0], [0, 0]]), ValueError, r"edge_index must be \[2, num_edges\]"),
    *(
        (lambda data=data: ToDiffusionGraph()(data), TypeError, "data must be")
        for data in (None, HeteroData(), [], [1])
    ),
    (lambda: pad([]), ValueError, "batch must hold at least one item"),
    (lambda: pad(None), TypeError, "batch must be a list of items; got None"),
    (
        lambda: pad(torch.zeros(2, 3)),
        TypeError,
        "batch must be a list of items; got a float32 tensor",
    ),
    (padded(3, 4), TypeError, "every item of batch must be tokens and a label"),
    (padded((ONE, 0), (ONE, ONE, 0)), TypeError, "every item of batch .* like the first"),
    (
        padded((ONE / 2, 0)),
        TypeError,
        r"tokens of an item of batch must be whole numbers \[L\]; got a float32 tensor",
    ),
    (
        padded((ONE[None], 0)),
        TypeError,
        r"whole numbers \[L\]; got an int64 tensor of shape \[1, 1\]",
    ),
    (padded(([1, 2], 0)), TypeError, r"whole numbers \[L\]; got \[1, 2\]"),
    (
        padded((ONE, 0.5)),
        TypeError,
        "the label of an item of batch must be a whole number; got 0.5",
    ),
]

test_what_does_not_fit_is_refused = refuses(*REFUSALS)


def batches() -> Iterator[tuple[str, Any]]:
    yield "a batch", ToDiffusionGraph()(Batch.from_data_list(MOLECULES))
    yield "a list", ToDiffusionGraph()(MOLECULES)
    for workers in (0, 1):
        loader = DataLoader(
            MOLECULES, 4, collate_fn=ToDiffusionGraph("remaining"), num_workers=workers
        )
        yield f"{workers} workers", next(iter(loader))


def test_a_batch_has_a_graph_of_its_own(no_typecheck: None) -> None:
    layer = DIFFormerConv(4, 4)
    alone = torch.cat([layer(data.x, data.edge_index, data.edge_weight) for data in MOLECULES])
    for name, batch in batches():
        assert batch.graph.num_graphs == 4, name
        torch.testing.assert_close(
            layer(batch.x, batch.graph), alone, msg=lambda text, name=name: f"{name}: {text}"
        )
    dataset = [ToDiffusionGraph()(data) for data in MOLECULES]
    batch = next(iter(BatchLoader(dataset, 4)))
    with pytest.raises(
        TypeError,
        match=r"graph of the batch; got a list of 4 graphs.*collate_fn=ToDiffusionGraph\(\)",
    ):
        GCNConv(4, 4)(batch.x, batch.graph)


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


def test_what_a_graph_has_found_is_pickled_and_changes_nothing() -> None:
    graph = Graph(5, torch.randint(5, (2, 9)))
    graph.with_self_loops("remaining").prepare()
    again = pickle.loads(pickle.dumps(graph))
    looped = again.with_self_loops("remaining")
    assert torch.equal(looped.csc.order, graph.with_self_loops("remaining").csc.order)
    assert looped.reweighted("twice", lambda: looped._own_weights() * 2).pattern is looped.pattern
    data = MOLECULES[2]
    plain = Graph.from_data(data)
    prepared = Graph.from_data(data).prepare()
    layer = GCNConv(4, 4)
    x = data.x.clone().requires_grad_()

    def grad(graph: Graph) -> Tensor:
        return torch.autograd.grad(layer(x, graph).square().sum(), x)[0]

    assert torch.equal(grad(plain), grad(prepared))


def test_pad() -> None:
    items = [(torch.full((n,), n - 1), n % 2) for n in (2, 4, 1)]
    tokens, mask, labels = pad(items)
    assert tokens.tolist() == [[1, 1, 0, 0], [3, 3, 3, 3], [0, 0, 0, 0]]
    assert mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert labels.tolist() == [0, 0, 1]
    assert (tokens.dtype, mask.dtype, labels.dtype) == (torch.long, torch.bool, torch.long)
    tokens, mask, _ = pad(items[:2], max_length=3)
    assert tokens.tolist() == [[1, 1, 0], [3, 3, 3]]
    assert mask.tolist() == [[True, True, False], [True] * 3]
    assert pad(items[:1], max_length=3)[0].shape == (1, 2)  # never longer than needed
    batch = [
        (byte_tokens(b"ab", 9), byte_tokens(b"abcd", 3), 1),
        (byte_tokens(b"", 9), byte_tokens(b"\0\xff", 9), 0),
    ]
    tokens, mask, other, other_mask, labels = pad(batch)
    assert tokens.tolist() == [[98, 99], [0, 0]]
    assert mask.tolist() == [[True, True], [False, False]]
    assert other.tolist() == [[98, 99, 100], [1, 256, 0]]
    assert other_mask.sum(dim=1).tolist() == [3, 2]
    assert labels.tolist() == [1, 0]


class Counting(SequenceDataset):
    """Item i is i + 1 times the token i."""

    vocabulary = 5
    classes = 2

    def __len__(self) -> int:
        return 5

    def item(self, index: int):
        return torch.full((index + 1,), index), index % 2


LIST_OPS = ListOps(num=5, min_length=10, max_length=30)


@pytest.mark.usefixtures("no_typecheck")
def test_sequences_in_a_loader_by_any_whole_number() -> None:
    shapes = [
        (tokens.shape, mask.shape, len(labels))
        for tokens, mask, labels in DataLoader(LIST_OPS, 2, collate_fn=pad)
    ]
    assert [count for *_, count in shapes] == [2, 2, 1]
    assert all(tokens == mask and 10 <= tokens[1] <= 30 for tokens, mask, _ in shapes)
    assert [label for _, label in Counting()] == [0, 1, 0, 1, 0]
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), -2, np.int8(-2)):
        assert Counting()[index][0].tolist() == [3] * 4
    for index in (5, -6):
        with pytest.raises(IndexError, match=rf"-5 \.\. 4; got {index}"):
            Counting()[index]
    for index in (-1, 5, 10**20):
        with pytest.raises(IndexError, match=rf"index must lie in 0 \.\. 4; got {index}"):
            LIST_OPS.item(index)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    "index", [1.5, "a", None, True, slice(0, 2), [0, 1], torch.tensor([0, 1]), torch.tensor(0.5)]
)
def test_indices_and_seeds_that_are_none(index: Any) -> None:
    for read in (
        Counting().__getitem__,
        Pathfinder(num=4).__getitem__,
        Pathfinder(num=4).scene,
        LIST_OPS.item,
    ):
        with pytest.raises(TypeError, match="index must be a whole number; got"):
            read(index)
    for task in (ListOps, Pathfinder):
        with pytest.raises(TypeError, match="seed must be a whole number"):
            task(seed=index)


def test_neighbouring_keys_give_unrelated_numbers() -> None:
    first = torch.tensor(
        [item_random("task", seed, i).random() for seed in range(20) for i in range(200)]
    )
    assert first.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.05
    assert item_random("a", 1, 23).random() != item_random("a", 12, 3).random()
    assert item_random("a", 1).random() == item_random("a", 1).random()
