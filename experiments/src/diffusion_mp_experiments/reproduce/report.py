"""What the lines of a table come to: means over splits, differences split by split, and the text that says so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from diffusion_mp_experiments.reproduce.records import Record
from diffusion_mp_experiments.reproduce.states import MEASURES
from diffusion_mp_experiments.reproduce.table import Table

Estimate = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One row of a table, in the units of its metric."""

    row: str
    title: str
    score: Estimate
    validation: float
    differences: Mapping[str, Estimate]
    ablated: Mapping[str, float]
    states: Mapping[str, list[float]]
    splits: int
    trials: int
    seconds: float


def lines(table: Table, records: Iterable[Record]) -> list[Line]:
    """The rows that have results, in the order of the table."""
    runs = [record for record in records if record["kind"] == "run"]
    searches = [record for record in records if record["kind"] == "search"]
    tests = {row.name: _by_split(table, runs, row.name, "test") for row in table.rows}
    found = []
    for row in table.rows:
        test = tests[row.name]
        if not test:
            continue
        mine = [record for record in runs if record["row"] == row.name]
        search = [record for record in searches if record["row"] == row.name]
        against = {name: _differences(test, tests[name], table) for name in table.baselines if name != row.name}
        found.append(
            Line(
                row.name,
                row.title,
                estimate(list(test.values())),
                statistics.fmean(_by_split(table, runs, row.name, "validation").values()),
                {name: difference for name, difference in against.items() if difference},
                _ablated(table, mine),
                _states(mine),
                len({record["split"] for record in mine}),
                max((len(record["trials"]) for record in search), default=0),
                sum(record["seconds"] for record in [*mine, *search]),
            )
        )
    return found


def _by_split(table: Table, runs: Sequence[Record], row: str, name: str) -> dict[int, float]:
    """The mean over the seeds of every split, or with one split every seed; what diverged counts as the worst."""
    values: dict[int, list[float]] = {}
    for run in runs:
        if run["row"] == row:
            worst = 0.0 if table.metric.mode == "max" else math.inf
            unit = run["seed"] if table.splits == 1 else run["split"]
            values.setdefault(unit, []).append(worst if run[name] is None else run[name])
    return {unit: table.metric.scale * statistics.fmean(found) for unit, found in sorted(values.items())}


def _differences(one: Mapping[int, float], other: Mapping[int, float], table: Table) -> Estimate | None:
    """How far one is ahead, on the splits (or seeds) that both have: mean and standard error."""
    pairs = [table.metric.sign * (one[unit] - other[unit]) for unit in one if unit in other]
    if not pairs:
        return None
    mean, deviation = estimate(pairs)
    return mean, deviation / math.sqrt(len(pairs))


def _ablated(table: Table, runs: Sequence[Record]) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run["ablated"])
    values = {name: [run["ablated"].get(name) for run in runs] for name in names}
    return {
        name: table.metric.scale * statistics.fmean(known)
        for name, found in values.items()
        if (known := [value for value in found if value is not None])
    }


def _states(runs: Sequence[Record]) -> dict[str, list[float]]:
    """The mean over runs of every measure, state by state; nothing where runs differ in their number of states."""
    known = [run["states"] for run in runs if run.get("states")]
    names = dict.fromkeys(name for states in known for name in states)
    values = {name: [states[name] for states in known if name in states] for name in names}
    alike = {name: found for name, found in values.items() if len({len(states) for states in found}) == 1}
    return {name: [statistics.fmean(each) for each in zip(*found, strict=True)] for name, found in alike.items()}


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard deviation (n − 1), nan for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def markdown(table: Table, found: Sequence[Line]) -> str:
    """The table as it is printed and reported."""
    digits = 1 if table.metric.scale == 100 else 3
    titles = {row.name: row.title for row in table.rows}
    baselines = [name for name in table.baselines if any(name == line.row for line in found)]
    ablations = list(dict.fromkeys(name for line in found for name in line.ablated))
    head = [
        "",
        table.metric.title,
        *(f"ahead of {titles[name]}" for name in baselines),
        *ablations,
        "validation",
        "trials",
    ]
    rows = [head, ["---"] * len(head)]
    for line in found:
        ahead = [_signed(line.differences.get(name), digits) for name in baselines]
        ablated = [f"{line.ablated[name]:.{digits}f}" if name in line.ablated else "" for name in ablations]
        score, trials = _spread(line.score, digits), str(line.trials)
        rows.append([line.title, score, *ahead, *ablated, f"{line.validation:.{digits}f}", trials])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def curves(table: Table, found: Sequence[Line]) -> str:
    """A table with a sweep: a row for every curve, a column for every value; then measures of the last states."""
    assert table.sweep is not None
    digits, by_name = 1 if table.metric.scale == 100 else 3, {line.row: line for line in found}
    head = "| " + " | ".join([table.sweep.title, *map(str, table.sweep.values)]) + " |"
    rule = "|" + " --- |" * (1 + len(table.sweep.values))

    def matrix(cell: Callable[[Line], str]) -> str:
        rows = []
        for curve, title in table.curves.items():
            points = [by_name.get(row.name) for row in table.rows if row.curve == curve]
            if any(points):
                rows.append([title, *("" if point is None else cell(point) for point in points)])
        return "\n".join([head, rule, *("| " + " | ".join(cells) + " |" for cells in rows)])

    metric = table.metric.title[:1].upper() + table.metric.title[1:]
    parts = [f"{metric}:\n\n{matrix(lambda line: _spread(line.score, digits))}"]
    for name in ("spread", "rank"):
        if any(line.states.get(name) for line in found):
            told = matrix(partial(_last, name))
            parts.append(f"Of the last state of the trained model {MEASURES[name]}:\n\n{told}")
    return "\n\n".join(parts)


def _last(name: str, line: Line) -> str:
    return f"{line.states[name][-1]:.3g}" if line.states.get(name) else ""


def _spread(value: Estimate, digits: int) -> str:
    return f"{value[0]:.{digits}f}" + ("" if math.isnan(value[1]) else f" ± {value[1]:.{digits}f}")


def _signed(value: Estimate | None, digits: int) -> str:
    return "" if value is None else f"{'+' if value[0] >= 0 else '−'}{_spread((abs(value[0]), value[1]), digits)}"


def section(table: Table, found: Sequence[Line], notes: str = "") -> str:
    """A table with how it was made, in Markdown."""
    splits, hours = max(line.splits for line in found), sum(line.seconds for line in found) / 3600
    if max(line.trials for line in found) == 1:
        tuned = "with the settings that its configuration names"
    elif table.nested:
        tuned = "each tuned on its own validation nodes"
    else:
        tuned = f"tuned on {_counted(table.tuning, 'other')}"
    seeds = "" if table.seeds == 1 else f", {table.seeds} seeds on {'it' if splits == 1 else 'each'}"
    how = (
        f"{_counted(splits, 'split')}{seeds}, {tuned}; at most {table.epochs} epochs, stopped after {table.patience} "
        f"without a better validation score. All of it took {hours:.1f} hours of one core."
    )
    made = {line.row for line in found}
    if missing := [row.title for row in table.rows if row.name not in made]:
        how += f" Not made yet: {'; '.join(missing)}."
    shown = markdown(table, found) if table.sweep is None else curves(table, found)
    parts = [f"## {table.title}\n", notes, how + "\n", shown + "\n"]
    return "\n".join(part for part in parts if part)


def chosen(table: Table, records: Iterable[Record]) -> str:
    """What the search of every row has chosen, in Markdown; with nested tuning that is in `results/` only."""
    found = ["What the searches chose:\n"]
    titles = {row.name: row.title for row in table.rows}
    for record in records:
        if record["kind"] == "search" and record["split"] is None and record["trials"][0]["settings"]:
            tried = [trial for trial in record["trials"] if trial["value"] is not None] or record["trials"]
            settings = max(tried, key=lambda trial: trial["value"])["settings"]
            told = (
                f"{path} {value:.3g}" if isinstance(value, float) else f"{path} {value}"
                for path, value in settings.items()
            )
            found.append(f"- {titles[record['row']]}: {', '.join(told)}")
    return "\n".join(found) if len(found) > 1 else ""


def _counted(number: object, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
