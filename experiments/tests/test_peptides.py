"""Peptides-func from SMILES: the official split, the graphs, what is refused."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from diffusion_mp_experiments.graphs import PeptidesFunctional
from small_sets import LABELS, make_peptides

needs_rdkit = pytest.mark.skipif(
    find_spec("rdkit") is None,
    reason="pip install 'diffusion-mp-experiments[molecules]'",
)
BAD_ROWS = [
    ("CC(=O)N", "[1, 0]", r"Row 3 .* must have 10 labels 0 or 1; got \[1, 0\]"),
    (
        "CC(=O)N",
        "[1, 0, 0, 0, 0, 0, 0, 0, 0, 2]",
        r"Row 3 .* must have 10 labels 0 or 1; got",
    ),
    ("no molecule", LABELS, "Row 3 .* no molecule: 'no molecule'"),
]


@needs_rdkit
def test_graphs_labels_and_order_of_the_split(tmp_path, monkeypatch):
    make_peptides(tmp_path)
    benzene, ethanol = PeptidesFunctional(tmp_path, tmp_path / "cache")
    (methane,) = PeptidesFunctional(tmp_path, tmp_path / "cache", "val")
    assert (benzene.num_nodes, benzene.num_edges) == (6, 12)
    assert (ethanol.x.shape, ethanol.edge_attr.shape) == ((3, 9), (4, 3))
    assert (methane.num_nodes, methane.num_edges) == (1, 0)
    assert ethanol.x[:, 0].tolist() == [6, 6, 8]
    assert ethanol.y.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0, 1]]
    assert ethanol.y.dtype == torch.float32
    assert ethanol.is_undirected()
    first = PeptidesFunctional(tmp_path, tmp_path / "cache", num_graphs=1)
    assert [data.num_nodes for data in first] == [6]
    monkeypatch.setattr(
        PeptidesFunctional, "make", lambda self: pytest.fail("made again")
    )
    assert len(PeptidesFunctional(tmp_path, tmp_path / "cache")) == 2


@needs_rdkit
@pytest.mark.parametrize(("smiles", "labels", "message"), BAD_ROWS)
def test_bad_rows_are_refused(tmp_path, smiles, labels, message):
    make_peptides(tmp_path, **{smiles: labels})
    with pytest.raises(ValueError, match=message):
        PeptidesFunctional(tmp_path, tmp_path / "cache", "test")
    assert not list((tmp_path / "cache" / "processed").glob("*-test-1"))


def test_bad_splits_and_missing_files(tmp_path, monkeypatch):
    split = make_peptides(tmp_path)[1]
    for count in (0, 3):
        with pytest.raises(ValueError, match="num_graphs must be at"):
            PeptidesFunctional(tmp_path, tmp_path / "cache", num_graphs=count)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"diffusion-mp-experiments\[molecules\]"
    ):
        PeptidesFunctional(tmp_path, tmp_path / "cache")
    for rows, message in (
        ([{"any": "object"}], "allow_pickle"),
        ([-1], "rows of train"),
        ([0.5], "rows of train"),
    ):
        np.savez(split, train=np.array(rows))
        with pytest.raises(ValueError, match=message):
            PeptidesFunctional(tmp_path, tmp_path / "cache")
    split.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"missing splits_random_stratified_peptide\.npz\. Put"
    ):
        PeptidesFunctional(tmp_path, tmp_path / "cache")


@needs_rdkit
@pytest.mark.data
def test_the_real_file(data_root, tmp_path):
    folder = data_root / "peptides-functional"
    if not folder.is_dir():
        pytest.skip(f"no peptides-functional at {data_root}")
    dataset = PeptidesFunctional(folder, tmp_path, "test", num_graphs=60)
    assert dataset.num_features == 9
    # LRGB: 150.9 atoms and 307.3 directed bonds on average; 60 peptides stray from it.
    nodes, edges = (
        sum(getattr(data, size) for data in dataset)
        for size in ("num_nodes", "num_edges")
    )
    assert nodes / 60 == pytest.approx(150.9, rel=0.3)
    assert edges / nodes == pytest.approx(307.3 / 150.9, rel=0.02)
    assert dataset._data.y.shape == (60, 10)
    rows = [
        PeptidesFunctional(folder, tmp_path, s, num_graphs=1)._rows[0]
        for s in ("train", "val", "test")
    ]
    assert rows == [1, 6, 0]
