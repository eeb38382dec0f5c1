"""Makes a table: searches settings row by row, trains with the best ones on all splits, and records every run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from diffusion_mp_experiments.reproduce.records import Record, Records, write
from diffusion_mp_experiments.reproduce.search import Search, open_storage
from diffusion_mp_experiments.reproduce.table import Row, Table, digest
from diffusion_mp_experiments.reproduce.training import train
from diffusion_mp_experiments.train.checkpoints import check_writable
from diffusion_mp_experiments.train.many_runs import each

Key = tuple[str, str, int, int, bool]


@dataclass(frozen=True)
class Run:
    row: str
    settings: dict[str, Any]
    config: dict[str, Any]
    metric: str
    split: int
    seed: int
    tuning: bool

    @property
    def key(self) -> Key:
        return self.row, digest(self.config), self.split, self.seed, self.tuning


def key(record: Record) -> Key:
    """What identifies the run that made a record."""
    return record["row"], record["config"], record["split"], record["seed"], record["tuning"]


def reproduce(table: Table, out: Path, jobs: int = 1, only: Sequence[str] = ()) -> list[Record]:
    """Make the rows of a table (`only` these), or continue what was stopped; return the lines of `results.jsonl`.

    The folder `out` gets `runs.jsonl`, a line for every training that has ended, `search.log`, Optuna's trials, and in
    the end `results.jsonl`: of every row that is complete its reported runs and its search. `jobs` is the number of
    processes, of one thread each. ValueError if another process works in the folder.
    """
    rows = table.named(only)
    check_writable(out)
    try:
        with FileLock(out / "lock", timeout=0):
            return _Harness(table, out).make(rows, jobs)
    except Timeout as error:
        raise ValueError(f"Another process is at work in {out}; wait for it, or give another --out.") from error


class _Harness:
    def __init__(self, table: Table, out: Path) -> None:
        self.table, self.out, self.records = table, out, Records(out / "runs.jsonl")
        self.done: dict[Key, Record] = {key(record): record for record in self.records.lines}
        self.storage = open_storage(out / "search.log")
        self.found: dict[str, list[Search]] = {}

    def searches(self, row: Row) -> list[Search]:
        if row.name not in self.found:
            splits = range(self.table.splits) if self.table.nested else [None]
            self.found[row.name] = [Search(self.table, row, self.storage, split) for split in splits]
        return self.found[row.name]

    def make(self, rows: Sequence[Row], jobs: int) -> list[Record]:
        trials = [trial for row in rows for search in self.searches(row) for trial in self.trials(search)]
        # By trial and then by row: whenever it is stopped, all rows have had nearly the same budget.
        trials.sort(key=lambda trial: trial[0])
        total = len(trials) + len(rows) * self.table.splits * self.table.seeds
        with tqdm(total=total, unit="run", desc=self.table.name, smoothing=0) as bar:
            self.run([run for _, run in trials], jobs, bar)
            for row in rows:
                for search in self.searches(row):
                    search.tell(self.values(search))
            self.run([run for row in rows for run in self.reported(row)], jobs, bar)
        results = [record for row in self.table.rows for record in self.results(row)]
        write(results, self.out / "results.jsonl")
        return results

    def trials(self, search: Search) -> Iterator[tuple[int, Run]]:
        for number, settings in enumerate(search.settings):
            for split in search.splits:
                yield number, self.planned(search.row, settings, split, 0, tuning=True)

    def reported(self, row: Row) -> Iterator[Run]:
        searches = self.searches(row)
        for split in range(self.table.splits):
            search = searches[split if self.table.nested else 0]
            settings = search.best(self.values(search))
            yield from (self.planned(row, settings, split, seed, tuning=False) for seed in range(self.table.seeds))

    def planned(self, row: Row, settings: dict[str, Any], split: int, seed: int, tuning: bool) -> Run:
        config = self.table.config(row, settings)
        return Run(row.name, settings, config, self.table.metric.name, split, seed, tuning)

    def run(self, runs: Sequence[Run], jobs: int, bar: tqdm[Any]) -> None:
        left = {run.key: (run,) for run in runs if run.key not in self.done}
        bar.n += len(runs) - len(left)
        bar.initial += len(runs) - len(left)  # they do not count in the estimate of the time left
        bar.refresh()
        for (run,), result in each(_train, list(left.values()), jobs):
            record = {"table": self.table.name, "row": run.row, "config": digest(run.config)}
            record |= {"split": run.split, "seed": run.seed, "tuning": run.tuning, "settings": run.settings, **result}
            self.records.append(record)
            self.done[run.key] = record
            bar.set_postfix_str(run.row, refresh=False)
            bar.update()

    def values(self, search: Search) -> dict[int, float | None]:
        """The mean validation metric, higher being better, of every trial that is done; None if it diverged."""
        found: dict[int, list[float | None]] = {}
        for number, run in self.trials(search):
            if run.key in self.done:
                found.setdefault(number, []).append(self.done[run.key]["validation"])
        means = {}
        for number, values in found.items():
            known = [value for value in values if value is not None]
            if len(values) == len(search.splits):
                means[number] = self.table.metric.sign * statistics.fmean(known) if known == values else None
        return means

    def results(self, row: Row) -> list[Record]:
        """The lines of a row, or none while it is incomplete."""
        if not any(record["row"] == row.name for record in self.records.lines):
            return []
        searches = [(search, self.values(search)) for search in self.searches(row)]
        if any(search.splits and len(values) < len(search.settings) for search, values in searches):
            return []
        runs = [self.done.get(run.key) for run in self.reported(row)]
        if None in runs:
            return []
        lines = [{"kind": "run", **run} for run in runs if run is not None]
        for search, values in searches:
            trials = [{"settings": settings, "value": values.get(k)} for k, settings in enumerate(search.settings)]
            seconds = sum(self.done[run.key]["seconds"] for _, run in self.trials(search))
            where = {"table": self.table.name, "row": row.name, "split": search.split, "tuning": search.splits}
            lines.append({"kind": "search", **where, "trials": trials, "seconds": round(seconds, 1)})
        return lines


def _train(run: Run) -> Record:
    return train(run.config, run.metric, run.split, run.seed, run.tuning)
