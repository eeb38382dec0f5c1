"""PATTERN and CLUSTER: published densities and sizes, fixed patterns, seeds, the cache, one pinned graph."""

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import AddRandomWalkPE, Compose
from torch_geometric.utils import subgraph

from diffusion_mp.data import AddLaplacianPE
from diffusion_mp_experiments.graphs import SBMDataset
from diffusion_mp_experiments.graphs.drawn import (
    cluster_graph,
    draw_pattern,
    pattern_graph,
)

# Arrays of the right shapes that no graphs have.
DAMAGES = [
    ("edge_index", lambda array: array * 1000, "the number of its graph's nodes"),
    ("edge_index", lambda array: array - 1, "down to -1"),
    ("x.slices", lambda array: array + 1, "that ascend from 0"),
    ("y.slices", lambda array: array * 2, "y is divided into graphs at"),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digest(data: Data) -> str:
    parts = (data.x.argmax(dim=1), data.edge_index, data.y)
    return hashlib.sha256(
        b"".join(part.numpy().tobytes() for part in parts)
    ).hexdigest()[:16]


def cluster(root, split="train", num_graphs=2, **options) -> SBMDataset:
    return SBMDataset(root, "CLUSTER", split, num_graphs=num_graphs, **options)


def density(graphs: list[Data], chosen) -> float:
    """Edges over pairs of different nodes (i, j) for which chosen(y_i, y_j) is true, over all graphs."""
    edges = pairs = 0
    for data in graphs:
        edges += int(chosen(*data.y[data.edge_index]).sum())
        pairs += int(chosen(data.y[:, None], data.y).fill_diagonal_(False).sum())
    return edges / pairs


def mean(graphs: list[Data], size: str) -> float:
    return sum(getattr(data, size) for data in graphs) / len(graphs)


def test_cluster_has_the_published_densities_and_sizes_and_shows_a_node_of_each_community():
    generator = seeded()
    graphs = [cluster_graph(generator) for _ in range(300)]
    assert density(graphs, torch.eq) == pytest.approx(0.55, abs=0.005)
    assert density(graphs, torch.ne) == pytest.approx(0.25, abs=0.003)
    sizes = torch.stack([torch.bincount(g.y, minlength=6) for g in graphs])
    assert (int(sizes.min()), int(sizes.max())) == (5, 34)
    # SFi-Former, Table 4: 117.2 nodes and 2 150.9 edges, each counted once; two standard errors of 300 graphs are 2 %.
    assert mean(graphs, "num_nodes") == pytest.approx(117.2, rel=0.03)
    assert mean(graphs, "num_edges") == pytest.approx(2 * 2150.9, rel=0.06)
    shown = []
    for seed in range(20):
        data = cluster_graph(seeded(seed))
        number = data.x.argmax(dim=1)
        assert torch.equal(data.x.sum(dim=1), torch.ones(data.num_nodes))
        nodes = number.nonzero().flatten()
        assert sorted(number[nodes].tolist()) == [1, 2, 3, 4, 5, 6]
        assert torch.equal(data.y[nodes], number[nodes] - 1)
        shown.append(nodes / data.num_nodes)
    # In random order, not the first of a block.
    assert torch.cat(shown).mean() == pytest.approx(0.5, abs=0.1)


def test_pattern_has_the_published_densities_and_sizes():
    generator = seeded()
    pattern = draw_pattern(generator)
    graphs = [pattern_graph(pattern, generator) for _ in range(300)]
    assert density(graphs, torch.ne) == pytest.approx(0.5, abs=0.005)
    assert {int(g.y.sum()) for g in graphs} == {20}
    # Five sizes uniform on 5..34 (mean 19.5, variance 899/12): the pairs within and between communities.
    within = 5 * (19.5**2 + 899 / 12 - 19.5)
    between = 5 * 4 * 19.5**2
    expected = (0.5 * within + 0.35 * between) / (within + between)
    background = density(graphs, lambda one, other: one + other == 0)
    assert background == pytest.approx(expected, abs=0.004)
    letters = torch.cat([g.x[g.y == 0] for g in graphs]).mean(dim=0)
    assert letters.tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    # SFi-Former, Table 4: 118.9 nodes and 3 039.3 edges, each counted once.
    assert mean(graphs, "num_nodes") == pytest.approx(118.9, rel=0.03)
    assert mean(graphs, "num_edges") == pytest.approx(2 * 3039.3, rel=0.06)
    generator = seeded()
    pairs, letters = zip(*(draw_pattern(generator) for _ in range(100)), strict=True)
    share = torch.cat(pairs, 1).size(1) / (100 * 190)
    assert share == pytest.approx(0.5, abs=0.015)
    counts = torch.cat(letters).bincount().tolist()
    assert counts == pytest.approx([2000 / 3] * 3, rel=0.1)
    sizes = {len(draw_pattern(generator, sizes=(5, 8)).letters) for _ in range(60)}
    assert sizes == {5, 6, 7, 8}


def planted(data: Data) -> tuple[list[int], list[tuple[int, int]]]:
    """What does not depend on the order of the pattern's nodes: its degrees, and letters with degrees."""
    edges, _ = subgraph(data.y == 1, data.edge_index, num_nodes=data.num_nodes)
    degree = torch.bincount(edges[0], minlength=data.num_nodes)[data.y == 1].tolist()
    letter = data.x[data.y == 1].argmax(dim=1).tolist()
    return sorted(degree), sorted(zip(letter, degree, strict=True))


def test_every_hundredth_graph_of_any_split_carries_one_pattern(tmp_path):
    train = SBMDataset(tmp_path, "PATTERN", num_graphs=103)
    test = SBMDataset(tmp_path, "PATTERN", "test", num_graphs=3)
    for i in range(3):
        assert planted(train[i]) == planted(train[100 + i]) == planted(test[i])
        assert digest(train[i]) != digest(train[100 + i])
    assert len({str(planted(train[i])) for i in range(100)}) == 100
    spread = SBMDataset(tmp_path, "PATTERN", num_graphs=100, pattern_sizes=(5, 34))
    sizes = {int(data.y.sum()) for data in spread}
    assert sizes <= set(range(5, 35))
    assert len(sizes) > 20


@pytest.mark.parametrize(
    ("name", "letters", "classes"), [("PATTERN", 3, 2), ("CLUSTER", 7, 6)]
)
def test_graphs_are_simple_and_undirected(tmp_path, name, letters, classes):
    dataset = SBMDataset(tmp_path, name, num_graphs=5)
    assert len(dataset) == 5
    assert (dataset.num_features, dataset.num_classes) == (letters, classes)
    for data in dataset:
        assert data.is_undirected()
        assert data.is_coalesced()
        assert not data.has_self_loops()
        assert data.x.dtype == torch.float32
        assert data.y.dtype == torch.int64
        assert data.validate()


def test_prefixes_seeds_splits_and_the_global_generator(tmp_path):
    before = torch.get_rng_state()
    ten, three = (cluster(tmp_path, num_graphs=n) for n in (10, 3))
    assert list(map(digest, ten))[:3] == list(map(digest, three))
    assert torch.equal(before, torch.get_rng_state())
    test = cluster(tmp_path, "test")
    others = (cluster(tmp_path, seed=1), cluster(tmp_path, "val"), test)
    assert len({digest(dataset[0]) for dataset in (ten, *others)}) == 4
    assert digest(test[0]) == "76d9a1e2d0113885"
    pattern = SBMDataset(tmp_path, "PATTERN", "test", num_graphs=1)
    assert digest(pattern[0]) == "5545658008f562d5"


def test_a_run_that_dies_leaves_nothing_and_the_cache_is_made_once(
    tmp_path, monkeypatch
):
    def die(data: Data) -> Data:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster(tmp_path, pre_transform=die)
    assert len(cluster(tmp_path)) == 2
    first = cluster(tmp_path)
    monkeypatch.setattr(SBMDataset, "make", lambda self: pytest.fail("made again"))
    again = cluster(tmp_path)
    assert list(map(digest, first)) == list(map(digest, again))


def test_a_cache_with_another_number_is_made_anew(tmp_path):
    dataset = cluster(tmp_path)
    expected = list(map(digest, dataset))
    path = Path(dataset.processed_dir, "x.npy")
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match="other numbers than were written.*made anew"):
        again = cluster(tmp_path)
    assert list(map(digest, again)) == expected


@pytest.mark.parametrize(("name", "change", "message"), DAMAGES)
def test_a_cache_of_numbers_of_no_graphs_is_refused(tmp_path, name, change, message):
    path = Path(cluster(tmp_path).processed_dir, f"{name}.npy")
    array = change(np.load(path))
    np.save(path, array)
    # As if they had been written so.
    record = path.with_name("sources.json")
    content = json.loads(record.read_text())
    content["crc32"][name] = zlib.crc32(array.tobytes())
    record.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{message}.*Delete the folder"):
        cluster(tmp_path)


def test_encodings_are_saved_and_batched(tmp_path):
    encode = Compose([AddLaplacianPE(4), AddRandomWalkPE(6)])
    dataset = cluster(tmp_path, num_graphs=3, pre_transform=encode)
    batch = next(iter(DataLoader(dataset, batch_size=3)))
    assert batch.laplacian_eigenvectors.shape == (batch.num_nodes, 4)
    assert batch.random_walk_pe.shape == (batch.num_nodes, 6)
    # Another transform makes them anew; one graph is divided like several.
    (again,) = cluster(tmp_path, num_graphs=1, pre_transform=AddLaplacianPE(5))
    assert again.laplacian_mask.shape == (again.num_nodes, 5)
    (again,) = cluster(tmp_path, num_graphs=1)
    assert "laplacian_mask" not in again
    with pytest.raises(TypeError, match="name of the graphs must be a tensor"):
        cluster(tmp_path, pre_transform=lambda data: data.update({"name": "one"}))
