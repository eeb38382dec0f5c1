"""What a part of a graph can not know, and what is no part of one, is refused in a sentence."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed

from diffusion_mp.diffusivities import AdjacencyDiffusivity, SimpleDiffusivity
from diffusion_mp.distributed import ShardedGraph, node_parallel
from diffusion_mp.models import CertifiedTransformer, DIFFormer, NodeFormer
from diffusion_mp.updates import ImplicitEuler

EDGES, X = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.ones(4, 3)


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", world_size=1, rank=0)
    yield
    distributed.destroy_process_group()


def sharded(**options) -> ShardedGraph:
    return ShardedGraph(EDGES, 4, **options)


def blocks(attention: str | None = None) -> Tensor:
    """A network of certified blocks on a graph as one of two ranks has it."""
    graph = sharded()
    graph.total_nodes = 8
    options = {"matrix": "diagonal"} if attention is None else {"graph": None, "attention": attention}
    return node_parallel(CertifiedTransformer(3, 4, 2, **options))(X, graph)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: sharded(bounds=[0, 2, 4]), r"rise from 0 to num_nodes = 4"),
    (lambda: sharded(bounds=[0, 3]), r"got \[0, 3\]"),
    (lambda: ShardedGraph(EDGES + 1, 4), r"edge_index must lie in \[0, 3\]"),
    (lambda: DIFFormer(3, 4, 2, kernel="sigmoid")(X, sharded()), "can not be taken over .*Use DIFFormer-s"),
    (lambda: AdjacencyDiffusivity(direction="undirected")(X, sharded()), "Make the graph undirected .* before it"),
    (lambda: AdjacencyDiffusivity()(X, sharded()).T, "transpose of a coupling over several ranks is not"),
    (lambda: SimpleDiffusivity()(X, sharded()).diagonal(), "entries of a coupling"),
    (lambda: ImplicitEuler(1.0)(X, AdjacencyDiffusivity()(X, sharded())), "all rows"),
    (lambda: NodeFormer(3, 4, 2)(X, sharded(), return_coupling=True)[1][0].at(EDGES), "Export attention in one"),
    (blocks, "WeightedGraph needs all edges of the graph at once, not a HaloCoupling of some rows"),
    (lambda: blocks("all"), "RowAttention needs all nodes of the graph, not 4 of 8"),
    (lambda: blocks("neighbours"), "RowAttention needs all nodes of the graph, not 4 of 8"),
])  # fmt: skip
@pytest.mark.usefixtures("group", "no_typecheck")
def test_operations_that_a_rank_cannot_do_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=sentence):
        call()


def test_without_ranks_there_are_no_parts() -> None:
    with pytest.raises(ValueError, match=r"there are no ranks yet. Call torch.distributed.init_process_group first"):
        sharded()
