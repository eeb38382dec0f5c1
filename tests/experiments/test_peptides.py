"""Peptides-func from SMILES: the official split, the graphs, what is refused."""

import gzip
import shutil
import sys

import numpy as np
import pytest
import torch

from diffusion_mp_experiments.graphs import PeptidesFunctional

NEEDS_RDKIT = "molecules are read with rdkit: pip install 'diffusion-mp-experiments[molecules]'"
ROWS = ["CCO", "c1ccccc1", "C", "CC(=O)N", "no molecule"]


@pytest.fixture
def source(tmp_path):
    """Five rows in the layout of the benchmark; the last two are bad in one way each."""
    folder = tmp_path / "source"
    (folder / "raw").mkdir(parents=True)
    labels = ["[1, 0, 0, 0, 0, 0, 0, 0, 0, 1]"] * 3 + ["[1, 0]"] + ["[0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines = [f'{i},{s},X,"{y}",{i}' for i, (s, y) in enumerate(zip(ROWS, labels, strict=True))]
    with gzip.open(folder / "raw" / "peptide_multi_class_dataset.csv.gz", "wt") as file:
        file.write("\n".join([",smiles,peptide_seq,labels,identifier", *lines]))
    split = {"train": np.array([1, 0, 2]), "val": np.array([3]), "test": np.array([4])}
    np.savez(folder / "splits_random_stratified_peptide.npz", **split)
    return folder


def test_graphs_labels_and_order_of_the_split(source, tmp_path):
    pytest.importorskip("rdkit", reason=NEEDS_RDKIT)
    benzene, ethanol, methane = PeptidesFunctional(source, tmp_path / "cache", log=False)
    assert (benzene.num_nodes, benzene.num_edges) == (6, 12)
    assert (ethanol.x.shape, ethanol.edge_attr.shape) == ((3, 9), (4, 3))
    assert (methane.num_nodes, methane.num_edges) == (1, 0)
    assert ethanol.x[:, 0].tolist() == [6, 6, 8]
    assert ethanol.y.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0, 1]]
    assert ethanol.y.dtype == torch.float32
    assert ethanol.is_undirected()


def test_the_first_graphs_only_and_the_cache(source, tmp_path, monkeypatch):
    pytest.importorskip("rdkit", reason=NEEDS_RDKIT)
    two = PeptidesFunctional(source, tmp_path / "cache", num_graphs=2, log=False)
    assert [data.num_nodes for data in two] == [6, 3]
    assert len(PeptidesFunctional(source, tmp_path / "cache", log=False)) == 3
    monkeypatch.setattr(PeptidesFunctional, "make", lambda self: pytest.fail("made again"))
    assert len(PeptidesFunctional(source, tmp_path / "cache", num_graphs=2, log=False)) == 2


@pytest.mark.parametrize(
    ("split", "message"),
    [("val", "Row 3 .* has 2 labels; expected 10"), ("test", "Row 4 .* no molecule: 'no molecule'")],
)
def test_bad_rows_are_refused(source, tmp_path, split, message):
    pytest.importorskip("rdkit", reason=NEEDS_RDKIT)
    with pytest.raises(ValueError, match=message):
        PeptidesFunctional(source, tmp_path / "cache", split, log=False)


def test_missing_files_are_named(source, tmp_path):
    (source / "splits_random_stratified_peptide.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing splits_random_stratified_peptide\.npz\. Put"):
        PeptidesFunctional(source, tmp_path / "cache")
    shutil.rmtree(source)
    with pytest.raises(FileNotFoundError, match=r"missing raw/peptide_multi_class_dataset\.csv\.gz, splits"):
        PeptidesFunctional(source, tmp_path / "cache")


def test_without_rdkit(source, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion_mp_experiments.graphs.peptides.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"diffusion-mp-experiments\[molecules\]"):
        PeptidesFunctional(source, tmp_path / "cache", log=False)
    assert "rdkit" not in sys.modules or sys.modules["rdkit"] is not None


@pytest.mark.parametrize("count", [0, 4])
def test_a_bad_number_of_graphs(source, tmp_path, count):
    with pytest.raises(ValueError, match="num_graphs must be at"):
        PeptidesFunctional(source, tmp_path / "cache", num_graphs=count)


def test_a_split_file_with_pickles_is_not_read(source, tmp_path):
    np.savez(source / "splits_random_stratified_peptide.npz", train=np.array([{"any": "object"}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        PeptidesFunctional(source, tmp_path / "cache")


@pytest.mark.data
def test_the_real_file(data_root, tmp_path):
    pytest.importorskip("rdkit", reason=NEEDS_RDKIT)
    folder = data_root / "peptides-functional"
    if not folder.is_dir():
        pytest.skip(f"no peptides-functional at {data_root}")
    dataset = PeptidesFunctional(folder, tmp_path, "test", num_graphs=60, log=False)
    assert dataset.num_features == 9
    # LRGB: 150.9 atoms and 307.3 directed bonds on average; 60 peptides stray from it.
    assert sum(data.num_nodes for data in dataset) / 60 == pytest.approx(150.9, rel=0.3)
    assert sum(data.num_edges for data in dataset) / sum(data.num_nodes for data in dataset) == pytest.approx(
        307.3 / 150.9, rel=0.02
    )
    assert dataset._data.y.shape == (60, 10)
    rows = [PeptidesFunctional(folder, tmp_path, s, num_graphs=1, log=False)._rows[0] for s in ("train", "val", "test")]
    assert rows == [1, 6, 0]
