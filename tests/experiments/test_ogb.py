"""OGB's archives, in small."""

import numpy as np
import pytest
import torch
from small_sets import make_ogb, rows_of, write

from diffusion_mp_experiments.graphs import load_ogb

CHANGES = [
    ("edge_index", lambda array: np.where(array == 3, 4, array), r"edge_index must lie in 0\.\.3, got up to 4"),
    ("edge_index", lambda array: array - 1, r"edge_index must lie in 0\.\.3, got up to 2 and down to -1"),
    ("y", lambda array: array + 36, r"y must lie in -1\.\.39, got up to 75"),
    ("y", lambda array: array - 2, r"y must lie in -1\.\.39, got up to 37 and down to -2"),
]


@pytest.fixture
def arxiv(tmp_path):
    """Four papers and five citations: 0 → 1, 3 → 1, 2 → 0, 3 → 3, 0 → 2."""
    make_ogb("ogbn-arxiv")(tmp_path)
    write(tmp_path / "ogbn_arxiv", {"raw/node-feat.csv.gz": rows_of(np.arange(4 * 128).reshape(4, 128) / 8)})
    return tmp_path


@pytest.fixture
def proteins(tmp_path):
    make_ogb("ogbn-proteins")(tmp_path)
    return tmp_path


def test_arxiv(arxiv):
    data = load_ogb(arxiv, "ogbn-arxiv")
    assert data.edge_index.tolist() == [[0, 3, 2, 3, 0], [1, 1, 0, 3, 2]]
    assert data.x.shape == (4, 128)
    assert data.x[1, 3] == (128 + 3) / 8
    assert data.y.tolist() == [0, 39, 4, 4]
    assert data.node_year.tolist() == [2013, 2017, 2020, 2018]
    masks = (data.train_mask, data.val_mask, data.test_mask)
    assert [mask.nonzero().tolist() for mask in masks] == [[[0]], [[1]], [[2]]]
    data.validate()
    write(arxiv / "ogbn_arxiv", {"split/time/test.csv.gz": "2\n3\n"})  # another split is read anew
    assert load_ogb(arxiv, "ogbn-arxiv").test_mask.nonzero().tolist() == [[2], [3]]
    (arxiv / "ogbn_arxiv" / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing split/time/valid.csv.gz. Unpack arxiv.*folder ogbn_arxiv"):
        load_ogb(arxiv, "ogbn-arxiv", cache=arxiv / "none")


def test_proteins_have_both_directions(proteins, monkeypatch):
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BLOCK", 1)  # several blocks
    rows = np.repeat([[0.5], [0.25], [1], [2], [3]], 8, 1)
    write(proteins / "ogbn_proteins", {"raw/edge-feat.csv.gz": rows_of(rows)})
    data = load_ogb(proteins, "ogbn-proteins")
    assert data.num_nodes == 4
    assert data.edge_index.tolist() == [[0, 1, 3, 1, 2, 0, 3, 3, 0, 2], [1, 0, 1, 3, 0, 2, 3, 3, 2, 0]]
    assert data.edge_attr[:, 0].tolist() == [0.5, 0.5, 0.25, 0.25, 1, 1, 2, 2, 3, 3]
    assert data.y.shape == (4, 112)
    assert data.y.dtype == torch.int64
    assert data.node_species.tolist() == [3702, 4932, 9606, 3702]
    assert data.x is None
    raw = proteins / "ogbn_proteins" / "raw"
    (raw / "species.csv.gz").rename(raw / "node_species.csv.gz")  # as the ogb package does
    assert load_ogb(proteins, "ogbn-proteins").node_species[0] == 3702


@pytest.mark.parametrize(("name", "change", "message"), CHANGES)
def test_a_cache_that_was_changed(arxiv, name, change, message):
    load_ogb(arxiv, "ogbn-arxiv")
    cache = arxiv / "ogbn_arxiv" / "processed" / "arrays"
    np.save(cache / f"{name}.npy", change(np.load(cache / f"{name}.npy")))
    with pytest.raises(ValueError, match=rf"arrays: {message}.*Delete the folder"):
        load_ogb(arxiv, "ogbn-arxiv")
