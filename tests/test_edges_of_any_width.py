"""Edges, batches and categories in every integer type, wherever they enter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from diffusion_mp import (
    CertifiedTransformer,
    DIFFormer,
    GCNConv,
    GINConv,
    Graph,
    LabelPropagation,
)
from diffusion_mp.checks import INTEGERS
from diffusion_mp.data import (
    PartOf,
    RandomPartitionLoader,
)
from helpers import built, randn, refuses

N = 12
X = randn(N, 4).float()
RING = torch.stack([torch.arange(N), (torch.arange(N) + 1) % N])
EDGES = torch.cat([RING, RING.flip(0)], 1)
BATCH = torch.arange(N) // 12

DIFFORMER = built(lambda: DIFFormer(4, 8, 3)).eval()
GCN = built(lambda: GCNConv(4, 3)).eval()
LINKS = built(lambda: DIFFormer(4, 8, 3, task="link")).eval()
TABLES = built(lambda: CertifiedTransformer([3, 4], 8, 3)).eval()
PAIR = built(lambda: GINConv(4, nn.Linear(4, 3))).eval()

TAKERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "a layer": lambda as_: GCN(X, as_(EDGES)),
    "a model": lambda as_: DIFFORMER(X, as_(EDGES), batch=as_(BATCH)),
    "pairs of states": lambda as_: PAIR((X, X), as_(EDGES)),
    "links": lambda as_: LINKS(X, as_(EDGES), edge_label_index=as_(EDGES[:, :3])),
    "categories": lambda as_: TABLES(
        as_(torch.stack([torch.arange(N) % 3, torch.arange(N) % 4], 1)), EDGES
    ),
    "ptr": lambda as_: Graph(N, as_(EDGES), ptr=as_(torch.tensor([0, N]))).ptr,
    "from_data": lambda as_: Graph.from_data(
        Data(x=X, edge_index=as_(EDGES), batch=as_(BATCH))
    ).degree(),
    "the loader": lambda as_: [
        (part.edge_index.as_tensor(), part.x)
        for part in RandomPartitionLoader(
            Data(x=X, edge_index=as_(EDGES)), 3, halo=True, degrees="full"
        )
    ],
    "clusters": lambda as_: [
        part.n_id
        for part in RandomPartitionLoader(
            Data(x=X, edge_index=EDGES), 3, clusters=as_(torch.arange(N) // 4)
        )
    ],
    "PartOf": lambda as_: (
        PartOf(Data(edge_index=as_(EDGES), num_nodes=N), "full")(
            Data(edge_index=as_(EDGES), num_nodes=N, n_id=as_(torch.arange(N)))
        ).full_degree
    ),
    "labels": lambda as_: LabelPropagation(3)(as_(torch.arange(N) % 3), as_(EDGES)),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_of_any_type_are_the_same_integers(taker, dtype):
    take = TAKERS[taker]
    with torch.no_grad():
        assert same(take(lambda tensor: tensor.to(dtype)), take(lambda tensor: tensor))


test_numbers_out_of_range_are_named = refuses(
    (
        lambda: GCN(X, torch.full((2, 3), 300).to(torch.uint16)),
        ValueError,
        "edge_index.*300",
    ),
    (lambda: GCN(X, (EDGES - 1).to(torch.uint64)), ValueError, "edge_index"),
    (
        lambda: PAIR((X, X), torch.full((2, 3), 12).to(torch.uint32)),
        ValueError,
        "edge_index",
    ),
)
