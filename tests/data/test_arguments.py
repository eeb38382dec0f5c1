"""What parts of a graph are made of: arguments that are something else are named."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from diffusion_mp.data import PartOf, RandomPartitionLoader, find_clusters
from diffusion_mp.errors import as_whole
from helpers import refuses

pytestmark = pytest.mark.usefixtures(
    "no_typecheck"
)  # our own sentences, not the test run's shape checks

EDGES = torch.randint(0, 60, (2, 200), generator=torch.Generator().manual_seed(0))
DATA = Data(x=torch.zeros(60, 2), edge_index=EDGES)


def parts(data=DATA, num_parts=4, **options):
    return list(RandomPartitionLoader(data, num_parts, **options))


@pytest.mark.parametrize(
    "form", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.byte, torch.Tensor.int]
)
def test_clusters_in_another_form_are_the_same_clusters(form):
    """Bytes, as indices, would be a mask."""
    clusters = torch.arange(60) // 6
    for part, same in zip(parts(clusters=form(clusters)), parts(clusters=clusters), strict=True):
        assert torch.equal(part.n_id, same.n_id)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_edges_of_fewer_bits(dtype):
    narrow = Data(x=DATA.x, edge_index=EDGES.to(dtype))
    for part, same in zip(parts(narrow, degrees="full"), parts(degrees="full"), strict=True):
        assert torch.equal(part.edge_index, same.edge_index)
        assert torch.equal(part.full_degree, same.full_degree)
    assert torch.equal(find_clusters(narrow, 4), find_clusters(DATA, 4))


OF_LOADER = [
    ({"halo": 1}, "halo must be True or False; got 1"),
    ({"allow_unlabelled": None}, "allow_unlabelled must be True or False"),
    ({"num_replicas": 2, "rank": "0"}, "rank must be a whole number"),
    ({"clusters": torch.zeros(60)}, "clusters must hold integers; got a float32 tensor"),
    ({"clusters": "metis"}, "clusters must be a tensor"),
    ({"data": HeteroData()}, "one graph.*got HeteroData"),
    (
        {"data": Data(edge_index=EDGES.tolist(), num_nodes=60)},
        r"edge_index must be a tensor \[2, num_edges\]",
    ),
]
ONES = torch.ones(60, 10).bool()
OF_LOADER_VALUES = [
    ({"num_parts": None}, "pass num_parts or batch_size, one of them"),
    ({"num_parts": 2, "batch_size": 3}, "one of them; got 2 and 3"),
    ({"num_parts": None, "batch_size": 0}, "batch_size must be at least 1"),
    (
        {"num_parts": 61, "allow_unlabelled": True},
        "num_parts must leave every part a node; got 61 parts of 60 nodes",
    ),
    ({"num_parts": 5, "num_replicas": 2}, "multiple of the 2 proc"),
    ({"num_replicas": 2, "rank": 2}, "rank must lie in 0 "),
    (
        {"data": Data(edge_index=EDGES, num_nodes=60, train_mask=ONES)},
        r"bool tensor \[60\], one split.*Split\.of",
    ),
    (
        {"data": Data(edge_index=EDGES, num_nodes=60, train_mask=[True] * 60)},
        r"train_mask must be a bool tensor",
    ),
    ({"data": Data(edge_index=EDGES + 1, num_nodes=60)}, r"edge_index must lie in \[0, 59\]"),
    (
        {"data": Data(x=DATA.x, adj_t=torch.eye(60).to_sparse_csr())},
        "must have edge_index; got adj_t",
    ),
    (
        {"data": Data(x=DATA.x, edge_index=EDGES.to("meta"))},
        "must be on the CPU.*got edge_index on meta",
    ),
    (
        {"clusters": torch.arange(4)},
        r"clusters must hold an integer for each of 60 nodes; got.*\[4\]",
    ),
    ({"clusters": torch.arange(60) - 1}, "clusters must be numbered 0 .* they reach from -1 to 58"),
    (
        {"clusters": torch.arange(60) * 2},
        "60 nodes have at most as many; they reach from 0 to 118.*return_inverse",
    ),
]
OF_BATCHES = [
    (Data(), TypeError, r"a batch must have n_id \[n\].*PyG's loaders set it; for ClusterLoader"),
    (Data(batch_size=1), TypeError, "a batch must have n_id"),
    (Data(batch_size="1", n_id=torch.tensor([1])), TypeError, "batch_size must be a whole number"),
    (Data(n_id=torch.tensor([0.5])), TypeError, "n_id must hold integers"),
    (Data(batch_size=1, n_id=torch.tensor([60])), ValueError, "nodes n_id of the 60 of data"),
    (Data(batch_size=1, n_id=torch.tensor([-1])), ValueError, "nodes n_id of the 60 of data"),
    (
        Data(batch_size=3, n_id=torch.tensor([1, 2])),
        ValueError,
        r"a batch must have batch_size <= n nodes",
    ),
]
OTHERS = [
    (
        lambda: RandomPartitionLoader(DATA, 4).set_epoch(1.5),
        TypeError,
        "epoch must be a whole number",
    ),
    (lambda: find_clusters(DATA, 4, seed=-1), ValueError, r"seed must lie in 0 \.\. 2\*\*31 - 1"),
    (
        lambda: find_clusters(DATA, method="label_propagation", seed=None),
        TypeError,
        "seed must be a whole number",
    ),
    (
        lambda: find_clusters(DATA, 61),
        ValueError,
        "num_clusters must be at most the number of nodes, 60; got 61",
    ),
    (lambda: find_clusters(DATA, 0), ValueError, "num_clusters must be at least 1"),
    (lambda: find_clusters(DATA), ValueError, "METIS needs, and label propagation finds; got None"),
    (
        lambda: find_clusters(DATA, 8, "label_propagation"),
        ValueError,
        "got 8 with method='label_propagation'",
    ),
]
REFUSALS = [
    (lambda options=options: parts(**options), TypeError, message) for options, message in OF_LOADER
]
REFUSALS += [
    (lambda options=options: parts(**options), ValueError, message)
    for options, message in OF_LOADER_VALUES
]
REFUSALS += [
    (lambda batch=batch: PartOf(DATA).forward(batch), *refusal) for batch, *refusal in OF_BATCHES
]

test_what_does_not_fit_is_refused = refuses(*REFUSALS, *OTHERS)


def test_whole_numbers():
    assert [as_whole(value, "n") for value in (3, np.int64(3), torch.tensor(3))] == [3, 3, 3]
    for value in (3.0, "3", None, True, torch.tensor(3.0), [3]):
        with pytest.raises(TypeError, match=r"n must be a whole number; got .*\. Round it\."):
            as_whole(value, "n", "Round it.")
