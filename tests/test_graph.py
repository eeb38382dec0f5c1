"""`Graph`: what it accepts, what it caches, its policies, and its edges by their ends."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import add_remaining_self_loops

from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import Compressed, compress, members
from diffusion_mp.layers import GCNConv
from diffusion_mp.models import DIFFormer
from helpers import refuses

EDGES = torch.tensor([[0, 0, 1, 2, 2], [1, 2, 2, 2, 0]])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def adjacency(graph: Graph) -> Tensor:
    """a_ij with i the target, j the source."""
    dense = torch.zeros(graph.num_nodes, graph.num_nodes)
    return dense.index_put((graph.edges[1], graph.edges[0]), graph.weights(dense), accumulate=True)


def test_self_loop_policies_with_weights() -> None:
    graph = Graph(4, EDGES, WEIGHT)
    plain = adjacency(graph)
    assert graph.with_self_loops("keep") is graph
    assert torch.equal(adjacency(graph.with_self_loops("add")), plain + torch.eye(4))
    assert torch.equal(
        adjacency(graph.with_self_loops("remove")), plain - torch.diag(plain.diagonal())
    )
    index, weight = add_remaining_self_loops(EDGES, WEIGHT, num_nodes=4)
    assert torch.equal(
        adjacency(graph.with_self_loops("remaining")), adjacency(Graph(4, index, weight))
    )


def test_a_part_with_full_degree_has_the_entries_of_the_whole_graph() -> None:
    """Nodes 0, 2, 3 of four, under every policy: degree and normalised entries are those of the whole, cut out."""
    part = torch.tensor([0, 2, 3])
    whole = Graph(4, EDGES, WEIGHT)
    inside = torch.isin(EDGES, part).all(0)
    local = torch.searchsorted(part, EDGES[:, inside])
    degree = torch.stack([whole.degree("in"), whole.degree("out")], 1)[part]
    cut = Graph(3, local, WEIGHT[inside], full_degree=degree)
    x = torch.zeros(4, 1)
    for options in itertools.product(
        ("sym", "row"), ("keep", "add", "remove", "remaining"), ("directed", "undirected", "pyg")
    ):
        diffusivity = AdjacencyDiffusivity(options[0], self_loops=options[1], direction=options[2])
        expected = diffusivity(x, whole).to_dense()[0][part][:, part]
        assert torch.allclose(
            diffusivity(x[part], cut).to_dense()[0], expected, rtol=1e-6, atol=0
        ), options
        turned = diffusivity(x, whole.reverse()).to_dense()[0][part][:, part]
        assert torch.allclose(
            diffusivity(x[part], cut.reverse()).to_dense()[0], turned, rtol=1e-6, atol=0
        ), options
    bare = AdjacencyDiffusivity("sym")(x[part], Graph(3, local, WEIGHT[inside])).to_dense()[0]
    assert not torch.allclose(
        bare, AdjacencyDiffusivity("sym")(x, whole).to_dense()[0][part][:, part]
    )
    assert not AdjacencyDiffusivity("row")(
        x[part], cut
    ).row_stochastic  # rows lost what went to node 1
    assert torch.equal(
        Graph.from_data(Data(edge_index=local, num_nodes=3, full_degree=degree)).degree(),
        degree[:, 0],
    )
    assert torch.equal(cut.within(1).degree(), torch.tensor([1.0, 2, 0]))


DEGREES = r"full_degree must be floating point \[3, 2\].*got a"
ADJACENCY = torch.eye(3).to_sparse()
test_what_is_no_graph_is_refused = refuses(
    (lambda: Graph(3, EDGES, full_degree=torch.zeros(3)), DEGREES),
    (lambda: Graph(3, EDGES, full_degree=torch.zeros(3, 2).long()), DEGREES),
    (lambda: Graph.from_edge_index(EDGES.to("meta")), "edge_index must have values"),
    (
        lambda: Graph.from_sparse(ADJACENCY.bool()),
        r"adjacency must be floating point; got a bool .*\.float\(\)",
    ),
    (lambda: Graph.from_sparse(torch.eye(3).to_sparse(1)), "adjacency must be square"),
    (
        lambda: Graph(3, EDGES, WEIGHT / 2).degree(dtype=torch.long),
        "would be cut off as torch.int64",
    ),
    (lambda: Graph(3, EDGES, WEIGHT / 2).weights(EDGES), "would be cut off as torch.int64"),
)


def test_constructors_agree() -> None:
    expected = adjacency(Graph(3, EDGES, WEIGHT))
    sparse = expected.to_sparse_csr()
    data = Data(edge_index=EDGES, edge_weight=WEIGHT, num_nodes=3)
    x = torch.rand(3, 2)
    for graph in (
        Graph.from_edge_index(EDGES, WEIGHT),
        Graph.from_edge_index(EdgeIndex(EDGES, sparse_size=(3, 3)), WEIGHT, 3),
        Graph.from_sparse(sparse),
        Graph.from_sparse(sparse.to_sparse_coo()),
        Graph.from_data(data),
        Graph.from_data(Data(adj_t=sparse, num_nodes=3)),
        Graph.coerce(x, EDGES, WEIGHT),
        Graph.coerce(x, EdgeIndex(EDGES, sparse_size=(3, 3)), WEIGHT),
        Graph.coerce(x, sparse),
    ):
        assert torch.equal(adjacency(graph), expected)
    ready = Graph(3, EDGES)
    assert Graph.coerce(x, ready) is ready


def test_a_batch_of_pyg_is_a_ragged_batch() -> None:
    parts = [Data(edge_index=EDGES, num_nodes=3), Data(edge_index=EDGES[:, :1], num_nodes=2)]
    batch = Batch.from_data_list(parts)
    graph = Graph.from_data(batch)
    assert graph.num_graphs == 2
    assert graph.ptr.tolist() == [0, 3, 5]
    assert graph.batch.tolist() == batch.batch.tolist()
    assert not graph.is_single
    part = batch.subgraph(
        torch.tensor([1, 1, 0, 1, 1]).bool()
    )  # PyG leaves the boundaries of the whole
    assert Graph.from_data(part).ptr.tolist() == [0, 2, 4]


def test_data_with_several_kinds_of_nodes_are_refused_and_taken_when_they_are_one() -> None:
    data = HeteroData()
    data["author"].x = torch.rand(3, 2)
    data["paper"].x = torch.rand(2, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2], [1, 0]])
    for several in (data, Batch.from_data_list([data, data])):
        with pytest.raises(
            TypeError, match=r"kinds of nodes author, paper\. Pass data\.to_homogeneous\(\)"
        ):
            Graph.from_data(several)
    assert Graph.from_data(data.to_homogeneous()).edges.tolist() == [[0, 2], [4, 3]]


def test_one_graph_is_the_default_and_signed_weights_pass_without_validation() -> None:
    graph = Graph(3, EDGES)
    assert graph.is_single
    assert graph.ptr.tolist() == [0, 3]
    assert graph.batch.tolist() == [0, 0, 0]
    assert "num_nodes=3" in repr(graph)
    assert Graph(3).num_edges == 0
    assert Graph(3).degree().tolist() == [0, 0, 0]
    graph = Graph(3, EDGES, -WEIGHT, validate=False)
    assert graph.degree("in").tolist() == [-5, -1, -9]


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_batch_and_ptr_say_the_same(sizes: list[int]) -> None:
    ptr = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    by_ptr = Graph(int(ptr[-1]), ptr=ptr)
    assert by_ptr.ptr.tolist() == ptr.tolist()
    assert by_ptr.num_graphs == len(sizes)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    assert by_ptr.batch.tolist() == batch.tolist()
    if sizes[-1]:  # a batch vector cannot name empty graphs at its end
        assert Graph(len(batch), batch=batch).ptr.tolist() == ptr.tolist()


@given(num_nodes=st.integers(1, 8), num_edges=st.integers(0, 20), seed=st.integers(0, 99))
def test_policies_on_random_multigraphs(num_nodes: int, num_edges: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    graph = Graph(num_nodes, edge_index)
    plain = adjacency(graph)
    remaining = adjacency(
        graph.with_self_loops("remaining")
    )  # one loop each; parallel ones count with their mean
    assert torch.equal(remaining, plain - torch.diag(plain.diagonal()) + torch.eye(num_nodes))
    assert torch.equal(graph.degree("in"), plain.sum(1))
    assert torch.equal(graph.degree("out"), plain.sum(0))
    assert torch.equal(adjacency(graph.to_undirected()), 0.5 * (plain + plain.T))


def test_what_a_graph_keeps_serves_training_and_learned_weights() -> None:
    graph = Graph(4, torch.tensor([[0, 1, 2], [1, 2, 3]]))
    model = DIFFormer(3, 4, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(x, graph)
    got = model(x, graph)
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    weight = torch.ones(4, requires_grad=True)
    graph = Graph(3, torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), weight)
    assert graph.is_symmetric
    for _ in range(2):
        AdjacencyDiffusivity("sym", self_loops="add")(
            torch.ones(3, 1), graph
        ).degree().sum().backward()
    with torch.no_grad():
        weight[0] = 2
    assert not graph.is_symmetric


def sorted_by_torch(
    node: Tensor, opposite: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    ordered, order = torch.sort(node, stable=True)
    return torch.searchsorted(ordered, torch.arange(num_nodes + 1)), order, opposite[order]


@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (4, 0), (1, 3), (5, 40), (997, 2003)])
@pytest.mark.parametrize("ordered", [False, True])
def test_compressed_forms_are_those_of_a_stable_sort(nodes: int, edges: int, ordered: bool) -> None:
    node, opposite = torch.randint(
        max(nodes, 1), (2, edges), generator=torch.Generator().manual_seed(edges)
    )
    node = node.sort().values if ordered else node
    expected = sorted_by_torch(node, opposite, nodes)
    found = Compressed(node, opposite, nodes)
    assert (found.parts[1] is None) == bool((node[1:] >= node[:-1]).all())
    for parts in ((found.ptr, found.order, found.other), compress(node, opposite, nodes)):
        for got, want in zip(parts, expected, strict=True):
            assert got.dtype == torch.int32
            assert torch.equal(got.long(), want)
    for got, want in zip(
        torch.ops.diffusion_mp.compress(node, opposite, nodes), expected, strict=True
    ):
        assert torch.equal(got.long(), want)


def test_compressing_passes_opcheck_and_refuses_nodes_that_do_not_exist() -> None:
    node, opposite = torch.randint(9, (2, 20), generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(torch.ops.diffusion_mp.compress.default, (node, opposite, 9))
    graph = Graph(3, torch.tensor([[0, 5, 1], [-1, 0, 2]]), validate=False)
    for compressed in (graph.csr, graph.csc):
        with pytest.raises(ValueError, match=r"edge_index must lie in \[0, 2\] for 3 nodes"):
            compressed.ptr  # noqa: B018 (counted when asked for)


@pytest.mark.parametrize("policy", ["add", "remaining"])
def test_edges_with_loops_stand_in_the_order_of_their_targets(policy: str) -> None:
    graph = Graph(
        5, torch.tensor([[4, 0, 0, 3, 1], [2, 1, 0, 1, 4]]), torch.rand(5)
    ).with_self_loops(policy)  # type: ignore[arg-type]
    assert graph.csr.parts[1] is None
    assert graph.csc.parts[1] is not None
    for compressed, ends in ((graph.csr, 1), (graph.csc, 0)):
        expected = sorted_by_torch(graph.edges[ends], graph.edges[1 - ends], 5)
        for got, want in zip(
            (compressed.ptr, compressed.order, compressed.other), expected, strict=True
        ):
            assert torch.equal(got.long(), want)


def test_sums_of_half_precision_weights() -> None:
    graph = Graph(2, torch.zeros(2, 5000, dtype=torch.long), torch.ones(5000, dtype=torch.float16))
    assert graph.degree()[0] == graph.degree(dtype=torch.float16)[0] == 5000


def test_the_default_device_is_not_that_of_the_data() -> None:
    layer = GCNConv(2, 2)
    x = torch.rand(5, 2)
    batch = torch.tensor([0, 0, 1, 1, 1])
    expected = layer(x, EDGES[:, :1], batch=batch)
    with torch.device("meta"):
        graph = Graph(5, EDGES[:, :1], batch=batch)
        assert members(graph.ptr, 5, x.device)[0].tolist() == batch.tolist()
        assert torch.equal(layer(x, graph), expected)
