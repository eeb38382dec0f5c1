"""What parts of a graph are made of: arguments that are something else are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from diffusion_mp.data import PartOf, RandomPartitionLoader, find_clusters
from diffusion_mp.errors import as_whole

pytestmark = pytest.mark.usefixtures("no_typecheck")  # our own sentences, not the test run's shape checks

EDGES = torch.randint(0, 60, (2, 200), generator=torch.Generator().manual_seed(0))
DATA = Data(x=torch.zeros(60, 2), edge_index=EDGES)


def parts(data=DATA, num_parts=4, **options):
    return list(RandomPartitionLoader(data, num_parts, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "a"}, "seed must be a whole number; got 'a'"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"halo": 1}, "halo must be True or False; got 1"),
        ({"halo": "yes"}, "halo must be True or False"),
        ({"allow_unlabelled": None}, "allow_unlabelled must be True or False"),
        ({"num_replicas": 1.5}, "num_replicas must be a whole number"),
        ({"num_replicas": 2, "rank": "0"}, "rank must be a whole number"),
        ({"clusters": torch.zeros(60)}, "clusters must hold integers; got a float32 tensor"),
        ({"clusters": "metis"}, "clusters must be a tensor"),
        ({"num_parts": 2.5}, "num_parts must be an integer"),
        ({"num_parts": True}, "num_parts must be an integer"),
        ({"data": Data(edge_index=EDGES.tolist(), num_nodes=60)}, r"edge_index must be a tensor \[2, num_edges\]"),
    ],
)
def test_options_of_the_loader(options, message):
    with pytest.raises(TypeError, match=message):
        parts(**options)


def test_an_epoch_is_a_whole_number():
    with pytest.raises(TypeError, match="epoch must be a whole number"):
        RandomPartitionLoader(DATA, 4).set_epoch(1.5)


def test_a_training_mask_is_a_tensor():
    with pytest.raises(ValueError, match=r"train_mask must be a bool tensor \[60\]"):
        parts(Data(edge_index=EDGES, num_nodes=60, train_mask=[True] * 60))


@pytest.mark.parametrize("form", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.byte, torch.Tensor.int])
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


def test_clusters_to_find():
    for seed in ("a", 1.5, None):
        for options in ({"num_clusters": 4}, {"method": "label_propagation"}):
            with pytest.raises(TypeError, match="seed must be a whole number"):
                find_clusters(DATA, seed=seed, **options)
    with pytest.raises(ValueError, match="num_clusters must be at most the number of nodes, 60; got 61"):
        find_clusters(DATA, 61)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (Data(), TypeError, "batch_size must be a whole number; got None.*PyG's loaders set it"),
        (Data(batch_size=1), TypeError, "n_id must be"),
        (Data(batch_size=1, n_id=torch.tensor([60])), ValueError, "nodes n_id of the 60 of data"),
        (Data(batch_size=1, n_id=torch.tensor([-1])), ValueError, "nodes n_id of the 60 of data"),
        (Data(batch_size=3, n_id=torch.tensor([1, 2])), ValueError, r"a batch must have batch_size <= n nodes"),
    ],
)
def test_batches_that_are_no_part(batch, error, message):
    with pytest.raises(error, match=message):
        PartOf(DATA).forward(batch)


def test_whole_numbers():
    assert [as_whole(value, "n") for value in (3, np.int64(3), torch.tensor(3))] == [3, 3, 3]
    for value in (3.0, "3", None, True, torch.tensor(3.0), [3]):
        with pytest.raises(TypeError, match=r"n must be a whole number; got .*\. Round it\."):
            as_whole(value, "n", "Round it.")
