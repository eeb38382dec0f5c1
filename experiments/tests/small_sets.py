"""Small files in the formats of the data sets: what tests read, and what the hostile-files test damages."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from scipy.io import savemat
from scipy.sparse import csc_matrix, csr_matrix

from diffusion_mp import (
    CertifiedDIFFormer,
    GaussianDiffusivity,
    MixturePenalty,
    SymmetricDiffusivity,
)
from diffusion_mp_experiments.train import save_checkpoint


@contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Fails unless what is allocated inside stays below so many bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def write(folder: Path, contents: dict[str, bytes | str]) -> list[Path]:
    """The files, gzipped where their names say so."""
    for name, content in contents.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(
            gzip.compress(data, mtime=0) if name.endswith(".gz") else data
        )
    return [folder / name for name in contents]


def tarred(contents: dict[str, bytes]) -> bytes:
    """A tar archive of files, and a link out of it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        link = tarfile.TarInfo("aclImdb/train/pos/1_1.txt")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        archive.addfile(link)
    return content.getvalue()


def make_heterophilous(folder: Path, **other) -> list[Path]:
    """Six nodes, each undirected edge once, two splits."""
    rng = np.random.default_rng(0)
    position = rng.integers(0, 3, (2, 6))
    arrays = {
        "node_features": rng.standard_normal((6, 4)).astype(np.float32),
        "node_labels": np.array([0, 1, 2, 0, 1, 2]),
        "edges": np.array([[0, 1], [2, 1], [5, 3], [4, 5]]),
        "train_masks": position == 0,
        "val_masks": position == 1,
        "test_masks": position == 2,
    }
    np.savez(folder / "small.npz", **{**arrays, **other})
    return [folder / "small.npz"]


def make_facebook(folder: Path, **other) -> list[Path]:
    """Six students: gender in the second column, and four friendships."""
    people = np.array(
        [
            [1, 2, 0, 7],
            [1, 1, 3, 7],
            [2, 0, 3, 9],
            [1, 2, 4, 9],
            [6, 1, 0, 0],
            [2, 2, 3, 7],
        ],
        np.uint16,
    )
    pairs = np.array([[0, 1, 1, 4], [1, 2, 5, 3]])
    rows, columns = np.concatenate([pairs, pairs[::-1]], 1)
    friends = csc_matrix((np.ones(8), (rows, columns)), (6, 6))
    raw = folder / "small" / "raw"
    raw.mkdir(parents=True)
    savemat(
        raw / "data.mat",
        {"A": friends, "local_info": people, **other},
        do_compression=True,
    )
    return [raw / "data.mat"]


def make_mnist(folder: Path, count: int = 7) -> list[Path]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, count * 784, np.uint8).tobytes()
    digits = rng.integers(0, 10, count, np.uint8).tobytes()
    files = {
        "images-idx3": struct.pack(">4I", 2051, count, 28, 28) + pixels,
        "labels-idx1": struct.pack(">2I", 2049, count) + digits,
    }
    return write(folder, {f"raw/train-{name}-ubyte.gz": files[name] for name in files})


GROUPS = ("sci.space", "rec.autos")
MESSAGES = {
    "20news-bydate-train/sci.space/1": b"Newsgroups: sci.space\nFrom: a\n\nThe rocket flies; the rocket lands.",
    "20news-bydate-train/rec.autos/7": b"Subject: autos\r\n\r\nAn engine and a wheel, an engine\xe9.",
    "20news-bydate-test/rec.autos/9": b"Subject: wheel\n\nengine wheel rocket",
    "20news-bydate-test/sci.med/2": b"Subject: other\n\nmedicine",
    "20news-bydate-test/sci.space/3": b"Subject: rocket engine wheel\n\n",
}


def make_newsgroups(folder: Path) -> list[Path]:
    return write(folder, {"20news-bydate.tar.gz": tarred(MESSAGES)})


def make_checkpoint(folder: Path) -> list[Path]:
    save_checkpoint(
        {"state_dict": {"weight": torch.ones(5, 4)}, "epoch": 3, "name": "run"},
        folder / "run.ckpt",
    )
    return [folder / "run.ckpt"]


def make_saved(folder: Path) -> list[Path]:
    """A model whose arguments are numbers, names and objects."""
    kernel = GaussianDiffusivity(
        bandwidth=0.3, normalize=None, measure="distance", row_stochastic=False
    )
    penalty = MixturePenalty(widths=(0.5, 1.0))
    inputs = 0.5 * SymmetricDiffusivity(kernel)
    CertifiedDIFFormer(5, 4, 2, 3, penalty=penalty, inputs=inputs).save(
        folder / "model.safetensors"
    )
    return [folder / "model.safetensors"]


def make_tu(folder: Path, **other: str) -> list[Path]:
    """Three graphs of 3, 1 and 2 nodes, with labels of nodes and edges."""
    texts = {
        "A": "1, 2\n2, 1\n2, 3\n3, 2\n5, 6\n6, 5\n",
        "graph_indicator": "1\n1\n1\n2\n3\n3\n",
        "graph_labels": "1\n-1\n1\n",
        "node_labels": "0\n2\n1\n0\n1\n1\n",
        "edge_labels": "0\n0\n1\n1\n0\n0\n",
    }
    texts |= other
    return write(folder, {f"SMALL/raw/SMALL_{part}.txt": texts[part] for part in texts})


def make_synmol(folder: Path, **other) -> list[Path]:
    """Three molecules of 2, 3 and 1 atoms."""
    arrays = {
        "atom_type": np.array([0, 2, 1, 1, 0, 2], np.uint8),
        "node_label": np.array([0, 1, 0, 0, 1, 0], np.uint8),
        "edge_index_local": np.array(
            [[0, 1, 0, 1, 1, 2], [1, 0, 1, 0, 2, 1]], np.int16
        ),
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
    content = {
        "edges": [[0, 1], [1, 0], [2, 1], [2, 2]],
        "node_ids": {"A": 0},
        "FX": make_series(),
    }
    return write(folder, {"chickenpox.json": json.dumps({**content, **other})})


def make_covid(folder: Path) -> list[Path]:
    days = [str(day) for day in range(12)]
    edges = {day: [[0, 1], [1, 0], [2, 2]] for day in days}
    weights = {day: [float(day), 3.0, 5.0] for day in days}
    mapping = {"edge_index": edges, "edge_weight": weights}
    content = {"edge_mapping": mapping, "time_periods": 12, "y": make_series()}
    return write(folder, {"england_covid.json": json.dumps(content)})


KNOWN = 506
TRAIN = 6
TESTED = 9
FEATURES = 4
CLASSES = 3


def make_planetoid(folder: Path) -> list[Path]:
    """A tenth of Cora's size, with one number that no paper has; protocols and names of old and new libraries."""
    rng = np.random.default_rng(0)
    tested = rng.permutation(
        np.setdiff1d(np.arange(KNOWN, KNOWN + TESTED + 1), [KNOWN + 4])
    )
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
    }
    contents: dict[str, bytes | str] = {}
    for protocol, (part, content) in zip(
        (2, 4, 5, 2, 4, 5, 2), {**parts, "graph": graph}.items(), strict=True
    ):
        data = pickle.dumps(content, protocol)
        if protocol == 2:
            data = data.replace(b"numpy._core", b"numpy.core").replace(
                b"scipy.sparse._csr", b"scipy.sparse.csr"
            )
        contents[f"Cora/raw/ind.cora.{part}"] = data
    contents["Cora/raw/ind.cora.test.index"] = "".join(f"{node}\n" for node in tested)
    return sorted(write(folder, contents))


LABELS = "[1, 0, 0, 0, 0, 0, 0, 0, 0, 1]"


def make_peptides(folder: Path, **other: str) -> list[Path]:
    """Ethanol, benzene and methane, and other SMILES strings with their labels, of which the last is to test with."""
    rows = dict.fromkeys(("CCO", "c1ccccc1", "C"), LABELS) | other
    lines = [
        f'{i},{smiles},X,"{labels}",{i}'
        for i, (smiles, labels) in enumerate(rows.items())
    ]
    split = folder / "splits_random_stratified_peptide.npz"
    np.savez(split, train=[1, 0], val=[2], test=[len(rows) - 1])
    text = "\n".join([",smiles,peptide_seq,labels,identifier", *lines])
    return [*write(folder, {"raw/peptide_multi_class_dataset.csv.gz": text}), split]


def make_mat(folder: Path, *, compressed: bool = False, **other) -> list[Path]:
    """Six users of LINKX's Pokec."""
    rng = np.random.default_rng(0)
    variables = {
        "about": "a variable that is not read",
        "node_feat": rng.standard_normal((6, 5)),
        "edge_index": rng.integers(0, 6, (2, 9)),
        "label": rng.integers(-1, 2, (1, 6)),
    }
    savemat(folder / "pokec.mat", {**variables, **other}, do_compression=compressed)
    return [folder / "pokec.mat"]


def profile(
    user,
    *,
    public="1",
    completion="50",
    gender="1",
    region="kraj a, x",
    age="20",
    texts=(),
    end="",
):
    """A line of SNAP's profiles; `texts` are the numbers of columns that are filled, from 9 to 59."""
    fields = [
        user,
        public,
        completion,
        gender,
        region,
        "2012-05-25 11:20:00.0",
        "2005-04-03 00:00:00.0",
        age,
    ]
    fields += [
        "something, else" if column in texts else "null" for column in range(9, 60)
    ]
    return "\t".join(map(str, fields)) + end + "\n"


PROFILES = [profile(7), profile(3, gender="0", region="kraj b", age="31", texts=[9])]
PROFILES += [profile(12, gender="null", age="0")]


def make_pokec(
    folder: Path,
    profiles=PROFILES,
    pairs="7\t3\n3\t12\n12\t7\n7\t12\n",
    *,
    zipped=False,
) -> list[Path]:
    texts = {"profiles": "".join(profiles), "relationships": pairs}
    return write(
        folder,
        {f"soc-pokec-{name}.txt{'.gz' * zipped}": text for name, text in texts.items()},
    )


def rows_of(table) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in np.asarray(table).tolist())


def make_ogb(name: str) -> Callable[..., list[Path]]:
    """Four nodes and five edges; others may replace a file, by its path."""
    rng = np.random.default_rng(0)
    tables: dict[str, object] = {"edge": [[0, 1], [3, 1], [2, 0], [3, 3], [0, 2]]}
    if name == "ogbn-arxiv":
        tables |= {
            "node-feat": rng.standard_normal((4, 128)).round(3),
            "node-label": [[0], [39], [4], [4]],
        }
        tables["node_year"] = [[2013], [2017], [2020], [2018]]
    else:
        tables |= {
            "edge-feat": rng.random((5, 8)).round(3),
            "node-label": rng.integers(0, 2, (4, 112)),
        }
        tables["species"] = [[3702], [4932], [9606], [3702]]
    contents = {f"raw/{file}.csv.gz": rows_of(table) for file, table in tables.items()}
    split = "time" if name == "ogbn-arxiv" else "species"
    contents |= {
        f"split/{split}/{part}.csv.gz": f"{node}\n"
        for node, part in enumerate(("train", "valid", "test"))
    }
    return lambda folder, **other: write(
        folder / name.replace("-", "_"), {**contents, **other}
    )


REVIEWS = {
    "train/pos/0_9.txt": b"Good.<br />Very \xc3\xa9!",
    "train/neg/10_2.txt": b"Bad, and " * 9,
    "train/neg/9_1.txt": b"Worse",
    "test/pos/3_10.txt": b"Fine",
    "test/neg/0_1.txt": b"",
}


def make_imdb(name: str) -> Callable[[Path], list[Path]]:
    contents = {f"aclImdb/{file}": text for file, text in REVIEWS.items()}
    return lambda folder: write(folder, {name: tarred(contents)} if name else REVIEWS)
