"""A problem on which models are compared: graphs, labels and the names of both, and one file that keeps them."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp.checks import (
    check_choice,
    check_edge_rows,
    check_finite,
    check_integer_pairs,
    check_range,
    check_state,
)
from diffusion_mp_experiments.files.arrays import read_npz
from diffusion_mp_experiments.files.reading import (
    as_path,
    check_indices,
    check_present,
    reading,
)
from diffusion_mp_experiments.train.checkpoints import replace_file

Masks = tuple[Tensor, Tensor, Tensor]
#: The array of a file in which everything but tensors is.
RECORD = "problem"
_FIELDS = ("x", "edge_index", "edge_attr", "edge_weight", "y")
_RECORDED = ("task", "classes", "names", "directed", "notes", "encoding")
_LARGEST = 1 << 35  # bytes of all arrays
_WAY_OUT = "Give a file that Problem.save wrote, or write it anew."


@dataclass(frozen=True)
class Question:
    """What is asked of data: target, task and directed of `read`."""

    target: str | None = None
    task: str | None = None
    directed: bool | None = None


@dataclass(frozen=True)
class Problem:
    """Graphs, or one graph, and what is predicted of them.

    Args:
        task: what has labels: "node" (nodes, or rows of a table without edges), "graph", or "link" (the edges).
        classes: names of the classes, or () where a number is predicted.
        graphs: one graph for nodes and links. It has x [N, C], y [N] of int64 (-1: unknown) or float64 (NaN: unknown),
            and where the source has them edge_index [2, E], edge_attr [E, D] and edge_weight [E]. Of several graphs,
            each has y [1].
        names: names of the nodes, rows or graphs in the source.
        split: masks [N] or [N, S] over nodes, or over graphs, that came with the data: training, validation, test.
        directed: whether an edge may be there without its reverse.
        notes: sentences that say what was changed or left out on reading.
        encoding: how the columns of a table became features, for new rows; None where there was no table.
    """

    task: Literal["node", "graph", "link"]
    classes: tuple[str, ...]
    graphs: Sequence[Data]
    names: tuple[str, ...]
    split: Masks | None = None
    directed: bool = False
    notes: tuple[str, ...] = ()
    encoding: dict[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write everything to one .npz file without pickles, complete or not at all.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written. The message names the file.
        """
        arrays: dict[str, Any] = {}
        for field in _FIELDS:
            parts = [data[field] for data in self.graphs if field in data]
            if parts:
                along = _dimension(field)
                sizes = [part.size(along) for part in parts]
                arrays[field] = torch.cat(parts, along).numpy()
                arrays[f"{field}.sizes"] = np.array(sizes)
        if self.split is not None:
            arrays["split"] = torch.stack(self.split).numpy()
        record = {name: getattr(self, name) for name in _RECORDED}
        arrays[RECORD] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        replace_file(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> "Problem":
        """Return the problem in a file that `save` wrote.

        Args:
            path: path of the file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged. The message names the file.
        """
        path = as_path(path, "path")
        check_present("The problem", path.parent, [path], _WAY_OUT)
        with reading(path, _WAY_OUT):
            arrays = read_arrays(path)
            record = json.loads(arrays.pop(RECORD).tobytes())
            for name in ("classes", "names", "notes"):
                record[name] = tuple(map(str, record[name]))
            tensors = {name: torch.from_numpy(part) for name, part in arrays.items()}
            if "split" in tensors:
                record["split"] = tuple(tensors["split"].bool())
            problem = cls(graphs=_divided(tensors), **record)
            problem._check()
        return problem

    def _check(self) -> None:
        check_choice(self.task, "task", ("node", "graph", "link"))
        for number, data in enumerate(self.graphs):
            check_graph(data, f"graph {number}: ")
        rows = [data.num_nodes for data in self.graphs]
        if self.task == "graph":
            rows = [1] * len(self.graphs)
        if self.task != "link":
            labels = [data.y for data in self.graphs]
            if [len(part) for part in labels] != rows:
                raise ValueError("y does not go with its nodes or graphs")
            if self.classes:
                check_indices(torch.cat(labels), len(self.classes), "y", low=-1)
        sizes = {len(self.names), *map(len, self.split or ())}
        if sizes != {sum(rows)}:
            raise ValueError(
                "its names or its split do not go with its nodes or graphs"
            )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a .npz file without pickles. Call this function within `reading`."""
    return read_npz(path, None, _LARGEST)


def check_graph(data: Data, where: str = "") -> None:
    """Raise unless x is finite, edges join its nodes, and what edges have is finite; `where` begins the message."""
    check_state(data.x, f"{where}x")
    check_finite(data.x, f"{where}x")
    if data.edge_index is None:
        return
    check_integer_pairs(data.edge_index, f"{where}edge_index")
    check_range(data.edge_index, f"{where}edge_index", len(data.x))
    for field in ("edge_attr", "edge_weight"):
        if field in data:
            check_edge_rows(data[field], data.num_edges, f"{where}{field}")
            check_finite(data[field], f"{where}{field}")


def _divided(tensors: dict[str, Tensor]) -> list[Data]:
    parts = {}
    for field in _FIELDS:
        if field in tensors:
            sizes = tensors[f"{field}.sizes"].tolist()
            # `split` refuses sizes that do not add up.
            parts[field] = tensors[field].split(sizes, _dimension(field))
    rows = zip(*parts.values(), strict=True)
    return [Data(**dict(zip(parts, row, strict=True))) for row in rows]


def _dimension(field: str) -> int:
    return int(field == "edge_index")
