"""Problems in tables: rows with or without edges between them, and molecules as SMILES strings."""

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_smiles

from diffusion_mp.checks import needed_by
from diffusion_mp_experiments.compare.problem import Problem, Question
from diffusion_mp_experiments.compare.tidying import (
    NO_FEATURES,
    as_problem,
    class_name,
    is_missing,
    is_number,
    some,
)
from diffusion_mp_experiments.files.reading import reading

Columns = dict[str, list[str]]

_TARGETS = ("label", "target", "class", "y")
_IDENTIFIERS = ("id", "node_id", "node", "")  # pandas leaves its index without a name
_ENDS = (
    ("source", "target"),
    ("src", "dst"),
    ("from", "to"),
    ("source_id", "target_id"),
    ("src_id", "dst_id"),
    ("u", "v"),
)
_WEIGHTS = ("weight", "edge_weight")
_PARTS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
_KINDS = 50  # different values of a column that become indicator columns
_IDS = 10  # texts that all differ, in a first column that has the ids
_SOME_WORDS = 0.1  # share of words in a column that may be meant as numbers
_LOOKED_AT = 20  # values that must all be molecules where no column is named smiles
_TABLE = "Save the table as text in UTF-8, separated by commas, with the names of the columns in the first line."


def read_table(
    path: Path,
    edges: Path | None,
    identifier: str | None,
    question: Question,
) -> Problem:
    """Read rows of a table, with the table of the edges between them if there is one, or molecules.

    Args:
        path: the table; a row is a node, or a molecule if there is a column of SMILES strings. A column named split
            with the words train, val and test has the split.
        edges: table of the edges.
        identifier: column of the ids, by default the one named id, node_id or node, or the first where there are edges.
        question: what is asked of the table.

    Raises:
        ValueError: a table is damaged, or there is nothing to predict. The message names the file.
    """
    table = _Table(path)
    if identifier is None:
        identifier = table.identifier(needed=edges is not None)
    names = table.take_names(identifier)
    what, labels = table.take_target(question)
    part = table.take_split()
    kept = list(range(table.rows))
    smiles = None
    encoding: dict[str, Any] = {}
    if edges is None:
        smiles = table.molecules()
    if smiles is not None:
        # The nameless index of pandas tells less than the molecules.
        if not identifier:
            names = table.columns[smiles]
        graphs, kept = _molecules(table, smiles)
        encoding = {"smiles": smiles, "identifier": identifier, **_kinds_of(graphs)}
        graphs = _with_indicators(graphs, encoding)
    else:
        if identifier is None:
            identifier = table.distinct_texts()
            names = table.take_names(identifier)
        columns = table.feature_columns()
        encoding["x"] = [asdict(column) for column in columns]
        encoding["identifier"] = identifier
        data = Data(x=table.features(columns))
        graphs = [data]
        if edges is not None:
            # A table has every edge once.
            question = replace(question, directed=bool(question.directed))
            joining = _Table(edges)
            _add_edges(data, joining, table, names)
            encoding["weighted"] = "edge_weight" in data
            if joining.columns:
                columns = joining.feature_columns()
                encoding["edge_attr"] = [asdict(column) for column in columns]
                data.edge_attr = joining.features(columns).float()
                named = some([column.name for column in columns])
                table.notes.append(
                    f"Edges have the features {named}, for the rows that read them."
                )
            table.notes += joining.notes
    return as_problem(
        graphs,
        _label_values([labels[i] for i in kept], question.task),
        what,
        question,
        table.notes,
        names=[names[i] for i in kept],
        split=None
        if part is None
        else (part[kept] == 0, part[kept] == 1, part[kept] == 2),
        of_graphs=smiles is not None,
        encoding=encoding,
    )


def read_new(
    source: Any, edges: Path | None, encoding: dict[str, Any]
) -> tuple[list[Data], list[str]]:
    """Read a table with the columns of another one, and encode it in the same way; also return the ids of its rows.

    Args:
        source: the table, a path or a DataFrame.
        edges: table of the edges, where the other one had edges.
        encoding: how the other table was encoded, `Problem.encoding`.

    Raises:
        ValueError: a column is missing or of another kind. The message names it.
    """
    table = _Table(source)
    identifier = encoding.get("identifier")
    if "smiles" in encoding:
        name = encoding["smiles"]
        table.check_column(name, "the column of molecules")
        graphs, kept = _molecules(table, name)
        names = table.columns[name]
        wrong = [names[row] for row in sorted({*range(table.rows)} - {*kept})]
        if wrong:
            raise ValueError(
                f"{table.path}: {len(wrong)} rows are no molecules: {some(wrong)}; remove them."
            )
        if identifier and identifier in table.columns:
            names = table.take_names(identifier)
        return _with_indicators(graphs, encoding), names
    # Only edges need the ids.
    if edges is None and identifier not in table.columns:
        identifier = None
    names = table.take_names(identifier)
    columns = [Column(**column) for column in encoding["x"]]
    data = Data(x=table.features(columns))
    if edges is not None:
        joining = _Table(edges)
        _add_edges(data, joining, table, names)
        weighted = "edge_weight" in data
        if encoding.get("weighted", weighted) != weighted:
            wanted = "no column of weights" if weighted else "a column named weight"
            raise ValueError(
                f"{edges} must have {wanted}, as the table of the compared edges; change it accordingly."
            )
        if "edge_attr" in encoding:
            columns = [Column(**column) for column in encoding["edge_attr"]]
            data.edge_attr = joining.features(columns).float()
    return [data], names


@dataclass(frozen=True)
class Column:
    """How a column of texts becomes features.

    Attributes:
        name: its name.
        kinds: different texts, each of which becomes an indicator column; none for numbers.
        mean: mean of the numbers, which replaces those that are missing.
        marked: whether an indicator column says where numbers are missing.
    """

    name: str
    kinds: Sequence[str] = ()
    mean: float = 0.0
    marked: bool = False

    def features(self, table: "_Table") -> np.ndarray:
        """Return the features [rows, …] of a column; a text that is none of the kinds has no indicator."""
        if self.kinds:
            texts = [*map(_known, table.columns[self.name])]
            unseen = sorted({*texts} - {*self.kinds})
            if unseen:
                warnings.warn(
                    f'{table.path}: the column "{self.name}" has texts that the compared table does not have, '
                    f"{some(unseen)}. Nothing was learned of them: their rows are predicted from the other columns.",
                    stacklevel=2,
                )
            return np.array(texts)[:, None] == np.array(self.kinds)
        numbers = table.numbers(self.name)
        if numbers is None:
            raise ValueError(
                f'{table.path}: the column "{self.name}" must hold numbers, as in the compared table.'
            )
        missing = np.isnan(numbers)
        filled = np.where(missing, self.mean, numbers)
        return np.stack([missing, filled] if self.marked else [filled], 1)


class _Table:
    """A table of texts, from which columns are taken one after another; what is left are features.

    Args:
        source: path of the file, or a DataFrame.

    Attributes:
        path: path of the file, or words for it.
        columns: the columns by their names.
        rows: number of rows.
        notes: what was changed or left out.
    """

    def __init__(self, source: Any) -> None:
        self.path: Path | str = "The table"
        self.notes: list[str] = []
        if isinstance(source, Path):
            self.path = source
            self.columns, empty = _read_columns(source)
            if empty:
                self.notes.append(
                    f"{empty} empty rows at the end of {source} were left out."
                )
        else:
            self.columns = _columns(_rows(source.to_csv(index=False), ","), ",")
        self.rows = len(next(iter(self.columns.values())))
        self._parsed: dict[str, np.ndarray | None] = {}

    def numbers(self, name: str) -> np.ndarray | None:
        """Return the numbers of a column, see `_numbers`; they are parsed once."""
        if name not in self._parsed:
            self._parsed[name] = _numbers(self.columns[name])
        return self._parsed[name]

    def named(self, names: Collection[str]) -> list[str]:
        return [column for column in self.columns if column.lower() in names]

    def check_column(self, name: str, argument: str) -> None:
        if name not in self.columns:
            raise ValueError(
                f"{self.path} has no column {name!r}; {argument} must be one of {some(self.columns)}."
            )

    def identifier(self, needed: bool) -> str | None:
        """Return the column that is named like one of ids, or else the first if ids are needed."""
        found = sorted(
            self.named(_IDENTIFIERS),
            key=lambda name: _IDENTIFIERS.index(name.lower()),
        )
        if needed:
            found += self.columns
        return found[0] if found else None

    def distinct_texts(self) -> str | None:
        """Return the first column if it has another text in every row, which can be no feature."""
        name = next(iter(self.columns), None)
        if name is None or self.numbers(name) is not None:
            return None
        texts = {*self.columns[name]}
        if not len(texts) == self.rows >= _IDS or "" in texts:
            return None
        self.notes.append(
            f"The column {name} has the ids of the rows, since every row has another text. If there are edges between "
            f"them, give the table of these with edges= (--edges)."
        )
        return name

    def take_names(self, identifier: str | None) -> list[str]:
        """Remove the column of ids and return it; without one, rows are numbered from 0."""
        if identifier is None:
            return [str(row) for row in range(self.rows)]
        self.check_column(identifier, "identifier")
        names = self.columns.pop(identifier)
        if self.columns.pop("", None):
            self.notes.append(
                f"The column without a name was left out, since {identifier} has the ids."
            )
        twice = _repeated(names)
        if twice or "" in names:
            wrong = f"{some(twice)} several times"
            if "" in names:
                wrong = "rows without one"
            raise ValueError(
                f'{self.path}: the ids in the column "{identifier}" must all be different, and there are {wrong}; '
                f"correct them, or name another column with identifier=."
            )
        return names

    def take_target(self, question: Question) -> tuple[str, list[str]]:
        """Remove the column that is predicted, and return what begins messages about it, and the column.

        Of links nothing is predicted; columns that look like a target are removed all the same.
        """
        found = self.named(_TARGETS)
        if question.target is not None:
            self.check_column(question.target, "target")
            found = [question.target]
        if question.task == "link":
            for name in found:
                del self.columns[name]
                self.notes.append(f"The column {name} was left out.")
            return str(self.path), [""] * self.rows
        if len(found) != 1:
            raise ValueError(
                f"{self.path} must have one column named label, target, class or y, and has {len(found)}; name the "
                f'column to predict with target=, one of {some(self.columns)}, or predict links with task="link".'
            )
        (name,) = found
        what = f'{self.path}: the column "{name}"'
        why = self.note_text(name)
        if why:
            what += f", which {why},"
        return what, self.columns.pop(name)

    def take_split(self) -> Tensor | None:
        """Remove a column of train, val and test, and return the number of the part of every row (-1: none)."""
        for name in self.named(["split"]):
            texts = [_known(text).lower() for text in self.columns[name]]
            words = {*texts} - {""}
            # A column of other words is a feature like any other.
            if words and words <= _PARTS.keys():
                del self.columns[name]
                part = torch.tensor([_PARTS.get(text, -1) for text in texts])
                if {0, 1, 2} <= {*part.tolist()}:
                    return part
                self.notes.append(
                    f"The column {name} was left out: it must have train, val and test, and has {some(sorted(words))}."
                )
                return None
        return None

    def molecules(self) -> str | None:
        """Return the name of the column of SMILES strings, if there is one."""
        found = self.named(["smiles"])
        if found or find_spec("rdkit") is None:
            return next(iter(found), None)
        for name, texts in self.columns.items():
            first = texts[:_LOOKED_AT]
            # Categories such as C, N and O are short and repeat, molecules hardly.
            words = _numbers(first) is None and max(map(len, first)) > 2
            different = words and not _repeated(first)
            if different and all(from_smiles(text).num_nodes for text in first):
                return name
        return None

    def note_text(self, name: str) -> str:
        """Say it in a note, and return why, if a column is text, but nearly all of its cells are numbers."""
        if self.numbers(name) is not None:
            return ""
        texts = self.columns[name]
        # Different ones, of which a column of categories has few.
        known = Counter(text for text in texts if not is_missing(text))
        words = [text for text in known if _numbers([text]) is None]
        if sum(known[word] for word in words) > _SOME_WORDS * known.total():
            return ""
        row = texts.index(words[0]) + 1
        why = f"was read as text, since {words[0]!r} in row {row} is no number"
        self.notes.append(f"The column {name} {why}.")
        return why

    def feature_columns(self) -> list[Column]:
        """Return the columns that become features, and say in notes how."""
        found = []
        for name, texts in self.columns.items():
            numbers = self.numbers(name)
            if numbers is None:
                self.note_text(name)
                kinds = sorted({*map(_known, texts)})
                count = len(kinds)
                note = f"became {count} indicator columns."
                if count > _KINDS:
                    note = f"was left out: it is text with {count} different values."
                else:
                    found.append(Column(name, kinds))
                    if "" in kinds:
                        note = f"became {count} indicator columns, one of them for missing."
                self.notes.append(f"The column {name} {note}")
                continue
            missing = np.isnan(numbers)
            if missing.all():
                self.notes.append(f"The column {name} was left out: it is empty.")
                continue
            if missing.any():
                self.notes.append(
                    f"{missing.sum()} missing numbers of the column {name} became its mean, and an indicator column."
                )
            mean = float(numbers[~missing].mean())
            found.append(Column(name, mean=mean, marked=bool(missing.any())))
        if not found:
            self.notes.append(NO_FEATURES)
        return found

    def features(self, columns: Sequence[Column]) -> Tensor:
        """Return features [rows, C] of the columns, a column of ones if there are none.

        In double precision, since single precision would make one number of times that differ by seconds.
        """
        parts = [np.ones((self.rows, 1))] if not columns else []
        for column in columns:
            self.check_column(column.name, "a column of the compared table")
            parts.append(column.features(self))
        return torch.from_numpy(np.hstack(parts).astype(np.float64))


def _read_columns(path: Path) -> tuple[Columns, int]:
    """Return the columns of a file, and the number of empty rows at its end, which are left out."""
    with reading(path, _TABLE):
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise ValueError("it has zero bytes, which are no text")
        # A tab is no blank: it separates columns, of which the first may have no name.
        text = text.lstrip(" \r\n")
        first, _, rest = text.partition("\n")
        separator = max(",;\t|", key=first.count)
        # For Excel, a first line may say it.
        said = re.fullmatch(r'"?sep=(.)"?\s*', first)
        if said:
            separator = said[1]
            text = rest
        rows = _rows(text, separator)
        filled = [number for number, row in enumerate(rows, 1) if "".join(row).strip()]
        end = max(filled, default=0)
        return _columns(rows[:end], separator), len(rows) - end


def _rows(text: str, separator: str) -> list[list[str]]:
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows = [*lines]
    if rows and len(rows[0]) == 1:
        # In a single column, an empty line is a cell.
        return [row or [""] for row in rows]
    return [row for row in rows if row]


def _columns(rows: list[list[str]], separator: str) -> Columns:
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
    columns = {}
    for name, column in zip(names, zip(*rows[1:], strict=True), strict=True):
        columns[name] = [cell.strip() for cell in column]
        if separator == ";":
            # Commas that separate nothing may be decimal.
            points = [cell.replace(",", ".") for cell in columns[name]]
            if _numbers(points) is not None:
                columns[name] = points
    return columns


def _repeated(values: Sequence[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]


def _known(text: str) -> str:
    """Return a text, or an empty one if it says that something is missing."""
    return "" if is_missing(text) else text


def _numbers(texts: list[str]) -> np.ndarray | None:
    """Return floats, NaN where they are missing, infinite or beyond float32; None if there is text."""
    # For Python, 1_0 is ten.
    if any("_" in text for text in texts):
        return None
    # Not in texts, where they may be words.
    cells = ["" if text in ("-", ".") else _known(text) for text in texts]
    try:
        values = np.array([float(cell or "nan") for cell in cells])
    except ValueError:
        return None
    values[np.abs(values) > np.finfo(np.float32).max] = np.nan
    return values


def _label_values(texts: list[str], task: str | None) -> np.ndarray:
    """Return numbers, or else texts, as in `as_labels`; classes whose numbers are written otherwise stay texts."""
    values = _numbers(texts)
    if values is not None:
        finite = np.isfinite(values)
        pairs = zip(texts, values, finite, strict=True)
        exact = all(
            _digits(text) == class_name(value) for text, value, ok in pairs if ok
        )
        if exact or is_number(np.unique(values[finite]), "", task):
            return values
    return np.array([_known(text) or None for text in texts], object)


def _digits(text: str) -> str:
    """Return a number without zeros at its end: 3.0 of a table is the class 3."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def _add_edges(data: Data, edges: _Table, nodes: _Table, names: Sequence[str]) -> None:
    """Set edge_index of the graph, and edge_weight if the table of edges has weights; other columns are left."""
    columns = edges.columns
    columns.pop("", None)
    place = {name: number for number, name in enumerate(names)}
    lower = {name.lower(): name for name in columns}
    ends = list(columns)[:2]
    pairs = [pair for pair in _ENDS if lower.keys() >= set(pair)]
    if pairs:
        ends = [lower[end] for end in pairs[0]]
    elif len(ends) < 2 or place.keys() >= set(ends):
        raise ValueError(
            f"{edges.path} must begin with a line of names, such as source,target; got {some(columns)}."
        )
    else:
        nodes.notes.append(
            f"The ends of edges are the first two columns, {some(ends)}; if others are, name them source and target."
        )
    listed = [columns.pop(end) for end in ends]
    unknown = sorted({*listed[0], *listed[1]} - place.keys())
    if unknown:
        raise ValueError(
            f"{edges.path}: the columns {some(ends)} must hold ids of {nodes.path}, and {len(unknown)} are not: "
            f"{some(unknown)}; add them there, leave these edges out, or name the columns of ends source and target."
        )
    data.edge_index = torch.tensor([[place[name] for name in end] for end in listed])
    found = edges.named(_WEIGHTS)
    if len(found) > 1:
        raise ValueError(
            f"{edges.path} has several columns of weights, {some(found)}; remove one, or give it another name, so that "
            f"it becomes a feature of the edges."
        )
    for name in found:
        weights = _numbers(columns.pop(name))
        if weights is None or not (weights >= 0).all():
            raise ValueError(
                f'{edges.path}: the column "{name}" must hold numbers >= 0; correct it, or give it another name, '
                f"so that it becomes a feature of the edges."
            )
        data.edge_weight = torch.from_numpy(weights).float()


def _molecules(table: _Table, name: str) -> tuple[list[Data], list[int]]:
    """Return the molecules of a column of SMILES strings, and the numbers of their rows."""
    with needed_by("A table of molecules", "diffusion-mp-experiments[molecules]"):
        import_module("rdkit")
    texts = table.columns[name]
    graphs = [from_smiles(text) for text in texts]
    # PyG makes a graph without nodes of what rdkit cannot read.
    kept = [number for number, graph in enumerate(graphs) if graph.num_nodes]
    wrong = [
        text for text, graph in zip(texts, graphs, strict=True) if not graph.num_nodes
    ]
    if not kept:
        raise ValueError(
            f'{table.path}: none of the column "{name}" is a molecule that rdkit reads; it must hold SMILES strings.'
        )
    if wrong:
        table.notes.append(
            f"{len(wrong)} rows that are no molecules were left out: {some(wrong)}."
        )
    others = [column for column in table.columns if column != name]
    if others:
        table.notes.append(f"The columns {some(others)} were left out beside {name}.")
    return [graphs[i] for i in kept], kept


def _kinds_of(graphs: list[Data]) -> dict[str, list[list[int]]]:
    """Return the kinds of atoms and bonds that occur, for every column of the graphs."""
    found = {}
    for name in ("x", "edge_attr"):
        columns = torch.cat([graph[name] for graph in graphs]).t()
        found[name] = [column.unique().tolist() for column in columns]
    return found


def _with_indicators(graphs: list[Data], kinds: dict[str, Any]) -> list[Data]:
    """Return the graphs with an indicator column for every kind of atom and bond."""
    encoded = [Data(edge_index=graph.edge_index) for graph in graphs]
    for name in ("x", "edge_attr"):
        parts = [graph[name] for graph in graphs]
        columns = zip(torch.cat(parts).t(), kinds[name], strict=True)
        marks = [column[:, None] == torch.tensor(found) for column, found in columns]
        rows = torch.cat(marks, 1).float().split([*map(len, parts)])
        for data, part in zip(encoded, rows, strict=True):
            data[name] = part
    return encoded
