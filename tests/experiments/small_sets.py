"""Small files in the formats of the data sets: what tests read, and what the hostile-files test damages."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
from scipy.io import savemat
from scipy.sparse import csc_matrix


def make_heterophilous(folder: Path, **other) -> Path:
    """Six nodes, each undirected edge once, two splits."""
    rng = np.random.default_rng(0)
    place = rng.integers(0, 3, (2, 6))
    arrays = {
        "node_features": rng.standard_normal((6, 4)).astype(np.float32),
        "node_labels": np.array([0, 1, 2, 0, 1, 2]),
        "edges": np.array([[0, 1], [2, 1], [5, 3], [4, 5]]),
        **{f"{name}_masks": place == part for part, name in enumerate(("train", "val", "test"))},
    }
    np.savez(folder / "small.npz", **{**arrays, **other})
    return folder / "small.npz"


def make_facebook(folder: Path, **other) -> list[Path]:
    """Six students: gender in the second column, and four friendships."""
    people = np.array([[1, 2, 0, 7], [1, 1, 3, 7], [2, 0, 3, 9], [1, 2, 4, 9], [6, 1, 0, 0], [2, 2, 3, 7]], np.uint16)
    pairs = np.array([[0, 1, 1, 4], [1, 2, 5, 3]])
    rows, columns = np.concatenate([pairs, pairs[::-1]], 1)
    friends = csc_matrix((np.ones(8), (rows, columns)), (6, 6))
    raw = folder / "small" / "raw"
    raw.mkdir(parents=True)
    savemat(raw / "data.mat", {"A": friends, "local_info": people, **other}, do_compression=True)
    return [raw / "data.mat"]


def make_mnist(folder: Path, count: int = 7) -> list[Path]:
    rng = np.random.default_rng(0)
    (folder / "raw").mkdir()
    images = struct.pack(">4I", 2051, count, 28, 28) + rng.integers(0, 256, count * 784, np.uint8).tobytes()
    labels = struct.pack(">2I", 2049, count) + rng.integers(0, 10, count, np.uint8).tobytes()
    paths = [folder / "raw" / f"train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    for path, content in zip(paths, (images, labels), strict=True):
        path.write_bytes(gzip.compress(content, mtime=0))
    return paths


GROUPS = ("sci.space", "rec.autos")
MESSAGES = {
    "20news-bydate-train/sci.space/1": b"Newsgroups: sci.space\nFrom: a\n\nThe rocket flies; the rocket lands.",
    "20news-bydate-train/rec.autos/7": b"Subject: autos\r\n\r\nAn engine and a wheel, an engine\xe9.",
    "20news-bydate-test/rec.autos/9": b"Subject: wheel\n\nengine wheel rocket",
    "20news-bydate-test/sci.med/2": b"Subject: other\n\nmedicine",
    "20news-bydate-test/sci.space/3": b"Subject: rocket engine wheel\n\n",
}


def make_newsgroups(folder: Path) -> list[Path]:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in MESSAGES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    path = folder / "20news-bydate.tar.gz"
    path.write_bytes(gzip.compress(content.getvalue(), mtime=0))
    return [path]


def make_tu(folder: Path) -> list[Path]:
    """Three graphs of 3, 1 and 2 nodes, with labels of nodes and edges."""
    raw = folder / "SMALL" / "raw"
    raw.mkdir(parents=True)
    texts = {
        "A": "1, 2\n2, 1\n2, 3\n3, 2\n5, 6\n6, 5\n",
        "graph_indicator": "1\n1\n1\n2\n3\n3\n",
        "graph_labels": "1\n-1\n1\n",
        "node_labels": "0\n2\n1\n0\n1\n1\n",
        "edge_labels": "0\n0\n1\n1\n0\n0\n",
    }
    for part, text in texts.items():
        (raw / f"SMALL_{part}.txt").write_text(text)
    return [raw / f"SMALL_{part}.txt" for part in texts]


def make_synmol(folder: Path, **other) -> list[Path]:
    """Three molecules of 2, 3 and 1 atoms."""
    arrays = {
        "atom_type": np.array([0, 2, 1, 1, 0, 2], np.uint8),
        "node_label": np.array([0, 1, 0, 0, 1, 0], np.uint8),
        "edge_index_local": np.array([[0, 1, 0, 1, 1, 2], [1, 0, 1, 0, 2, 1]], np.int16),
        "edge_feat": np.eye(6, 5, dtype=np.float32),
        "num_nodes": np.array([2, 3, 1], np.int16),
        "num_edges": np.array([2, 4, 0], np.int16),
        "y": np.array([0, 1, 1], np.uint8),
        "train_index": np.array([2, 0]),
        "test_index": np.array([1]),
    }
    np.savez(folder / "logic8_graphs_plain.npz", **{**arrays, **other})
    return [folder / "logic8_graphs_plain.npz"]


def make_series(times: int = 12) -> list[list[float]]:
    return np.random.default_rng(0).standard_normal((times, 3)).round(3).tolist()


def make_chickenpox(folder: Path, **other) -> list[Path]:
    content = {"edges": [[0, 1], [1, 0], [2, 1], [2, 2]], "node_ids": {"A": 0}, "FX": make_series()}
    (folder / "chickenpox.json").write_text(json.dumps({**content, **other}))
    return [folder / "chickenpox.json"]


def make_covid(folder: Path) -> list[Path]:
    days = [str(day) for day in range(12)]
    mapping = {
        "edge_index": {day: [[0, 1], [1, 0], [2, 2]] for day in days},
        "edge_weight": {day: [float(day), 3.0, 5.0] for day in days},
    }
    content = {"edge_mapping": mapping, "time_periods": 12, "y": make_series()}
    (folder / "england_covid.json").write_text(json.dumps(content))
    return [folder / "england_covid.json"]
