"""Formats of the readers of text, archives and images, for the hostile-files test; see `hostile.py`."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hostile import Format, check_data
from small_sets import GROUPS, make_chickenpox, make_covid, make_newsgroups, make_tu

from diffusion_mp_experiments.files.text_tables import number_blocks
from diffusion_mp_experiments.graphs import load_newsgroups, load_ogb, load_pokec, load_snapshots, load_tu
from diffusion_mp_experiments.sequences import IMDb, SequenceDataset


def check_items(dataset: SequenceDataset) -> None:
    """Every item is tokens of the vocabulary and a label of a class."""
    assert len(dataset) > 0
    for *texts, label in dataset:
        assert 0 <= label < dataset.classes
        for tokens in texts:
            assert tokens.dtype == torch.long
            assert tokens.dim() == 1
            assert not len(tokens) or 0 <= int(tokens.min()) <= int(tokens.max()) < dataset.vocabulary


# --- Pokec


def _profiles() -> str:
    day = "2012-05-25 11:20:00.0"
    texts = [["null"] * 51, ["something, else"] + ["null"] * 50, ["null"] * 50 + ["a\u017e\u0165"]]
    users = [(7, "1", "kraj a, x", 20), (3, "0", "kraj b, y", 31), (12, "null", "null", 0)]
    rows = (
        [str(user), "1", "50", gender, region, day, day, str(age), *text]
        for (user, gender, region, age), text in zip(users, texts, strict=True)
    )
    return "".join("\t".join(row) + "\n" for row in rows)


_POKEC = {"soc-pokec-profiles.txt": _profiles(), "soc-pokec-relationships.txt": "7\t3\n3\t12\n12\t7\n7\t12\n"}


def _make_pokec(folder: Path) -> list[Path]:
    for name, text in _POKEC.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in _POKEC]


def _make_pokec_gz(folder: Path) -> list[Path]:
    for name, text in _POKEC.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return [folder / f"{name}.gz" for name in _POKEC]


def _make_pokec_cache(folder: Path) -> list[Path]:
    sources = _make_pokec(folder)
    load_pokec(folder, progress=False)
    for source in sources:
        source.unlink()
    return sorted((folder / "processed" / "pokec-snap").iterdir())


def _load_pokec_cache(folder: Path) -> None:
    data = load_pokec(folder, progress=False)
    check_data(data)
    assert data.x.shape == (data.num_nodes, 65)
    assert -1 <= int(data.y.min()) <= int(data.y.max()) <= 1


def _load_pokec(folder: Path) -> None:
    """From the files, not from what an earlier reading left."""
    shutil.rmtree(folder / "processed", ignore_errors=True)
    _load_pokec_cache(folder)
    assert bool(load_pokec(folder, progress=False).x.isfinite().all())


# --- Open Graph Benchmark


def _csv(rows: np.ndarray) -> bytes:
    return gzip.compress("".join(",".join(map(str, row)) + "\n" for row in rows.tolist()).encode(), mtime=0)


def make_ogb(name: str) -> Callable[[Path], list[Path]]:
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 4, (5, 2))
    if name == "ogbn-arxiv":
        split, tables = (
            "time",
            {
                "edge": edges,
                "node-feat": rng.standard_normal((4, 128)).round(3),
                "node-label": np.array([[0], [39], [4], [4]]),
                "node_year": np.full((4, 1), 2018),
            },
        )
    else:
        split, tables = (
            "species",
            {
                "edge": edges,
                "edge-feat": rng.random((5, 8)).round(3),
                "node-label": rng.integers(0, 2, (4, 112)),
                "node_species": np.full((4, 1), 3702),
            },
        )

    def make(folder: Path) -> list[Path]:
        root = folder / name.replace("-", "_")
        files = {root / "raw" / f"{file}.csv.gz": rows for file, rows in tables.items()}
        files |= {
            root / "split" / split / f"{part}.csv.gz": np.array([[node]])
            for node, part in enumerate(("train", "valid", "test"))
        }
        for file, rows in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_csv(rows))
        return list(files)

    return make


def _make_ogb_cache(folder: Path) -> list[Path]:
    sources = make_ogb("ogbn-arxiv")(folder)
    load_ogb(folder, "ogbn-arxiv", progress=False)
    for source in sources:
        source.unlink()
    return sorted((folder / "ogbn_arxiv" / "processed" / "arrays").iterdir())


def _load_ogb_cache(folder: Path, name: str) -> None:
    data = load_ogb(folder, name, progress=False)
    check_data(data)
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool
    assert 0 <= int(data.y.min()) <= int(data.y.max()) < (40 if name == "ogbn-arxiv" else 2)


def _load_ogb(name: str) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        shutil.rmtree(folder / name.replace("-", "_") / "processed", ignore_errors=True)
        _load_ogb_cache(folder, name)

    return load


# --- IMDb


_REVIEWS = {
    "train/pos/0_9.txt": b"Good.<br />Very \xc3\xa9!",
    "train/neg/10_2.txt": b"Bad, and " * 9,
    "test/pos/3_10.txt": b"Fine",
    "test/neg/0_1.txt": b"",
}


def _tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in _REVIEWS.items():
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        link = tarfile.TarInfo("aclImdb/train/pos/1_1.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return content.getvalue()


def _make_tar(folder: Path) -> list[Path]:
    (folder / "aclImdb.tar").write_bytes(_tar())
    return [folder / "aclImdb.tar"]


def _make_tar_gz(folder: Path) -> list[Path]:
    (folder / "aclImdb_v1.tar.gz").write_bytes(gzip.compress(_tar(), mtime=0))
    return [folder / "aclImdb_v1.tar.gz"]


def _make_reviews(folder: Path) -> list[Path]:
    for name, text in _REVIEWS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return [folder / name for name in _REVIEWS if _REVIEWS[name]]


def _load_imdb(name: str) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        for split in ("train", "test"):
            check_items(IMDb(folder / name, split))

    return load


# --- tables of numbers


def _make_numbers(folder: Path) -> list[Path]:
    (folder / "numbers.csv.gz").write_bytes(gzip.compress(b"1.5,-2e3,0\n4,5,6\n-0.25,8,9", mtime=0))
    return [folder / "numbers.csv.gz"]


def _load_numbers(folder: Path) -> None:
    blocks = number_blocks(folder / "numbers.csv.gz", 3, np.float32, delimiter=",", progress=False)
    for _, block in blocks:
        assert block.dtype == np.float32
        assert block.shape[1] == 3
        assert np.isfinite(block).all()


# --- newsgroups, sets of small graphs and series


def _load_newsgroups(folder: Path) -> None:
    data = load_newsgroups(folder, groups=GROUPS, num_words=4)
    assert data.x.isfinite().all()
    assert len(data.x) == len(data.y)
    assert set(data.y.tolist()) == {0, 1}


def _load_tu(folder: Path) -> None:
    for data in load_tu(folder, "SMALL"):
        check_data(data)
        assert data.x.isfinite().all()


def _load_series(name: str) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        for data in load_snapshots(folder, name):
            check_data(data)
            assert data.x.isfinite().all()

    return load


FORMATS = [
    Format("pokec text", _make_pokec, _load_pokec),
    Format("pokec text gzipped", _make_pokec_gz, _load_pokec),
    Format("pokec cache", _make_pokec_cache, _load_pokec_cache),
    Format("ogbn-arxiv", make_ogb("ogbn-arxiv"), _load_ogb("ogbn-arxiv")),
    Format("ogbn-proteins", make_ogb("ogbn-proteins"), _load_ogb("ogbn-proteins")),
    Format("ogbn-arxiv cache", _make_ogb_cache, lambda folder: _load_ogb_cache(folder, "ogbn-arxiv")),
    Format("imdb archive", _make_tar, _load_imdb("aclImdb.tar")),
    Format("imdb archive gzipped", _make_tar_gz, _load_imdb("aclImdb_v1.tar.gz")),
    Format("imdb folder", _make_reviews, _load_imdb("")),
    Format("number table gzipped", _make_numbers, _load_numbers),
    Format("20 newsgroups", make_newsgroups, _load_newsgroups),
    Format("tu", make_tu, _load_tu),
    Format("chickenpox", make_chickenpox, _load_series("chickenpox")),
    Format("england_covid", make_covid, _load_series("england_covid")),
]
