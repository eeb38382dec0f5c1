"""Loading Planetoid from disk: sentences for what is missing, nothing written, known sizes on the real files."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import Payload, check_data
from hostile_binary import FEATURES, KNOWN, TESTED, TRAIN, make_planetoid
from torch_geometric.datasets import Planetoid
from torch_geometric.io import read_planetoid_data

from diffusion_mp.data import random_split_per_class
from diffusion_mp_experiments.graphs import load_planetoid


def test_missing_root_says_what_where_and_how(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_planetoid(tmp_path / "nowhere", "cora")
    message = str(caught.value)
    for part in ("ind.cora.x", "ind.cora.test.index", str(tmp_path / "nowhere" / "Cora" / "raw"), "download=True"):
        assert part in message


def test_only_the_missing_files_are_named(tmp_path):
    raw = tmp_path / "CiteSeer" / "raw"
    raw.mkdir(parents=True)
    (raw / "ind.citeseer.x").touch()
    with pytest.raises(FileNotFoundError, match=r"missing ind\.citeseer\.tx, "):
        load_planetoid(tmp_path, "CiteSeer")


def test_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="Cora, CiteSeer, PubMed, got 'Pokec'"):
        load_planetoid(tmp_path, "Pokec")


def test_download_calls_pyg_and_explains_its_failure(tmp_path, monkeypatch):
    asked = []

    def fail(self, root, name):
        asked.append((root, name))
        raise OSError("no route to host")

    monkeypatch.setattr(Planetoid, "__init__", fail)
    with pytest.raises(ConnectionError, match=r"could not download Cora .* no route to host.*put them under"):
        load_planetoid(tmp_path, "Cora", download=True)
    assert asked == [(str(tmp_path), "Cora")]


def test_download_that_brings_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Planetoid, "__init__", lambda self, root, name: None)
    with pytest.raises(FileNotFoundError, match=r"missing ind\.cora\.x"):
        load_planetoid(tmp_path, "Cora", download=True)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes"),
    [("Cora", 2708, 10556, 1433, 7), ("CiteSeer", 3327, 9104, 3703, 6)],
)
def test_known_sizes_and_nothing_written(data_root, name, nodes, edges, features, classes):
    folder = data_root / "Planetoid" / name
    before = sorted(folder.rglob("*"))
    data = load_planetoid(data_root / "Planetoid", name)
    assert (data.num_nodes, data.num_edges, data.num_features) == (nodes, edges, features)
    assert int(data.y.max()) + 1 == classes
    assert int(data.train_mask.sum()) == 20 * classes
    assert (int(data.val_mask.sum()), int(data.test_mask.sum())) == (500, 1000)
    rows = data.x.sum(dim=1)
    assert torch.allclose(rows[rows > 0], torch.ones(()))
    assert sorted(folder.rglob("*")) == before


@pytest.mark.data
def test_citeseer_placeholders_have_no_label(data_root):
    data = load_planetoid(data_root / "Planetoid", "CiteSeer", normalize_features=False)
    unlabelled = data.y < 0
    assert int(unlabelled.sum()) == 15
    assert data.x[unlabelled].abs().sum() == 0
    assert not (unlabelled & (data.train_mask | data.val_mask | data.test_mask)).any()
    split = random_split_per_class(data.y, 20, 500, None, torch.Generator().manual_seed(0))
    assert not (unlabelled & (split.train | split.val | split.test)).any()
    assert int((load_planetoid(data_root / "Planetoid", "Cora").y < 0).sum()) == 0


@pytest.mark.data
@pytest.mark.parametrize("name", ["Cora", "CiteSeer"])
def test_the_graph_is_that_of_pyg(data_root, name):
    """Bit by bit, but for the labels of the numbers without a paper."""
    ours = load_planetoid(data_root / "Planetoid", name, normalize_features=False)
    theirs = read_planetoid_data(str(data_root / "Planetoid" / name / "raw"), name)
    assert ours.keys() == theirs.keys()
    theirs.y[ours.y < 0] = -1
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype
        assert torch.equal(ours[key], value)


@pytest.fixture
def raw(tmp_path) -> Path:
    """The files of a small data set with one number that no paper has, in the test range."""
    return make_planetoid(tmp_path)[0].parent


def test_old_and_new_pickles(raw, tmp_path):
    data = load_planetoid(tmp_path, "Cora", normalize_features=False)
    check_data(data)
    assert data.x.shape == (KNOWN + TESTED + 1, FEATURES)
    assert data.y[KNOWN + 4] == -1
    assert int((data.y < 0).sum()) == 1
    assert (int(data.train_mask.sum()), int(data.val_mask.sum()), int(data.test_mask.sum())) == (TRAIN, 500, TESTED)
    tested = [int(line) for line in (raw / "ind.cora.test.index").read_text().split()]
    with (raw / "ind.cora.ty").open("rb") as file:  # this test wrote it
        assert data.y[tested].tolist() == pickle.load(file).argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "cut", [lambda lines: lines[:-1], lambda lines: lines[:4], lambda lines: [*lines[:-1], lines[0]]]
)
def test_a_shorter_test_index_is_refused(raw, tmp_path, cut):
    """With fewer lines PyG makes another graph of the same files, and says nothing."""
    path = raw / "ind.cora.test.index"
    path.write_text("\n".join(cut(path.read_text().split())))
    with pytest.raises(
        ValueError, match=r"ind\.cora\.test\.index: it (has the shape|must hold different).*Fetch the eight"
    ):
        load_planetoid(tmp_path, "Cora")


@pytest.mark.parametrize("line", ["-1", "10000", "507.5", "x", "9" * 30])
def test_other_lines_in_the_test_index_are_refused(raw, tmp_path, line):
    path = raw / "ind.cora.test.index"
    path.write_text("\n".join([*path.read_text().split()[1:], line]))
    with pytest.raises(ValueError, match=r"ind\.cora\.test\.index: "):
        load_planetoid(tmp_path, "Cora")


@pytest.mark.parametrize("part", ["x", "y", "tx", "ty", "allx", "ally"])
def test_files_of_other_lengths_are_refused(raw, tmp_path, part):
    with (raw / f"ind.cora.{part}").open("rb") as file:
        content = pickle.load(file)
    (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(content[:-1]))
    with pytest.raises(ValueError, match=r"ind\.cora\.\S+: it (has the shape|must hold different)"):
        load_planetoid(tmp_path, "Cora")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph.pop(3), "neighbours of every number from 0 to 514"),
        (lambda graph: graph[3].append(516), "the neighbours must lie in 0..515, got up to 516"),
        (lambda graph: graph[3].append(-1), "got up to 5[01][0-9] and down to -1"),
        (lambda graph: graph[3].append("x"), "where integers belong"),
        (lambda graph: graph[3].append(2**70), "OverflowError"),
    ],
)
def test_other_graphs_are_refused(raw, tmp_path, change, message):
    with (raw / "ind.cora.graph").open("rb") as file:
        graph = pickle.load(file)
    change(graph)
    (raw / "ind.cora.graph").write_bytes(pickle.dumps(graph))
    with pytest.raises(ValueError, match=rf"ind\.cora\.graph: .*{message}"):
        load_planetoid(tmp_path, "Cora")


def test_a_forbidden_name_is_named_and_not_run(raw, tmp_path):
    marker = tmp_path / "marker"
    (raw / "ind.cora.tx").write_bytes(pickle.dumps([np.ones(2), Payload(marker)]))
    with pytest.raises(ValueError, match=r"ind\.cora\.tx: it asks for posix\.system, which is no array\. Fetch"):
        load_planetoid(tmp_path, "Cora")
    assert not marker.exists()


def test_what_was_downloaded_is_not_run_either(tmp_path, monkeypatch):
    """PyG would unpickle the files at once, and those that lie in its folder `processed`."""
    harm, raw = Payload(tmp_path / "marker"), tmp_path / "Cora" / "raw"
    processed = raw.parent / "processed"
    processed.mkdir(parents=True)
    for name in ("data.pt", "pre_transform.pt", "pre_filter.pt"):
        torch.save(harm, processed / name)

    def download(self):
        assert self.raw_dir == str(raw)
        for file in self.raw_file_names:
            (raw / file).write_bytes(pickle.dumps(harm))

    monkeypatch.setattr(Planetoid, "download", download)
    with pytest.raises(ValueError, match=r"ind\.cora\.x: it asks for posix\.system"):
        load_planetoid(tmp_path, "Cora", download=True)
    assert not (tmp_path / "marker").exists()


def test_a_download_of_good_files(tmp_path, monkeypatch):
    monkeypatch.setattr(Planetoid, "download", lambda self: make_planetoid(tmp_path / "new"))
    (tmp_path / "new").mkdir()
    with pytest.raises(FileNotFoundError, match=r"missing ind\.cora\.x"):
        load_planetoid(tmp_path, "Cora", download=True)
    assert load_planetoid(tmp_path / "new", "Cora", download=True).num_nodes == KNOWN + TESTED + 1
