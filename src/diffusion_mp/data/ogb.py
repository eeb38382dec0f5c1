"""Node property prediction of the Open Graph Benchmark, from the files that OGB publishes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch_geometric.data import Data

from diffusion_mp.data.arguments import as_path
from diffusion_mp.data.mapped import ArrayFolder, mapped_arrays
from diffusion_mp.data.mapped_graph import check_graph
from diffusion_mp.data.text_tables import count_lines, number_blocks
from diffusion_mp.errors import check_choice


@dataclass(frozen=True)
class _Table:
    """The attribute that a file of `raw` becomes, its columns, type and classes. Undirected edges are in it once."""

    name: str
    columns: int
    dtype: type[np.generic]
    classes: int | None = None
    undirected: bool = False

    @property
    def row(self) -> str:
        """What it has a row for."""
        return "edge" if self.name.startswith("edge_") else "node"


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
            "node-label": _Table("y", 1, np.int64, classes=40),
            "node_year": _Table("node_year", 1, np.int64),
        },
    ),
    "ogbn-proteins": _Benchmark(
        "proteins.zip",
        "species",
        {
            "edge": _Table("edge_index", 2, np.int64, undirected=True),
            "edge-feat": _Table("edge_attr", 8, np.float32, undirected=True),
            "node-label": _Table("y", 112, np.int64, classes=2),
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
    Errors: ValueError for an unknown name, and naming the file, and the line where it is known, for what is no table of
    finite numbers, tables of different lengths, an edge to a node that does not exist, a label out of range, and splits
    that are empty or share a node; FileNotFoundError saying which files are missing and where to get them.
    """
    check_choice(name, "name", _BENCHMARKS)
    benchmark = _BENCHMARKS[name]
    folder = as_path(root, "root") / name.replace("-", "_")
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
        rows = {file: count_lines(file, progress=progress) for file in tables}
        counts = {table.row: rows[file] for file, table in tables.items() if table.name in ("edge_index", "y")}
        for file, table in tables.items():
            if rows[file] != counts[table.row]:
                raise ValueError(
                    f"{file} must have {counts[table.row]} rows, one for each {table.row} as the other files have; got "
                    f"{rows[file]}. Take all of them from one {benchmark.archive}."
                )
            below = counts["node"] if table.name == "edge_index" else table.classes
            _read_table(file, table, rows[file], below, arrays, progress=progress)
        _read_masks(splits, counts["node"], arrays)

    made_by = f"{name} {_VERSION}"
    where = as_path(cache, "cache") if cache else folder / "processed" / "arrays"
    arrays = mapped_arrays(where, make, [*tables, *splits], made_by=made_by)
    check_graph(where, arrays, classes=max(table.classes or 0 for table in tables.values()))
    return Data(num_nodes=len(arrays["y"]), **arrays)


def _raw(folder: Path, file: str) -> Path:
    """The file of a table. (Proteins were published with species.csv.gz, which the ogb package renames.)"""
    old, path = folder / "raw" / f"{file.removeprefix('node_')}.csv.gz", folder / "raw" / f"{file}.csv.gz"
    return old if old.is_file() and not path.is_file() else path


def _read_table(
    path: Path, table: _Table, rows: int, below: int | None, arrays: ArrayFolder, *, progress: bool
) -> None:
    """Writes a table [rows, columns], [rows] for one column, or edges [2, E]."""
    copies = 2 if table.undirected else 1
    across = table.name == "edge_index"
    shape = (2, copies * rows) if across else (copies * rows, table.columns)[: 1 + (table.columns > 1)]
    what = "nodes" if across else "labels" if below else "numbers"
    arrays.create(table.name, shape, table.dtype)
    for start, block in number_blocks(
        path, table.columns, table.dtype, delimiter=",", below=below, what=what, progress=progress
    ):
        here = slice(copies * start, copies * (start + len(block)))
        block = np.repeat(block, copies, axis=0)
        if across:
            if table.undirected:
                block[1::2] = block[1::2, ::-1]
            arrays.write(table.name, (slice(None), here), block.T)
        else:
            arrays.write(table.name, here, block.reshape(-1, *shape[1:]))


def _read_masks(splits: dict[Path, str], num_nodes: int, arrays: ArrayFolder) -> None:
    """Writes a mask for each file of node numbers; no node is in two of them, or twice in one."""
    split_of = np.full(num_nodes, -1)
    for number, (path, name) in enumerate(splits.items()):
        for start, nodes in number_blocks(path, 1, np.int64, below=num_nodes, what="nodes", progress=False):
            values, times = np.unique(nodes, return_counts=True)
            again = values[(times > 1) | (split_of[values] >= 0)]
            if len(again):
                raise ValueError(f"{path}, from line {start + 1} on: node {again[0]} is in a split already.")
            split_of[values] = number
        mask = split_of == number
        if not mask.any():
            raise ValueError(f"{path} must name the nodes of a split, one each line; it names none.")
        arrays.put(f"{name}_mask", mask)
