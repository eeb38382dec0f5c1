"""Damaged and malicious variants of files, and the formats they are made for; `test_hostile_files.py` reads them."""

import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

import small_sets as small
from diffusion_mp import load
from diffusion_mp_experiments import graphs
from diffusion_mp_experiments.files.text_tables import number_blocks
from diffusion_mp_experiments.sequences import IMDb
from diffusion_mp_experiments.train import load_checkpoint


@dataclass(frozen=True)
class Format:
    """A kind of file: `make` writes a small valid example into an empty folder and returns the files to be damaged.

    `load` reads that folder and returns graphs, each of which must agree with itself (see `check_data`). It may raise
    ValueError or FileNotFoundError, whose sentence names a file. With `cache`, a folder that a first `load` makes, its
    files are damaged instead; the others stay there only if `sources`.
    """

    name: str
    make: Callable[..., list[Path]]
    load: Callable[[Path], Iterable[Data]]
    cache: str | None = None
    sources: bool = False

    def example(self, folder: Path) -> list[Path]:
        files = self.make(folder)
        if self.cache is None:
            return files
        self.read(folder)
        for file in [] if self.sources else files:
            file.unlink()
        return sorted((folder / self.cache).iterdir())

    def read(self, folder: Path) -> None:
        if self.cache is None:  # from the files, not from what an earlier reading left
            for built in folder.rglob("processed"):
                shutil.rmtree(built)
        for data in self.load(folder):
            check_data(data)


def check_data(data: Data) -> None:
    """The parts of one graph agree: edges between nodes that exist, rows for every node or edge, finite features."""
    num_nodes = len(data.x) if data.x is not None else data.num_nodes
    if data.edge_index is not None:
        assert data.edge_index.shape == (2, data.num_edges)
        assert not data.edge_index.is_floating_point()
        assert (
            not data.num_edges
            or 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < num_nodes
        )
    for key, value in data.items():
        if key.startswith("edge_") and key != "edge_index":
            assert value.size(0) == data.num_edges, key
        elif key == "x" or key.endswith("_mask") or (key == "y" and value.size(0) != 1):
            assert value.size(0) == num_nodes, key
        if key.endswith("_mask"):
            assert value.dtype == torch.bool
    assert data.x is None or bool(data.x.isfinite().all())
    assert data.y is None or data.y.is_floating_point() or int(data.y.min()) >= -1


def _one(load: Callable[..., Data], *arguments: object) -> Callable[[Path], list[Data]]:
    return lambda folder: [load(folder, *arguments)]


def _read_imdb(name: str, folder: Path) -> list[Data]:
    for dataset in (IMDb(folder / name, "train"), IMDb(folder / name, "test")):
        assert len(dataset) > 0
        for tokens, label in dataset:
            assert label in (0, 1)
            assert ((tokens >= 1) & (tokens <= 256)).all()
    return []


def _read_numbers(folder: Path) -> list[Data]:
    path = folder / "numbers.csv.gz"
    for _, block in number_blocks(path, 3, np.float32, delimiter=","):
        assert (block.dtype, block.shape[1]) == (np.float32, 3)
        assert np.isfinite(block).all()
    return []


def _read_peptides(folder: Path) -> list[Data]:
    sets = (graphs.PeptidesFunctional(folder, folder / "c", s) for s in SPLITS)
    return [data for dataset in sets for data in dataset]


def _read_synmol(folder: Path) -> list[Data]:
    return graphs.load_synmol(folder, "train") + graphs.load_synmol(folder, "test")


def _read_newsgroups(folder: Path) -> list[Data]:
    return [graphs.load_newsgroups(folder, groups=small.GROUPS, num_words=4)]


SPLITS = ("train", "val", "test")
_SBM = "processed/CLUSTER-train-2-seed0-v1"
_SNAP = "processed/pokec-snap"
_ARXIV = small.make_ogb("ogbn-arxiv"), _one(graphs.load_ogb, "ogbn-arxiv")
_PROTEINS = small.make_ogb("ogbn-proteins"), _one(graphs.load_ogb, "ogbn-proteins")
_POKEC = small.make_pokec, _one(graphs.load_pokec)
_ROWS: list[Format] = [
    Format("planetoid", small.make_planetoid, _one(graphs.load_planetoid, "Cora")),
    Format(
        "graphs",
        lambda _: [],
        lambda folder: graphs.SBMDataset(folder, "CLUSTER", num_graphs=2),
        _SBM,
    ),
    Format("pokec-mat", small.make_mat, _one(graphs.load_pokec, "linkx")),
    Format(
        "heterophilous",
        small.make_heterophilous,
        _one(graphs.load_heterophilous, "small"),
    ),
    Format("synmol", small.make_synmol, _read_synmol),
    Format("mnist", small.make_mnist, _one(graphs.load_mnist, 5)),
    Format("facebook", small.make_facebook, _one(graphs.load_facebook, "small")),
    Format("peptides", small.make_peptides, _read_peptides),
    Format("pokec", *_POKEC),
    Format("pokec gzipped", partial(small.make_pokec, zipped=True), _POKEC[1]),
    Format("pokec cache", *_POKEC, _SNAP),
    Format("pokec cache and sources", *_POKEC, _SNAP, sources=True),
    Format("ogbn-arxiv", *_ARXIV),
    Format("ogbn-proteins", *_PROTEINS),
    Format("ogbn-arxiv cache", *_ARXIV, "ogbn_arxiv/processed/arrays"),
    *(
        Format(f"imdb {name}", small.make_imdb(name), partial(_read_imdb, name))
        for name in ("", "a.tar", "a.tar.gz")
    ),
    Format(
        "numbers",
        lambda f: small.write(f, {"numbers.csv.gz": "1.5,-2e3,0\n4,5,6\n-0.25,8,9"}),
        _read_numbers,
    ),
    Format("news", small.make_newsgroups, _read_newsgroups),
    Format(
        "checkpoint",
        small.make_checkpoint,
        lambda folder: load_checkpoint(folder / "run.ckpt") and [],
    ),
    Format(
        "saved model",
        small.make_saved,
        lambda folder: load(folder / "model.safetensors") and [],
    ),
    Format("tu", small.make_tu, lambda folder: graphs.load_tu(folder, "SMALL")),
    Format(
        "chickenpox",
        small.make_chickenpox,
        lambda folder: graphs.load_snapshots(folder, "chickenpox"),
    ),
    Format(
        "england_covid",
        small.make_covid,
        lambda folder: graphs.load_snapshots(folder, "england_covid"),
    ),
]
FORMATS = {
    row.name: row
    for row in _ROWS
    if row.name != "peptides" or find_spec("rdkit") is not None
}


def mutations(blob: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` variants of a file's content: first one of every kind, then mostly flips of single bits and bytes."""
    rng = random.Random(seed)
    size = len(blob)

    def flipped(places: Iterable[int], mask: int | None = None) -> bytes:
        changed = bytearray(blob)
        for position in places:
            changed[position] ^= mask or rng.randrange(1, 256)
        return bytes(changed)

    def zeros() -> bytes:
        start = rng.randrange(size)
        stop = min(size, start + 64)
        return blob[:start] + bytes(stop - start) + blob[stop:]

    def at_an_end() -> bytes:
        """Most of what a parser decides by stands at the beginning or, in a zip file, at the end."""
        position = rng.randrange(min(size, 256))
        return flipped([position if rng.random() < 0.7 else size - 1 - position])

    text = "<!doctype html><title>404 Not Found: Größe</title>\n".encode("latin-1")
    often: list[Callable[[], bytes]] = [
        lambda: flipped([rng.randrange(size)], 1 << rng.randrange(8)),
        lambda: flipped([rng.randrange(size)]),
        at_an_end,
        lambda: flipped(rng.randrange(size) for _ in range(rng.randrange(2, 9))),
        lambda: blob[: rng.randrange(size)],
    ]
    once = [
        lambda: b"",
        lambda: blob[:-1],
        lambda: blob[: min(16, size // 2)],
        lambda: text,
        lambda: blob + blob,
        lambda: rng.randbytes(max(size, 64)),
        zeros,
        *often,
    ]
    for i in range(count):
        yield (once[i] if i < len(once) else rng.choice(often))()


_MEMORY = 1 << 30  # bytes on top of what is mapped once everything is imported


def answer(pipe: Connection, scratch: Path) -> None:
    """Read one folder after another, in a process of its own, and send what came of it: see `HostileReader`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for (
        format
    ) in FORMATS.values():  # what readers import late is there before memory is limited
        folder = scratch / format.name
        folder.mkdir()
        format.example(folder)
        format.read(folder)
    mapped = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY,) * 2)
    pipe.send("ready")
    while True:
        name, folder = pipe.recv()
        try:
            FORMATS[name].read(folder)
            pipe.send(("loaded", ""))
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            named = (
                isinstance(error, (ValueError, FileNotFoundError))
                and str(folder) in said
            )
            pipe.send(("refused" if named else "bad", said))
