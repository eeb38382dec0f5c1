"""Node property prediction of the Open Graph Benchmark, from the files that OGB publishes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch_geometric.data import Data

from diffusion_mp.data.mapped import ArrayFolder, mapped_arrays
from diffusion_mp.data.mapped_graph import check_graph
from diffusion_mp.data.text_tables import count_lines, number_blocks
from diffusion_mp.errors import check_choice


@dataclass(frozen=True)
class _Table:
    """The attribute that a file of `raw` becomes, its columns and type. Undirected edges are in it once."""

    name: str
    columns: int
    dtype: type[np.generic]
    undirected: bool = False


@dataclass(frozen=True)
class _Benchmark:
    archive: str
    split: str
    tables: dict[str, _Table]


_VERSION = "1"
_SPLITS = {"train": "train", "valid": "val", "test": "test"}  # OGB's names and ours
_BENCHMARKS = {
    "ogbn-arxiv": _Benchmark(
        "arxiv.zip",
        "time",
        {
            "edge": _Table("edge_index", 2, np.int64),
            "node-feat": _Table("x", 128, np.float32),
            "node-label": _Table("y", 1, np.int64),
            "node_year": _Table("node_year", 1, np.int64),
        },
    ),
    "ogbn-proteins": _Benchmark(
        "proteins.zip",
        "species",
        {
            "edge": _Table("edge_index", 2, np.int64, undirected=True),
            "edge-feat": _Table("edge_attr", 8, np.float32, undirected=True),
            "node-label": _Table("y", 112, np.int64),
            "node_species": _Table("node_species", 1, np.int64),
        },
    ),
}


def load_ogb(
    root: str | Path,
    name: Literal["ogbn-arxiv", "ogbn-proteins"],
    *,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Data:
    """One node data set of the Open Graph Benchmark (Hu et al. 2020), with its split in its masks.

    Reads the archive as it is unpacked: `root/ogbn_arxiv/raw/*.csv.gz` and `root/ogbn_arxiv/split/time/*.csv.gz`; the
    ogb package puts it there too. Its `processed` folder holds pickles and is not opened, so nothing here depends on
    what `torch.load` allows. The arrays lie in `cache` (by default `root/ogbn_arxiv/processed/arrays`), complete or not
    at all, beside the SHA-256 sums of the files, and are opened by memory map.

    - ogbn-arxiv: x [N, 128], y [N] of 40 classes, node_year [N], and edge_index as published, from a paper to those it
      cites; most models take both directions.
    - ogbn-proteins: y [N, 112] of 0 and 1, node_species [N], edge_index in both directions, edge 2k + 1 the reverse of
      edge 2k, edge_attr [E, 8]; there is no x.

    Shapes: as above, and train_mask, val_mask, test_mask [N].
    Errors: ValueError for an unknown name or a file in another format; FileNotFoundError saying which files are missing
    and where to get them.
    """
    check_choice(name, "name", _BENCHMARKS)
    benchmark = _BENCHMARKS[name]
    folder = Path(root).expanduser() / name.replace("-", "_")
    tables = {_raw(folder, file): table for file, table in benchmark.tables.items()}
    splits = {folder / "split" / benchmark.split / f"{file}.csv.gz": mask for file, mask in _SPLITS.items()}

    def make(arrays: ArrayFolder) -> None:
        missing = [str(file.relative_to(folder)) for file in (*tables, *splits) if not file.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{name} is not at {folder}: missing {', '.join(missing)}. Unpack {benchmark.archive} "
                f"(https://ogb.stanford.edu/docs/nodeprop) and name its folder {folder.name}, or let the ogb package "
                "download it."
            )
        for file, table in tables.items():
            _read_table(file, table, arrays, progress=progress)
        num_nodes = len(np.load(arrays.path / "y.npy", mmap_mode="r"))
        for file, mask in splits.items():
            _read_mask(file, f"{mask}_mask", num_nodes, arrays)

    made_by = f"{name} {_VERSION}"
    where = Path(cache).expanduser() if cache else folder / "processed" / "arrays"
    arrays = mapped_arrays(where, make, [*tables, *splits], made_by=made_by)
    check_graph(where, arrays)
    return Data(num_nodes=len(arrays["y"]), **arrays)


def _raw(folder: Path, file: str) -> Path:
    """The file of a table. (Proteins were published with species.csv.gz, which the ogb package renames.)"""
    old, path = folder / "raw" / f"{file.removeprefix('node_')}.csv.gz", folder / "raw" / f"{file}.csv.gz"
    return old if old.is_file() and not path.is_file() else path


def _read_table(path: Path, table: _Table, arrays: ArrayFolder, *, progress: bool) -> None:
    """Writes a table [rows, columns], [rows] for one column, or edges [2, E]."""
    copies = 2 if table.undirected else 1
    num_rows = copies * count_lines(path, progress=progress)
    across = table.name == "edge_index"
    shape = (2, num_rows) if across else (num_rows, table.columns)[: 1 + (table.columns > 1)]
    arrays.create(table.name, shape, table.dtype)
    for start, block in number_blocks(path, table.columns, table.dtype, delimiter=",", progress=progress):
        rows = slice(copies * start, copies * (start + len(block)))
        block = np.repeat(block, copies, axis=0)
        if across:
            if table.undirected:
                block[1::2] = block[1::2, ::-1]
            arrays.write(table.name, (slice(None), rows), block.T)
        else:
            arrays.write(table.name, rows, block.reshape(-1, *shape[1:]))


def _read_mask(path: Path, name: str, num_nodes: int, arrays: ArrayFolder) -> None:
    mask = np.zeros(num_nodes, np.bool_)
    for _, nodes in number_blocks(path, 1, np.int64, progress=False):
        if not 0 <= nodes.min() <= nodes.max() < num_nodes:
            raise ValueError(f"{path}: the nodes must lie in 0..{num_nodes - 1}; got {nodes.min()}..{nodes.max()}.")
        mask[nodes] = True
    arrays.put(name, mask)
