"""Arguments of loaders, parts and clusters: what does not fit is refused by its name."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from diffusion_mp.checks import as_whole
from diffusion_mp.data import PartOf, RandomPartitionLoader, find_clusters
from helpers import refuses

# Our own sentences, not the test run's shape checks.
pytestmark = pytest.mark.usefixtures("no_typecheck")

EDGES = torch.randint(0, 60, (2, 200), generator=torch.Generator().manual_seed(0))
DATA = Data(x=torch.zeros(60, 2), edge_index=EDGES)


def parts(**options: Any) -> list[Data]:
    return list(RandomPartitionLoader(**{"data": DATA, "num_parts": 4} | options))


@pytest.mark.parametrize(
    "form",
    [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.byte, torch.Tensor.int],
)
def test_clusters_in_another_form_are_the_same_clusters(form):
    """Bytes, as indices, would be a mask."""
    clusters = torch.arange(60) // 6
    for part, same in zip(
        parts(clusters=form(clusters)), parts(clusters=clusters), strict=True
    ):
        assert torch.equal(part.n_id, same.n_id)


def graph(edge_index: Any = EDGES, **attributes: Any) -> Data:
    return Data(edge_index=edge_index, num_nodes=60, **attributes)


OF_LOADER: list[tuple[dict[str, Any], type, str]] = [
    ({"halo": 1}, TypeError, "halo"),
    ({"allow_unlabelled": None}, TypeError, "allow_unlabelled"),
    ({"num_replicas": 2, "rank": "0"}, TypeError, "rank"),
    ({"data": HeteroData()}, TypeError, "data"),
    ({"num_parts": None}, ValueError, "num_parts or batch_size"),
    ({"num_parts": 2, "batch_size": 3}, ValueError, "num_parts or batch_size"),
    ({"num_parts": None, "batch_size": 0}, ValueError, "batch_size"),
    ({"num_parts": 61, "allow_unlabelled": True}, ValueError, "num_parts"),
    ({"num_replicas": 2, "rank": 2}, ValueError, "rank"),
    ({"data": graph(train_mask=torch.ones(60, 10).bool())}, ValueError, "train_mask"),
    ({"data": graph(train_mask=[True] * 60)}, TypeError, "train_mask"),
    (
        {"data": Data(x=DATA.x, adj_t=torch.eye(60).to_sparse_csr())},
        ValueError,
        "edge_index",
    ),
    ({"data": graph(EDGES.to("meta"))}, ValueError, "on the CPU"),
]
OF_PARTS: list[tuple[Data, type, str]] = [
    (Data(batch_size="1", n_id=torch.tensor([1])), TypeError, "batch_size"),
    (Data(n_id=torch.tensor([0.5])), TypeError, "n_id"),
    (Data(batch_size=1, n_id=torch.tensor([60])), ValueError, "n_id"),
    (Data(batch_size=3, n_id=torch.tensor([1, 2])), ValueError, "batch_size"),
]
test_what_does_not_fit_is_refused = refuses(
    *((lambda options=each[0]: parts(**options), *each[1:]) for each in OF_LOADER),
    *(
        (lambda batch=each[0]: PartOf(DATA).forward(batch), *each[1:])
        for each in OF_PARTS
    ),
    (lambda: RandomPartitionLoader(DATA, 4).set_epoch(1.5), TypeError, "epoch"),
    (lambda: find_clusters(DATA, 4, seed=-1), ValueError, "seed"),
    (lambda: find_clusters(DATA, 61), ValueError, "num_clusters"),
    (lambda: find_clusters(DATA), ValueError, "num_clusters"),
    (lambda: find_clusters(DATA, 8, "label_propagation"), ValueError, "num_clusters"),
)


def test_whole_numbers():
    assert [as_whole(value, "n") for value in (3, np.int64(3), torch.tensor(3))] == [
        3,
        3,
        3,
    ]
