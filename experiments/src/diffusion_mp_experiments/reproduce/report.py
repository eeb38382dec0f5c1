"""What the records of a table come to: means over splits, differences split by split, and their text in Markdown."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
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


Lines = Sequence[Line]


def lines(table: Table, records: Sequence[Record]) -> list[Line]:
    """Return what every row came to, compared with the table's baselines, and with its GCN for the overview picture."""
    # A table may have lost a row since its results were made.
    of: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        of[record["kind"], record["row"]].append(record)
    made = [row for row in table.rows if of["run", row.name]]
    tests = {row.name: _by_split(table, of["run", row.name], "test") for row in made}
    # The picture of all tables compares with the GCN, whatever a table compares with.
    compared = {*table.baselines, "gcn"} & tests.keys()
    result = []
    for row in made:
        runs = of["run", row.name]
        searches = of["search", row.name]
        test = tests[row.name]
        differences = {}
        for name in compared - {row.name}:
            units = test.keys() & tests[name].keys()
            if units:
                differences[name] = _difference(table, test, tests[name], units)
        ablated = _by_name(run["ablated"] for run in runs)
        line = Line(
            row.name,
            row.title,
            estimate(list(test.values())),
            statistics.fmean(_by_split(table, runs, "validation").values()),
            differences,
            {
                name: table.metric.scale * statistics.fmean(each)
                for name, each in ablated.items()
            },
            _states(runs),
            len({run["split"] for run in runs}),
            max((len(search["trials"]) for search in searches), default=0),
            sum(record["seconds"] for record in runs + searches),
        )
        result.append(line)
    return result


def _by_split(table: Table, runs: Sequence[Record], name: str) -> dict[int, float]:
    """Return the mean over the seeds for every split, or with one split every seed; a diverged run is the worst."""
    values: dict[int, list[float]] = defaultdict(list)
    worst = {"max": 0.0, "min": math.inf}[table.metric.mode]
    # With one split, seeds are what differs from run to run.
    unit = "seed" if table.splits == 1 else "split"
    for run in runs:
        values[run[unit]].append(worst if run[name] is None else run[name])
    return {
        number: table.metric.scale * statistics.fmean(each)
        for number, each in sorted(values.items())
    }


def _difference(
    table: Table,
    one: Mapping[int, float],
    other: Mapping[int, float],
    units: Set[int],
) -> Estimate:
    """Return how far one is ahead on these splits (or seeds): mean and standard error."""
    mean, deviation = estimate(
        [table.metric.sign * (one[unit] - other[unit]) for unit in units]
    )
    return mean, deviation / math.sqrt(len(units))


def _states(runs: Sequence[Record]) -> dict[str, list[float]]:
    """Return the mean over runs of every measure, state by state; none if runs differ in their number of states."""
    return {
        name: [statistics.fmean(each) for each in zip(*states, strict=True)]
        for name, states in _by_name(run.get("states", {}) for run in runs).items()
        if len(set(map(len, states))) == 1
    }


def _by_name(mappings: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return all values of every name, except None."""
    values: dict[str, list[Any]] = defaultdict(list)
    for mapping in mappings:
        for name, value in mapping.items():
            if value is not None:
                values[name].append(value)
    return values


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and standard deviation (n − 1); the deviation is nan for one value and for an infinite mean."""
    mean = statistics.fmean(values)
    deviation = math.nan
    if len(values) > 1 and math.isfinite(mean):
        deviation = statistics.stdev(values)
    return mean, deviation


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown(table: Table, lines: Lines) -> str:
    digits = table.metric.digits
    baselines = [
        name for name in table.baselines if any(name == line.row for line in lines)
    ]
    ablations = list(dict.fromkeys(name for line in lines for name in line.ablated))
    ahead = [f"ahead of {table.row(name).title}" for name in baselines]
    rows = []
    for line in lines:
        # Rows without an attention have nothing to replace.
        ablated = [line.ablated.get(name, math.nan) for name in ablations]
        cells = [
            line.title,
            spread(line.score, digits),
            *(signed(line.differences.get(name), digits) for name in baselines),
            *("" if math.isnan(each) else f"{each:.{digits}f}" for each in ablated),
            f"{line.validation:.{digits}f}",
            str(line.trials),
        ]
        rows.append(cells)
    return grid(
        ["", table.metric.title, *ahead, *ablations, "validation", "trials"], rows
    )


def points(
    table: Table, lines: Lines
) -> tuple[Sweep, list[tuple[str, dict[int, Line]]]]:
    """Return the sweep of a table that has one, the title of every curve, and its lines by the place of the value."""
    assert table.sweep is not None
    by_name = {line.row: line for line in lines}
    curves = []
    for curve, title in table.curves.items():
        names = [row.name for row in table.rows if row.curve == curve]
        at = {k: by_name[name] for k, name in enumerate(names) if name in by_name}
        curves.append((title, at))
    return table.sweep, curves


def last_measures(lines: Lines) -> list[str]:
    """Return the measures of last states that a sweep shows; a network of one state has none."""
    return [
        name
        for name in ("spread", "rank")
        if any(line.states.get(name) for line in lines)
    ]


def curves(table: Table, lines: Lines) -> str:
    """Return a table with a sweep: a row for every curve, a column for every value; then measures of last states."""
    sweep, lines_of = points(table, lines)
    title = table.metric.title

    def of_lines(cell: Callable[[Line], str]) -> str:
        rows = []
        for curve, at in lines_of:
            cells = [cell(at[k]) if k in at else "" for k in range(len(sweep.values))]
            if at:
                rows.append([curve, *cells])
        return grid([sweep.title, *map(str, sweep.values)], rows)

    def last_state(name: str, line: Line) -> str:
        states = line.states.get(name)
        return f"{states[-1]:.3g}" if states else ""

    scores = of_lines(lambda line: spread(line.score, table.metric.digits))
    parts = [f"{title[:1].upper() + title[1:]}:\n\n{scores}"]
    for name in last_measures(lines):
        last = of_lines(partial(last_state, name))
        parts.append(f"Last state of the trained model, {MEASURES[name]}:\n\n{last}")
    return "\n\n".join(parts)


def spread(value: Estimate, digits: int) -> str:
    mean, deviation = value
    if math.isnan(deviation):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def signed(value: Estimate | None, digits: int) -> str:
    if value is None:
        return ""
    mean, deviation = value
    # The sign of mathematics, not the hyphen.
    return f"{'+' if mean >= 0 else '−'}{spread((abs(mean), deviation), digits)}"


def section(table: Table, lines: Lines, notes: str = "") -> str:
    splits = max(line.splits for line in lines)
    hours = sum(line.seconds for line in lines) / 3600
    if max(line.trials for line in lines) == 1:
        # With one trial there was nothing to choose.
        tuned = "with fixed settings"
    elif table.nested:
        tuned = "each tuned on its own validation nodes"
    else:
        tuned = f"tuned on {_counted(table.tuning, 'other split')}"
    how = _counted(splits, "split")
    if table.seeds > 1:
        how += f", {table.seeds} seeds on {'it' if splits == 1 else 'each'}"
    sentences = [
        f"{how}, {tuned}.",
        f"At most {table.epochs} epochs, stopped after {table.patience} without a better validation score.",
        f"Computing time: {hours:.1f} core hours.",
    ]
    rows = {line.row for line in lines}
    if missing := [row.title for row in table.rows if row.name not in rows]:
        sentences.append(f"Not computed yet: {'; '.join(missing)}.")
    shown = markdown if table.sweep is None else curves
    parts = [
        f"# {table.title}\n",
        notes,
        "\n".join(sentences) + "\n",
        f"{shown(table, lines)}\n",
    ]
    return "\n".join(filter(None, parts))


def summary(tables: Iterable[tuple[Table, Lines]], folder: str, best: int = 3) -> str:
    """A row for every table: its GCN, and the rows with the best validation scores; its title links to its page."""
    rows = []
    for table, lines in tables:
        scores = {line.row: spread(line.score, table.metric.digits) for line in lines}
        ranked = sorted(lines, key=lambda line: -table.metric.sign * line.validation)
        cells = [f"{line.title}: {scores[line.row]}" for line in ranked[:best]]
        if table.sweep is not None and table.sweep.path == "data.name":
            # Scores on different data cannot be ranked.
            cells = [f"{len(table.sweep.values)} sets of data, see the page"]
        cells += [""] * (best - len(cells))
        link = f"[{table.title}]({folder}/{table.name}.md)"
        rows.append([link, table.metric.title, scores.get("gcn", ""), *cells])
    places = ["best on validation", "second", "third"]
    return grid(["table", "score", "GCN", *places[:best]], rows)


def best_trial(search: Record) -> Record:
    """Return the trial that a search has chosen; a single trial has no score, since it is the best without one."""
    scored = [trial for trial in search["trials"] if trial["value"] is not None]
    return max(scored, key=lambda trial: trial["value"], default=search["trials"][0])


def chosen(table: Table, records: Iterable[Record]) -> str:
    """Return what the search of every row has chosen, in Markdown; with nested tuning `results/` alone has it."""
    sentences = []
    for record in records:
        if record["kind"] == "search" and record["split"] is None:
            values = [
                f"{path} {format(value, '.3g' if isinstance(value, float) else '')}"
                for path, value in best_trial(record)["settings"].items()
            ]
            if values:
                title = table.row(record["row"]).title
                sentences.append(f"- {title}: {', '.join(values)}")
    if not sentences:
        return ""
    return "\n".join(["Settings chosen by the searches:\n", *sentences])


def card(table: Table, record: Record, flags: str) -> str:
    """Return the card of a saved model in Markdown: what its run was, and the flags with which it is made again."""
    row = table.row(record["row"])
    metric = table.metric
    data = table.config(row, record["settings"])["data"]
    data["init_args"].pop("root", None)
    versions = [f"{name} {version}" for name, version in record["versions"].items()]

    def score(name: str) -> str:
        value = record[name]
        if value is None:
            return "none"
        return f"{metric.scale * value:.{metric.digits}f}"

    facts = {
        "data": f"`{data['class_path'].rpartition('.')[2]}`, {data['init_args']}, hash {record['data']}",
        "settings": f"hash {record['config']}",
        "split, seed": f"{record['split']}, {record['seed']}",
        f"{metric.title}, test": score("test"),
        f"{metric.title}, validation": f"{score('validation')}, in epoch {record['epoch']}",
        "versions": ", ".join(versions),
        "made by": f"`diffusion-mp reproduce {table.name} --only {row.curve or row.name} {flags}`",
    }
    return f"# {table.title}: {row.title}\n\n{grid(['', ''], facts.items())}\n"


def _counted(number: object, what: str) -> str:
    if number == 1:
        return f"{number} {what}"
    return f"{number} {what}s"
