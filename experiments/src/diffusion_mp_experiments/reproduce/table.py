"""A table of results as files: `<table>/table.yaml`, a YAML file for every row, lines of JSON for its runs."""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from diffusion_mp.checks import (
    Count,
    PositiveNumber,
    check_counts,
    check_kind,
    describe,
)
from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.settings import checked_fields
from diffusion_mp_experiments.train.checkpoints import replace_file

Config = dict[str, Any]
Kind = TypeVar("Kind")
#: How much of everything a table takes: what `--quick` changes, and what its results record.
BUDGET = ("splits", "seeds", "tuning", "trials", "epochs", "patience")


def _check_mapping(value: Any, name: str) -> None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must hold names and values; got {describe(value)}.")


def _check_class(config: Any, name: str) -> None:
    _check_mapping(config, name)
    check_kind(config.get("class_path"), f"class_path of {name}", str, "a class")
    _check_mapping(config.get("init_args", {}), f"init_args of {name}")


# What a YAML file may say in a field: it is checked where the object is made of it.
Text = Annotated[str, partial(check_kind, kind=str, what="text")]
Fields = Annotated[Config, _check_mapping]
ClassConfig = Annotated[Config, _check_class]


@checked_fields
@dataclass(frozen=True)
class Metric:
    """The reported metric: the module logs `val_<name>` and `test_<name>`; `title` and `scale` are for readers."""

    name: Text = "acc"
    mode: Literal["max", "min"] = "max"
    title: Text = "accuracy in %"
    scale: PositiveNumber = 100.0

    @property
    def sign(self) -> float:
        return 1.0 if self.mode == "max" else -1.0

    @property
    def digits(self) -> int:
        return 1 if self.scale == 100 else 3


@checked_fields
@dataclass(frozen=True)
class Row:
    """A model, or a predictor that is not trained by epochs.

    Attributes:
        model: `class_path` and `init_args` of a model, without in_channels and out_channels. An edge_dim of "data" is
            the number of features that edges have, or null.
        predictor: the same of a predictor, in place of a model.
        optimizer: further arguments of the LightningModule.
        data: further arguments of the data module.
        attention: "identity" or "uniform": the model is trained and tested with its attention replaced.
        search: axes in addition to the axes of the table; an axis of the table that is null here is left out.
        fixed: values by the paths of axes, set as a search would set them.
        curve: in a table with a sweep, the row of which this row is a point.
    """

    name: str
    title: Text
    model: ClassConfig | None = None
    predictor: ClassConfig | None = None
    optimizer: Fields = field(default_factory=dict)
    data: Fields = field(default_factory=dict)
    attention: Literal["identity", "uniform"] | None = None
    search: Fields = field(default_factory=dict)
    fixed: Fields = field(default_factory=dict)
    curve: str = ""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.predictor is None):
            raise ValueError(
                f"row {self.name!r} must have either a model or a predictor."
            )


@checked_fields
@dataclass(frozen=True)
class Sweep:
    """An axis, by its path in a search, along which every row of a table is trained: rows become curves."""

    path: Text
    values: list[Any]
    title: Text

    def __post_init__(self) -> None:
        if not isinstance(self.values, list) or not self.values:
            raise ValueError(
                "values of sweep must be a list with a value or more; got none."
            )

    def points(self, row: Row) -> Iterator[Row]:
        for value in self.values:
            yield replace(
                row,
                name=f"{row.name}@{value}",
                title=f"{row.title}, {self.title} {value}",
                fixed={**row.fixed, self.path: value},
                curve=row.name,
            )


@checked_fields
@dataclass(frozen=True)
class Table:
    """How a table is made; docs/results.md says what the numbers mean.

    Attributes:
        data: `class_path` and `init_args` of a LightningDataModule that takes `split`, and `tuning` unless nested.
        module: further arguments of the LightningModule that trains, such as its metric.
        splits: number of splits of the reported runs.
        seeds: number of seeds of the reported runs, on every split.
        tuning: number of splits on which settings are chosen; "nested" chooses for each reported split by its
            validation nodes.
        trials: number of settings that are drawn for every row.
        epochs: largest number of epochs.
        patience: largest number of epochs without a better validation score.
        search: the axes that all models share; predictors share the axes of the data module (`data.k`).
        baselines: rows that the others are compared with, split by split.
        quick: values of the attributes in `BUDGET` for `--quick`.
        sweep: the axis that makes every row a curve.
        curves: the titles of the curves, with a sweep.
    """

    name: str
    title: Text
    data: ClassConfig
    rows: Sequence[Row]
    metric: Metric = Metric()
    module: Fields = field(default_factory=dict)
    splits: Count = 10
    seeds: Count = 1
    tuning: int | Literal["nested"] = 2
    trials: Count = 30
    epochs: Count = 300
    patience: Count = 100
    search: Fields = field(default_factory=dict)
    baselines: Sequence[str] = ()
    quick: Fields = field(default_factory=dict)
    sweep: Sweep | None = None
    curves: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tuning != "nested":
            check_counts(tuning=self.tuning)
        if unknown := sorted(self.quick.keys() - set(BUDGET)):
            raise ValueError(f"quick says {unknown}; it may say {', '.join(BUDGET)}.")
        if self.quick:
            # A typing error in `quick` shows here, not months later in the first run with --quick.
            replace(self, quick={}, **self.quick)
        rows = {row.name for row in self.rows}
        if unknown := sorted(set(map(str, self.baselines)) - rows):
            raise ValueError(
                f"baselines of table {self.name!r} must be rows of it; {', '.join(unknown)} are not."
            )

    @property
    def nested(self) -> bool:  # whether every reported split has settings of its own
        return self.tuning == "nested"

    def named(self, names: Sequence[str]) -> list[Row]:
        """Return the rows of these names, or the points of these curves; without names, all rows."""
        names_of_rows = dict.fromkeys(row.curve or row.name for row in self.rows)
        if unknown := sorted(set(names) - names_of_rows.keys()):
            raise ValueError(
                f"{self.name} has no row {', '.join(unknown)}; it has {', '.join(names_of_rows)}."
            )
        # In the order of the table, whatever the order of the names.
        chosen = names or names_of_rows
        return [row for row in self.rows if (row.curve or row.name) in chosen]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def axes(self, row: Row) -> Config:
        """Return the axes that are searched for a row: the axes of the table that apply to it, and its own."""
        shared = {
            path: axis
            for path, axis in self.search.items()
            if row.model is not None or path.startswith("data.")
        }
        return {
            path: axis
            for path, axis in {**shared, **row.search}.items()
            if axis is not None
        }

    def config(self, row: Row, settings: Mapping[str, Any]) -> Config:
        """Return everything that decides a training except the split, with these settings at their paths."""
        parts = {**row.optimizer, "data": with_arguments(self.data, **row.data)}
        # Only what decides this training: the digest of it is the identity of a run in results/.
        schedule: Config = {}
        if row.model is not None:
            parts["model"] = row.model
            schedule = {"epochs": self.epochs, "patience": self.patience}
        else:
            parts["predictor"] = row.predictor
        if row.attention is not None:
            schedule["attention"] = row.attention
        parts = deepcopy(parts)
        for path, value in {**row.fixed, **settings}.items():
            _put(parts, path.split("."), value, row.name)
        data = parts.pop("data")
        return {"data": data, "module": {**self.module, **parts}, **schedule}


def _put(config: Config, path: list[str], value: Any, row: str) -> None:
    *above, last = path
    for name in above:
        config = config.setdefault(name, {})
        # A path is `model.dropout`, without the level that YAML has between a class and its arguments.
        if isinstance(config, dict) and "class_path" in config:
            config = config.setdefault("init_args", {})
        if not isinstance(config, dict):
            raise ValueError(
                f"row {row!r} has no {'.'.join(path)}: {name} is {config!r}, which has no parts."
            )
    if last in config:
        name = ".".join(path)
        raise ValueError(
            f"row {row!r} gives {name} and searches it; say `{name}: null` in its search, or do not give it."
        )
    config[last] = value


def digest(config: Any) -> str:
    """Hash a configuration, except for the place of the data, to twelve hexadecimal digits."""
    config = deepcopy(config)
    # The same data in another folder are the same run.
    for place in ("root", "problem"):
        config.get("data", {}).get("init_args", {}).pop(place, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def find_table(name: str, folder: Path | None = None) -> Path:
    """Return the folder of a table: the folder below `folder`, or else the folder in this package.

    Raises:
        FileNotFoundError: neither folder exists.
    """
    others = []
    for tables in (folder, configs_folder()):
        if tables is not None:
            if (tables / name / "table.yaml").is_file():
                return tables / name
            names = [path.parent.name for path in sorted(tables.glob("*/table.yaml"))]
            others.append(f"in {tables} are {names}")
    raise FileNotFoundError(
        f"There is no table {name!r}: tables {' and '.join(others)}. A table of your own is a folder with table.yaml; "
        "give the folder that holds it as --configs."
    )


def load_table(folder: Path, root: str | None = None) -> Table:
    """Load the table of a folder, its rows in the order of `rows` in table.yaml; `root` replaces the root of its data.

    With `like: TABLE` a table may name rows of that table, next to it or in this package. It inherits the other
    values of that table, axis by axis in `search`. With `like: ROW` a row inherits from that row all but its title,
    arguments and axes. A null axis is not searched.
    """
    path = folder / "table.yaml"
    content, files = _gathered(folder)
    # All files must be listed: nobody would miss a row that is computed by nobody.
    names = content.pop("rows", [])
    rows_here = {name for name, file in files.items() if file.parent == folder}
    if not isinstance(names, list) or not rows_here <= {*map(str, names)} <= set(files):
        raise ValueError(
            f"{path} must list its rows: the other files there, {', '.join(sorted(rows_here)) or 'none'}, "
            f"and with `like` any of {', '.join(sorted(set(files) - rows_here)) or 'none'}; got {names}."
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{path}: rows must be a list with a row or more, each of them once; got {names}."
        )
    rows = [
        _build(Row, _read_row(files, name), str(files[name]), name=name)
        for name in names
    ]
    content["metric"] = _build(Metric, content.get("metric", {}), f"{path}: metric")
    curves = {}
    if content.get("sweep") is not None:
        sweep = _build(Sweep, content["sweep"], f"{path}: sweep")
        content["sweep"] = sweep
        curves = {row.name: row.title for row in rows}
        rows = [point for row in rows for point in sweep.points(row)]
    table = _build(
        Table, content, str(path), name=folder.name, rows=rows, curves=curves
    )
    if root is not None:
        table = replace(table, data=with_arguments(table.data, root=root))
    return table


def _build(kind: type[Kind], content: Any, where: str, **others: Any) -> Kind:
    """Make a dataclass of what a file says, and of others that it must not say; a ValueError begins with `where`."""
    try:
        return kind(**others, **content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _gathered(folder: Path, *below: Path) -> tuple[Config, dict[str, Path]]:
    """Return the content of table.yaml and the files of rows by name, merged into the files of the `like` table."""
    path = folder / "table.yaml"
    content = _read(path)
    rows_here = {
        path.stem: path for path in folder.glob("*.yaml") if path.stem != "table"
    }
    if "like" not in content:
        return content, rows_here
    name = str(content.pop("like"))
    try:
        like = find_table(name, folder.parent)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is like {name}, which is no other table. {error}"
        ) from error
    # Two tables that are like each other would be read for ever.
    if like in (folder, *below):
        raise ValueError(f"{path} is like {name}, which is no other table.")
    other, files = _gathered(like, folder, *below)
    search = content.get("search", {})
    if isinstance(search, dict):
        # Its own first, since axes are drawn in this order.
        content["search"] = {**search, **_over(other.get("search", {}), search)}
    return {**other, **content}, {**files, **rows_here}


def _over(base: Any, changes: Any) -> Any:
    """Return the fields of two mappings, of which the second wins; the fields of `init_args` are merged one by one."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes  # which is refused unless it is a mapping
    both = {**base, **changes}
    if "init_args" in base.keys() & changes.keys():
        both["init_args"] = _over(base["init_args"], changes["init_args"])
    return both


def with_arguments(config: Config, **arguments: Any) -> Config:
    return {**config, "init_args": {**config.get("init_args", {}), **arguments}}


def _read(path: Path) -> Config:
    try:
        # Plain values only: a table is data until one of its classes is made.
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no YAML: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold names and values; got {describe(content)}.")
    return content


def _read_row(files: Mapping[str, Path], name: str, *below: str) -> Config:
    content = _read(files[name])
    if "like" not in content:
        return content
    if (like := str(content.pop("like"))) not in files or like in (name, *below):
        raise ValueError(
            f"{files[name]} is like {like}, which is no other row of this table."
        )
    other = _read_row(files, like, name, *below)
    row = {**other, **content}
    for part in _INHERITED & content.keys() & other.keys():
        row[part] = _over(other[part], content[part])
    return row


# What a row takes over from the row that it is like, unless it gives the same name.
_INHERITED = {"model", "predictor", "optimizer", "data", "search", "fixed"}

Record = dict[str, Any]


def budget(table: Table) -> Record:
    """Return the line of results.jsonl that says with how much of everything the results of a table were made."""
    # With the names that every line has.
    line = {"kind": "budget", "table": table.name, "row": None, "seconds": 0.0}
    return line | {name: getattr(table, name) for name in BUDGET}


def as_made(table: Table, records: Iterable[Record], path: Path) -> Table:
    """Return the table with the budget of its results: options of `reproduce` may have replaced table.yaml's."""
    for record in records:
        if record["kind"] == "budget":
            values = {name: record[name] for name in BUDGET if name in record}
            try:
                return replace(table, **values)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: {error} Make the results again, or delete the file."
                ) from error
    return table


class Records:
    """The lines of a file that only one process appends to; an unfinished last line is cut off."""

    def __init__(self, path: Path, needed: str = "") -> None:
        self.path = path
        content = b""
        if path.is_file():
            content = path.read_bytes()
        # A kill in the middle of a write leaves a line without an end; what is appended must not continue it.
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            replace_file(path, complete)
        self.lines = parsed(complete, path, needed)

    def append(self, record: Record) -> None:
        """Append a line, which is on the disk when this returns."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        # Without a buffer a full disk shows in the number of bytes that were written.
        with self.path.open("ab", buffering=0) as file:
            if file.write(line) < len(line):
                message = f"{self.path} cannot be written: its disk is full. Make room, and start again"
                raise OSError(errno.ENOSPC, message)
            # What counts as done must outlive a loss of power.
            os.fsync(file)
        self.lines.append(record)


def parsed(content: bytes, path: Path, needed: str = "") -> list[Record]:
    """Parse the lines of a file of results; a ValueError names a line that is not valid, or lacks what is needed."""
    records = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Bytes that are not UTF-8 raise a ValueError too.
            raise ValueError(
                f"{path}, line {number} is no JSON: {error}. Delete that line, or the file."
            ) from error
        if not isinstance(record, dict) or not record.keys() >= set(needed.split()):
            raise ValueError(
                f"{path}, line {number} holds no result with {needed or 'names'}. Delete it, or the file."
            )
        records.append(record)
    return records


def write_records(records: Iterable[Record], path: Path) -> None:
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
    replace_file(path, "".join(lines).encode())
