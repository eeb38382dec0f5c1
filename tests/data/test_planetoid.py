"""Loading Planetoid from disk: sentences for what is missing, nothing written, known sizes on the real files."""

import pytest
import torch
from torch_geometric.datasets import Planetoid

from diffusion_mp.data import load_planetoid, random_split_per_class


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
