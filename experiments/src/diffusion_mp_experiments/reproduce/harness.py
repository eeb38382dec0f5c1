"""Make a table: search settings row by row, train with the best settings on all splits, and record every run."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from diffusion_mp_experiments.reproduce.table import (
    Config,
    Record,
    Records,
    Row,
    Table,
    budget,
    digest,
    write_records,
)
from diffusion_mp_experiments.reproduce.training import train
from diffusion_mp_experiments.train.checkpoints import check_writable
from diffusion_mp_experiments.train.many_runs import Runner, each


def drawn(path: str, axis: Any, random: np.random.RandomState) -> Any:
    """Draw a value of the axis of a path (`model.dropout`).

    An axis is `{"choice": [...]}` of plain values, `{"uniform": [low, high]}` or `{"loguniform": [low, high]}`.
    """
    try:
        match axis:
            case {"choice": [_, *_] as choices} if _plain(choices):
                # A uniform number for each of several, as Optuna drew for the published tables.
                if len(choices) == 1:
                    return choices[0]
                return choices[int(random.uniform(size=len(choices)).argmax())]
            case {"uniform": [low, high]} if float(low) < float(high):
                return random.uniform(float(low), float(high))
            case {"loguniform": [low, high]} if 0 < float(low) < float(high):
                # YAML reads 1e-4, without a point, as text.
                return math.exp(
                    random.uniform(math.log(float(low)), math.log(float(high)))
                )
    except (TypeError, ValueError, OverflowError):
        pass  # an end that is no finite number
    raise ValueError(
        f"the axis {path} must be a choice of numbers, names or null, or uniform or loguniform with [low, high], two "
        f"numbers in order; got {axis!r}."
    )


def _plain(values: list[Any]) -> bool:
    return all(isinstance(value, bool | int | float | str | None) for value in values)


class Search(NamedTuple):
    """The trials of a row, each on all tuning splits; a row without axes has one trial and no splits.

    With nested tuning there is a search for every reported `split`, on its validation nodes.
    """

    row: Row
    split: int | None
    splits: list[int]
    settings: list[Config]

    def best(self, values: Mapping[int, float | None]) -> Config:
        if not self.splits:
            return self.settings[0]
        converged = {k: value for k, value in values.items() if value is not None}
        if not converged:
            raise ValueError(
                f"All trials of row {self.row.name!r} diverged; lower its learning rates."
            )
        # The first of equals, so that further trials that are only as good change nothing.
        return self.settings[max(converged, key=lambda k: (converged[k], -k))]


def searches(table: Table, row: Row) -> list[Search]:
    """Return the search of a row, or with nested tuning a search for every split.

    The settings of trial k are drawn with the seed k. So a search that was stopped, or gets more trials, goes on as it
    would have, and rows draw the same values of shared axes.
    """
    axes = table.axes(row)
    settings = []
    for number in range(table.trials if axes else 1):
        random = np.random.RandomState(number)
        settings.append(
            {path: drawn(path, axis, random) for path, axis in axes.items()}
        )
    # One setting needs no scores to be the best.
    tuned = len(settings) > 1
    if table.nested:
        return [
            Search(row, split, [split] * tuned, settings)
            for split in range(table.splits)
        ]
    return [Search(row, None, list(range(int(table.tuning) * tuned)), settings)]


#: A training that is planned: the beginning of its record, and its configuration.
Planned = tuple[Record, Config]


def key(record: Record) -> tuple[Any, ...]:
    """Return what identifies the run that makes a record."""
    return tuple(record[name] for name in ("row", "config", "split", "seed", "tuning"))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, in which no other process works: two would train the same runs and mix their lines.

    Raises:
        ValueError: another process is at work in it.
    """
    check_writable(folder)
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(
            f"Another process is at work in {folder}; wait for it, or give another --out."
        ) from error


def reproduce(
    table: Table,
    out: Path,
    jobs: int = 1,
    only: Sequence[str] = (),
    save: Path | None = None,
    device: str = "cpu",
) -> list[Record]:
    """Make the rows of a table, or continue what was stopped; return its lines in `results.jsonl`.

    The folder `out` gets `runs.jsonl`, a line for every training that has ended, and in the end `results.jsonl`: the
    budget, and of every complete row its reported runs and its search.

    Args:
        table: the table.
        out: the folder of the results.
        jobs: number of processes, of one thread each.
        only: names of the rows to make. By default all.
        save: a folder that gets the model of the first reported run of every row. By default no model is saved.
        device: where all processes train.

    Raises:
        ValueError: another process works in `out`.
    """
    rows = table.named(only)
    # Before hours of training, not after.
    if save is not None:
        check_writable(save)
    with alone_in(out):
        return Harness(table, out, save, device, partial(each, jobs=jobs)).make(rows)


@dataclass
class Harness:
    """The runs of a table in a folder: those that are done, and what is still to be trained.

    Args:
        table: the table.
        out: the folder of the results.
        save: a folder for models, see `reproduce`.
        device: where networks train.
        train_each: trains runs as `each` does.
        search_each: the same for the trials of searches, which may end earlier. By default `train_each`.
    """

    table: Table
    out: Path
    save: Path | None = None
    device: str = "cpu"
    train_each: Runner = each
    search_each: Runner | None = None

    def __post_init__(self) -> None:
        self.records = Records(
            self.out / "runs.jsonl",
            "row config split seed tuning validation seconds",
        )
        # A run is known by what decides its number, so a table that was changed keeps what is as before.
        self.done = {key(record): record for record in self.records.lines}

    def make(self, rows: Sequence[Row]) -> list[Record]:
        trials = [
            trial
            for row in rows
            for search in searches(self.table, row)
            for trial in self.trials(search)
        ]
        # By trial and then by row: whenever it is stopped, all rows have had nearly the same budget.
        trials.sort(key=lambda trial: trial[0])
        # Which settings will be reported is not known yet, but how many runs there will be.
        total = len(trials) + len(rows) * self.table.splits * self.table.seeds
        with tqdm(total=total, unit="run", desc=self.table.name, smoothing=0) as bar:
            searched = [planned for _, planned in trials]
            self.run(searched, self.search_each or self.train_each, bar)
            reported = [planned for row in rows for planned in self.reported(row)]
            # By split and then by row, for the same reason.
            reported.sort(key=lambda planned: planned[0]["split"])
            self.run(reported, self.train_each, bar)
        return self.write()

    def write(self) -> list[Record]:
        """Write the lines of all complete rows to `results.jsonl`, and return them."""
        results = [record for row in self.table.rows for record in self.results(row)]
        lines = [budget(self.table), *results] if results else []
        write_records(lines, self.out / "results.jsonl")
        return results

    def trials(self, search: Search) -> Iterator[tuple[int, Planned]]:
        for number, settings in enumerate(search.settings):
            for split in search.splits:
                yield number, self.planned(search.row, settings, split, 0, tuning=True)

    def reported(self, row: Row) -> Iterator[Planned]:
        for search in searches(self.table, row):
            values = self.values(search)
            # Stopped before the first trial has ended.
            if search.splits and not values:
                continue
            settings = search.best(values)
            for split in range(self.table.splits):
                if search.split in (None, split):
                    for seed in range(self.table.seeds):
                        yield self.planned(row, settings, split, seed, tuning=False)

    def planned(
        self, row: Row, settings: Config, split: int, seed: int, tuning: bool
    ) -> Planned:
        config = self.table.config(row, settings)
        record = {"table": self.table.name, "row": row.name, "config": digest(config)}
        run = {"split": split, "seed": seed, "tuning": tuning, "settings": settings}
        return record | run, config

    def run(
        self, runs: Sequence[Planned], train_each: Runner, bar: "tqdm[Any]"
    ) -> None:
        metric = self.table.metric.name
        # Trials that have drawn the same settings are one run.
        left = {
            key(planned): (planned, config, metric, saved, self.device)
            for planned, config in runs
            if (saved := self.saved(planned)) or key(planned) not in self.done
        }
        # What is done does not count in the estimate of the time left.
        bar.n += len(runs) - len(left)
        bar.initial += len(runs) - len(left)
        bar.refresh()
        for (planned, *_), result in train_each(_train, list(left.values())):
            record = planned | result
            # Otherwise it was trained again only for its model.
            if key(record) not in self.done:
                self.records.append(record)
                self.done[key(record)] = record
            # `update` draws the bar, ten times a second at most.
            bar.set_postfix_str(record["row"], refresh=False)
            bar.update()

    def saved(self, planned: Record) -> Path | None:
        """Return the file for the model of a run; None if none is to be saved, or its card says that it is there."""
        later = planned["tuning"] or planned["split"] or planned["seed"]
        if self.save is None or later or self.table.row(planned["row"]).model is None:
            return None
        path = self.save / f"{planned['row']}.safetensors"
        card = path.with_suffix(".md")
        made_by = card.read_text("utf-8") if card.is_file() else ""
        if path.exists() and planned["config"] in made_by:
            return None
        return path

    def values(self, search: Search) -> dict[int, float | None]:
        """Return the mean validation metric, higher being better, of every finished trial; None if it diverged."""
        by_trial: dict[int, list[Any]] = defaultdict(list)
        for number, record in self.tried(search):
            by_trial[number].append(record["validation"])
        means: dict[int, float | None] = {}
        for number, values in by_trial.items():
            # A trial is compared once it is done on every tuning split.
            if len(values) == len(search.splits):
                means[number] = None
                if None not in values:
                    means[number] = self.table.metric.sign * statistics.fmean(values)
        return means

    def tried(self, search: Search) -> Iterator[tuple[int, Record]]:
        """Yield the records of the trials that are done, with their numbers."""
        for number, (planned, _) in self.trials(search):
            if key(planned) in self.done:
                yield number, self.done[key(planned)]

    def results(self, row: Row, partly: bool = False) -> list[Record]:
        """Return the lines of a row, or none while the row is incomplete; `partly` returns what there is."""
        searched = [
            (search, self.values(search)) for search in searches(self.table, row)
        ]
        # Whatever is missing in a search may still be its best setting.
        if not partly and any(
            search.splits and len(values) < len(search.settings)
            for search, values in searched
        ):
            return []
        reported = [self.done.get(key(planned)) for planned, _ in self.reported(row)]
        if not partly and None in reported:
            return []
        lines = []
        for record in filter(None, reported):
            run = {"kind": "run", **record}
            run.pop("curve", None)  # a line of its own length, for pictures only
            lines.append(run)
        for search, values in searched:
            seconds = sum(record["seconds"] for _, record in self.tried(search))
            lines.append(
                {
                    "kind": "search",
                    "table": self.table.name,
                    "row": row.name,
                    "split": search.split,
                    "tuning": search.splits,
                    "trials": [
                        {"settings": settings, "value": values.get(k)}
                        for k, settings in enumerate(search.settings)
                    ],
                    "seconds": round(seconds, 1),
                }
            )
        return lines


def _train(planned: Record, config: Config, *options: Any) -> Record:
    metric, save, device = options
    run = planned["split"], planned["seed"], planned["tuning"]
    return train(config, metric, *run, save, device)
