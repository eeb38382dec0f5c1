"""Random partitions (even, new, with a training node in every part, uniform) and clusters of nodes."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.data import PartOf, find_clusters
from diffusion_mp.data.partition import Cut, random_partition


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 60), st.data())
def test_parts_are_even_and_each_has_what_it_needs(num_nodes, data):
    num_parts = data.draw(st.integers(1, num_nodes))
    needed = torch.zeros(num_nodes, dtype=torch.bool)
    needed[: data.draw(st.integers(num_parts, num_nodes))] = True
    clusters = torch.tensor(
        data.draw(st.lists(st.integers(0, 9), min_size=num_nodes, max_size=num_nodes))
    )
    for grouped in (None, clusters):
        part = random_partition(num_nodes, num_parts, drawn(num_nodes), grouped, needed)
        sizes = torch.bincount(part, minlength=num_parts)
        assert len(sizes) == num_parts
        assert int(sizes.max() - sizes.min()) <= 1
        assert (torch.bincount(part[needed], minlength=num_parts) > 0).all()


@pytest.mark.parametrize(
    ("num_parts", "dtype"),
    [(256, torch.uint8), (257, torch.int16), (32_769, torch.int32)],
)
def test_part_ids_are_as_small_as_they_can_be(num_parts, dtype):
    part = random_partition(32_770, num_parts, drawn())
    assert part.dtype == dtype
    assert int(part.max()) == num_parts - 1


@pytest.mark.parametrize("needs", [False, True])
def test_the_distribution_is_uniform_where_no_part_lacks_a_training_node(
    needs,
):
    """Pairs share a part with probability (n/p - 1)/(n - 1), training pairs and others alike: 20 nodes, 4 parts.

    Nodes 0..16 train: no part of five nodes can be without one, so that nothing is ever exchanged.
    """
    needed = torch.arange(20) < 17 if needs else None
    generator = drawn()
    draws = 4000
    parts = torch.stack(
        [random_partition(20, 4, generator, None, needed) for _ in range(draws)]
    )
    assert (
        (torch.stack([parts == k for k in range(4)]).float().mean(1) - 0.25).abs()
        < 0.03
    ).all()
    together = (
        (parts[:, :, None] == parts[:, None, :])
        .float()
        .mean(0)[~torch.eye(20, dtype=torch.bool)]
    )
    assert ((together - 4 / 19).abs() < 0.03).all()  # 4.6 standard deviations


def test_clusters_stay_together_but_at_the_cuts():
    """Of ten clusters of six nodes, in parts of 20, at most two are cut; which ones lie together changes."""
    clusters = torch.arange(60).remainder(10)
    generator = drawn()
    seen = set()
    for _ in range(20):
        part = random_partition(60, 3, generator, clusters)
        whole = [len(part[clusters == c].unique()) == 1 for c in range(10)]
        assert sum(whole) >= 8
        seen.add(tuple(part[clusters == c].mode().values.item() for c in range(10)))
    assert len(seen) > 15


def dense(edge_index: Tensor, part: Tensor, k: int, halo: bool) -> Tensor:
    """Numbers of the edges of part k, by definition."""
    source, target = edge_index
    arrives = part[target] == k
    leaves = part[source] == k
    if not halo:
        return (arrives & leaves).nonzero().flatten()
    kept = arrives | leaves
    nodes = edge_index[:, kept].flatten()
    return (kept | (source == target) & torch.isin(source, nodes)).nonzero().flatten()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("halo", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_cut_has_the_edges_of_the_definition_in_chunks_of_any_size(
    halo, chunk, monkeypatch
):
    monkeypatch.setattr("diffusion_mp.data.partition.CHUNK", chunk)
    edge_index = torch.randint(0, 30, (2, 200), generator=drawn())
    part = random_partition(30, 4, drawn(1))
    cut = Cut(edge_index, part, 4, halo=halo)
    for k in range(4):
        n_id, own, e_id, local = cut[k]
        assert torch.equal(n_id[:own], (part == k).nonzero().flatten())
        assert torch.equal(e_id, dense(edge_index, part, k, halo))
        assert torch.equal(n_id[local], edge_index[:, e_id])
        assert torch.equal(n_id.unique(), n_id.sort().values)  # no node twice
        context = edge_index[:, e_id].unique()
        assert torch.equal(n_id[own:], context[part[context] != k])


def test_a_batch_of_no_node_of_its_own_keeps_no_edge():
    whole = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    batch = Data(
        n_id=torch.tensor([2, 1]), edge_index=torch.tensor([[1], [0]]), batch_size=0
    )
    assert PartOf(whole)(batch).kept_edges == 1.0


def test_nothing_to_cut():
    cut = Cut(torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 1, 1]), 2)
    for n_id, own, e_id, local in (cut[0], cut[1]):
        assert len(n_id) == own
        assert e_id.shape == (0,)
        assert local.shape == (2, 0)
        assert local.dtype == e_id.dtype == torch.long
    lonely = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=4)
    assert find_clusters(lonely, method="label_propagation").tolist() == [0, 1, 2, 3]


def planted(groups: int = 8, size: int = 10) -> Data:
    """Rings of dense groups, in a random numbering, with one edge from each group to the next, in one direction."""
    order = torch.randperm(groups * size, generator=torch.Generator().manual_seed(0))
    # Loops as well, which mean nothing here.
    inside = torch.cartesian_prod(torch.arange(size), torch.arange(size)).T
    edges = torch.cat([inside + size * k for k in range(groups)], 1)
    bridges = torch.stack([torch.arange(groups), torch.arange(groups).roll(-1)]) * size
    data = Data(
        edge_index=order[torch.cat([edges, bridges], 1)], num_nodes=groups * size
    )
    data.group = torch.empty(groups * size, dtype=torch.long)
    data.group[order] = torch.arange(groups).repeat_interleave(size)
    return data


@pytest.mark.parametrize(
    "options",
    [{"num_clusters": 8}, {"method": "label_propagation", "seed": 1}],
    ids=str,
)
def test_planted_groups_are_found_and_nothing_global_moves(
    options,
):
    if "method" not in options:
        pytest.importorskip(
            "pymetis", reason="METIS is an extra: pip install diffusion-mp[metis]"
        )
    data = planted()
    state = (random.getstate(), torch.get_rng_state())
    clusters = find_clusters(data, **options)
    assert torch.equal(clusters[:, None] == clusters, data.group[:, None] == data.group)
    assert clusters.unique().tolist() == list(range(8))
    assert torch.equal(find_clusters(data, **options), clusters)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
