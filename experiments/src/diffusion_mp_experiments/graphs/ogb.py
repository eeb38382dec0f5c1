"""Node property prediction of the Open Graph Benchmark, from the files that OGB publishes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from diffusion_mp.checks import check_choice, check_edge_rows, check_kind, check_pairs
from diffusion_mp_experiments.files.reading import as_path, check_present
from diffusion_mp_experiments.files.text_tables import count_lines, number_blocks
from diffusion_mp_experiments.graphs.cached import ArrayFolder, mapped_graph

OgbName = Literal["ogbn-arxiv", "ogbn-proteins"]


@dataclass(frozen=True)
class _Table:
    """The attribute of a file: its columns, type, name in sentences and classes; undirected edges are in it once."""

    name: str
    columns: int
    dtype: type[np.generic]
    what: str = "numbers"
    classes: int | None = None
    undirected: bool = False

    @property
    def row(self) -> str:
        return "edge" if self.name.startswith("edge_") else "node"


_VERSION = "1"
_BLOCK = 1 << 22  # edges; ogbn-proteins has 79 million
_SPLITS = {"train": "train", "valid": "val", "test": "test"}  # OGB's names and ours
_FOLDERS = {"ogbn-arxiv": "time", "ogbn-proteins": "species"}  # of the splits
_TABLES = {
    "ogbn-arxiv": {
        "edge": _Table("edge_index", 2, np.int64, "nodes"),
        "node-feat": _Table("x", 128, np.float32),
        "node-label": _Table("y", 1, np.int64, "labels", classes=40),
        "node_year": _Table("node_year", 1, np.int64),
    },
    "ogbn-proteins": {
        "edge": _Table("edge_index", 2, np.int64, "nodes", undirected=True),
        "edge-feat": _Table("edge_attr", 8, np.float32, undirected=True),
        "node-label": _Table("y", 112, np.int64, "labels", classes=2),
        "node_species": _Table("node_species", 1, np.int64),
    },
}


def load_ogb(
    root: str | Path,
    name: OgbName,
    *,
    cache: str | Path | None = None,
) -> Data:
    """Load a node data set of the Open Graph Benchmark (Hu et al. 2020), with the masks of its split.

    The function reads the unpacked archive, `root/ogbn_arxiv/raw/*.csv.gz` and `root/ogbn_arxiv/split/time/*.csv.gz`,
    where the ogb package puts it too. The `processed` folder of the archive holds pickles and is not opened. The arrays
    are memory-mapped.

    - ogbn-arxiv: x [N, 128], y [N] of 40 classes, node_year [N], and edge_index as published, from a paper to the
      papers that it cites. Most models take both directions.
    - ogbn-proteins: y [N, 112] of 0 and 1, node_species [N], edge_index in both directions (edge 2k + 1 is the reverse
      of edge 2k), edge_attr [E, 8]. There is no x.

    Args:
        root: the folder that holds the unpacked archive.
        name: "ogbn-arxiv" or "ogbn-proteins".
        cache: the folder of the arrays. By default `root/ogbn_arxiv/processed/arrays`.

    Raises:
        FileNotFoundError: a file is missing. The message says where to get it.
        ValueError: a file is damaged.

    Examples:
        >>> load_ogb(folder, "ogbn-arxiv")  # says what to put where
        Traceback (most recent call last):
        FileNotFoundError: ogbn-arxiv...raw/edge.csv.gz...https://ogb.stanford.edu/docs/nodeprop...
    """
    check_choice(name, "name", _TABLES)
    folder = as_path(root, "root") / name.replace("-", "_")
    archive = f"{name.removeprefix('ogbn-')}.zip"
    tables = {_raw(folder, file): table for file, table in _TABLES[name].items()}
    splits = {
        folder / "split" / _FOLDERS[name] / f"{file}.csv.gz": mask
        for file, mask in _SPLITS.items()
    }

    def make(arrays: ArrayFolder) -> None:
        way_out = f"Unpack {archive} (https://ogb.stanford.edu/docs/nodeprop) and name its folder {folder.name}"
        check_present(
            name,
            folder,
            [*tables, *splits],
            f"{way_out}, or let the ogb package download it.",
        )
        rows = {file: count_lines(file) for file in tables}
        counts = {
            table.row: rows[file]
            for file, table in tables.items()
            if table.name in ("edge_index", "y")
        }
        for file, table in tables.items():
            if rows[file] != counts[table.row]:
                raise ValueError(
                    f"{file} must have {counts[table.row]} rows, one for each {table.row} as the other files have; got "
                    f"{rows[file]}. Take all of them from one {archive}."
                )
            below = counts["node"] if table.name == "edge_index" else table.classes
            _write_table(file, table, rows[file], below, arrays)
        _write_masks(splits, counts["node"], arrays)

    where = as_path(cache, "cache") if cache else folder / "processed" / "arrays"
    # Only labels have classes.
    classes = max(table.classes or 0 for table in tables.values())
    data = mapped_graph(
        where, make, [*tables, *splits], made_by=f"{name} {_VERSION}", classes=classes
    )
    data.num_nodes = len(data.y)
    return data


def _raw(folder: Path, file: str) -> Path:
    """Return the file of a table. (Proteins were published with species.csv.gz, which the ogb package renames.)"""
    old = folder / "raw" / f"{file.removeprefix('node_')}.csv.gz"
    path = folder / "raw" / f"{file}.csv.gz"
    return old if old.is_file() and not path.is_file() else path


def _write_table(
    path: Path, table: _Table, rows: int, below: int | None, arrays: ArrayFolder
) -> None:
    """Write the attribute of a table: edges [2, E], one column as [rows], and anything else as [rows, columns]."""
    # Each undirected edge becomes two rows, one after the other.
    copies = 1 + table.undirected
    is_edges = table.name == "edge_index"
    shape = (copies * rows, *([table.columns] if table.columns > 1 else []))
    if is_edges:
        shape = (2, copies * rows)
    arrays.create(table.name, shape, table.dtype)
    blocks = number_blocks(
        path, table.columns, table.dtype, delimiter=",", below=below, what=table.what
    )
    for start, block in blocks:
        here = slice(copies * start, copies * (start + len(block)))
        block = np.repeat(block, copies, axis=0)
        if is_edges:
            if table.undirected:
                block[1::2] = block[1::2, ::-1]  # the second of the two goes back
            arrays.write(table.name, (slice(None), here), block.T)
        else:
            arrays.write(table.name, here, block.reshape(-1, *shape[1:]))


def _write_masks(splits: dict[Path, str], num_nodes: int, arrays: ArrayFolder) -> None:
    """Write a mask for each file of node numbers; no node may be in two files, or twice in one."""
    # One array for all splits shows a node that is in two of them.
    split_of = np.full(num_nodes, -1)
    for number, (path, name) in enumerate(splits.items()):
        for start, nodes in number_blocks(
            path, 1, np.int64, below=num_nodes, what="nodes"
        ):
            values, times = np.unique(nodes, return_counts=True)
            again = values[(times > 1) | (split_of[values] >= 0)]
            if len(again):
                raise ValueError(
                    f"{path}, from line {start + 1} on: node {again[0]} is in a split already."
                )
            split_of[values] = number
        mask = split_of == number
        if not mask.any():
            raise ValueError(
                f"{path} must name the nodes of a split, one each line; it names none."
            )
        arrays.put(f"{name}_mask", mask)


class SumEdgeFeatures(BaseTransform):
    """Transform that sets the features of every node to the sum of the features of the edges that end there.

        x_i = Σ_{j→i} e_ji

    A node without incoming edges gets zero. Models use these features on ogbn-proteins, whose nodes have none (Hu et
    al. 2020). Sums are taken in double precision and in blocks, so edges may be memory-mapped.

    Shapes:
        edge_index: [2, E].
        edge_attr: [E, D].
        x: [N, D].

    Examples:
        >>> data = SumEdgeFeatures()(Data(x=x, edge_index=edge_index, edge_attr=torch.ones(12, 2)))
    """

    def forward(self, data: Any) -> Data:
        check_kind(data, "data", Data, "a torch_geometric Data")
        check_kind(
            data.edge_attr,
            "data.edge_attr",
            Tensor,
            "a tensor [E, D] with the features of the edges",
        )
        attr = data.edge_attr
        nodes = int(data.num_nodes or 0)
        edges = check_pairs(data.edge_index, "data.edge_index", nodes, attr.device)
        check_edge_rows(attr, edges.size(1), "data.edge_attr")
        x = torch.zeros(nodes, attr.size(1), dtype=torch.float64, device=attr.device)
        for start in range(0, edges.size(1), _BLOCK):
            here = slice(start, start + _BLOCK)
            x.index_add_(0, edges[1, here], attr[here].double())
        data.x = x.to(attr.dtype)
        return data
