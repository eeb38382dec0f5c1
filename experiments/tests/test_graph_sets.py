"""TU sets, SynMol and PyG Temporal's sets from files: small ones, damaged ones, and the real ones."""

from itertools import pairwise

import pytest
import torch
from torch_geometric.datasets import TUDataset

from diffusion_mp_experiments.graphs import (
    fit_forecast,
    load_snapshots,
    load_synmol,
    load_tu,
)
from hostile import check_data
from small_sets import make_chickenpox, make_covid, make_series, make_synmol, make_tu


def test_small_tu(tmp_path):
    make_tu(tmp_path)
    graphs = load_tu(tmp_path, "SMALL")
    assert [graph.num_nodes for graph in graphs] == [3, 1, 2]
    assert torch.cat([graph.y for graph in graphs]).tolist() == [1, 0, 1]
    assert graphs[0].x.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert graphs[2].edge_index.tolist() == [[0, 1], [1, 0]]
    for graph in graphs:
        check_data(graph)
    make_tu(tmp_path)[3].unlink()
    with pytest.raises(
        ValueError, match="its nodes have neither labels nor attributes"
    ):
        load_tu(tmp_path, "SMALL")
    make_tu(tmp_path, A="1, 2\n2, 1\n2, 3\n3, 2\n", edge_labels="0\n0\n1\n1\n")
    sizes = [
        (graph.num_nodes, graph.num_edges, len(graph.edge_attr))
        for graph in load_tu(tmp_path, "SMALL")
    ]
    assert sizes == [(3, 4, 4), (1, 0, 0), (2, 0, 0)]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "channels"), [("MUTAG", 188, 7), ("PROTEINS", 1113, 4)]
)
def test_tu_is_that_of_pyg_and_nothing_is_written(
    data_root, tmp_path, name, count, channels
):
    (tmp_path / name).mkdir()
    (tmp_path / name / "raw").symlink_to(
        (data_root / "TUDataset" / name / "raw").resolve()
    )
    expected = TUDataset(str(tmp_path), name, use_node_attr=True)
    before = sorted((data_root / "TUDataset").rglob("*"))
    graphs = load_tu(data_root / "TUDataset", name)
    assert sorted((data_root / "TUDataset").rglob("*")) == before
    assert (len(graphs), graphs[0].num_features) == (count, channels)
    for graph, same in zip(graphs, expected, strict=True):
        for key in ("x", "edge_index", "y"):
            assert torch.equal(graph[key], same[key])


def test_small_synmol(tmp_path):
    make_synmol(tmp_path)
    train = load_synmol(tmp_path, "train")
    test = load_synmol(tmp_path, "test")
    assert [graph.num_nodes for graph in train + test] == [1, 2, 3]
    assert test[0].x.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert test[0].edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert test[0].edge_attr.argmax(1).tolist() == [2, 3, 4, 0]
    assert test[0].node_label.tolist() == [0, 0, 1]
    for graph in train + test:
        check_data(graph)


def test_small_chickenpox_and_covid(tmp_path):
    make_chickenpox(tmp_path)
    series = torch.tensor(make_series())
    snapshots = load_snapshots(tmp_path, "chickenpox")
    assert len(snapshots) == 8
    for now, snapshot in enumerate(snapshots, 4):
        check_data(snapshot)
        assert torch.equal(snapshot.y, series[now])
        assert torch.equal(
            snapshot.x, torch.stack([series[now - lag] for lag in (4, 3, 2, 1)], 1)
        )
    # Both ways, whether or not the file has both.
    assert snapshots[0].edge_index.tolist() == [[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]]
    assert snapshots[0].edge_weight.tolist() == [1.0] * 5
    make_covid(tmp_path)
    series = torch.tensor(make_series())
    series = (series - series.mean(0)) / series.std(0, correction=0)
    snapshots = load_snapshots(tmp_path, "england_covid", lags=2)
    assert len(snapshots) == 10
    torch.testing.assert_close(snapshots[3].y, series[5])
    torch.testing.assert_close(snapshots[3].x[:, 1], series[4])
    pair = (snapshots[3].edge_index == torch.tensor([[0], [1]])).all(0)
    # The mean of 4, on day 4, and 3.
    assert snapshots[3].edge_weight[pair] == 3.5


@pytest.mark.data
def test_real_sets_have_their_known_sizes(data_root):
    train = load_synmol(data_root / "SynMol", "train")
    test = load_synmol(data_root / "SynMol", "test")
    assert (len(train), len(test)) == (7753, 918)
    assert sum(graph.num_nodes for graph in train + test) == 185_198
    assert all(graph.is_undirected() for graph in test[:50])
    for name, times, nodes in (("chickenpox", 517, 20), ("england_covid", 53, 129)):
        snapshots = load_snapshots(data_root / "spatial_temporal", name)
        assert (len(snapshots), snapshots[0].num_nodes) == (times, nodes)
        assert all(snapshot.is_undirected() for snapshot in snapshots[:3])
        assert all(torch.equal(a.x[:, 1:], b.x[:, :-1]) for a, b in pairwise(snapshots))
    snapshots = load_snapshots(data_root / "spatial_temporal", "chickenpox")
    forecast = fit_forecast("ridge", snapshots[: len(snapshots) // 5])
    tested = snapshots[int(0.4 * len(snapshots)) :]
    error = torch.stack([(forecast(s.x) - s.y).square().mean() for s in tested]).mean()
    assert float(error) == pytest.approx(0.645, abs=0.001)


def test_forecasts_are_what_they_say(tmp_path):
    make_chickenpox(tmp_path, FX=make_series(60))
    snapshots = load_snapshots(tmp_path, "chickenpox")
    past = snapshots[:30]
    now = snapshots[40]
    expected = {
        "zero": torch.zeros(3),
        "last": now.x[:, 3],
        "mean": now.x.mean(1),
        "own": torch.stack([s.y for s in past]).mean(0),
        "pooled": now.x.mean(1) + (now.x[:, 3] - now.x.mean(1)).mean(),
    }
    for name, forecast in expected.items():
        torch.testing.assert_close(fit_forecast(name, past)(now.x), forecast)
    for snapshot in snapshots:
        snapshot.y = snapshot.x @ torch.tensor([0.1, -0.3, 0.2, 0.5]) + 0.7
    forecast = fit_forecast("ridge", snapshots[:20])
    torch.testing.assert_close(
        forecast(snapshots[-1].x), snapshots[-1].y, rtol=0, atol=1e-2
    )
