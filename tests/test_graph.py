"""`Graph`: what it accepts, what it caches, its policies, and its edges by their ends."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import add_remaining_self_loops

from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import Compressed, compress, members
from diffusion_mp.layers import GCNConv
from helpers import refuses

EDGES = torch.tensor([[0, 0, 1, 2, 2], [1, 2, 2, 2, 0]])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def adjacency(graph: Graph) -> Tensor:
    """a_ij with i the target, j the source."""
    dense = torch.zeros(graph.num_nodes, graph.num_nodes)
    return dense.index_put(
        (graph.edges[1], graph.edges[0]), graph.weights(dense), accumulate=True
    )


def random_edges(num_nodes: int, num_edges: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_edges)
    return torch.randint(max(num_nodes, 1), (2, num_edges), generator=generator)


def test_remaining_loops_with_weights_are_those_of_pyg():
    index, weight = add_remaining_self_loops(EDGES, WEIGHT, num_nodes=4)
    got = adjacency(Graph(4, EDGES, WEIGHT).with_self_loops("remaining"))
    assert torch.equal(got, adjacency(Graph(4, index, weight)))


#: Nodes 0, 2, 3 of a graph of four, and what a part of these nodes knows of it.
PART = torch.tensor([0, 2, 3])
OF_FOUR = Graph(4, EDGES, WEIGHT)
INSIDE = torch.isin(EDGES, PART).all(0)
LOCAL = torch.searchsorted(PART, EDGES[:, INSIDE])
DEGREE = torch.stack([OF_FOUR.degree("in"), OF_FOUR.degree("out")], 1)[PART]
CUT = Graph(3, LOCAL, WEIGHT[INSIDE], full_degree=DEGREE)


@pytest.mark.parametrize("normalization", ["sym", "row"])
@pytest.mark.parametrize("self_loops", ["keep", "add", "remove", "remaining"])
@pytest.mark.parametrize("direction", ["directed", "undirected", "pyg"])
def test_a_part_with_full_degree_has_the_entries_of_the_whole_graph(
    normalization, self_loops, direction
):
    diffusivity = AdjacencyDiffusivity(
        normalization, self_loops=self_loops, direction=direction
    )

    def entries(graph: Graph) -> Tensor:
        return diffusivity(torch.zeros(graph.num_nodes, 1), graph).to_dense()[0]

    for part, graph in ((CUT, OF_FOUR), (CUT.reverse(), OF_FOUR.reverse())):
        expected = entries(graph)[PART][:, PART]
        assert_close(entries(part), expected, rtol=1e-6, atol=0)


def test_what_a_part_knows_is_its_degree():
    x = torch.zeros(3, 1)
    without = AdjacencyDiffusivity("sym")(x, Graph(3, LOCAL, WEIGHT[INSIDE])).to_dense()
    assert not torch.allclose(AdjacencyDiffusivity("sym")(x, CUT).to_dense(), without)
    # Rows lost what went to node 1.
    assert not AdjacencyDiffusivity("row")(x, CUT).row_stochastic
    data = Data(edge_index=LOCAL, num_nodes=3, full_degree=DEGREE)
    assert torch.equal(Graph.from_data(data).degree(), DEGREE[:, 0])
    assert torch.equal(CUT.within(1).degree(), torch.tensor([1.0, 2, 0]))


test_what_is_no_graph_is_refused = refuses(
    (lambda: Graph(3, EDGES, full_degree=torch.zeros(3)), ValueError, "full_degree"),
    (
        lambda: Graph(3, EDGES, full_degree=torch.zeros(3, 2).long()),
        ValueError,
        "full_degree",
    ),
    (
        lambda: Graph.from_sparse(torch.eye(3).to_sparse().bool()),
        TypeError,
        "adjacency",
    ),
    (lambda: Graph.from_sparse(torch.eye(3).to_sparse(1)), ValueError, "adjacency"),
    (lambda: Graph.from_sparse(torch.ones(3, 2).to_sparse()), ValueError, "adjacency"),
    (
        lambda: Graph(3, EDGES, WEIGHT).degree(dtype=torch.long),
        TypeError,
        "torch.int64",
    ),
    (lambda: Graph(3, EDGES, WEIGHT).weights(EDGES), TypeError, "torch.int64"),
)


def test_constructors_agree():
    expected = adjacency(Graph(3, EDGES, WEIGHT))
    sparse = expected.to_sparse_csr()
    listed = EdgeIndex(EDGES, sparse_size=(3, 3))
    x = torch.rand(3, 2)
    for graph in (
        Graph(3, listed, WEIGHT),
        Graph.from_sparse(sparse),
        Graph.from_sparse(sparse.to_sparse_coo()),
        Graph.from_data(Data(edge_index=EDGES, edge_weight=WEIGHT, num_nodes=3)),
        Graph.from_data(Data(adj_t=sparse, num_nodes=3)),
        Graph.coerce(x, EDGES, WEIGHT),
        Graph.coerce(x, listed, WEIGHT),
        Graph.coerce(x, sparse),
    ):
        assert torch.equal(adjacency(graph), expected)
    ready = Graph(3, EDGES)
    assert Graph.coerce(x, ready) is ready


def test_a_batch_of_pyg_is_a_ragged_batch():
    parts = [
        Data(edge_index=EDGES, num_nodes=3),
        Data(edge_index=EDGES[:, :1], num_nodes=2),
    ]
    batch = Batch.from_data_list(parts)
    graph = Graph.from_data(batch)
    assert graph.ptr.tolist() == [0, 3, 5]
    assert graph.batch.tolist() == batch.batch.tolist()
    assert not graph.is_single
    # PyG leaves the boundaries of the whole batch in a part of it.
    part = batch.subgraph(torch.tensor([1, 1, 0, 1, 1]).bool())
    assert Graph.from_data(part).ptr.tolist() == [0, 2, 4]


def test_data_with_several_kinds_of_nodes_are_taken_when_they_are_one():
    data = HeteroData()
    data["author"].x = torch.rand(3, 2)
    data["paper"].x = torch.rand(2, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2], [1, 0]])
    for several in (data, Batch.from_data_list([data, data])):
        with pytest.raises(TypeError, match=r"data\.to_homogeneous\(\)"):
            Graph.from_data(several)
    assert Graph.from_data(data.to_homogeneous()).edges.tolist() == [[0, 2], [4, 3]]


def test_one_graph_is_the_default_and_signed_weights_pass_without_validation():
    graph = Graph(3, EDGES)
    assert graph.is_single
    assert graph.ptr.tolist() == [0, 3]
    assert graph.batch.tolist() == [0, 0, 0]
    assert "num_nodes=3" in repr(graph)
    assert Graph(3).degree().tolist() == [0, 0, 0]
    assert Graph(3, EDGES, -WEIGHT, validate=False).degree("in").tolist() == [
        -5,
        -1,
        -9,
    ]


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_batch_and_ptr_say_the_same(sizes):
    ptr = [0, *itertools.accumulate(sizes)]
    by_ptr = Graph(ptr[-1], ptr=torch.tensor(ptr))
    assert by_ptr.ptr.tolist() == ptr
    assert by_ptr.num_graphs == len(sizes)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    assert by_ptr.batch.tolist() == batch.tolist()
    if sizes[-1]:  # a batch vector cannot name empty graphs at its end
        assert Graph(len(batch), batch=batch).ptr.tolist() == ptr


@given(num_nodes=st.integers(1, 8), num_edges=st.integers(0, 20))
def test_policies_on_random_multigraphs(num_nodes, num_edges):
    graph = Graph(num_nodes, random_edges(num_nodes, num_edges))
    dense = adjacency(graph)
    without = dense - torch.diag(dense.diagonal())
    loops = torch.eye(num_nodes)
    for policy, expected in (
        ("keep", dense),
        ("add", dense + loops),
        ("remove", without),
        ("remaining", without + loops),  # parallel ones count with their mean
    ):
        assert torch.equal(adjacency(graph.with_self_loops(policy)), expected), policy
    assert torch.equal(graph.degree("in"), dense.sum(1))
    assert torch.equal(graph.degree("out"), dense.sum(0))
    assert torch.equal(adjacency(graph.to_undirected()), 0.5 * (dense + dense.T))


def sorted_by_torch(node: Tensor, opposite: Tensor, num_nodes: int) -> list[Tensor]:
    ordered, order = torch.sort(node, stable=True)
    return [
        torch.searchsorted(ordered, torch.arange(num_nodes + 1)),
        order,
        opposite[order],
    ]


def forms(compressed: Compressed) -> list[Tensor]:
    return [compressed.ptr, compressed.order, compressed.other]


def as_numbers(parts: Any) -> list[list[int]]:
    return [part.tolist() for part in parts]


@pytest.mark.parametrize(
    ("nodes", "edges"), [(0, 0), (4, 0), (1, 3), (5, 40), (997, 2003)]
)
@pytest.mark.parametrize("ordered", [False, True])
def test_compressed_forms_are_those_of_a_stable_sort(nodes, edges, ordered):
    node, opposite = random_edges(nodes, edges)
    if ordered:
        node = node.sort().values
    expected = as_numbers(sorted_by_torch(node, opposite, nodes))
    compressed = Compressed(node, opposite, nodes)
    assert (compressed.parts[1] is None) == bool((node[1:] >= node[:-1]).all())
    assert all(part.dtype == torch.int32 for part in forms(compressed))
    assert as_numbers(forms(compressed)) == expected
    assert as_numbers(compress(node, opposite, nodes)) == expected
    assert (
        as_numbers(torch.ops.diffusion_mp.compress(node, opposite, nodes)) == expected
    )


def test_compressing_passes_opcheck_and_refuses_nodes_that_do_not_exist():
    torch.library.opcheck(
        torch.ops.diffusion_mp.compress.default, (*random_edges(9, 20), 9)
    )
    graph = Graph(3, torch.tensor([[0, 5, 1], [-1, 0, 2]]), validate=False)
    for compressed in (graph.csr, graph.csc):
        with pytest.raises(ValueError, match="edge_index"):
            compressed.ptr  # noqa: B018 (counted when asked for)


@pytest.mark.parametrize("policy", ["add", "remaining"])
def test_edges_with_loops_stand_in_the_order_of_their_targets(policy):
    graph = Graph(5, torch.tensor([[4, 0, 0, 3, 1], [2, 1, 0, 1, 4]]), torch.rand(5))
    looped = graph.with_self_loops(policy)
    source, target = looped.edges
    assert looped.csr.parts[1] is None
    assert as_numbers(forms(looped.csr)) == as_numbers(
        sorted_by_torch(target, source, 5)
    )
    assert as_numbers(forms(looped.csc)) == as_numbers(
        sorted_by_torch(source, target, 5)
    )
    weighted = looped.with_weights(looped._edge_weights())
    assert weighted.pattern is looped.pattern  # which took the sorting


def test_sums_of_half_precision_weights():
    graph = Graph(
        2, torch.zeros(2, 5000, dtype=torch.long), torch.ones(5000, dtype=torch.float16)
    )
    assert graph.degree()[0] == graph.degree(dtype=torch.float16)[0] == 5000


def test_the_default_device_is_not_that_of_the_data():
    layer = GCNConv(2, 2)
    x = torch.rand(5, 2)
    batch = torch.tensor([0, 0, 1, 1, 1])
    expected = layer(x, EDGES[:, :1], batch=batch)
    with torch.device("meta"):
        graph = Graph(5, EDGES[:, :1], batch=batch)
        assert members(graph.ptr, 5, x.device)[0].tolist() == batch.tolist()
        assert torch.equal(layer(x, graph), expected)
