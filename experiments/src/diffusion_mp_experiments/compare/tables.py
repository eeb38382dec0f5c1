"""Problems in tables: rows with or without edges between them, and molecules as SMILES strings."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_smiles

from diffusion_mp.checks import needed_by
from diffusion_mp_experiments.compare.problem import Problem
from diffusion_mp_experiments.compare.tidying import (
    graph_problem,
    node_problem,
    some,
)
from diffusion_mp_experiments.files.reading import reading

Columns = dict[str, list[str]]

_TARGETS = ("label", "target", "class", "y")
_IDENTIFIERS = ("id", "node_id", "node", "")  # pandas leaves its index without a name
_ENDS = (("source", "target"), ("src", "dst"), ("from", "to"))
_WEIGHTS = ("weight", "edge_weight")
_MISSING = ("", "na", "n/a", "nan", "null", "?")
_PARTS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
_KINDS = 50  # different values of a column that become indicator columns
_LOOKED_AT = 20  # values that must all be molecules where no column is named smiles
_TABLE = "Save the table as text in UTF-8, separated by commas, with the names of the columns in the first line."


def read_table(
    path: Path,
    edges: Path | None = None,
    *,
    target: str | None = None,
    task: str | None = None,
    identifier: str | None = None,
    directed: bool | None = None,
) -> Problem:
    """Read rows of a table, with the table of the edges between them if there is one, or molecules.

    Args:
        path: the table; a row is a node, or a molecule if there is a column of SMILES strings. A column named split
            with the words train, val and test has the split.
        edges: table of the edges.
        target: column that is predicted, by default the only one named label, target, class or y.
        task: as in `read`.
        identifier: column of the ids, by default the one named id, node_id or node, or the first where there are edges.
        directed: whether edges keep their direction.

    Raises:
        ValueError: a table is damaged, or there is nothing to predict. The message names the file.
    """
    columns = _read_columns(path)
    names = _take_names(path, columns, identifier, edges is not None)
    labels = _take_target(path, columns, target, task == "link")
    part, notes = _take_split(columns)
    molecules = None
    if edges is None:
        molecules = _molecule_column(columns)
    if molecules is not None:
        return _molecules(path, columns, molecules, labels, part, task, notes)
    x, more = _features(columns, len(names))
    notes += more
    data = Data(x=torch.from_numpy(x))
    if edges is not None:
        notes += _add_edges(data, edges, path, names)
    what, values = _labels(path, labels)
    if task == "link":
        notes += [f"The column {name} was left out." for name in labels]
    return node_problem(
        data,
        values,
        what,
        task=task,
        directed=bool(directed),
        notes=notes,
        names=names,
        split=_masks(part),
    )


def _read_columns(path: Path) -> Columns:
    with reading(path, _TABLE):
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("it has zero bytes, which are no text")
        first = text.lstrip().partition("\n")[0]
        lines = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=max(",;\t", key=first.count),
            strict=True,
        )
        rows = [row for row in lines if row]
        if len(rows) < 2:
            raise ValueError("it has no rows below a line of names")
        names = [name.strip() for name in rows[0]]
        twice = _repeated(names)
        if twice:
            raise ValueError(f"several of its columns are named {some(twice)}")
        for number, row in enumerate(rows):
            if len(row) != len(names):
                raise ValueError(
                    f"row {number} has {len(row)} cells below {len(names)} names of columns"
                )
    cells = zip(*rows[1:], strict=True)
    return {
        name: [cell.strip() for cell in column]
        for name, column in zip(names, cells, strict=True)
    }


def _repeated(values: Sequence[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]


def _named(columns: Columns, names: Collection[str]) -> list[str]:
    return [column for column in columns if column.lower() in names]


def _take_names(
    path: Path, columns: Columns, identifier: str | None, needed: bool
) -> tuple[str, ...]:
    """Remove the column of ids and return it; without one, rows are numbered from 0."""
    if identifier is None:
        found = _named(columns, _IDENTIFIERS)
        if needed:
            found += columns
        if not found:
            rows = len(next(iter(columns.values())))
            return tuple(map(str, range(rows)))
        identifier = found[0]
    _check_column(path, columns, identifier, "identifier")
    names = columns.pop(identifier)
    twice = _repeated(names)
    if twice or "" in names:
        wrong = f"{some(twice)} several times"
        if "" in names:
            wrong = "rows without one"
        raise ValueError(
            f'{path}: the ids in the column "{identifier}" must all be different, and there are {wrong}; '
            f"correct them, or name another column with identifier=."
        )
    return tuple(names)


def _check_column(path: Path, columns: Columns, name: str, argument: str) -> None:
    if name not in columns:
        raise ValueError(
            f"{path} has no column {name!r}; {argument} must be one of {some(columns)}."
        )


def _take_target(
    path: Path, columns: Columns, target: str | None, optional: bool
) -> Columns:
    """Remove the column that is predicted and return it by its name."""
    found = _named(columns, _TARGETS)
    if target is not None:
        _check_column(path, columns, target, "target")
        found = [target]
    if len(found) != 1 and not optional:
        raise ValueError(
            f"{path} must have one column named label, target, class or y, and has {len(found)}; name the column to "
            f'predict with target=, one of {some(columns)}, or predict links with task="link".'
        )
    return {name: columns.pop(name) for name in found}


def _take_split(columns: Columns) -> tuple[Tensor | None, list[str]]:
    """Remove a column of train, val and test, and return the number of the part of every row (-1: none), and notes."""
    for name in _named(columns, ["split"]):
        texts = ["" if _is_missing(text) else text.lower() for text in columns[name]]
        words = {*texts} - {""}
        # A column of other words is a feature like any other.
        if words and words <= _PARTS.keys():
            del columns[name]
            part = torch.tensor([_PARTS.get(text, -1) for text in texts])
            if {0, 1, 2} <= {*part.tolist()}:
                return part, []
            return None, [
                f"The column {name} was left out: it must have train, val and test, and has {some(sorted(words))}."
            ]
    return None, []


def _masks(part: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    return None if part is None else (part == 0, part == 1, part == 2)


def _labels(path: Path, labels: Columns) -> tuple[str, np.ndarray]:
    """Return what begins messages about the first column, and its values as in `as_labels`."""
    for name, texts in labels.items():
        values = _numbers(texts)
        if values is None:
            known = [None if _is_missing(text) else text for text in texts]
            values = np.array(known, object)
        return f'{path}: the column "{name}"', values
    return str(path), np.empty(0)


def _is_missing(text: str) -> bool:
    return text.lower() in _MISSING


def _numbers(texts: list[str]) -> np.ndarray | None:
    """Return floats, NaN where they are missing, infinite or beyond float32; None if there is text."""
    try:
        values = np.array(
            [float("nan" if _is_missing(text) else text) for text in texts]
        )
    except ValueError:
        return None
    values[np.abs(values) > np.finfo(np.float32).max] = np.nan
    return values


def _features(columns: Columns, rows: int) -> tuple[np.ndarray, list[str]]:
    """Return float32 features [rows, C], a column of ones if there are none, and notes."""
    parts = []
    notes = []
    for name, texts in columns.items():
        numbers = _numbers(texts)
        if numbers is None:
            kinds = _indicators(["" if _is_missing(text) else text for text in texts])
            if kinds.shape[1] > _KINDS:
                notes.append(
                    f"The column {name} was left out: it is text with {kinds.shape[1]} different values."
                )
                continue
            parts.append(kinds)
            notes.append(
                f"The column {name} became {kinds.shape[1]} indicator columns."
            )
            continue
        missing = np.isnan(numbers)
        if missing.all():
            notes.append(f"The column {name} was left out: it is empty.")
            continue
        if missing.any():
            numbers[missing] = numbers[~missing].mean()
            parts.append(missing[:, None])
            notes.append(
                f"{missing.sum()} missing numbers of the column {name} became its mean, and an indicator column."
            )
        parts.append(numbers[:, None])
    if not parts:
        parts = [np.ones((rows, 1))]
        notes.append("There are no features, so a constant takes their place.")
    return np.hstack(parts).astype(np.float32), notes


def _indicators(values: Sequence[str] | np.ndarray) -> np.ndarray:
    found, place = np.unique(values, return_inverse=True)
    return place[:, None] == np.arange(len(found))


def _add_edges(
    data: Data, path: Path, nodes: Path, names: tuple[str, ...]
) -> list[str]:
    """Set edge_index of the graph, and edge_weight and edge_attr if the table has such columns."""
    columns = _read_columns(path)
    columns.pop("", None)
    place = {name: number for number, name in enumerate(names)}
    lower = {name.lower(): name for name in columns}
    pairs = [pair for pair in _ENDS if lower.keys() >= set(pair)]
    ends = [lower[end] for end in pairs[0]] if pairs else list(columns)[:2]
    if len(ends) < 2 or (not pairs and place.keys() >= set(ends)):
        raise ValueError(
            f"{path} must begin with a line of names, such as source,target; got {some(columns)}."
        )
    listed = [columns.pop(end) for end in ends]
    unknown = sorted({*listed[0], *listed[1]} - place.keys())
    if unknown:
        raise ValueError(
            f"{path}: the ends of edges must be ids of {nodes}, and {len(unknown)} are not: {some(unknown)}; "
            f"add them there, or leave their edges out."
        )
    data.edge_index = torch.tensor([[place[name] for name in end] for end in listed])
    for name in _named(columns, _WEIGHTS):
        weights = _numbers(columns.pop(name))
        if weights is None or not (weights >= 0).all():
            raise ValueError(
                f'{path}: the column "{name}" must hold numbers >= 0; correct it, or give it another name, '
                f"so that it becomes a feature of the edges."
            )
        data.edge_weight = torch.from_numpy(weights).float()
    if not columns:
        return []
    features, notes = _features(columns, data.num_edges)
    data.edge_attr = torch.from_numpy(features)
    return notes


def _molecule_column(columns: Columns) -> str | None:
    """Return the name of the column of SMILES strings, if there is one."""
    found = _named(columns, ["smiles"])
    if found or find_spec("rdkit") is None:
        return next(iter(found), None)
    for name, texts in columns.items():
        first = texts[:_LOOKED_AT]
        # Categories such as C, N and O repeat, molecules hardly.
        different = _numbers(first) is None and len(set(first)) == len(first)
        if different and all(from_smiles(text).num_nodes for text in first):
            return name
    return None


def _molecules(
    path: Path,
    columns: Columns,
    name: str,
    labels: Columns,
    part: Tensor | None,
    task: str | None,
    notes: list[str],
) -> Problem:
    with needed_by("A table of molecules", "diffusion-mp-experiments[molecules]"):
        import_module("rdkit")
    graphs = [from_smiles(text) for text in columns[name]]
    # PyG makes a graph without nodes of what rdkit cannot read.
    kept = [number for number, graph in enumerate(graphs) if graph.num_nodes]
    if not kept:
        raise ValueError(
            f'{path}: none of the column "{name}" is a molecule that rdkit reads; it must hold SMILES strings.'
        )
    if len(kept) < len(graphs):
        wrong = [columns[name][i] for i in set(range(len(graphs))).difference(kept)]
        notes.append(
            f"{len(wrong)} rows that are no molecules were left out: {some(wrong)}."
        )
    others = [column for column in columns if column != name]
    if others:
        notes.append(f"The columns {some(others)} were left out beside {name}.")
    kept_labels = {column: [texts[i] for i in kept] for column, texts in labels.items()}
    what, values = _labels(path, kept_labels)
    return graph_problem(
        _with_indicators([graphs[i] for i in kept]),
        values,
        what,
        task=task,
        notes=notes,
        names=[columns[name][i] for i in kept],
        split=_masks(None if part is None else part[kept]),
    )


def _with_indicators(graphs: list[Data]) -> list[Data]:
    """Return the graphs with an indicator column for every kind of atom and bond that occurs."""
    encoded = [Data(edge_index=graph.edge_index) for graph in graphs]
    for field in ("x", "edge_attr"):
        parts = [graph[field] for graph in graphs]
        columns = torch.cat(parts).numpy().T
        kinds = np.hstack([_indicators(column) for column in columns])
        rows = torch.from_numpy(kinds).float().split([*map(len, parts)])
        for data, part in zip(encoded, rows, strict=True):
            data[field] = part
    return encoded
