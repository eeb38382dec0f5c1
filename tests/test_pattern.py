"""`Pattern`: edges by their ends, in one counting pass, in narrow indices, and not moved where they stand right."""

import pytest
import torch
from torch import Tensor

from diffusion_mp.graph import Graph
from diffusion_mp.graph.ops import Compressed, compress


def sorted_by_torch(node: Tensor, opposite: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    ordered, order = torch.sort(node, stable=True)
    return torch.searchsorted(ordered, torch.arange(num_nodes + 1)), order, opposite[order]


@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (4, 0), (1, 3), (5, 40), (997, 2003)])
@pytest.mark.parametrize("ordered", [False, True])
def test_compressed_forms_are_those_of_a_stable_sort(nodes: int, edges: int, ordered: bool) -> None:
    node, opposite = torch.randint(max(nodes, 1), (2, edges), generator=torch.Generator().manual_seed(edges))
    node = node.sort().values if ordered else node
    expected = sorted_by_torch(node, opposite, nodes)
    found = Compressed(node, opposite, nodes)
    assert (found.moved is None) == bool((node[1:] >= node[:-1]).all())
    for parts in ((found.ptr, found.order, found.other), compress(node, opposite, nodes)):
        for got, want in zip(parts, expected, strict=True):
            assert got.dtype == torch.int32
            assert torch.equal(got.long(), want)
    for got, want in zip(torch.ops.diffusion_mp.compress(node, opposite, nodes), expected, strict=True):
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
    graph = Graph(5, torch.tensor([[4, 0, 0, 3, 1], [2, 1, 0, 1, 4]]), torch.rand(5)).with_self_loops(policy)  # type: ignore[arg-type]
    assert graph.csr.moved is None
    assert graph.csc.moved is not None
    for compressed, ends in ((graph.csr, 1), (graph.csc, 0)):
        ptr, order, other = sorted_by_torch(graph.edges[ends], graph.edges[1 - ends], 5)
        assert [part.tolist() for part in (compressed.ptr, compressed.order, compressed.other)] == [
            part.tolist() for part in (ptr, order, other)
        ]
