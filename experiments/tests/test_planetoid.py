"""Loading Planetoid from disk: sentences for what is missing, nothing written, known sizes on the real files."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.datasets import Planetoid
from torch_geometric.io import read_planetoid_data

from diffusion_mp.data import random_split_per_class
from diffusion_mp_experiments.graphs import load_planetoid
from helpers import Payload
from hostile import check_data
from small_sets import FEATURES, KNOWN, TESTED, TRAIN, make_planetoid

OTHER_INDICES = [
    lambda lines: lines[
        :-1
    ],  # PyG makes another graph of fewer lines, and says nothing
    lambda lines: lines[:4],
    lambda lines: [*lines[:-1], lines[0]],
    *(
        lambda lines, line=line: [*lines[1:], line]
        for line in ("-1", "10000", "507.5", "x", "9" * 30)
    ),
]
OTHER_CONTENT = [
    *(
        (
            part,
            lambda content: content[:-1],
            r"\S+: it (has the shape|must hold different)",
        )
        for part in ("x", "y", "tx", "ty", "allx", "ally")
    ),
    (
        "x",
        lambda matrix: matrix.toarray(),
        r"x: it must hold a CSR matrix, not a ndarray of shape \(6, 4\)",
    ),
    ("ally", lambda labels: labels[:, 0], "ally: it must hold an array"),
    ("ty", lambda labels: labels[:, :0], "ty: it must hold an array"),
    ("y", lambda labels: np.ones((50, 3), np.int32), r"x: it has the shape \(6, 4\)"),
    ("graph", list, "graph: it must hold a dictionary, not a list"),
    (
        "graph",
        lambda graph: graph | {600: [1]},
        "graph: .*neighbours of every number from 0 to 516",
    ),
    (
        "graph",
        lambda graph: graph | {3: [516]},
        "graph: the neighbours must lie in 0..515, got up to 516",
    ),
    (
        "graph",
        lambda graph: graph | {3: [-1]},
        "graph: .*got up to 5[01][0-9] and down to -1",
    ),
    ("graph", lambda graph: graph | {3: ["x"]}, "graph: .*where integers belong"),
    ("graph", lambda graph: graph | {3: [2**70]}, "graph: OverflowError"),
    (
        "tx",
        lambda content: [np.ones(2), Payload(Path("marker"))],
        r"tx: it asks for posix\.system, which is no",
    ),
]


def test_missing_files_are_named_and_pyg_may_download_them(tmp_path, monkeypatch):
    said = r"nowhere/Cora/raw: missing ind\.cora\.x, .*ind\.cora\.test\.index\. .*download=True"
    with pytest.raises(FileNotFoundError, match=said):
        load_planetoid(tmp_path / "nowhere", "cora")
    raw = tmp_path / "CiteSeer" / "raw"
    raw.mkdir(parents=True)
    (raw / "ind.citeseer.x").touch()
    with pytest.raises(FileNotFoundError, match=r"missing ind\.citeseer\.tx, "):
        load_planetoid(tmp_path, "CiteSeer")
    asked = []

    def fail(self, root, name):
        asked.append((root, name))
        raise OSError("no route to host")

    monkeypatch.setattr(Planetoid, "__init__", fail)
    with pytest.raises(
        ConnectionError,
        match=r"could not download Cora .* no route to host.*put them under",
    ):
        load_planetoid(tmp_path, "Cora", download=True)
    assert asked == [(str(tmp_path), "Cora")]
    monkeypatch.setattr(Planetoid, "__init__", lambda self, root, name: None)
    with pytest.raises(FileNotFoundError, match=r"missing ind\.cora\.x"):
        load_planetoid(tmp_path, "Cora", download=True)


def test_what_was_downloaded_is_not_run(tmp_path, monkeypatch):
    """PyG would unpickle the files at once, and those that lie in its folder `processed`."""
    harm = Payload(tmp_path / "marker")
    raw = tmp_path / "Cora" / "raw"
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


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "sizes", "classes", "unlabelled"),
    [("Cora", (2708, 10556, 1433), 7, 0), ("CiteSeer", (3327, 9104, 3703), 6, 15)],
)
def test_the_graph_is_that_of_pyg_and_nothing_is_written(
    data_root, name, sizes, classes, unlabelled
):
    """Bit by bit, but for the labels of the numbers without a paper."""
    folder = data_root / "Planetoid" / name
    before = sorted(folder.rglob("*"))
    data = load_planetoid(data_root / "Planetoid", name, normalize_features=False)
    assert (data.num_nodes, data.num_edges, data.num_features) == sizes
    assert int(data.train_mask.sum()) == 20 * classes
    assert (int(data.val_mask.sum()), int(data.test_mask.sum())) == (500, 1000)
    theirs = read_planetoid_data(str(folder / "raw"), name)
    assert data.keys() == theirs.keys()
    nobody = data.y < 0
    theirs.y[nobody] = -1
    for key, value in theirs.items():
        assert data[key].dtype == value.dtype
        assert torch.equal(data[key], value)
    assert int(nobody.sum()) == unlabelled
    assert data.x[nobody].abs().sum() == 0
    split = random_split_per_class(
        data.y, 20, 500, None, torch.Generator().manual_seed(0)
    )
    for mask in (data.train_mask, data.val_mask, data.test_mask, *split):
        assert not (nobody & mask).any()
    rows = load_planetoid(data_root / "Planetoid", name).x.sum(dim=1)
    assert torch.allclose(rows[rows > 0], torch.ones(()))
    assert sorted(folder.rglob("*")) == before


@pytest.fixture
def raw(tmp_path) -> Path:
    """The files of a small data set with one number that no paper has, in the test range."""
    return make_planetoid(tmp_path)[0].parent


def test_old_and_new_pickles_and_too_few_papers(raw, tmp_path):
    data = load_planetoid(tmp_path, "Cora", normalize_features=False)
    check_data(data)
    assert data.x.shape == (KNOWN + TESTED + 1, FEATURES)
    assert (data.y < 0).nonzero().tolist() == [[KNOWN + 4]]
    masks = (data.train_mask, data.val_mask, data.test_mask)
    assert [int(mask.sum()) for mask in masks] == [TRAIN, 500, TESTED]
    tested = [int(line) for line in (raw / "ind.cora.test.index").read_text().split()]
    labels = pickle.loads((raw / "ind.cora.ty").read_bytes())  # this test wrote it
    assert data.y[tested].tolist() == labels.argmax(axis=1).tolist()
    for part in ("x", "y"):
        rows = pickle.loads((raw / f"ind.cora.all{part}").read_bytes())[:7]
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(rows))
    with pytest.raises(
        ValueError,
        match="y: 7 papers to train with and 500 to validate with exceed the 506 of allx",
    ):
        load_planetoid(tmp_path, "Cora")


@pytest.mark.parametrize("change", OTHER_INDICES)
def test_other_test_indices_are_refused(raw, tmp_path, change):
    path = raw / "ind.cora.test.index"
    path.write_text("\n".join(change(path.read_text().split())))
    with pytest.raises(ValueError, match=r"ind\.cora\.test\.index: .*Fetch the eight"):
        load_planetoid(tmp_path, "Cora")


@pytest.mark.parametrize(("part", "change", "message"), OTHER_CONTENT)
def test_other_content_is_refused(raw, tmp_path, part, change, message):
    path = raw / f"ind.cora.{part}"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    with pytest.raises(ValueError, match=rf"ind\.cora\.{message}"):
        load_planetoid(tmp_path, "Cora")
    assert not Path("marker").exists()
