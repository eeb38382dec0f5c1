"""`TensorCache`: a layer that gets the same tensors again takes the graph it made of them, and never a wrong one."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch_geometric import EdgeIndex

from diffusion_mp.graph import Graph
from diffusion_mp.layers import GCNConv
from diffusion_mp.runtime import cache
from diffusion_mp.runtime.cache import TensorCache, cached_by

X = torch.zeros(4, 2)


def edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 2], [1, 2, 3, 0]])


@pytest.mark.parametrize("form", [Tensor.clone, Tensor.int, lambda e: EdgeIndex(e)])
def test_the_same_tensors_are_prepared_once(form):
    edge_index = form(edges())
    weight = torch.rand(4)
    batch = torch.zeros(4, dtype=torch.long)
    for tensors in ((edge_index,), (edge_index, weight), (edge_index, weight, batch)):
        graph = Graph.coerce(X, *tensors)
        assert Graph.coerce(X, *tensors) is graph
        assert Graph.coerce(X, form(edges()), *tensors[1:]) is not graph
    # The same edges, of more nodes.
    assert Graph.coerce(torch.zeros(9, 2), edge_index).num_nodes == 9
    assert Graph.coerce(X, edge_index).num_nodes == 4
    alone = Graph.coerce(X, None, None, batch)
    assert Graph.coerce(X, None, None, batch) is alone


OTHER = torch.tensor([[3, 1, 2, 2], [1, 2, 3, 0]])
WRITES: dict[str, Callable[[Tensor], object]] = {
    "through numpy": lambda edge_index: edge_index.numpy().put(0, 3),
    "through data": lambda edge_index: edge_index.data[0].narrow(0, 0, 1).fill_(3),
    "by setting": lambda edge_index: edge_index.set_(OTHER.clone()),  # type: ignore[call-overload]
    "by exchange": lambda edge_index: setattr(edge_index, "data", OTHER.clone()),
    "in inference mode": torch.inference_mode()(
        lambda edge_index: edge_index[0].narrow(0, 0, 1).fill_(3)
    ),
    "through a view": lambda edge_index: edge_index[0].narrow(0, 0, 1).fill_(3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_into_the_edges_is_seen(write):
    layer = GCNConv(2, 2)
    x = torch.rand(4, 2)
    edge_index = edges()
    before = layer(x, edge_index)
    write(edge_index)
    assert torch.equal(edge_index, OTHER)
    after = layer(x, edge_index)
    assert not torch.equal(before, after)
    assert_close(after, layer(x, Graph(4, edge_index.clone())))


def test_weights_and_batches_written_to():
    edge_index = torch.tensor([[0, 2], [1, 3]])
    weight = torch.rand(2)
    batch = torch.zeros(4, dtype=torch.long)
    graph = Graph.coerce(X, edge_index, weight, batch)
    weight.mul_(2)
    doubled = Graph.coerce(X, edge_index, weight, batch)
    assert torch.equal(doubled.weights(X), 2 * graph.weights(X))
    batch[2:] = 1
    assert Graph.coerce(X, edge_index, weight, batch).num_graphs == 2
    assert doubled.num_graphs == 1


def test_learned_weights_are_not_copied():
    edge_index = edges()
    layer = GCNConv(2, 2)
    weight = torch.rand(4, requires_grad=True)
    for _ in range(2):
        weight.grad = None
        layer(torch.rand(4, 2), edge_index, weight).sum().backward()
        assert weight.grad is not None
    assert Graph.coerce(X, edge_index, weight).edge_weight is weight


def test_what_is_found_in_inference_mode_serves_training():
    with torch.inference_mode():
        edge_index = edges()
        layer = GCNConv(2, 2)
        layer(torch.rand(4, 2), edge_index)
    layer = GCNConv(2, 2)
    x = torch.rand(4, 2, requires_grad=True)
    layer(x, edge_index).sum().backward()
    assert x.grad is not None
    a = torch.arange(4)
    with torch.inference_mode():
        found = cached_by((a,), "twice", lambda: a * 2)
        fresh = torch.arange(4)
        assert counted(fresh) == (6, 1)
        assert counted(fresh) == (6, 0)
        fresh += 1
        assert counted(fresh) == (10, 1)
    assert not found.is_inference()


def test_what_is_freed_is_forgotten():
    recent: TensorCache[Graph] = TensorCache(100)

    def take(edge_index: Tensor) -> Graph:
        return recent.get(4, (edge_index,), lambda e: Graph(4, e))

    kept = edges()
    passing = edges()
    graph = take(kept)
    gone = weakref.ref(take(passing))
    del passing
    gc.collect()
    assert gone() is None
    assert take(kept) is graph
    for _ in range(50):
        take(edges())
    assert len(recent._entries) == 1


def test_what_has_no_room_is_forgotten():
    recent: TensorCache[object] = TensorCache(20)

    def take(tensor: Tensor) -> object:
        return recent.get(0, (tensor,), lambda _: object())

    first, second, third = (torch.zeros(8) for _ in range(3))
    values = [take(tensor) for tensor in (first, second, third)]
    assert [take(tensor) for tensor in (third, second)] == [values[2], values[1]]
    assert take(first) is not values[0]
    large = torch.zeros(21)
    assert (
        recent.get(0, (large,), lambda t: t) is large
    )  # no copy is made of what has no room


def test_threads_get_the_graphs_of_their_own_edges():
    several = [
        torch.randint(4, (2, 6), generator=torch.Generator().manual_seed(seed))
        for seed in range(20)
    ]

    def agrees(place: int) -> bool:
        return torch.equal(Graph.coerce(X, several[place]).edges, several[place])

    with ThreadPoolExecutor(8) as threads:
        assert all(
            threads.map(
                agrees, np.random.default_rng(0).integers(20, size=2000).tolist()
            )
        )


def counted(*tensors: torch.Tensor, key: str = "sum") -> tuple[int, int]:
    calls = []

    def find() -> int:
        calls.append(1)
        return int(sum(tensor.sum() for tensor in tensors))

    return cached_by(tensors, key, find), len(calls)


def test_it_is_computed_once_for_a_key_and_tensors_that_are_not_written_to():
    a = torch.arange(4)
    b = torch.arange(3)
    assert counted(a, b) == (9, 1)
    assert counted(a, b) == (9, 0)
    assert counted(a, b, key="another") == (9, 1)
    b += 1
    assert counted(a, b) == (12, 1)
    assert counted(a, b) == (12, 0)
    assert counted(a, b.clone()) == (12, 1)
    assert counted(a) == (6, 1)


def test_values_go_with_their_tensor():
    before = len(cache._KEPT)
    a = torch.arange(4)
    counted(a)
    assert len(cache._KEPT) == before + 1
    del a
    gc.collect()
    assert len(cache._KEPT) == before


def test_nothing_of_a_transform_is_kept():
    a = torch.arange(4.0)

    def twice(x: Tensor) -> Tensor:
        return cached_by((a,), "a transform", lambda: a * x)

    torch.func.vmap(twice)(torch.ones(3))
    assert torch.equal(twice(torch.ones(())), a)
