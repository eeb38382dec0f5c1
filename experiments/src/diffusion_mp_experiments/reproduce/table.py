"""A table of results as files: `configs/<table>/table.yaml` says how it is made, every other YAML there is a row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from diffusion_mp.errors import check_choice, check_counts
from diffusion_mp_experiments.reproduce.space import Space

Config = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """What is reported: the module logs `val_<name>` and `test_<name>`; `title` and `scale` are for readers."""

    name: str = "acc"
    mode: Literal["max", "min"] = "max"
    title: str = "accuracy in %"
    scale: float = 100.0

    @property
    def sign(self) -> float:
        """1 where more is better, −1 where less is."""
        return 1.0 if self.mode == "max" else -1.0


@dataclass(frozen=True)
class Row:
    """A model, or a predictor that is not trained by epochs; what else its module is told; what is searched.

    Attributes:
        model, predictor: `class_path` and `init_args` of one of them; the width of the features and the number of
            classes are filled in.
        optimizer: further arguments of the LightningModule (lr, weight_decay, optimizer).
        data: further arguments of the data module.
        attention: "identity" or "uniform": the model with its attention replaced, trained and tested so.
        search: axes of this row beside those of the table; one of the table that is null here is left out.
        fixed: values by the paths of axes, which stand where a search would put them.
        curve: in a table with a sweep the row that this is a point of.
    """

    name: str
    title: str
    model: Config | None = None
    predictor: Config | None = None
    optimizer: Config = field(default_factory=dict)
    data: Config = field(default_factory=dict)
    attention: Literal["identity", "uniform"] | None = None
    search: Config = field(default_factory=dict)
    fixed: Config = field(default_factory=dict)
    curve: str = ""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.predictor is None):
            raise ValueError(f"row {self.name!r} must have either a model or a predictor.")
        if self.attention is not None:
            check_choice(self.attention, "attention", ["identity", "uniform"])


@dataclass(frozen=True)
class Sweep:
    """One axis along which every row of a table is trained, so that rows are curves.

    Attributes:
        path: what is set, as a path of a search.
        values: to what, in the order of the curve.
        title: for readers.
    """

    path: str
    values: list[float | str | None]
    title: str

    def points(self, row: Row) -> Iterator[Row]:
        """The row at every value."""
        for value in self.values:
            told = {**row.fixed, self.path: value}
            title = f"{row.title}, {self.title} {value}"
            yield replace(row, name=f"{row.name}@{value}", title=title, fixed=told, curve=row.name)


@dataclass(frozen=True)
class Table:
    """How a table is made; see docs/results.md for what the numbers mean.

    Attributes:
        data: `class_path` and `init_args` of a LightningDataModule that takes `split`, and `tuning` unless nested.
        module: further arguments of the LightningModule that trains, such as its metric.
        splits, seeds: what is reported: every seed on every split.
        tuning: how many splits the settings are chosen on; "nested": each reported split by its own validation nodes.
        trials: settings that are tried for every row, drawn at random from one declared space.
        epochs, patience: at most so many, and so many without a better validation score.
        search: the axes that all models have in common; predictors have those of the data module (`data.k`) too.
        baselines: rows that the others are compared with, split by split.
        sweep: an axis that makes every row a curve.
        curves: with a sweep, the title of every curve.
    """

    name: str
    title: str
    data: Config
    rows: tuple[Row, ...]
    metric: Metric = Metric()
    module: Config = field(default_factory=dict)
    splits: int = 10
    seeds: int = 1
    tuning: int | Literal["nested"] = 2
    trials: int = 30
    epochs: int = 300
    patience: int = 100
    search: Config = field(default_factory=dict)
    baselines: tuple[str, ...] = ()
    quick: Config = field(default_factory=dict)
    sweep: Sweep | None = None
    curves: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts(splits=self.splits, seeds=self.seeds, trials=self.trials)
        check_counts(epochs=self.epochs, patience=self.patience)
        if self.tuning != "nested":
            check_counts(tuning=self.tuning)
        if not self.quick.keys() <= self.__dataclass_fields__.keys():
            raise ValueError(f"quick says how much less there is of what a table has; got {self.quick}.")
        unknown = sorted(set(self.baselines) - {row.name for row in self.rows})
        if unknown:
            raise ValueError(f"baselines of table {self.name!r} must be rows of it; {', '.join(unknown)} are not.")

    @property
    def nested(self) -> bool:
        """Whether every reported split has settings of its own."""
        return self.tuning == "nested"

    def named(self, names: Sequence[str]) -> list[Row]:
        """The rows of these names, or the points of these curves; all of them without names.

        Raises:
            ValueError: no such row.
        """
        known = dict.fromkeys(row.curve or row.name for row in self.rows)
        if unknown := sorted(set(names) - known.keys()):
            raise ValueError(f"{self.name} has no row {', '.join(unknown)}; it has {', '.join(known)}.")
        return [row for row in self.rows if not names or (row.curve or row.name) in names]

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def space(self, row: Row) -> Space:
        """What is searched for a row: its own axes, and those of the table that it has in common with the others."""
        shared = {path: axis for path, axis in self.search.items() if row.model is not None or path.startswith("data.")}
        axes = {**shared, **row.search}
        return Space({path: axis for path, axis in axes.items() if axis is not None})

    def quickly(self) -> Table:
        """The same in a few minutes, by what `quick` says."""
        return replace(self, **self.quick)

    def config(self, row: Row, settings: Mapping[str, Any]) -> Config:
        """All that decides a training but the split: what is built, with these settings in their places.

        Raises:
            ValueError: a setting that the row itself has fixed.
        """
        kind = "model" if row.model is not None else "predictor"
        told = deepcopy({**row.optimizer, kind: row.model or row.predictor, "data": _with(self.data, **row.data)})
        for path, value in {**row.fixed, **settings}.items():
            _put(told, path.split("."), value, row.name)
        schedule = {"epochs": self.epochs, "patience": self.patience} if row.model is not None else {}
        ablation = {} if row.attention is None else {"attention": row.attention}
        return {"data": told.pop("data"), "module": {**self.module, **told}, **schedule, **ablation}


def _put(config: Config, path: list[str], value: Any, row: str) -> None:
    *above, last = path
    for name in above:
        config = config.setdefault(name, {})
        if "class_path" in config:
            config = config.setdefault("init_args", {})
    if last in config:
        raise ValueError(
            f"row {row!r} gives {'.'.join(path)} and searches it; say `{'.'.join(path)}: null` in its search, or "
            "do not give it."
        )
    config[last] = value


def digest(config: Any) -> str:
    """Twelve letters that differ wherever anything in a configuration does, but for where the data lie."""
    config = deepcopy(config)
    config.get("data", {}).get("init_args", {}).pop("root", None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def load_table(folder: Path, root: str | None = None) -> Table:
    """The table of a folder, its rows in the order of `rows` in table.yaml; `root` is where its data lie instead.

    With `like: TABLE` it may name rows of that other one, and what table.yaml does not say is as it is there, axis by
    axis in `search`. With `like: ROW` a row is that other one, but for its title, its own arguments and its own axes.
    An axis that is null is not searched.

    Raises:
        FileNotFoundError: no such table; the sentence names those that there are.
        ValueError: a file that says what no table or row has.
    """
    if not (folder / "table.yaml").is_file():
        found = sorted(path.parent.name for path in folder.parent.glob("*/table.yaml"))
        raise FileNotFoundError(
            f"There is no table {folder.name!r}: {folder / 'table.yaml'} does not exist. "
            + (f"Tables there are {', '.join(found)}." if found else "Run this in a clone, or give its --configs.")
        )
    content, files = _gathered(folder)
    names, own = content.pop("rows", []), {name for name, path in files.items() if path.parent == folder}
    if not isinstance(names, list) or not own <= set(names) <= set(files):
        raise ValueError(
            f"{folder / 'table.yaml'} must list its rows: the other files there, {', '.join(sorted(own)) or 'none'}, "
            f"and with `like` any of {', '.join(sorted(set(files) - own)) or 'none'}; got {names}."
        )
    rows = tuple(_made(Row, {"name": name, **_read_row(files, name)}, files[name]) for name in names)
    content["metric"] = _made(Metric, content.get("metric", {}), folder / "table.yaml")
    content["baselines"] = tuple(content.get("baselines", ()))
    if (sweep := content.get("sweep")) is not None:
        content["sweep"] = sweep = _made(Sweep, sweep, folder / "table.yaml")
        content["curves"] = {row.name: row.title for row in rows}
        rows = tuple(point for row in rows for point in sweep.points(row))
    table = _made(Table, {"name": folder.name, "rows": rows, **content}, folder / "table.yaml")
    return table if root is None else replace(table, data=_with(table.data, root=root))


def _gathered(folder: Path) -> tuple[Config, dict[str, Path]]:
    """What table.yaml says and the files of rows by name, after those of the table that it is like."""
    content = _read(folder / "table.yaml")
    own = {path.stem: path for path in folder.glob("*.yaml") if path.stem != "table"}
    if "like" not in content:
        return content, own
    other, files = _gathered(folder.parent / content.pop("like"))
    told = content.get("search", {})
    axes = {**told, **other.get("search", {}), **told}  # its own first: their order is that in which they are drawn
    return {**other, **content, "search": axes}, {**files, **own}


def _with(config: Config, **arguments: Any) -> Config:
    return {**config, "init_args": {**config.get("init_args", {}), **arguments}}


def _read(path: Path) -> Config:
    content = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold names and values; got {type(content).__name__}.")
    return content


def _read_row(files: Mapping[str, Path], name: str) -> Config:
    own = _read(files[name])
    if "like" not in own:
        return own
    if (like := own.pop("like")) not in files or like == name:
        raise ValueError(f"{files[name]} is like {like}, which is no other row of this table.")
    other = _read_row(files, like)
    row = {**other, **own}
    for part in {"model", "predictor"} & own.keys() & other.keys():
        arguments = {**other[part].get("init_args", {}), **own[part].get("init_args", {})}
        row[part] = {**other[part], **own[part], "init_args": arguments}
    for part in ("optimizer", "data", "search", "fixed"):
        row[part] = {**other.get(part, {}), **own.get(part, {})}
    return row


def _made(kind: Any, content: Config, path: Path) -> Any:
    fields = kind.__dataclass_fields__
    unknown = sorted(set(content) - set(fields))
    if unknown:
        raise ValueError(f"{path} says {', '.join(unknown)}; known are {', '.join(fields)}.")
    try:
        return kind(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
