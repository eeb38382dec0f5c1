"""Clusters of nodes: METIS through either library, and label propagation."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData

from diffusion_mp.data import RandomPartitionLoader, find_clusters


def planted(groups: int = 8, size: int = 10) -> Data:
    """Rings of dense groups, in a random numbering, with one edge from each group to the next, in one direction."""
    order = torch.randperm(groups * size, generator=torch.Generator().manual_seed(0))
    inside = torch.cartesian_prod(torch.arange(size), torch.arange(size)).T  # loops as well, which mean nothing here
    edges = torch.cat([inside + size * k for k in range(groups)], 1)
    bridges = torch.stack([torch.arange(groups), torch.arange(groups).roll(-1)]) * size
    data = Data(edge_index=order[torch.cat([edges, bridges], 1)], num_nodes=groups * size)
    data.group = torch.empty(groups * size, dtype=torch.long)
    data.group[order] = torch.arange(groups).repeat_interleave(size)
    return data


def agree(a: Tensor, b: Tensor) -> bool:
    """The same sets of nodes, whatever their numbers."""
    return torch.equal(a[:, None] == a, b[:, None] == b)


def test_label_propagation_finds_planted_groups_and_nothing_global_moves() -> None:
    data, state = planted(), (random.getstate(), torch.get_rng_state())
    clusters = find_clusters(data, method="label_propagation", seed=1)
    assert agree(clusters, data.group)
    assert clusters.unique().tolist() == list(range(8))
    assert torch.equal(find_clusters(data, method="label_propagation", seed=1), clusters)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_metis_finds_planted_groups() -> None:
    pytest.importorskip("pymetis", reason="METIS is an extra: pip install diffusion-mp[metis]")
    data = planted()
    clusters = find_clusters(data, 8)
    assert agree(clusters, data.group)
    assert torch.equal(find_clusters(data, 8), clusters)


def test_batches_of_clusters_keep_more_edges() -> None:
    data = planted()
    clusters = find_clusters(data, method="label_propagation")
    for part in RandomPartitionLoader(data, 4, clusters=clusters):
        assert part.kept_edges > 0.97
    for part in RandomPartitionLoader(data, 4):
        assert part.kept_edges < 0.5


def test_metis_of_pyg_stands_in_for_pymetis(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG's own METIS is replaced by the answer; that it gets both directions, without loops, is looked at."""
    data = planted()

    def metis(self: ClusterData, edge_index: Tensor, num_nodes: int) -> Tensor:
        dense = torch.zeros(num_nodes, num_nodes, dtype=torch.long).index_put_(tuple(edge_index), torch.tensor(1), True)
        assert torch.equal(dense, dense.T)
        assert dense.max() == 1
        assert dense.diagonal().sum() == 0
        assert int(dense.sum()) == 8 * 90 + 16
        return data.group

    monkeypatch.setitem(sys.modules, "pymetis", None)
    monkeypatch.setattr(ClusterData, "_metis", metis)
    assert torch.equal(find_clusters(data, 8), data.group)


def test_without_any_metis_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Tensor:
        raise ImportError("'ClusterData' requires either 'pyg-lib' or 'torch-sparse'")

    monkeypatch.setitem(sys.modules, "pymetis", None)
    monkeypatch.setattr(ClusterData, "_metis", missing)
    with pytest.raises(ImportError, match=r"none of pymetis, pyg-lib and torch-sparse.*diffusion-mp\[metis\]"):
        find_clusters(planted(), 8)


@pytest.mark.usefixtures("no_typecheck")
def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"METIS needs, and label propagation finds; got None"):
        find_clusters(planted())
    with pytest.raises(ValueError, match=r"label propagation finds; got 8 with method='label_propagation'"):
        find_clusters(planted(), 8, "label_propagation")
    with pytest.raises(ValueError, match="num_clusters must be at least 1"):
        find_clusters(planted(), 0)
    with pytest.raises(ValueError, match="method must be one of 'metis', 'label_propagation'; got 'louvain'"):
        find_clusters(planted(), 8, "louvain")  # type: ignore[arg-type]


def test_nodes_without_edges_are_clusters_of_their_own() -> None:
    lonely = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=4)
    assert find_clusters(lonely, method="label_propagation").tolist() == [0, 1, 2, 3]
