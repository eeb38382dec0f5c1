"""OGB's archives, in small."""

import gzip

import numpy as np
import pytest
import torch

from diffusion_mp_experiments.graphs import load_ogb


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(",".join(map(str, row)) + "\n" for row in rows).encode()))


def splits(folder, names=("train", "valid", "test")):
    for node, name in enumerate(names):
        write(folder / f"{name}.csv.gz", [[node]])


@pytest.fixture
def arxiv(tmp_path):
    raw = tmp_path / "ogbn_arxiv" / "raw"
    x = np.arange(4 * 128).reshape(4, 128) / 8
    write(raw / "edge.csv.gz", [[0, 1], [3, 1], [2, 0]])
    write(raw / "node-feat.csv.gz", x.tolist())
    write(raw / "node-label.csv.gz", [[4], [39], [0], [4]])
    write(raw / "node_year.csv.gz", [[2013], [2017], [2020], [2018]])
    splits(tmp_path / "ogbn_arxiv" / "split" / "time")
    return tmp_path


@pytest.fixture
def proteins(tmp_path):
    raw = tmp_path / "ogbn_proteins" / "raw"
    write(raw / "edge.csv.gz", [[0, 1], [2, 1]])
    write(raw / "edge-feat.csv.gz", [[0.5] * 8, [0.25] * 8])
    write(raw / "node-label.csv.gz", [[1] * 112, [0] * 112, [1] + [0] * 111])
    write(raw / "species.csv.gz", [[3702], [4932], [9606]])
    splits(tmp_path / "ogbn_proteins" / "split" / "species")
    return tmp_path


def test_arxiv(arxiv):
    data = load_ogb(arxiv, "ogbn-arxiv")
    assert data.edge_index.tolist() == [[0, 3, 2], [1, 1, 0]]
    assert data.x.shape == (4, 128)
    assert data.x[1, 3] == (128 + 3) / 8
    assert data.y.tolist() == [4, 39, 0, 4]
    assert data.node_year.tolist() == [2013, 2017, 2020, 2018]
    masks = (data.train_mask, data.val_mask, data.test_mask)
    assert [mask.nonzero().tolist() for mask in masks] == [[[0]], [[1]], [[2]]]
    data.validate()


def test_proteins_have_both_directions(proteins, monkeypatch):
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BLOCK", 1)  # several blocks
    data = load_ogb(proteins, "ogbn-proteins")
    assert data.num_nodes == 3
    assert data.edge_index.tolist() == [[0, 1, 2, 1], [1, 0, 1, 2]]
    assert data.edge_attr[:, 0].tolist() == [0.5, 0.5, 0.25, 0.25]
    assert data.y.shape == (3, 112)
    assert data.y.dtype == torch.int64
    assert data.node_species.tolist() == [3702, 4932, 9606]
    assert data.x is None


def test_proteins_as_the_ogb_package_renames_them(proteins):
    raw = proteins / "ogbn_proteins" / "raw"
    (raw / "species.csv.gz").rename(raw / "node_species.csv.gz")
    assert load_ogb(proteins, "ogbn-proteins").node_species[0] == 3702


def test_missing_files(arxiv, tmp_path):
    (arxiv / "ogbn_arxiv" / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing split/time/valid.csv.gz. Unpack arxiv.*folder ogbn_arxiv"):
        load_ogb(arxiv, "ogbn-arxiv")


def test_another_split_is_read_anew(arxiv):
    assert load_ogb(arxiv, "ogbn-arxiv").test_mask.nonzero().tolist() == [[2]]
    write(arxiv / "ogbn_arxiv" / "split" / "time" / "test.csv.gz", [[2], [3]])
    assert load_ogb(arxiv, "ogbn-arxiv").test_mask.nonzero().tolist() == [[2], [3]]


def test_a_split_of_another_graph(arxiv):
    write(arxiv / "ogbn_arxiv" / "split" / "time" / "test.csv.gz", [[4]])
    with pytest.raises(ValueError, match=r"the nodes must lie in 0\.\.3; got 4\.\.4"):
        load_ogb(arxiv, "ogbn-arxiv")


@pytest.mark.usefixtures("no_typecheck")
def test_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="name must be one of 'ogbn-arxiv', 'ogbn-proteins'"):
        load_ogb(tmp_path, "ogbn-mag")


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("raw/edge", [[0, 1], [3, 4]], r"edge\.csv\.gz, line 2: the nodes must lie in 0\.\.3; got 0\.\.4"),
        ("raw/edge", [[0, 1], [-1, 2]], r"edge\.csv\.gz, line 2: the nodes must lie in 0\.\.3; got -1"),
        ("raw/edge", [[0, 1], [0.5, 2]], r"edge\.csv\.gz, from line 1 on: .*0\.5"),
        ("raw/node-label", [[0], [40], [1], [2]], r"node-label\.csv\.gz, line 2: the labels must lie in 0\.\.39"),
        ("raw/node-label", [[0], ["nan"], [1], [2]], r"node-label\.csv\.gz, from line 1 on: .*nan"),
        ("raw/node_year", [[2013]] * 3, r"node_year\.csv\.gz must have 4 rows, one for each node .* got 3"),
        ("raw/node-feat", [[1] * 128] * 5, r"node-feat\.csv\.gz must have 4 rows, one for each node .* got 5"),
        ("raw/node-feat", [[1] * 127 + ["inf"]] * 4, r"node-feat\.csv\.gz, line 1: the numbers must be finite"),
        ("split/time/test", [], r"test\.csv\.gz must name the nodes of a split, one each line; it names none"),
        ("split/time/test", [[-1]], r"test\.csv\.gz, line 1: the nodes must lie in 0\.\.3; got -1"),
        ("split/time/test", [[0]], r"test\.csv\.gz, from line 1 on: node 0 is in a split already"),
        ("split/time/test", [[2], [2]], r"test\.csv\.gz, from line 1 on: node 2 is in a split already"),
    ],
)
def test_files_that_do_not_agree(arxiv, file, rows, message):
    write(arxiv / "ogbn_arxiv" / f"{file}.csv.gz", rows)
    with pytest.raises(ValueError, match=message):
        load_ogb(arxiv, "ogbn-arxiv")
    assert not (arxiv / "ogbn_arxiv" / "processed" / "arrays").exists()


def test_edges_and_their_features_agree(proteins):
    write(proteins / "ogbn_proteins" / "raw" / "edge-feat.csv.gz", [[0.5] * 8] * 3)
    with pytest.raises(ValueError, match=r"edge-feat\.csv\.gz must have 2 rows, one for each edge .* got 3"):
        load_ogb(proteins, "ogbn-proteins")


def test_damaged_gzip(arxiv):
    path = arxiv / "ogbn_arxiv" / "raw" / "node-feat.csv.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"node-feat\.csv\.gz: EOFError.*Fetch the file again"):
        load_ogb(arxiv, "ogbn-arxiv")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("edge_index", lambda array: np.where(array == 3, 4, array), r"edge_index must lie in 0\.\.3, got up to 4"),
        ("y", lambda array: array + 36, r"y must lie in -1\.\.39, got up to 75"),
    ],
)
def test_a_cache_that_somebody_changed(arxiv, name, change, message):
    load_ogb(arxiv, "ogbn-arxiv")
    cache = arxiv / "ogbn_arxiv" / "processed" / "arrays"
    np.save(cache / f"{name}.npy", change(np.load(cache / f"{name}.npy")))
    with pytest.raises(ValueError, match=rf"arrays: {message}.*Delete the folder"):
        load_ogb(arxiv, "ogbn-arxiv")
