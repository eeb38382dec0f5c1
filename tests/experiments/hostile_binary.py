"""Formats of the hostile-files test: pickles, arrays, tensors, archives and caches."""

from __future__ import annotations

import gzip
import pickle
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from hostile import Format, check_data
from scipy.io import savemat
from scipy.sparse import csr_matrix
from small_sets import make_facebook, make_heterophilous, make_mnist, make_synmol

from diffusion_mp_experiments.graphs import (
    PeptidesFunctional,
    SBMDataset,
    load_facebook,
    load_heterophilous,
    load_mnist,
    load_planetoid,
    load_pokec,
    load_synmol,
)

KNOWN, TRAIN, TESTED, FEATURES, CLASSES = 506, 6, 9, 4, 3


def make_planetoid(folder: Path) -> list[Path]:
    """A tenth of Cora's size, with one number that no paper has; protocols and names of old and new libraries."""
    rng = np.random.default_rng(0)
    tested = rng.permutation(np.setdiff1d(np.arange(KNOWN, KNOWN + TESTED + 1), [KNOWN + 4]))
    allx = csr_matrix(rng.integers(0, 2, (KNOWN, FEATURES)).astype(np.float32))
    ally = np.eye(CLASSES, dtype=np.int32)[rng.integers(0, CLASSES, KNOWN)]
    graph: defaultdict[int, list[int]] = defaultdict(list)
    for node in range(KNOWN + TESTED + 1):
        graph[node] = rng.integers(0, KNOWN, 2).tolist()
    parts = {
        "x": allx[:TRAIN],
        "tx": allx[:TESTED],
        "allx": allx,
        "y": ally[:TRAIN],
        "ty": ally[:TESTED],
        "ally": ally,
        "graph": graph,
    }
    raw = folder / "Cora" / "raw"
    raw.mkdir(parents=True)
    for protocol, (part, content) in zip((2, 4, 5, 2, 4, 5, 2), parts.items(), strict=True):
        data = pickle.dumps(content, protocol)
        if protocol == 2:
            data = data.replace(b"numpy._core", b"numpy.core").replace(b"scipy.sparse._csr", b"scipy.sparse.csr")
        (raw / f"ind.cora.{part}").write_bytes(data)
    (raw / "ind.cora.test.index").write_text("".join(f"{node}\n" for node in tested))
    return sorted(raw.iterdir())


def make_cache(folder: Path) -> list[Path]:
    dataset = load_cache(folder)
    return sorted(Path(dataset.processed_dir).iterdir())


def load_cache(folder: Path) -> SBMDataset:
    dataset = SBMDataset(folder, "CLUSTER", num_graphs=2, log=False)
    assert len(dataset) == 2
    for data in dataset:
        check_data(data)
    return dataset


def make_peptides(folder: Path) -> list[Path]:
    (folder / "raw").mkdir()
    lines = [f'{i},{smiles},X,"[{"1, 0, " * 4}1, 0]",{i}' for i, smiles in enumerate(["CCO", "c1ccccc1", "C"])]
    text = "\n".join([",smiles,peptide_seq,labels,identifier", *lines])
    molecules = folder / "raw" / "peptide_multi_class_dataset.csv.gz"
    molecules.write_bytes(gzip.compress(text.encode()))
    split = folder / "splits_random_stratified_peptide.npz"
    np.savez(split, train=np.array([1, 0]), val=np.array([2]), test=np.array([0]))
    return [molecules, split]


def load_peptides(folder: Path) -> None:
    for split in ("train", "val"):
        for data in PeptidesFunctional(folder, folder / "cache", split, log=False):
            check_data(data)
            assert data.y.shape == (1, 10)


def make_mat(*, compressed: bool) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        rng = np.random.default_rng(0)
        variables = {
            "about": "a variable that nobody asks for",
            "node_feat": rng.standard_normal((6, 5)),
            "edge_index": rng.integers(0, 6, (2, 9)),
            "label": rng.integers(-1, 2, (1, 6)),
        }
        savemat(folder / "pokec.mat", variables, do_compression=compressed)
        return [folder / "pokec.mat"]

    return make


def load_mat(folder: Path) -> None:
    data = load_pokec(folder, "linkx")
    check_data(data)
    assert len(data.y) == data.num_nodes


def make_arrays(folder: Path) -> list[Path]:
    make_mat(compressed=False)(folder)
    load_mat(folder)
    return sorted((folder / "processed" / "pokec-linkx").iterdir())


def make_arrays_alone(folder: Path) -> list[Path]:
    """The cache without what it was made of: it can be refused, but not made anew."""
    arrays = make_arrays(folder)
    (folder / "pokec.mat").unlink()
    return arrays


def load_molecules(folder: Path) -> None:
    for split in ("train", "test"):
        for data in load_synmol(folder, split):
            check_data(data)
            assert data.y.shape == (1,)


def load_images(folder: Path) -> None:
    data = load_mnist(folder, 5)
    assert data.x.shape == (5, 784)
    assert 0 <= int(data.y.min()) <= int(data.y.max()) <= 9


FORMATS = [
    Format("planetoid", make_planetoid, lambda folder: check_data(load_planetoid(folder, "Cora"))),
    Format("cached-graphs", make_cache, load_cache),
    Format("pokec-mat", make_mat(compressed=False), load_mat),
    Format("pokec-mat-compressed", make_mat(compressed=True), load_mat),
    Format("mapped-arrays", make_arrays, load_mat),
    Format("mapped-arrays-alone", make_arrays_alone, load_mat),
    Format(
        "heterophilous",
        lambda folder: [make_heterophilous(folder)],
        lambda f: check_data(load_heterophilous(f, "small")),
    ),
    Format("synmol", make_synmol, load_molecules),
    Format("mnist", make_mnist, load_images),
    Format("facebook", make_facebook, lambda folder: check_data(load_facebook(folder, "small"))),
]
if find_spec("rdkit") is not None:
    FORMATS.append(Format("peptides", make_peptides, load_peptides))
