"""Pictures of tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from diffusion_mp_experiments.reproduce.records import Record
from diffusion_mp_experiments.reproduce.report import Line
from diffusion_mp_experiments.reproduce.states import MEASURES
from diffusion_mp_experiments.reproduce.table import Table

# Of Okabe and Ito, told apart by everybody; with more curves than colours the lines differ, too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLES = ("-", "--")


def draw_differences(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """How far each row is ahead of the baselines, with twice the standard error."""
    titles = {row.name: row.title for row in table.rows}
    baselines = [name for name in table.baselines if any(name in line.differences for line in lines)]
    figure = Figure(figsize=(9, 1.5 + 0.32 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for k, name in enumerate(baselines):
        shown = [(place, line.differences[name]) for place, line in enumerate(lines) if name in line.differences]
        axes.errorbar(
            [mean for _, (mean, _) in shown],
            [place + 0.18 * (k - (len(baselines) - 1) / 2) for place, _ in shown],
            xerr=[2 * error for _, (_, error) in shown],
            fmt=_MARKERS[k],
            color=_COLOURS[k],
            markersize=4,
            capsize=2,
            linewidth=1,
            label=f"ahead of {titles[name]}",
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=table.metric.scale / 50)  # a constant is far behind, and others close together
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(lines)), [line.title for line in lines])
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    unit = "seed by seed" if table.splits == 1 else "split by split"
    axes.set(xlabel=f"difference in {table.metric.title}, {unit}, ± 2 standard errors", title=table.title)
    figure.legend(loc="outside lower center", ncols=len(baselines), frameon=False)
    figure.savefig(path, dpi=120)


def draw_search(path: Path, table: Table, records: Iterable[Record]) -> None:
    """What every trial of every row came to on the tuning splits; with nested tuning, of every split."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record["kind"] == "search":
            tried = [trial["value"] for trial in record["trials"] if trial["value"] is not None]
            values.setdefault(record["row"], []).extend(table.metric.sign * table.metric.scale * each for each in tried)
    shown = [row for row in table.rows if values.get(row.name)]
    figure = Figure(figsize=(9, 1.2 + 0.26 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(shown):
        trials = values[row.name]
        axes.plot(trials, [place] * len(trials), "|", color=_COLOURS[0], markersize=8)
    axes.set_yticks(range(len(shown)), [row.title for row in shown])
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    axes.set(xlabel=f"validation {table.metric.title}, one mark per trial", title=f"{table.title}: the search")
    figure.savefig(path, dpi=120)


def _looks() -> Iterator[dict[str, Any]]:
    """A colour, a marker and a style of line for every curve."""
    for style in _STYLES:
        for colour, marker in zip(_COLOURS, _MARKERS, strict=True):
            yield {"color": colour, "marker": marker, "linestyle": style, "markersize": 4, "linewidth": 1.2}


def draw_states(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """Every measure of the states, layer by layer, at the last value of the sweep of a table."""
    by_name, sweep = {line.row: line for line in lines}, table.sweep
    assert sweep is not None
    figure = Figure(figsize=(4.2 * len(MEASURES) + 1, 4.4), layout="constrained")
    panels = figure.subplots(1, len(MEASURES))
    for (curve, title), look in zip(table.curves.items(), _looks(), strict=False):
        last = by_name.get(next(row.name for row in reversed(table.rows) if row.curve == curve))
        for panel, name in zip(panels, MEASURES, strict=True):
            if last is not None and last.states.get(name):
                told = {**look, "markersize": 2, "label": title if panel is panels[0] else None}
                panel.plot(range(len(last.states[name])), last.states[name], **told)
    for panel, (name, label) in zip(panels, MEASURES.items(), strict=True):
        panel.set(xlabel="layer", ylabel=label, yscale="linear" if name == "rank" else "log")
        panel.grid(linewidth=0.3)
    figure.suptitle(f"{table.title}: states of the trained models, {sweep.title} {sweep.values[-1]}")
    figure.legend(loc="outside lower center", ncols=min(3, len(table.curves)), frameon=False)
    figure.savefig(path, dpi=120)


def draw_curves(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """The metric, and how far apart and in how many directions the last states lie, along the sweep of a table."""
    sweep, by_name = table.sweep, {line.row: line for line in lines}
    assert sweep is not None
    measures = [name for name in ("spread", "rank") if any(line.states.get(name) for line in lines)]
    figure = Figure(figsize=(4.2 * (1 + len(measures)) + 1, 4.4), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(measures), squeeze=False)[0]
    for (curve, title), look in zip(table.curves.items(), _looks(), strict=False):
        rows = (row.name for row in table.rows if row.curve == curve)
        known = {place: by_name[name] for place, name in enumerate(rows) if name in by_name}
        if known:
            scores, deviations = zip(*(line.score for line in known.values()), strict=True)
            first.errorbar(list(known), scores, yerr=deviations, capsize=2, label=title, **look)
        for panel, measure in zip(others, measures, strict=True):
            last = {place: line.states[measure][-1] for place, line in known.items() if line.states.get(measure)}
            panel.plot(list(last), list(last.values()), **look)
    labels = [f"{table.metric.title}, ± 1 sd", *(MEASURES[name] for name in measures)]
    for panel, label in zip([first, *others], labels, strict=True):
        panel.set_xticks(range(len(sweep.values)), [str(value) for value in sweep.values])
        panel.set(xlabel=sweep.title, ylabel=label, yscale="log" if label == MEASURES["spread"] else "linear")
        panel.grid(linewidth=0.3)
    figure.suptitle(table.title)
    figure.legend(loc="outside lower center", ncols=min(3, len(table.curves)), frameon=False)
    figure.savefig(path, dpi=120)


def draw_energies(path: Path, table: Table, lines: Sequence[Line]) -> None:
    """F before the first step of every certified network and after each, the mean over its runs."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for line, look in zip((line for line in lines if any(line.states.get("F", []))), _looks(), strict=False):
        axes.plot(range(len(line.states["F"])), line.states["F"], label=line.title, **{**look, "markersize": 3})
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="steps", ylabel="F", yscale="log", title=f"{table.title}: the energy of the trained networks")
    axes.grid(linewidth=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
