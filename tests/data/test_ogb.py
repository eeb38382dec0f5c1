"""OGB's archives, in small."""

import gzip

import numpy as np
import pytest
import torch

from diffusion_mp.data import load_ogb


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
    monkeypatch.setattr("diffusion_mp.data.text_tables._BLOCK", 1)  # several blocks
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
