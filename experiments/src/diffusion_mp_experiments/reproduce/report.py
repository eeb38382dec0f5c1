"""What the records of a table come to: means over splits, differences split by split, and their text in Markdown."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_mp_experiments.reproduce.table import Record, Sweep, Table
from diffusion_mp_experiments.reproduce.training import MEASURES

Estimate = tuple[float, float]


@dataclass(frozen=True)
class Line:
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


def lines(table: Table, records: Sequence[Record]) -> list[Line]:
    """What every row came to, compared with the baselines of the table, and with its GCN for the picture of all."""
    runs: dict[str, list[Record]] = {row.name: [] for row in table.rows}
    searches: dict[str, list[Record]] = {row.name: [] for row in table.rows}
    for record in records:
        by_row = {"run": runs, "search": searches}.get(record["kind"], {})
        if record["row"] in by_row:
            by_row[record["row"]].append(record)
    tests = {name: _by_split(table, mine, "test") for name, mine in runs.items()}
    compared = {*table.baselines, "gcn"} & tests.keys()
    result = []
    for row in table.rows:
        mine = runs[row.name]
        search = searches[row.name]
        test = tests[row.name]
        if not mine:
            continue
        ahead = {
            name: _difference(table, test, tests[name])
            for name in compared
            if name != row.name
        }
        line = Line(
            row.name,
            row.title,
            estimate(list(test.values())),
            statistics.fmean(_by_split(table, mine, "validation").values()),
            {name: difference for name, difference in ahead.items() if difference},
            _ablated(table, mine),
            _states(mine),
            len({record["split"] for record in mine}),
            max((len(record["trials"]) for record in search), default=0),
            sum(record["seconds"] for record in [*mine, *search]),
        )
        result.append(line)
    return result


def _by_split(table: Table, runs: Sequence[Record], name: str) -> dict[int, float]:
    """The mean over the seeds of every split, or with one split every seed; a run that diverged counts as the worst."""
    values: dict[int, list[float]] = {}
    worst = 0.0 if table.metric.mode == "max" else math.inf
    for run in runs:
        # With one split, seeds are what differs from run to run.
        unit = run["seed"] if table.splits == 1 else run["split"]
        values.setdefault(unit, []).append(worst if run[name] is None else run[name])
    return {
        unit: table.metric.scale * statistics.fmean(found)
        for unit, found in sorted(values.items())
    }


def _difference(
    table: Table, one: Mapping[int, float], other: Mapping[int, float]
) -> Estimate | None:
    """How far one is ahead on the splits (or seeds) that both have: mean and standard error."""
    pairs = [
        table.metric.sign * (one[unit] - other[unit]) for unit in one if unit in other
    ]
    if not pairs:
        return None
    mean, deviation = estimate(pairs)
    return mean, deviation / math.sqrt(len(pairs))


def _ablated(table: Table, runs: Sequence[Record]) -> dict[str, float]:
    values = _by_name(run["ablated"] for run in runs)
    return {
        name: table.metric.scale * statistics.fmean(each)
        for name, each in values.items()
    }


def _states(runs: Sequence[Record]) -> dict[str, list[float]]:
    """The mean over runs of every measure, state by state; none where runs differ in their number of states."""
    return {
        name: [statistics.fmean(each) for each in zip(*states, strict=True)]
        for name, states in _by_name(run.get("states", {}) for run in runs).items()
        if len(set(map(len, states))) == 1
    }


def _by_name(mappings: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """All values of every name, but None."""
    values: dict[str, list[Any]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return values


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard deviation (n − 1), nan for one value and beside an infinite mean."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) if len(values) > 1 and math.isfinite(
        mean
    ) else math.nan


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]
    )


def markdown(table: Table, lines: Sequence[Line]) -> str:
    digits = table.metric.digits
    baselines = [
        name for name in table.baselines if any(name == line.row for line in lines)
    ]
    ablations = list(dict.fromkeys(name for line in lines for name in line.ablated))
    ahead = [f"ahead of {table.row(name).title}" for name in baselines]
    rows = []
    for line in lines:
        differences = [
            _signed(line.differences.get(name), digits) for name in baselines
        ]
        ablated = [
            f"{line.ablated[name]:.{digits}f}" if name in line.ablated else ""
            for name in ablations
        ]
        others = [f"{line.validation:.{digits}f}", str(line.trials)]
        rows.append(
            [line.title, _spread(line.score, digits), *differences, *ablated, *others]
        )
    return _grid(
        ["", table.metric.title, *ahead, *ablations, "validation", "trials"], rows
    )


def points(
    table: Table, lines: Sequence[Line]
) -> tuple[Sweep, list[tuple[str, dict[int, Line]]]]:
    """The sweep of a table that has one, the title of every curve, and its lines by the place of the value."""
    assert table.sweep is not None
    by_name = {line.row: line for line in lines}
    curves = []
    for curve, title in table.curves.items():
        names = [row.name for row in table.rows if row.curve == curve]
        curves.append(
            (
                title,
                {
                    position: by_name[name]
                    for position, name in enumerate(names)
                    if name in by_name
                },
            )
        )
    return table.sweep, curves


def curves(table: Table, lines: Sequence[Line]) -> str:
    """A table with a sweep: a row for every curve, a column for every value; then measures of the last states."""
    (sweep, lines_of), title = points(table, lines), table.metric.title

    def grid(cell: Callable[[Line], str]) -> str:
        places = range(len(sweep.values))
        rows = [
            [curve, *(cell(at[k]) if k in at else "" for k in places)]
            for curve, at in lines_of
            if at
        ]
        return _grid([sweep.title, *map(str, sweep.values)], rows)

    parts = [
        f"{title[:1].upper() + title[1:]}:\n\n{grid(lambda line: _spread(line.score, table.metric.digits))}"
    ]
    for name in ("spread", "rank"):
        if any(line.states.get(name) for line in lines):

            def last_state(line: Line, name: str = name) -> str:
                states = line.states.get(name)
                return f"{states[-1]:.3g}" if states else ""

            last = grid(last_state)
            parts.append(
                f"Last state of the trained model, {MEASURES[name]}:\n\n{last}"
            )
    return "\n\n".join(parts)


def _spread(value: Estimate, digits: int) -> str:
    return f"{value[0]:.{digits}f}" + (
        "" if math.isnan(value[1]) else f" ± {value[1]:.{digits}f}"
    )


def _signed(value: Estimate | None, digits: int) -> str:
    if value is None:
        return ""
    return (
        f"{'+' if value[0] >= 0 else '−'}{_spread((abs(value[0]), value[1]), digits)}"
    )


def section(table: Table, lines: Sequence[Line], notes: str = "") -> str:
    splits = max(line.splits for line in lines)
    hours = sum(line.seconds for line in lines) / 3600
    if max(line.trials for line in lines) == 1:
        tuned = "with fixed settings"
    elif table.nested:
        tuned = "each tuned on its own validation nodes"
    else:
        tuned = f"tuned on {_counted(table.tuning, 'other split')}"
    if table.seeds == 1:
        seeds = ""
    else:
        seeds = f", {table.seeds} seeds on {'it' if splits == 1 else 'each'}"
    how = f"{_counted(splits, 'split')}{seeds}, {tuned}. At most {table.epochs} epochs, stopped after {table.patience} "
    how += f"without a better validation score. Computing time: {hours:.1f} core hours."
    rows = {line.row for line in lines}
    if missing := [row.title for row in table.rows if row.name not in rows]:
        how += f" Not computed yet: {'; '.join(missing)}."
    shown = markdown(table, lines) if table.sweep is None else curves(table, lines)
    return "\n".join(
        part
        for part in [f"## {table.title}\n", notes, how + "\n", shown + "\n"]
        if part
    )


def chosen(table: Table, records: Iterable[Record]) -> str:
    """What the search of every row has chosen, in Markdown; with nested tuning that is in `results/` only."""
    sentences = []
    for record in records:
        if (
            record["kind"] == "search"
            and record["split"] is None
            and record["trials"][0]["settings"]
        ):
            tried = [
                trial for trial in record["trials"] if trial["value"] is not None
            ] or record["trials"]
            settings = max(tried, key=lambda trial: trial["value"])["settings"].items()
            values = (
                f"{path} {format(value, '.3g' if isinstance(value, float) else '')}"
                for path, value in settings
            )
            sentences.append(f"- {table.row(record['row']).title}: {', '.join(values)}")
    return (
        "\n".join(["Settings chosen by the searches:\n", *sentences])
        if sentences
        else ""
    )


def card(table: Table, record: Record, flags: str) -> str:
    """What there is to know of the model of a run that is saved, in Markdown; with these flags it is made again."""
    row = table.row(record["row"])
    metric = table.metric
    data = table.config(row, record["settings"])["data"]
    options = {
        name: value for name, value in data["init_args"].items() if name != "root"
    }
    values = (record[name] for name in ("test", "validation"))
    score, validation = (
        "none" if v is None else f"{metric.scale * v:.{metric.digits}f}" for v in values
    )
    facts = [
        (
            "data",
            f"`{data['class_path'].rpartition('.')[2]}`, {options}, hash {record['data']}",
        ),
        ("settings", f"hash {record['config']}"),
        ("split, seed", f"{record['split']}, {record['seed']}"),
        (f"{metric.title}, test", score),
        (f"{metric.title}, validation", f"{validation}, in epoch {record['epoch']}"),
        (
            "versions",
            ", ".join(
                f"{name} {version}" for name, version in record["versions"].items()
            ),
        ),
        (
            "made by",
            f"`diffusion-mp reproduce {table.name} --only {row.curve or row.name} {flags}`",
        ),
    ]
    return f"# {table.title}: {row.title}\n\n{_grid(['', ''], facts)}\n"


def _counted(number: object, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
